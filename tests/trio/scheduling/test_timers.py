"""Timers: when they fire, what overlaps, what a failure does, and how they stop. All in virtual time."""

import functools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5 import App, Reject, cron
from celery5.broker.keys import Keys
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.scheduling.periodic import OverlapPolicy
from celery5.protocol.scheduling.timers import (
    MAX_RUNS_AT_ONCE,
    TimerCounts,
    TimerStanding,
    decide_run,
    get_next_tick,
)
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.scheduling.timers import DeclareStart, DeclareTimer
from celery5.services.scheduling.timer_leadership import TimerLeadership
from celery5.services.scheduling.timers import TimerRuns, Timers
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import told

GRACE = 5.0
_NO_REDIS: Any = None  # what runs in each process asks nobody


@pytest.fixture
def timer() -> DeclareTimer:
    return DeclareTimer()


@asynccontextmanager
async def firing(
    timer: DeclareTimer,
    loop: AsyncioRunner,
    *,
    get_wall_time: Callable[[], float] | None = None,
    counts: dict[str, TimerCounts] | None = None,
) -> AsyncGenerator[TimerRuns]:
    """Both steps while the block lasts; then they stop as a worker stops them."""
    leadership = TimerLeadership(
        declared_timers=timer.list_timers("UTC"),
        default_redis=_NO_REDIS,
        keys=Keys("shop"),
        worker="w1",
        timer_standing=TimerStanding(),
        log=Log(worker="w1", app="shop"),
    )
    runs = TimerRuns(
        declared_timers=timer.list_timers("UTC"),
        timer_counts={} if counts is None else counts,
        asyncio_runner=loop,
        timer_leadership=leadership,
        grace_period=GRACE,
        log=Log(worker="w1", app="shop"),
    )
    more: dict[str, Any] = {} if get_wall_time is None else {"get_wall_time": get_wall_time}
    timers = Timers(
        declared_timers=timer.list_timers("UTC"), timer_runs=runs, timer_leadership=leadership, **more
    )
    async with trio.open_nursery() as holding:
        await holding.start(runs.run)
        async with trio.open_nursery() as ticking:
            await ticking.start(timers.run)
            yield runs
            ticking.cancel_scope.cancel()
        holding.cancel_scope.cancel()


async def test_it_runs_every_so_many_seconds_however_long_a_run_takes(
    timer: DeclareTimer, loop: AsyncioRunner, autojump_clock: MockClock
) -> None:
    times: list[float] = []

    @timer(10)
    async def note() -> None:
        times.append(trio.current_time() - start)
        await trio.sleep(7)

    start = trio.current_time()
    async with firing(timer, loop):
        await trio.sleep(45)
    assert times == pytest.approx([10, 20, 30, 40])


async def test_an_error_is_logged_once_for_each_failure_and_the_next_run_comes(
    timer: DeclareTimer, loop: AsyncioRunner, lines: Lines, autojump_clock: MockClock
) -> None:
    errors: list[BaseException] = [
        ValueError("no rates"),
        SystemExit(3),
        ExceptionGroup("two", [KeyError("a"), OSError("b")]),
        Reject("not now"),
    ]

    @timer(interval=timedelta(seconds=1))
    async def flaky() -> object:
        if errors:
            raise errors.pop(0)
        return object()  # it has no JSON form, and needs none

    async with firing(timer, loop) as runs:
        await trio.sleep(6.5)
        assert runs.get_status() == {"flaky": {"runs": 6, "failures": 4, "skipped": 0, "running": 0}}
    failed = told(lines, "timer:failed")
    assert [line["why"].partition(":")[0] for line in failed] == [
        "ValueError",
        "SystemExit",
        "ExceptionGroup",
        "Reject",
    ]
    assert "raise errors.pop(0)\nValueError: no rates" in failed[0]["traceback"]
    assert {line["level"] for line in failed} == {"error"}


