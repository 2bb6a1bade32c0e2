"""Values through a worker: plain ones arrive, and of a result that cannot be stored it is known that it came."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pydantic
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery5 import App, Event, JobState, TaskFailed, progress
from celery5.errors import BadArguments, BadRecord
from celery5.streams import Record, StreamEvents
from celery5.workflows import Flow
from tests.pure.job.test_values_kept import Money, SafeString, Whole, check_arrived, float64, numpy_number
from tests.redis.worker.workers import until, working

KINDS = ["trio", "asyncio", "thread"]


def make_task(app: App, kind: str, body: Callable[..., Any]) -> Any:
    """Return a task of a kind that calls `body` with its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    async def wait(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    if kind == "thread":
        return app.task(name="works")(call)
    return app.task(name="works", loop="asyncio" if kind == "asyncio" else "trio")(wait)


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Grumpy:
    """A value whose methods all raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    @property
    def model_dump_json(self) -> Any:
        raise RuntimeError("no model")


def make_loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


UNSTORABLE: list[tuple[str, Callable[[], Any], str]] = [
    ("object", object, "<object"),
    ("grumpy", Grumpy, "Grumpy"),
    ("loop", make_loop, "[[["),
    ("secret", lambda: Login(user="anna", password=pydantic.SecretStr("hunter2")), "anna"),
    ("nan", lambda: [float("nan")], "nan"),
    ("huge", lambda: {"x" * 10_000_000: object()}, "xxx"),
    ("surrogate", lambda: "\udc80", "udc80"),
    ("two keys", lambda: {1: "a", "1": "b"}, "'1'"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_without_json_form_is_told_and_its_job_does_not_run_again(app: App, kind: str) -> None:
    runs: list[str] = []

    def body(number: int) -> Any:
        name, make, _ = UNSTORABLE[number]
        runs.append(name)
        return make()

    task = make_task(app, kind, body)
    async with working(app):
        for number, (name, _, shown) in enumerate(UNSTORABLE):
            job = await task.adelay(number)
            with pytest.raises(TaskFailed) as caught:
                await job.aget()
            assert await job.astatus() is JobState.DEAD
            assert caught.value.reason == "unencodable-result", name
            assert caught.value.attempt == 1
            text = str(caught.value)
            assert "the task has returned" in text, name
            assert shown in text, name
            assert "hunter2" not in text
            assert "\n" not in text
            assert len(text) < 2500
    assert runs == [name for name, _, _ in UNSTORABLE]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_that_nobody_wants_need_not_be_stored(app: App, kind: str) -> None:
    def body(number: int) -> Any:
        return "x" * 2_000_000 if number else object()

    task = make_task(app, kind, body).options(ignore_result=True)
    async with working(app):
        for number in range(2):
            job = await task.adelay(number)
            with trio.fail_after(20):
                while await job.astatus() is not JobState.SUCCESS:
                    assert await job.astatus() is not JobState.DEAD
                    await trio.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_results_of_subclasses_arrive_as_plain_values(app: App, kind: str) -> None:
    results = [
        SafeString("<b>"),
        float64(1.5),
        Whole(3),
        {"x": [float64(2.0)]},
        Money("1.5"),
        numpy_number(4),
    ]
    task = make_task(app, kind, lambda number: results[number])
    async with working(app):
        jobs = [await task.adelay(number) for number in range(len(results))]
        assert [await job.aget() for job in jobs] == ["<b>", 1.5, 3, {"x": [2.0]}, "1.5", 4]


NAMES = (
    "self",
    "cls",
    "args",
    "kwargs",
    "task",
    "options",
    "name",
    "function",
    "app",
    "job",
    "fields",
    "flow",
    "n",
)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_keyword_argument_may_have_any_name(app: App, kind: str) -> None:
    def body(**more: int) -> dict[str, int]:
        return more

    task, named = make_task(app, kind, body), {name: n for n, name in enumerate(NAMES)}
    async with working(app):
        jobs = [
            await task.adelay(**named),
            await task.s(**named).adelay(),
            await app.signature(task.name, **named).adelay(),
            await task.options(unique_for=60).adelay(**named),
        ]
        for job in jobs:
            assert await job.aget() == named
        assert await (await (task.s(**named) >> task.s(**named)).astart()).aget() == named
    assert task.job(**named).task == task.name


async def test_a_declared_workflow_and_an_event_take_any_name_too(app: App) -> None:
    seen: list[dict[str, Any]] = []

    @app.task
    async def collect(**more: Any) -> dict[str, Any]:
        seen.append(more)
        return more

    @app.workflow
    def flow(flow: Flow, self: int, task: str) -> Any:
        return flow.call(collect, self=self, task=task, cls=1, args=2)

    async with working(app):
        run = await flow.astart(self=1, task=SafeString("t"))
        assert await run.aget() == {"self": 1, "task": "t", "cls": 1, "args": 2}

    @app.event
    class Paid(Event):
        self: int
        cls: str

    assert b'"cls":"x"' in Paid.job(self=1, cls="x").message


def test_a_keyword_of_the_running_job_is_refused_where_it_is_sent(app: App) -> None:
    def own(self: Any, **more: int) -> None: ...

    bound: Any = app.task(bind=True, name="bound")(cast("Any", own))

    with pytest.raises(BadArguments, match="'self' is the running job"):
        bound.job(self=1)
    assert bound.job(other=1).task == bound.name


async def test_options_headers_and_progress_take_subclasses(app: App) -> None:
    @app.task
    async def work(n: int) -> int:
        progress(float64(1), Whole(2), SafeString("half"))
        return n

    sent = work.options(
        id=SafeString("an-id"),
        key=SafeString("k"),
        countdown=float64(0.01),
        time_limit=float64(30),
        expires=Whole(60),
    )
    async with working(app):
        job = await sent.adelay(Whole(2))
        assert await job.aget() == 2
        assert job.id == "an-id"


class Reading(Record):
    name: str
    value: float


class Native(Record, primitive=True):
    name: str
    value: float


@dataclasses.dataclass
class Half:
    a: int
    b: int = dataclasses.field(default=0, compare=False)


async def test_records_and_state_of_streams_take_subclasses_and_refuse_what_would_change(app: App) -> None:
    readings = app.stream("readings", Reading, by="name")
    native, documents = app.stream("native", Native, by="name"), app.stream("documents")
    seen: list[Any] = []

    @app.processor(readings)
    async def note(events: StreamEvents[Reading]) -> None:
        async for record in events.records():
            events.state.set("last", {"value": float64(record.value)})
            seen.append((record, await events.state.get("last")))

    async with working(app):
        await readings.asend(Reading(name=SafeString("a"), value=float64(1.5)))
        await native.asend(Native(name=SafeString("a"), value=float64(2.5)))
        await documents.asend({"x": float64(1), "n": [SafeString("s")]})
        await until(lambda: bool(seen))
    assert seen == [(Reading(name="a", value=1.5), {"value": 1.5})]
    (stored,) = [record async for record in app.streams.aread("native", limit=1)]
    assert stored.record == {"name": "a", "value": 2.5}
    logins = app.stream("logins", Login)
    with pytest.raises(BadRecord, match="password"):
        await logins.asend(Login(user="a", password=pydantic.SecretStr("hunter2")))
    with pytest.raises(BadRecord, match="the same in JSON"):
        await documents.asend({1: 1, "1": 2})
    with pytest.raises(BadRecord, match="nan"):
        await documents.asend({"a": float("nan")})


async def test_values_of_workflows_and_signals_take_subclasses(app: App) -> None:
    @app.task
    async def same(value: Any) -> Any:
        return value

    @app.workflow
    def waits(flow: Flow, n: float) -> Any:
        answer = flow.wait_for("ok", timeout=60)
        return flow.call(same, {"n": n, "answer": answer, "fixed": float64(3.0)})

    async with working(app):
        run = await waits.astart(float64(1.5))
        await run.asignal("ok", SafeString("yes"))
        assert await run.aget() == {"n": 1.5, "answer": "yes", "fixed": 3.0}
        chained = same.s(SafeString("a")) | same.s()
        assert await (await chained.astart()).aget() == "a"
        with pytest.raises(BadArguments, match="the same in JSON"):
            await same.map([{1: 1, "1": 2}]).astart()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(values, min_size=8, max_size=8))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
async def test_any_json_value_comes_back_from_a_worker(app: App, drawn: list[Any]) -> None:
    if "back" not in {name.rpartition(".")[2] for name in app.tasks}:

        @app.task(name="back")
        async def back(value: Any) -> Any:
            return value

    task = app.tasks["back"]
    good = []
    for value in drawn:
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError:
            continue
        good.append(value)
    async with working(app):
        jobs = await app.asend_many([task.s(value) for value in good])
        for value, job in zip(good, jobs, strict=True):
            check_arrived(value, await job.aget())


async def test_an_async_function_behind_a_plain_wrapper_is_told_so(app: App) -> None:
    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    @app.task(max_retries=0)
    @counted
    async def pay(amount: int) -> int:
        return amount

    async with working(app):
        with pytest.raises(TaskFailed, match="async behind a plain wrapper; write the wrapper as async def"):
            await (await pay.adelay(1)).aget(timeout=20)
