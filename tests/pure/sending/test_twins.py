"""The error of a blocking call inside an event loop names the coroutine to await."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from celery5 import App
from celery5.broker.colour import get_awaitable_colour
from celery5.errors import BlockingInEventLoop
from celery5.results.async_result import AsyncResult, gather, revoke, wait

APP = App("twins", broker="redis://127.0.0.1:1/0")


@APP.task
def nothing() -> None:
    """Do nothing."""


JOB: AsyncResult[Any] = APP.result("some-id", queue="default")

CALLS: list[tuple[Callable[[], Any], str]] = [
    (nothing.delay, "adelay"),
    (lambda: APP.send_many([nothing.s()]), "asend_many"),
    (lambda: APP.send_jobs([nothing.job()]), "asend_jobs"),
    (APP.info, "ainfo"),
    (lambda: APP.find("some-id"), "afind"),
    (lambda: APP.empty("default"), "aempty"),
    (JOB.get, "aget"),
    (JOB.status, "astatus"),
    (JOB.forget, "aforget"),
    (JOB.revoke, "arevoke"),
    (lambda: gather([JOB]), "agather"),
    (lambda: wait([JOB]), "wait_async"),
    (lambda: revoke([JOB]), "arevoke"),
    (APP.dlq.read, "app.dlq.aread"),
    (APP.dlq.replay, "app.dlq.areplay"),
    (APP.limits.list, "app.limits.alist"),
    (APP.control.ping, "app.control.aping"),
    (lambda: APP.control.run(nothing.s(), to="web1"), "app.control.arun"),
    (APP.control.workers, "app.control.aworkers"),
    (APP.dlq.count, "app.dlq.acount"),
    (APP.dlq.purge, "app.dlq.apurge"),
    (lambda: APP.schedule.change("daily", 60), "app.schedule.achange"),
    (lambda: APP.schedule.pause("daily"), "app.schedule.apause"),
    (lambda: APP.schedule.trigger("daily"), "app.schedule.atrigger"),
    (APP.events.state, "app.events.astate"),
    (APP.schedule.schedulers, "app.schedule.aschedulers"),
    (APP.events.waiting, "app.events.awaiting"),
    (APP.backlog.flush, "aflush"),
    (APP.streams.info, "app.streams.ainfo"),
    (lambda: APP.streams.read("orders", "earliest"), "app.streams.aread"),
    (lambda: APP.streams.forget("orders", "bill"), "app.streams.aforget"),
    (lambda: APP.streams.reset("orders", "bill"), "app.streams.areset"),
    (lambda: APP.streams.dead_records.read("orders", "bill"), "app.streams.dead_records.aread"),
    (lambda: APP.streams.dead_records.purge("orders", "bill"), "app.streams.dead_records.apurge"),
]


@pytest.mark.parametrize(("call", "coroutine"), CALLS, ids=[name for _, name in CALLS])
def test_a_blocking_call_in_an_event_loop_names_the_coroutine_beside_it(
    call: Callable[[], Any], coroutine: str
) -> None:
    async def program() -> None:
        with pytest.raises(BlockingInEventLoop) as caught:
            call()
        assert str(caught.value) == (
            f"this would block the asyncio event loop: await {coroutine}(...) instead"
        )

    asyncio.run(program())


def test_user_code_before_the_loop_is_not_taken_for_an_api_call() -> None:
    def send() -> object:
        return nothing.delay()

    async def asend() -> None:
        with pytest.raises(BlockingInEventLoop, match=r"await adelay\(\.\.\.\)"):
            send()

    asyncio.run(asend())


def test_blocking_twin_has_name_signature_and_docstring_of_its_coroutine() -> None:
    get: Any = JOB.get
    assert (get.__name__, get.__qualname__, wait.__name__) == ("get", "AsyncResult.get", "wait")
    assert not inspect.iscoroutinefunction(get)
    assert inspect.signature(get) == inspect.signature(JOB.aget)
    first, *_, last = get.__doc__.splitlines()
    assert first == "Wait for the job to end and return its result."
    assert last == "For plain Python: in Trio or asyncio, await `aget`."


def test_blocking_twin_returns_inside_a_loop_what_needs_no_connection() -> None:
    async def program() -> None:
        assert gather([]) == []
        with pytest.raises(TypeError, match="gather takes a list of handles"):
            gather(JOB)  # type: ignore[arg-type]
        with pytest.raises(BlockingInEventLoop):
            gather([JOB])
        await asyncio.sleep(0)  # the refusal ends with the call: coroutines go on
        assert get_awaitable_colour() == "asyncio"

    asyncio.run(program())


PARTS = (
    APP,
    APP.bulk,
    APP.metrics,
    APP.jobs,
    APP.alerts,
    APP.audit,
    APP.workflows,
    JOB,
    APP.dlq,
    APP.limits,
    APP.control,
    APP.schedule,
    APP.events,
    APP.streams,
    APP.streams.dead_records,
)
TWINS = [
    (type(part), name)
    for part in PARTS
    for name, _ in inspect.getmembers(type(part), inspect.isfunction)
    if hasattr(type(part), f"a{name}") and inspect.iscoroutinefunction(getattr(type(part), f"a{name}"))
]


def test_there_are_twins() -> None:
    assert len(TWINS) > 60


@pytest.mark.parametrize(("kind", "name"), TWINS, ids=[f"{kind.__name__}.{name}" for kind, name in TWINS])
def test_a_coroutine_takes_and_returns_what_the_function_beside_it_does(kind: type[Any], name: str) -> None:
    assert inspect.signature(getattr(kind, f"a{name}")) == inspect.signature(getattr(kind, name))