@pytest.mark.parametrize(
    ("overlap", "starts", "skipped"),
    [
        ("skip", [1, 4, 7, 10], 7),
        ("queue", [1, 3.4, 5.8, 8.2, 10.6], 5),
        ("allow", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 0),
    ],
)
async def test_a_run_that_has_not_ended_is_treated_as_the_policy_says(
    timer: DeclareTimer,
    loop: AsyncioRunner,
    lines: Lines,
    autojump_clock: MockClock,
    overlap: OverlapPolicy,
    starts: list[float],
    skipped: int,
) -> None:
    times: list[float] = []

    @timer(1, overlap=overlap)
    async def slow() -> None:
        times.append(trio.current_time() - start)
        await trio.sleep(2.4)

    start = trio.current_time()
    async with firing(timer, loop) as runs:
        await trio.sleep(11.1)
        runs.stop()
        status = runs.get_status()["slow"]
    assert times == pytest.approx(starts)  # what waited when it stopped does not begin
    assert status["skipped"] == skipped
    assert sum(line["count"] for line in told(lines, "timer:skipped")) == skipped
    assert status["runs"] == len(times)


async def test_no_more_than_so_many_runs_overlap(
    timer: DeclareTimer, loop: AsyncioRunner, autojump_clock: MockClock
) -> None:
    @timer(1, overlap="allow")
    async def stuck() -> None:
        await trio.sleep_forever()

    async with firing(timer, loop) as runs:
        await trio.sleep(15.5)
        status = runs.get_status()["stuck"]
    assert (status["running"], status["skipped"]) == (MAX_RUNS_AT_ONCE, 15 - MAX_RUNS_AT_ONCE)


async def test_a_jitter_delays_each_run_by_less_and_shifts_none(
    timer: DeclareTimer, loop: AsyncioRunner, autojump_clock: MockClock
) -> None:
    times: list[float] = []

    @timer(10, jitter=4)
    async def note() -> None:
        times.append(trio.current_time() - start)

    start = trio.current_time()
    async with firing(timer, loop) as runs:
        await trio.sleep(1006)
        assert runs.get_status()["note"]["skipped"] == 0
    delays = [at - 10 * (number + 1) for number, at in enumerate(times)]
    assert len(times) == 100
    assert 0 <= min(delays) < 1
    assert 3 < max(delays) <= 4


async def test_running_timer_is_cancelled_after_the_grace_period(
    timer: DeclareTimer, loop: AsyncioRunner, lines: Lines, autojump_clock: MockClock
) -> None:
    ended: list[str] = []

    @timer(1)
    async def soon() -> None:
        await trio.sleep(GRACE - 1)
        ended.append("soon")

    @timer(1, overlap="queue")
    async def late() -> None:
        try:
            await trio.sleep(GRACE + 10)
            ended.append("late")
        finally:
            ended.append("cleaned up")

    async with firing(timer, loop):
        await trio.sleep(2.5)
        stopping = trio.current_time()
    assert ended == ["soon", "cleaned up"]
    assert trio.current_time() - stopping == pytest.approx(GRACE)
    assert [line["timer"] for line in told(lines, "timer:cancelled")] == ["late"]
    assert told(lines, "timer:failed") == []


async def test_each_function_runs_where_it_belongs(timer: DeclareTimer, loop: AsyncioRunner) -> None:
    import asyncio

    seen: dict[str, object] = {}
    done = {name: trio.Event() for name in ("on_trio", "on_asyncio", "in_thread")}
    token = trio.lowlevel.current_trio_token()

    @timer(0.01)
    async def on_trio() -> None:
        seen["on_trio"] = trio.lowlevel.current_task() is not None
        done["on_trio"].set()

    @timer(0.01, loop="asyncio")
    async def on_asyncio() -> None:
        await asyncio.sleep(0)
        seen["on_asyncio"] = asyncio.current_task() is not None
        token.run_sync_soon(done["on_asyncio"].set)

    @timer(0.01)
    def in_thread() -> None:
        seen["in_thread"] = threading.current_thread() is not threading.main_thread()
        token.run_sync_soon(done["in_thread"].set)

    async with firing(timer, loop):
        with trio.fail_after(30):
            for event in done.values():
                await event.wait()
    assert seen == {"on_trio": True, "on_asyncio": True, "in_thread": True}


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("", ["01 03:00:00", "01 03:30:00", "02 03:00:00"]),
        ("Europe/Berlin", ["02 02:00:00", "02 02:30:00"]),
    ],
)
async def test_a_cron_trigger_fires_by_the_wall_clock(
    timer: DeclareTimer, loop: AsyncioRunner, autojump_clock: MockClock, zone: str, expected: list[str]
) -> None:
    first = datetime(2026, 3, 1, 2, 59, 30, tzinfo=UTC).timestamp()
    begin = trio.current_time()
    times: list[str] = []

    def get_wall_time() -> float:
        return first + trio.current_time() - begin

    @timer(cron("*/30 3 * * *", timezone=zone))
    async def nightly() -> None:
        times.append(datetime.fromtimestamp(get_wall_time(), UTC).strftime("%d %H:%M:%S"))

    async with firing(timer, loop, get_wall_time=get_wall_time):
        await trio.sleep(86_400 + 60)
    assert times == expected


