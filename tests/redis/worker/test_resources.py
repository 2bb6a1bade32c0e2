"""Resources: opened once in each worker, given to tasks by an annotated parameter, checked, and opened again."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import pytest
import trio
import trio.lowlevel

from celery5 import App, Misconfigured, RetryPolicy, TaskFailed
from celery5.broker.colour import current_colour
from celery5.errors import ResourceUnavailable
from celery5.services.worker import resources as resources_module
from celery5.tasks import INJECTED, Resource
from celery5.testing import recorded, replaced
from tests.redis.worker.workers import Lines, start, until, working

NOTES: list[str] = []
AT_ONCE = RetryPolicy(max_retries=2, backoff=0.01, cap=0.01)


@pytest.fixture(autouse=True)
def no_notes() -> None:
    NOTES.clear()


class Bank:
    """What a resource is."""

    def __init__(self) -> None:
        self.opened_in = current_colour() or "thread"
        self.is_well = True

    def pay(self, amount: int) -> str:
        """Pay."""
        return f"{amount} paid, opened in {self.opened_in}"


async def open_bank() -> AsyncIterator[Bank]:
    """A generator function without a decorator."""
    NOTES.append("opened")
    try:
        yield Bank()
    finally:
        sleep = trio.sleep if current_colour() == "trio" else asyncio.sleep
        await sleep(0.001)
        NOTES.append("closed")


@asynccontextmanager
async def open_decorated() -> AsyncIterator[Bank]:
    """With its decorator."""
    yield Bank()


async def open_awaited() -> Bank:
    """A function that is awaited."""
    return Bank()


class BankSession(Bank):
    """A class that is an asynchronous context manager."""

    async def __aenter__(self) -> Bank:
        return self

    async def __aexit__(self, *_error: object) -> None:
        NOTES.append("session closed")


async def ping(bank: Bank) -> bool:
    """Return whether it is well."""
    return bank.is_well


def open_in_thread() -> Iterator[Bank]:
    """A generator function for a thread."""
    NOTES.append("opened")
    thread = threading.current_thread()
    yield Bank()
    assert threading.current_thread() is thread
    NOTES.append("closed")


@contextmanager
def open_decorated_in_thread() -> Iterator[Bank]:
    """With its decorator."""
    yield Bank()


def open_value() -> Bank:
    """A function whose value nothing closes."""
    return Bank()


class BlockingSession(Bank):
    """A class that is a context manager."""

    def __enter__(self) -> Bank:
        return self

    def __exit__(self, *_error: object) -> None:
        NOTES.append("session closed")


ASYNC_OPENERS = [open_bank, open_decorated, open_awaited, BankSession, lambda: BankSession()]
BLOCKING_OPENERS = [open_in_thread, open_decorated_in_thread, open_value, BlockingSession]


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
@pytest.mark.parametrize("opener", ASYNC_OPENERS)
async def test_a_resource_of_an_event_loop_is_opened_once_and_closed(
    url: str, app_name: str, opener: Any, loop: Any
) -> None:
    resource = Resource(opener, loop=loop)
    app = App(app_name, broker=url, loop=loop)

    @app.task
    async def pay(amount: int, bank: Annotated[Bank, resource] = INJECTED) -> str:
        return bank.pay(amount)

    @app.task
    async def pay_too(amount: int, *, bank: Annotated[Bank, Resource(opener, loop=loop)]) -> str:
        return bank.pay(amount)

    async with working(app):
        results = [await pay.adelay(1), await pay.adelay(2), await pay_too.adelay(3)]  # type: ignore[call-arg]
        assert [await result.aget() for result in results] == [
            f"{n} paid, opened in {loop}" for n in (1, 2, 3)
        ]
    assert {
        open_bank: ["opened", "closed"],
        BankSession: ["session closed"],
        ASYNC_OPENERS[-1]: ["session closed"],
    }.get(opener, []) == NOTES
    app.close()


@pytest.mark.parametrize("opener", BLOCKING_OPENERS)
async def test_a_resource_of_a_thread_is_shared_by_tasks_of_all_kinds(
    url: str, app_name: str, opener: Any
) -> None:
    app = App(app_name, broker=url)
    Shared = Annotated[Bank, Resource(opener)]
    banks = set[int]()

    @app.task
    async def on_trio(bank: Shared = INJECTED) -> str:
        banks.add(id(bank))
        return bank.pay(1)

    @app.task(loop="asyncio")
    async def on_asyncio(bank: Shared = INJECTED) -> str:
        banks.add(id(bank))
        return bank.pay(2)

    @app.task(bind=True)
    def in_thread(self: Any, amount: int, bank: Shared = INJECTED) -> str:
        banks.add(id(bank))
        return f"{self.attempt} {bank.pay(amount)}"

    async with working(app):
        results = [await on_trio.adelay(), await on_asyncio.adelay(), await in_thread.adelay(3)]
        paid = "paid, opened in thread"
        assert [await result.aget() for result in results] == [f"1 {paid}", f"2 {paid}", f"1 3 {paid}"]
    assert len(banks) == 1
    assert {open_in_thread: ["opened", "closed"], BlockingSession: ["session closed"]}.get(
        opener, []
    ) == NOTES
    app.close()


async def test_tasks_on_both_loops_get_a_resource_of_their_own(url: str, app_name: str) -> None:
    app = App(app_name, broker=url)
    Shared = Annotated[Bank, Resource(open_bank)]

    @app.task
    async def on_trio(bank: Shared = INJECTED) -> str:
        return bank.pay(1)

    @app.task(loop="asyncio")
    async def on_asyncio(bank: Shared = INJECTED) -> str:
        return bank.pay(2)

    async with working(app):
        assert await (await on_trio.adelay()).aget() == "1 paid, opened in trio"
        assert await (await on_asyncio.adelay()).aget() == "2 paid, opened in asyncio"
    assert NOTES == ["opened", "opened", "closed", "closed"]
    app.close()


async def test_only_the_resources_of_the_workers_queues_are_opened_until_a_job_needs_another(
    url: str, app_name: str
) -> None:
    app = App(app_name, broker=url)

    @app.task(queue="models")
    def other(bank: Annotated[Bank, Resource(open_in_thread)] = INJECTED) -> str:
        return bank.pay(1)

    @app.task
    def mine(bank: Annotated[Bank, Resource(open_value)] = INJECTED) -> str:
        return bank.pay(2)

    async with working(app, queues=("default",)):
        assert await (await mine.adelay()).aget() == "2 paid, opened in thread"
        assert not NOTES
        result = await other.options(queue="default").adelay()
        assert await result.aget() == "1 paid, opened in thread"
    assert NOTES == ["opened", "closed"]
    app.close()


@pytest.mark.parametrize("loop", ["trio", "asyncio", "thread"])
async def test_a_resource_whose_check_fails_is_opened_again(url: str, app_name: str, loop: Any) -> None:
    lines = Lines()
    opened = list[Bank]()

    async def open_one() -> AsyncIterator[Bank]:
        opened.append(Bank())
        yield opened[-1]

    def open_one_in_thread() -> Iterator[Bank]:
        opened.append(Bank())
        yield opened[-1]

    def ping_in_thread(bank: Bank) -> None:
        if not bank.is_well:
            raise OSError("the connection is gone")

    options: Any = {"check_interval": 0.02, "retry": AT_ONCE}
    if loop == "thread":
        resource = Resource(open_one_in_thread, check=ping_in_thread, **options)
    else:
        resource = Resource(open_one, loop=loop, check=ping, **options)
    app = App(app_name, broker=url, loop="trio" if loop == "thread" else loop)

    @app.task
    async def number(bank: Annotated[Bank, resource] = INJECTED) -> int:
        return opened.index(bank)

    with lines:
        async with working(app):
            assert await (await number.adelay()).aget() == 0
            opened[0].is_well = False
            await until(lambda: len(opened) == 2)
            await until(lambda: len(lines.of("resource:opened")) == 2)
            assert await (await number.adelay()).aget() == 1
    (failed,) = lines.of("resource:failed")
    assert failed["why"] == (
        "OSError: the connection is gone" if loop == "thread" else "ResourceBroken: its check returned False"
    )
    app.close()


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_a_check_that_hangs_has_failed(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    monkeypatch.setattr(resources_module, "CHECK_LIMIT", 0.02)

    async def hang(_bank: Bank) -> None:
        await (trio.sleep if loop == "trio" else asyncio.sleep)(60)

    app = App(app_name, broker=url, loop=loop)
    resource = Resource(open_bank, check=hang, check_interval=0.01, retry=AT_ONCE)

    @app.task
    async def pay(bank: Annotated[Bank, resource] = INJECTED) -> str:
        return bank.pay(1)

    with Lines() as lines:
        async with working(app):
            await until(lambda: NOTES[:3] == ["opened", "closed", "opened"])
    assert lines.of("resource:failed")[0]["why"].startswith(("TooSlowError", "TimeoutError"))
    app.close()


@pytest.mark.parametrize(("stable", "delays"), [(0.0, {0.01}), (60.0, {0.01, 0.02, 0.04})])
async def test_failures_of_a_resource_that_was_open_for_long_do_not_count(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, stable: float, delays: set[float]
) -> None:
    monkeypatch.setattr("celery5.runners.open_resources.STABLE_SECONDS", stable)
    policy = RetryPolicy(max_retries=2, backoff=0.01, cap=0.04, jitter=False)
    resource = Resource(open_value, check=lambda _bank: False, check_interval=0.01, retry=policy)
    app = App(app_name, broker=url)

    @app.task
    def pay(bank: Annotated[Bank, resource] = INJECTED) -> str:
        return bank.pay(1)

    with Lines() as lines:
        async with working(app):
            await until(lambda: len(lines.of("resource:failed")) >= 5)
    assert {line["again_in"] for line in lines.of("resource:failed")} == delays
    app.close()


async def test_jobs_wait_while_a_resource_is_opened_again(url: str, app_name: str) -> None:
    opened, may_open = list[Bank](), threading.Event()
    may_open.set()

    def open_slowly() -> Iterator[Bank]:
        assert may_open.wait(30)
        opened.append(Bank())
        yield opened[-1]

    resource = Resource(open_slowly, check=lambda bank: bank.is_well, check_interval=0.01, retry=AT_ONCE)
    app = App(app_name, broker=url)

    @app.task
    async def on_trio(bank: Annotated[Bank, resource] = INJECTED) -> int:
        return opened.index(bank)

    @app.task(loop="asyncio")
    async def on_asyncio(bank: Annotated[Bank, resource] = INJECTED) -> int:
        return opened.index(bank)

    @app.task
    def in_thread(bank: Annotated[Bank, resource] = INJECTED) -> int:
        return opened.index(bank)

    lines = Lines()
    with lines:
        async with working(app):
            may_open.clear()
            opened[0].is_well = False
            await until(lambda: bool(lines.of("resource:failed")))
            results = [await task.adelay() for task in (on_trio, on_asyncio, in_thread)]
            await trio.sleep(0.1)
            assert [await result.astatus() for result in results] == ["EXECUTING"] * 3
            may_open.set()
            assert [await result.aget() for result in results] == [1, 1, 1]
    app.close()


async def test_a_resource_that_stays_closed_fails_the_attempt(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.runners.open_resources.WAIT_LIMIT", 0.05)
    banks = [Bank()]

    def open_once() -> Iterator[Bank]:
        yield banks.pop()

    resource = Resource(open_once, check=lambda bank: bank.is_well, check_interval=0.01, retry=AT_ONCE)
    app = App(app_name, broker=url)

    @app.task(max_retries=0)
    def pay(bank: Annotated[Bank, resource] = INJECTED) -> str:
        return bank.pay(1)

    lines, bank = Lines(), banks[0]
    with lines:
        async with working(app):
            bank.is_well = False
            await until(lambda: bool(lines.of("resource:failed")))
            with pytest.raises(
                TaskFailed, match=r"resource 'open_once' was not open within 0\.05 s: the log says why"
            ):
                await (await pay.adelay()).aget()
    app.close()


async def test_a_resource_that_cannot_be_opened_ends_the_worker(url: str, app_name: str) -> None:
    tries = list[int]()

    def refuse() -> Iterator[Bank]:
        tries.append(1)
        raise OSError("no such host")
        yield

    app = App(app_name, broker=url)

    @app.task
    def pay(bank: Annotated[Bank, Resource(refuse, name="bank", retry=AT_ONCE)] = INJECTED) -> str:
        return bank.pay(1)

    with pytest.RaisesGroup(
        pytest.RaisesExc(ResourceUnavailable, match="resource 'bank': OSError: no such host"),
        flatten_subgroups=True,
    ):
        async with working(app):
            pass
    assert len(tries) == 3
    app.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("loop", ["trio", "asyncio", "thread"])
async def test_a_worker_that_is_stopped_while_it_opens_a_resource_closes_it(
    url: str, app_name: str, loop: Any, *, fails: bool
) -> None:
    """As when another part of it ends the start: the server refuses its login. If opening fails then, it ends, too."""
    is_allowed = threading.Event()

    async def open_late() -> AsyncIterator[Bank]:
        NOTES.append("opening")
        while not is_allowed.is_set():
            await (trio.sleep if loop == "trio" else asyncio.sleep)(0.001)
        if fails:
            raise OSError("no such host")
        yield Bank()
        NOTES.append("closed")

    def open_late_in_thread() -> Iterator[Bank]:
        NOTES.append("opening")
        assert is_allowed.wait(30)
        if fails:
            raise OSError("no such host")
        yield Bank()
        NOTES.append("closed")

    app = App(app_name, broker=url)
    bank = Resource(open_late_in_thread) if loop == "thread" else Resource(open_late, loop=loop)
    if loop == "thread":

        @app.task(name="pay")
        def pay_in_thread(bank: Annotated[Bank, bank] = INJECTED) -> str:
            return bank.pay(1)
    else:

        @app.task(name="pay", loop=loop)
        async def pay(bank: Annotated[Bank, bank] = INJECTED) -> str:
            return bank.pay(1)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start, nursery, app)
            await until(lambda: NOTES == ["opening"])
            nursery.cancel_scope.cancel()
            is_allowed.set()
    assert NOTES == ["opening"] if fails else ["opening", "closed"]
    app.close()


async def test_a_resource_that_does_not_close_is_abandoned(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources_module, "STOP_LIMIT", 0.05)

    async def open_forever() -> AsyncIterator[Bank]:
        try:
            yield Bank()
        finally:
            NOTES.append("closing")
            await trio.sleep(60)

    app = App(app_name, broker=url)

    @app.task
    async def pay(bank: Annotated[Bank, Resource(open_forever)] = INJECTED) -> str:
        return bank.pay(1)

    with trio.fail_after(20):
        async with working(app):
            assert await (await pay.adelay()).aget() == "1 paid, opened in trio"
    assert NOTES == ["closing"]
    app.close()


async def test_a_replaced_resource_is_not_opened(url: str, app_name: str) -> None:
    app = App(app_name, broker=url)
    resource = Resource(open_in_thread)

    @app.task
    def pay(amount: int, bank: Annotated[Bank, resource] = INJECTED) -> str:
        return bank.pay(amount)

    class Fake(Bank):
        def pay(self, amount: int) -> str:
            return f"fake {amount}"

    with replaced(open_in_thread, Fake()):
        async with working(app):
            assert await (await pay.adelay(1)).aget() == "fake 1"
        with replaced(resource, Bank()):
            assert pay(2) == "2 paid, opened in trio"
        assert pay(3) == "fake 3"
    assert not NOTES
    assert pay(4, Fake()) == pay(4, bank=Fake()) == "fake 4"
    with pytest.raises(ResourceUnavailable, match=r"open in workers only.*testing.replaced\(open_in_thread"):
        pay(5)
    app.close()


def test_recorded_jobs_get_replaced_resources(app_name: str) -> None:
    app = App(app_name)

    @app.task(loop="asyncio")
    async def pay(amount: int, bank: Annotated[Bank, Resource(open_bank)] = INJECTED) -> str:
        return bank.pay(amount)

    with recorded(app) as sent, replaced(open_bank, Bank()):
        pay.delay(1)
        assert sent.jobs[0].arguments == {"amount": 1}
        assert sent.run() == ["1 paid, opened in thread"]


def test_a_resource_that_its_task_cannot_use_is_refused(app_name: str) -> None:
    app = App(app_name)
    with pytest.raises(
        Misconfigured, match="pay is a def, and its resource 'open_bank' belongs to an event loop"
    ):

        @app.task(name="pay")
        def pay(bank: Annotated[Bank, Resource(open_bank)]) -> None: ...

    with pytest.raises(Misconfigured, match="pay runs on trio, and its resource 'open_bank' on asyncio"):

        @app.task(name="pay")
        async def pay_on_trio(bank: Annotated[Bank, Resource(open_bank, loop="asyncio")]) -> None: ...

    with pytest.raises(Misconfigured, match="parameter 'bank' gets a resource: put it last"):

        @app.task(name="pay")
        def pay_first(bank: Annotated[Bank, Resource(open_value)], amount: int) -> None: ...

    with pytest.raises(Misconfigured, match="parameter 'bank' gets a resource by name: put it behind the /"):

        @app.task(name="pay")
        def pay_by_place(bank: Annotated[Bank, Resource(open_value)], /) -> None: ...


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Resource(7), r"Resource\(7\): give a function or a class"),  # type: ignore[arg-type]
        (lambda: Resource(open_value, loop="curio"), "loop is 'curio'"),  # type: ignore[arg-type]
        (lambda: Resource(open_value, check=ping), "its check is to be a def"),
        (lambda: Resource(open_value, check_interval=0), "check_interval is 0: give seconds"),
        (lambda: Resource(open_value, retry={"tries": 1}), "resource 'open_value': retry_policy has 'tries'"),
        (lambda: Resource(open_value, loop="trio").enter(), "is no asynchronous context manager"),
    ],
)
def test_a_resource_that_makes_no_sense_is_refused(make: Any, why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        make()


def test_callers_and_other_workers_know_nothing_of_resources(app_name: str) -> None:
    app = App(app_name)

    @app.task(name="pay")
    def pay(amount: int, bank: "Annotated[Bank, Resource(open_value)]" = INJECTED) -> None: ...

    @App(f"{app_name}-2").task(name="pay")
    def pay_without(amount: int) -> None: ...

    assert pay.parameters.make_digest() == pay_without.parameters.make_digest()
    assert pay.s(1).tree.args == (1,)
    with pytest.raises(TypeError, match="bank"):
        pay.s(1, bank=Bank()).job()
