"""Health: checks look when their period lapses, on virtual time: whose word counts, what becomes of one that fails."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from celery5 import App, Misconfigured
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import CommandRefused
from celery5.health import HealthCheck
from celery5.health.checks import BrokerPing
from celery5.health.event_loop import LoopBlocks
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import CHECK_EXPIRED, HEALTH
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.commands.dispatcher import CommandRegistry, handle
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.health_checks import MAX_REMEMBERED_ERRORS, HealthMonitor
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import told

WORDS = ("burning", "smoking", "fine")


class Said(str, Enum):  # noqa: UP042  str() of it is another word
    """States as an application may name them."""

    SMOKING = "smoking"


class NoRedis:
    """Where local checks live, there is no Redis."""

    async def perform(self, call: Call[Any], /) -> Any:
        raise AssertionError(f"nobody asks Redis: {call}")

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]


@asynccontextmanager
async def looking(
    *checks: HealthCheck, circuit_breakers: CircuitBreakers | None = None
) -> AsyncGenerator[HealthMonitor, None]:
    """The service with these checks, while the block lasts."""
    log = Log(worker="w1", app="clinic")
    one = HealthMonitor(
        checks={check.name: check for check in checks},
        circuit_breakers=circuit_breakers or CircuitBreakers(tasks={}, log=log),
        redis=NoRedis(),
        keys=Keys("clinic"),
        loop_blocks=LoopBlocks(),
        health_store="broker",
        worker_group="",
        app=App("clinic"),
        asyncio_runner=AsyncioRunner(),
        log=log,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        yield one
        nursery.cancel_scope.cancel()


def saying(*answers: Any) -> Callable[[], Awaitable[Any]]:
    """A function that answers one after the other, then the last again and again; an error is raised."""
    left = list(answers)

    async def say() -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return say


async def test_it_looks_at_once_and_each_time_the_period_lapses(autojump_clock: MockClock) -> None:
    seen: list[float] = []

    async def look() -> None:
        seen.append(trio.current_time() - began)

    began = trio.current_time()
    async with looking(HealthCheck("a", look, period=7)):
        await trio.sleep(22)
    assert seen == [0, 7, 14, 21]


class Hasty(HealthCheck):
    """A check that is run again soon while it is in a bad state."""

    @property
    def recheck_period(self) -> float | None:
        return 4.0


async def test_recovery_of_a_check_is_seen_long_before_its_next_period(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[str] = []

    def record(_self: object, _check: HealthCheck, state: str, _why: str = "") -> None:
        recorded.append(state)

    monkeypatch.setattr(CircuitBreakers, "record_check", record)
    calls: list[float] = []
    began = trio.current_time()

    async def look() -> str:
        calls.append(trio.current_time() - began)
        return "unhealthy" if calls[-1] < 40 else "healthy"

    check = Hasty("broker", look, period=30)
    async with looking(check):
        await trio.sleep(45)
        assert check.state == "healthy"
        assert any(40 <= at <= 44 for at in calls)
        count = len(calls)
        await trio.sleep(14)
        assert len(calls) == count, "a good one is run at its periods alone"
    assert recorded == ["unhealthy", "unhealthy", "healthy"], "breakers count its periods, and changes"


def test_broker_is_asked_again_soon_unless_it_is_asked_as_often() -> None:
    assert BrokerPing().recheck_period == 4.0
    assert BrokerPing(period=3).recheck_period is None
    assert HealthCheck("a").recheck_period is None


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (True, "fine"),
        (None, "fine"),
        (False, "burning"),
        ("smoking", "smoking"),
        (["fine", "burning", "smoking"], "burning"),
        ({"fine", "smoking"}, "smoking"),
        (Said.SMOKING, "smoking"),
    ],
    ids=["true", "nothing", "false", "one", "a list", "a set", "an enum"],
)
async def test_of_several_states_the_first_by_precedence_counts(
    autojump_clock: MockClock, answer: Any, state: str
) -> None:
    check = HealthCheck("a", saying(answer), states=WORDS)
    async with looking(check) as health:
        await wait_all_tasks_blocked()
        assert health.get_reading("a").state == check.state == state
        assert health.get_reading("a").is_good == (state == "fine")


async def test_all_that_subscribed_are_asked_and_the_worst_word_counts(autojump_clock: MockClock) -> None:
    app = App("clinic")
    check = HealthCheck("a", saying("fine"), states=WORDS, period=5)
    check.subscribe(saying("fine", "smoking"))

    @check.subscribe
    @app.task
    async def third() -> str:
        return words.pop(0)

    words = ["fine", "burning", "fine"]
    async with looking(check):
        states: list[str] = []
        for _ in range(3):
            await wait_all_tasks_blocked()
            states.append(check.state)
            await trio.sleep(5)
    assert states == ["fine", "burning", "smoking"]


def test_what_cannot_look_is_refused_when_it_subscribes() -> None:
    app, check = App("clinic"), HealthCheck("a")

    async def asks(patient: str) -> None: ...
    def plain() -> None: ...

    boxed: Any = app.task(name="boxed", boxed=True)(plain)
    for wrong in (asks, boxed, "disk", app.task(asks)):
        look: Any = wrong
        with pytest.raises(Misconfigured, match="health check a: "):
            check.subscribe(look)
        with pytest.raises(Misconfigured, match="health check b: "):
            HealthCheck("b", look)
    check.subscribe(plain)
    check.subscribe(partial(asks, "you"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (ValueError("no"), "ValueError: no"),
        (SystemExit(3), "SystemExit: 3"),
        ("asleep", "ValueError: 'asleep' is none of its states: burning, smoking, fine"),
        (3, "ValueError: 3 is none of its states: burning, smoking, fine"),
        ([], "ValueError: [] is none of its states: burning, smoking, fine"),
    ],
    ids=str,
)
async def test_a_check_that_fails_is_an_error_in_the_log_and_keeps_its_state(
    autojump_clock: MockClock, wrong: Any, why: str
) -> None:
    check = HealthCheck("a", saying("smoking", wrong), states=WORDS, period=10, stale_after=3)
    with Lines() as lines:
        async with looking(check) as health:
            await trio.sleep(29)
            assert (check.state, health.get_reading("a").is_stale) == ("smoking", False)
            await trio.sleep(2)
            assert (health.get_reading("a").state, health.get_reading("a").is_stale) == ("smoking", True)
    failed = told(lines, "health:check-failed")
    assert [(line["level"], line["check"], line["why"]) for line in failed] == [("error", "a", why)]


async def test_each_fault_is_told_once_until_the_check_has_recovered(autojump_clock: MockClock) -> None:
    one, two = ValueError("one"), ValueError("two")
    moody = HealthCheck("a", saying(one, one, two, one, two, "fine", one, one), states=WORDS, period=1)
    moody.subscribe(saying("fine"))  # that another function looks well is no recovery
    with Lines() as lines:
        async with looking(moody):
            await trio.sleep(8.5)
    whys = [line["why"] for line in told(lines, "health:check-failed")]
    assert whys == ["ValueError: one", "ValueError: two", "ValueError: one"]


async def test_faults_that_are_new_at_each_look_are_all_told_and_few_remembered(
    autojump_clock: MockClock,
) -> None:
    always_new = saying(*(ValueError(str(n)) for n in range(3 * MAX_REMEMBERED_ERRORS)))
    with Lines() as lines:
        async with looking(HealthCheck("a", always_new, states=WORDS, period=1)) as health:
            await trio.sleep(3 * MAX_REMEMBERED_ERRORS - 0.5)
            assert len(health._logged_errors["a", 0]) <= MAX_REMEMBERED_ERRORS
    assert len(told(lines, "health:check-failed")) == 3 * MAX_REMEMBERED_ERRORS


async def test_of_several_that_look_those_that_do_not_fail_are_heard(autojump_clock: MockClock) -> None:
    check = HealthCheck("a", saying(ValueError("no")), states=WORDS)
    check.subscribe(saying("smoking"))
    async with looking(check):
        await wait_all_tasks_blocked()
        assert check.state == "smoking"


async def test_checks_that_hang_are_left_after_their_time_and_hold_up_nobody(
    autojump_clock: MockClock,
) -> None:
    seen: list[float] = []

    async def look() -> None:
        seen.append(trio.current_time())

    hanging = [HealthCheck(f"h{n}", trio.sleep_forever, period=10, timeout=4) for n in range(10)]
    with Lines() as lines:
        async with looking(*hanging, HealthCheck("a", look, period=1)):
            await trio.sleep(8.5)
            assert len(seen) == 9
    failed = told(lines, "health:check-failed")
    assert {line["why"] for line in failed} == {"took longer than its 4 s"}
    assert len(failed) == 10


async def test_a_limit_of_the_checks_own_is_told_as_what_it_is(autojump_clock: MockClock) -> None:
    async def look() -> None:
        with trio.fail_after(1):
            await trio.sleep_forever()

    with Lines() as lines:
        async with looking(HealthCheck("a", look, period=60)):
            await trio.sleep(2)
    assert [line["why"] for line in told(lines, "health:check-failed")] == ["TooSlowError"]


async def test_each_change_is_told_once_as_a_warning_until_it_is_good_again(
    autojump_clock: MockClock,
) -> None:
    said = saying("fine", "fine", "smoking", "smoking", "burning", "fine")
    with Lines() as lines:
        async with looking(HealthCheck("a", said, states=WORDS, period=1)):
            await trio.sleep(9)
    changed = told(lines, "health:changed")
    assert [(line["level"], line["before"], line["state"]) for line in changed] == [
        ("warning", "fine", "smoking"),
        ("warning", "smoking", "burning"),
        ("info", "burning", "fine"),
    ]


async def test_a_check_without_functions_is_what_was_reported_last(autojump_clock: MockClock) -> None:
    check = HealthCheck("a", states=WORDS)
    rhythmic = HealthCheck("b", states=WORDS, period=5, stale_after=2)
    check.report("burning")  # nobody is there to hear it
    async with looking(check, rhythmic) as health:
        assert health.get_reading("a").state == "unknown"
        check.report("smoking", "it is the toaster")
        rhythmic.report("fine")
        await trio.sleep(9)
        assert not health.get_reading("b").is_stale
        await trio.sleep(80_000)
        assert health.get_reading("b").is_stale
        reading = health.get_reading("a")
        assert (reading.state, reading.why, reading.is_stale) == ("smoking", "it is the toaster", False)
        with pytest.raises(
            Misconfigured, match="health check a has no state 'wet'; it has: burning, smoking"
        ):
            check.report("wet")
    check.report("burning")
    assert check.state == "smoking"


async def test_the_command_has_it_look_and_the_timer_waits_while_commands_come(
    autojump_clock: MockClock,
) -> None:
    seen: list[float] = []

    async def look() -> None:
        seen.append(trio.current_time() - began)

    began = trio.current_time()
    async with looking(HealthCheck("a", look, period=10)) as health:
        commands = CommandRegistry(
            handlers={**handle(CHECK_EXPIRED, health.check_expired), **handle(HEALTH, health.report_health)}
        )
        await trio.sleep(8)
        for _ in range(4):
            reading: Any = await commands.perform("check-expired", {"check": "a"})
            assert (reading.check, reading.state) == ("a", "healthy")
            await trio.sleep(10)
        assert seen == [0, 8, 18, 28, 38]  # the command's times alone
        await commands.perform("check-expired", {"check": "a"})
        await commands.perform("check-expired", {"check": "a"})  # told twice, it looks once
        assert seen[5:] == [48]
        await trio.sleep(26)
        assert seen[6:] == [63, 73]  # nobody tells it any more, so the timer does
        answer: Any = await commands.perform("health", {})
        assert [check.check for check in answer["checks"]] == ["a"]
        with pytest.raises(CommandRefused, match="no health check 'b' on this worker; known: a"):
            await commands.perform("check-expired", {"check": "b"})


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"states": "bad"}, "two or more words"),
        ({"states": ["good"]}, "two or more words"),
        ({"states": ["bad", "bad", "good"]}, "two or more words"),
        ({"allowed": {"wet": 1}}, "allowed names 'wet'; its states are"),
        ({"allowed": {"healthy": 1}}, "is its good state and trips nothing"),
        ({"allowed": {"unhealthy": -1}}, "counts of 0 or more"),
        ({"period": 0}, "are more than 0"),
        ({"timeout": 0}, "are more than 0"),
        ({"scope": "galactic"}, "use 'local', 'group', 'global'"),
        ({"name": "two words"}, "no spaces, no braces"),
        ({"name": ""}, "1 or more characters"),
    ],
    ids=str,
)
def test_a_check_without_sense_is_refused(said: dict[str, Any], match: str) -> None:
    with pytest.raises(Misconfigured, match=match):
        HealthCheck(**{"name": "a", **said})


def test_two_checks_of_one_name_are_refused() -> None:
    app = App("clinic", checks=[HealthCheck("a")])
    with pytest.raises(Misconfigured, match="two health checks are named 'a'"):
        app.health_check(name="a")(saying(True))