def test_the_setting_is_the_time_zone_of_timers_that_name_none(timer: DeclareTimer) -> None:
    @timer(cron("0 3 * * *"))
    async def nightly() -> None: ...

    @timer(cron("0 3 * * *", timezone="America/New_York"))
    async def far_away() -> None: ...

    zones = {entry.name: getattr(entry.interval, "zone", "") for entry in timer.list_timers("Europe/Berlin")}
    assert list(zones.values()) == ["Europe/Berlin", "America/New_York"]


def test_ticks_that_passed_while_the_process_was_blocked_are_left_out() -> None:
    assert get_next_tick(0, 0.0, 10) == 1
    assert get_next_tick(1, 10.0, 10) == 2
    assert get_next_tick(1, 9.999, 10) == 2  # the clock of the loop is a little behind
    assert get_next_tick(1, 45.0, 10) == 5


def test_what_happens_to_a_timer_that_is_due() -> None:
    assert {decide_run(policy, running=0, is_waiting=False) for policy in ("skip", "queue", "allow")} == {
        "run"
    }
    assert decide_run("skip", running=1, is_waiting=False) == "skip"
    assert decide_run("queue", running=1, is_waiting=False) == "wait"
    assert decide_run("queue", running=1, is_waiting=True) == "skip"
    assert decide_run("allow", running=MAX_RUNS_AT_ONCE - 1, is_waiting=False) == "run"
    assert decide_run("allow", running=MAX_RUNS_AT_ONCE, is_waiting=False) == "skip"


async def fine() -> None: ...


async def takes_one(_rate: int) -> None: ...


def yields() -> Any:
    yield


app = App("shop")


