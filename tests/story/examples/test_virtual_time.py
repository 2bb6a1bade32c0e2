"""Virtual time: `celery5.testing.virtual_time` lets days pass at once, in order, for jobs, schedules and workflows."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
import trio

from celery5 import App, Event, JobState, every, group
from celery5.errors import Misconfigured, WorkflowExpired, WorkflowFailed
from celery5.testing import VirtualClock, virtual_time
from celery5.workflows import Flow, RunState

pytest_plugins = ["celery5.testing.pytest"]
HOUR, DAY = 3600, 86_400


class Shop:
    """An application whose tasks note the virtual second in which they ran, counted from the start."""

    def __init__(self, name: str) -> None:
        self.app = app = App(name, results_ttl=90 * DAY)
        self.clock: VirtualClock | None = None
        self.started = 0.0
        self.notes: list[tuple[str, float]] = []

        @app.event
        class Paid(Event):
            order: int

        @app.task
        async def note(what: str) -> str:
            self.notes.append((what, self.second))
            return what

        @app.task(queue="far")
        def far(what: str) -> str:
            self.notes.append((what, self.second))
            return what

        @app.task(max_retries=0)
        async def fail(what: str) -> str:
            self.notes.append((what, self.second))
            raise ValueError(what)

        @app.task(max_retries=2, backoff=60, jitter=False)
        async def stubborn(what: str) -> str:
            self.notes.append((what, self.second))
            if len(self.notes) < 3:
                raise ValueError(what)
            return what

        @app.task
        async def undo(what: str) -> None:
            self.notes.append((f"undo {what}", self.second))

        @app.task(dynamic=True)
        async def grow(what: str) -> Any:
            return group(*[note.options(countdown=hours * HOUR).s(f"{what} {hours}") for hours in (2, 1)])

        self.note, self.far, self.fail, self.stubborn, self.undo, self.grow = (
            note, far, fail, stubborn, undo, grow,
        )  # fmt: skip
        self.paid = Paid

    @property
    def second(self) -> float:
        """Virtual seconds since the start."""
        assert self.clock is not None
        return round(self.clock.now - self.started, 3)

    def begin(self, clock: VirtualClock) -> None:
        """Count from now on."""
        self.clock, self.started = clock, clock.now


@pytest.fixture
def shop(app_name: str) -> Shop:
    """A shop whose workflows are declared before the worker starts."""
    return Shop(app_name)


@pytest.fixture
def start(shop: Shop, url: str) -> Iterator[Callable[[], VirtualClock]]:
    """Return a function that starts the worker with a clock that stands still."""
    opened: list[Any] = []

    def begin() -> VirtualClock:
        context = virtual_time(shop.app, broker=url)
        clock = context.__enter__()
        opened.append(context)
        shop.begin(clock)
        return clock

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


def test_a_run_that_a_signal_has_ended_is_not_looked_at_again(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow(deadline=DAY)
    def ask(flow: Flow) -> None:
        flow.wait_for("answer")

    clock = start()
    run = ask.start()
    clock.wait_until_idle()
    run.signal("answer")
    assert shop.app.workflows.list_runs(live_only=True) == []
    clock.advance(2 * DAY)
    assert run.status().state is RunState.SUCCESS


def test_a_sleep_ends_to_the_millisecond_and_no_sooner(shop: Shop, start: Callable[[], VirtualClock]) -> None:
    @shop.app.workflow
    def nap(flow: Flow) -> str:
        flow.call(shop.note, "before")
        flow.sleep(DAY)
        return flow.call(shop.note, "after")

    clock = start()
    run = nap.start()
    clock.advance(DAY - 0.001)
    assert shop.notes == [("before", 0.0)]
    assert run.status().state is RunState.RUNNING
    clock.advance(0.001)
    assert [what for what, _ in shop.notes] == ["before", "after"]
    assert abs(shop.notes[1][1] - DAY) < 0.0015  # Redis counts whole milliseconds
    assert run.get(timeout=30) == "after"


def test_sleeps_side_by_side_end_in_the_order_of_their_length(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    random = Random(7)
    lengths = [random.randrange(1, 30 * DAY) for _ in range(12)]

    @shop.app.workflow
    def naps(flow: Flow) -> None:
        with flow.parallel():
            for length in lengths:
                with flow.sequence():
                    flow.sleep(length)
                    flow.call(shop.far if length % 2 else shop.note, str(length))

    clock = start()
    run = naps.options(deadline=31 * DAY).start()
    clock.advance(30 * DAY)
    assert shop.notes == [(str(length), float(length)) for length in sorted(lengths)]
    assert run.status().state is RunState.SUCCESS


def test_a_sleep_after_a_map_and_those_of_several_runs_pass_together(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow
    def mapped(flow: Flow, what: str) -> str:
        flow.map(shop.note, ["a", "b"])
        flow.sleep(HOUR)
        return flow.call(shop.note, what)

    clock = start()
    first = mapped.start("first")
    clock.advance(60)
    second = mapped.start("second")
    clock.advance(HOUR)
    assert sorted(shop.notes) == [
        ("a", 0.0), ("a", 60.0), ("b", 0.0), ("b", 60.0), ("first", HOUR), ("second", HOUR + 60.0),
    ]  # fmt: skip
    assert (first.get(timeout=30), second.get(timeout=30)) == ("first", "second")


@pytest.mark.parametrize(
    ("after", "is_taken"),
    [(0.0, True), (HOUR / 2, True), (HOUR - 0.001, True), (HOUR, False), (HOUR + 0.001, False)],
)
def test_a_signal_comes_before_or_after_the_timeout_of_its_wait(
    shop: Shop, start: Callable[[], VirtualClock], after: float, is_taken: bool
) -> None:
    @shop.app.workflow
    def ask(flow: Flow) -> str:
        return flow.call(shop.note, flow.wait_for("answer", timeout=HOUR))

    clock = start()
    run = ask.start()
    clock.advance(after)
    assert run.signal("answer", "yes") is is_taken
    clock.advance(DAY)
    assert shop.notes == ([("yes", after)] if is_taken else [])
    if is_taken:
        assert run.get(timeout=30) == "yes"
    else:
        with pytest.raises(WorkflowFailed, match="no answer came in time"):
            run.get(timeout=30)
        assert run.status().ended == pytest.approx(shop.started + HOUR)


def test_wait_without_timeout_lasts_weeks_and_a_kept_signal_ends_it(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow
    def ask(flow: Flow) -> str:
        flow.sleep(HOUR)
        return flow.call(shop.note, flow.wait_for("answer"))

    clock = start()
    late, early = ask.start(), ask.start()
    early.signal("answer", "early")
    clock.advance(29 * DAY)
    late.signal("answer", "late")
    clock.wait_until_idle()
    assert shop.notes == [("early", HOUR), ("late", 29.0 * DAY)]
    assert (late.get(timeout=30), early.get(timeout=30)) == ("late", "early")


def test_a_wait_for_an_event_takes_it_in_time_or_times_out(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow(on_error="continue")
    def pay(flow: Flow, number: int) -> str:
        flow.wait_for(shop.paid, where={"order": number}, timeout=HOUR)
        return flow.call(shop.note, "next")

    clock = start()
    paid, unpaid = pay.start(1), pay.start(2)
    clock.advance(HOUR / 2)
    shop.paid.delay(order=1)
    clock.wait_until_idle()
    assert shop.notes == [("next", HOUR / 2)]
    clock.advance(DAY)
    shop.paid.delay(order=2)
    clock.wait_until_idle()
    assert shop.notes[1:] == [("next", HOUR)]
    assert (paid.status().failed, unpaid.status().failed) == (0, 1)


@pytest.mark.parametrize("deadline", [None, 2 * DAY])
def test_the_deadline_of_a_run_comes_while_it_sleeps(
    shop: Shop, start: Callable[[], VirtualClock], deadline: float | None
) -> None:
    @shop.app.workflow
    def nap(flow: Flow) -> str:
        flow.sleep(90 * DAY)
        return flow.call(shop.note, "after")

    clock = start()
    life = 30 * DAY if deadline is None else deadline
    run = nap.options(deadline=life).start() if deadline else nap.start()
    clock.advance(life - 0.001)
    assert run.status().state is RunState.RUNNING
    clock.advance(0.001)
    assert run.status().state is RunState.EXPIRED
    with pytest.raises(WorkflowExpired):
        run.get(timeout=30)
    clock.advance(90 * DAY)
    assert shop.notes == []


def test_the_countdown_and_expiry_of_a_step_pass_with_the_clock(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow(on_error="continue")
    def steps(flow: Flow) -> None:
        with flow.parallel():
            flow.call(shop.note.options(countdown=HOUR, expires=HOUR + 1), "in time")
            flow.call(shop.far.options(countdown=HOUR, expires=HOUR - 1), "too late")

    clock = start()
    run = steps.start()
    clock.advance(HOUR - 0.001)
    assert shop.notes == []
    clock.advance(1)
    assert shop.notes == [("in time", HOUR)]
    assert (run.status().done, run.status().failed) == (1, 1)


def test_retries_of_a_step_come_after_their_backoff(shop: Shop, start: Callable[[], VirtualClock]) -> None:
    @shop.app.workflow
    def steps(flow: Flow) -> str:
        flow.sleep(HOUR)
        return flow.call(shop.stubborn, "again")

    clock = start()
    run = steps.start()
    clock.advance(HOUR + 59.999)
    assert shop.notes == [("again", HOUR)]
    clock.advance(DAY)
    assert shop.notes == [("again", HOUR), ("again", HOUR + 60.0), ("again", HOUR + 180.0)]
    assert run.get(timeout=30) == "again"


def test_an_undo_with_a_countdown_runs_when_it_is_due(shop: Shop, start: Callable[[], VirtualClock]) -> None:
    undone = shop.note.options(undo=shop.undo.options(countdown=10 * DAY))

    @shop.app.workflow
    def steps(flow: Flow) -> None:
        flow.call(undone, "booked")
        flow.sleep(HOUR)
        flow.call(shop.fail, "failed")

    clock = start()
    run = steps.start()
    clock.advance(10 * DAY)
    assert run.status().state is RunState.UNDOING
    clock.advance(HOUR)
    assert shop.notes == [("booked", 0.0), ("failed", HOUR), ("undo booked", 10.0 * DAY + HOUR)]
    assert run.status().state is RunState.FAILED


def test_what_a_dynamic_step_returns_waits_in_virtual_time(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.workflow
    def steps(flow: Flow) -> Any:
        flow.sleep(HOUR)
        grown = flow.call(shop.grow, "child")
        flow.sleep(HOUR)
        return grown

    clock = start()
    run = steps.start()
    clock.advance(4 * HOUR)
    assert shop.notes == [("child 1", 2.0 * HOUR), ("child 2", 3.0 * HOUR)]
    assert run.get(timeout=30) == ["child 2", "child 1"]
    assert run.status().ended == pytest.approx(shop.started + 4 * HOUR)


def test_a_map_over_a_later_value_has_members_that_wait(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    @shop.app.task
    async def name_hours() -> list[str]:
        return ["a", "b"]

    @shop.app.workflow
    def steps(flow: Flow) -> Any:
        names = flow.call(name_hours)
        flow.sleep(HOUR)
        mapped = flow.map(shop.note.options(countdown=HOUR), names)
        flow.sleep(HOUR)
        flow.call(shop.note, "last")
        return mapped

    clock = start()
    run = steps.start()
    clock.advance(3 * HOUR)
    assert sorted(shop.notes) == [("a", 2.0 * HOUR), ("b", 2.0 * HOUR), ("last", 3.0 * HOUR)]
    assert list(run.get(timeout=30)) == ["a", "b"]


def test_results_of_runs_and_jobs_are_gone_after_their_ttl(
    shop: Shop, start: Callable[[], VirtualClock]
) -> None:
    clock = start()
    job, run = shop.note.delay("job"), shop.note.map(["a", "b"]).start()
    clock.wait_until_idle()
    ttl = shop.app.settings.results_ttl
    clock.advance(ttl / 2)
    assert (job.get(timeout=30), list(run.get(timeout=30))) == ("job", ["a", "b"])
    clock.advance(ttl / 2)
    assert job.status() is JobState.UNKNOWN
    assert shop.app.workflows.find(run.id) is None


def test_jobs_and_schedules_go_by_the_same_clock(shop: Shop, url: str) -> None:
    shop.app.schedule(shop.note.s("hourly"), every(hours=1), name="hourly")
    noon = datetime(2030, 5, 1, 12, 30, tzinfo=UTC).timestamp()
    with virtual_time(shop.app, broker=url, start_time=noon) as clock:
        shop.begin(clock)
        shop.note.options(countdown=HOUR).delay("countdown")
        shop.note.options(eta=datetime(2030, 5, 1, 15, tzinfo=UTC)).delay("eta")
        shop.note.options(countdown=DAY, expires=HOUR).delay("expired")
        clock.advance(3 * HOUR)
        assert shop.notes == [
            ("hourly", 1800.0), ("countdown", 3600.0), ("hourly", 5400.0), ("eta", 9000.0), ("hourly", 9000.0),
        ] or shop.notes[3:] == [("hourly", 9000.0), ("eta", 9000.0)]  # fmt: skip
        clock.advance(DAY)
        assert "expired" not in dict(shop.notes)
        shop.note.options(expires=HOUR).delay("fresh")
        clock.wait_until_idle()
        assert shop.notes[-1] == ("fresh", 27.0 * HOUR)
        assert sum(what == "hourly" for what, _ in shop.notes) == 27


def test_a_job_that_does_not_end_is_named_when_time_cannot_pass(
    shop: Shop, start: Callable[[], VirtualClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.testing.clock.STEP_LIMIT", 0.2)
    gate = trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    @shop.app.task(name="shop.block")
    async def block() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        await gate.wait()

    clock = start()
    block.delay()
    with pytest.raises(TimeoutError, match=r"queue default still has jobs on it or running.*shop\.block"):
        clock.advance(1)
    monkeypatch.undo()
    tokens[0].run_sync_soon(gate.set)
    clock.advance(1)


def test_wrong_spans_are_refused(shop: Shop, start: Callable[[], VirtualClock]) -> None:
    clock = start()
    wrong: Any
    for wrong in (-1, float("inf"), float("nan"), 1e18, "1d", None, timedelta(days=1)):
        with pytest.raises(ValueError, match="give a number of seconds, from 0 on"):
            clock.advance(wrong)


def test_a_start_that_is_no_time_is_refused() -> None:
    wrong: Any
    for wrong in (-1, float("nan"), 1e18, "now", datetime.now(UTC)):
        with (
            pytest.raises(ValueError, match=r"^start_time is .*: give a number of seconds, from 0 on$"),
            virtual_time(App("early"), start_time=wrong),
        ):
            raise AssertionError("a clock without a time")


def test_a_second_clock_is_refused(shop: Shop, start: Callable[[], VirtualClock]) -> None:
    start()
    with pytest.raises(Misconfigured, match="in force already"), virtual_time(App("other")):
        raise AssertionError("two clocks")


def test_time_is_real_again_after_the_block(shop: Shop, url: str) -> None:
    with virtual_time(shop.app, broker=url) as clock:
        clock.advance(DAY)
        assert clock.now > time.time() + DAY / 2
    job = shop.note.job("later")
    with virtual_time(shop.app, broker=url) as clock:
        assert abs(clock.now - time.time()) < HOUR
    assert b"later" in job.message


def test_a_fixture_gives_a_test_its_clock(
    shop: Shop, celery5_virtual_time: Callable[[App], VirtualClock]
) -> None:
    shop.begin(clock := celery5_virtual_time(shop.app))
    shop.note.options(countdown=DAY).delay("later")
    clock.advance(DAY)
    assert shop.notes == [("later", DAY)]


@pytest.mark.parametrize("run_loop", [trio.run, asyncio.run], ids=["trio", "asyncio"])
def test_time_passes_from_asynchronous_tests(
    shop: Shop, start: Callable[[], VirtualClock], run_loop: Callable[..., Any]
) -> None:
    clock = start()

    async def test() -> tuple[str, str]:
        in_thread = await shop.note.options(countdown=DAY).adelay("in a thread")
        if run_loop is trio.run:
            await trio.to_thread.run_sync(clock.advance, DAY)
        else:
            await asyncio.to_thread(clock.advance, DAY)
        blocking = await shop.note.options(countdown=DAY).adelay("blocking")
        clock.advance(DAY)
        return await in_thread.aget(timeout=30), await blocking.aget(timeout=30)

    result = run_loop(test) if run_loop is trio.run else run_loop(test())
    assert result == ("in a thread", "blocking")
    assert shop.notes == [("in a thread", DAY), ("blocking", 2.0 * DAY)]