@app.task
async def a_task() -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "error"),
    [
        (fine, {"interval": 0}, "timer fine: interval is 0: give seconds, 0.001 to 100 years, or cron"),
        (fine, {"interval": -1.5}, "interval is -1.5: give seconds"),
        (fine, {"interval": float("nan")}, "interval is nan: give seconds"),
        (fine, {"interval": 10**400}, "interval is 1000.*: give seconds"),
        (fine, {"interval": True}, "interval is True: give seconds"),
        (fine, {"interval": "0 3 * * *"}, r"give seconds, or cron\('0 3 \* \* \*'\)"),
        (fine, {"interval": fine}, r"write @app.timer\(interval=60\)"),
        (fine, {"interval": cron("99 3 * * *")}, "timer fine: .*minute '99'"),
        (fine, {"interval": 1, "overlap": "skipp"}, "overlap is 'skipp'; did you mean 'skip'"),
        (fine, {"interval": 1, "jitter": 2}, "jitter is 2: give seconds, 0 to 1"),
        (fine, {"interval": 1, "jitter": "much"}, "jitter is 'much'"),
        (fine, {"interval": 1, "loop": "curio"}, "loop is 'curio': give 'trio' or 'asyncio'"),
        (fine, {"interval": 1, "name": "a b"}, "timer name 'a b': use 1 to 200 characters"),
        (fine, {"interval": 1, "jiter": 2}, "jiter is no option; did you mean 'jitter'"),
        (fine, {"interval": 1, "on_leader": "yes"}, "timer fine: on_leader is 'yes': give True or False"),
        (fine, {"interval": 1, "onleader": True}, "onleader is no option; did you mean 'on_leader'"),
        (print, {"interval": 1, "loop": "asyncio"}, "is not async: loop='asyncio' is for async def"),
        (takes_one, {"interval": 1}, "timer takes_one is called without arguments: missing .*_rate"),
        (yields, {"interval": 1}, "timer yields: it has a yield"),
        (42, {"interval": 1, "name": "n"}, "timer n: 42 is no function"),
        (a_task, {"interval": 1}, r"is a task: write @app.task\(schedule=\.\.\.\) instead"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    timer: DeclareTimer, function: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(Misconfigured, match=f"(?i){error}") as caught:
        timer(**options)(function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "options", "error"),
    [
        (takes_one, {}, "start function takes_one is called without arguments: missing .*_rate"),
        (fine, {"on_leader": 1}, "start function fine: on_leader is 1: give True or False"),
        (fine, {"interval": 1}, "@app.on_start: interval is no option; there are name, loop, on_leader"),
        (a_task, {}, r"is a task"),
    ],
)
def test_a_mistake_of_a_start_function_is_said_in_one_line(
    timer: DeclareTimer, function: Any, options: dict[str, Any], error: str
) -> None:
    on_start: Any = DeclareStart(timer)
    with pytest.raises(Misconfigured, match=error) as caught:
        on_start(**options)(function) if options else on_start(function)
    assert "\n" not in str(caught.value)
    assert timer.known == {}


async def test_a_start_function_runs_once_in_each_process_and_may_fail(
    timer: DeclareTimer, loop: AsyncioRunner, lines: Lines, autojump_clock: MockClock
) -> None:
    times: list[float] = []
    on_start = DeclareStart(timer)

    @on_start
    async def warm_up() -> None:
        times.append(trio.current_time())

    @on_start(name="broken")
    async def fails() -> None:
        raise SystemExit("no rates")

    counts: dict[str, TimerCounts] = {}
    for _ in range(2):  # two incarnations of one process
        async with firing(timer, loop, counts=counts):
            await trio.sleep(60)
    assert len(times) == 1
    assert {name: (count.runs, count.failures) for name, count in counts.items()} == {
        "warm_up": (1, 0),
        "broken": (1, 1),
    }
    assert [line["timer"] for line in told(lines, "timer:failed")] == ["broken"]


def test_a_cluster_starts_with_a_process_that_asks_first_and_finds_nobody() -> None:
    assert TimerStanding().record_request(is_leader=True, others=0)
    assert not TimerStanding().record_request(is_leader=True, others=1)
    waiting = TimerStanding()
    assert not waiting.record_request(is_leader=False, others=0)  # the last leader is dead, or about to be
    assert not waiting.record_request(is_leader=True, others=0)
    leading = TimerStanding()
    assert leading.record_request(is_leader=True, others=0)
    assert not leading.record_request(is_leader=True, others=0)  # it lost the lead, and has it again


def test_two_timers_of_one_name_are_refused(timer: DeclareTimer) -> None:
    timer(1)(fine)
    with pytest.raises(Misconfigured, match="two timers are named 'fine'"):
        timer(2)(fine)
    timer(2, name="fine-too")(functools.partial(fine))
    assert list(timer.known) == ["fine", "fine-too"]


def test_the_decorator_returns_the_function(timer: DeclareTimer) -> None:
    decorate: Callable[[Callable[[], Awaitable[None]]], Callable[[], Awaitable[None]]] = timer(1)
    assert decorate(fine) is fine


def test_runnels_crontab_is_answered_with_what_to_write() -> None:
    with pytest.raises(AttributeError, match=r"@app\.task\(schedule=cron\("):
        getattr(app, "crontab")  # noqa: B009  a type checker knows that it is not there
    with pytest.raises(Exception, match=r"on_leader.*@app\.on_start\(on_leader=True\)"):
        app.task(on_leader=True)(fine)  # type: ignore[call-overload]  # pyright: ignore
