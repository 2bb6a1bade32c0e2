"""Circuits: breakers of tasks at work on virtual time: the proposal's example, and whom a breaker lets pass."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import pytest
import trio
from trio.testing import MockClock

from celery5 import App, Misconfigured
from celery5.health import BreakerPolicy, HealthCheck
from celery5.health.circuit_breaker import AFTER_PROBE_DELAY, MIN_HOLD, CircuitBreaker
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command, Failure
from celery5.protocol.job.verdict import CircuitBlocked, Interrupted, Outcome, Raised, Returned
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vital_sources import BreakerMetrics
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import told

WELL = Returned(b"1")
ILL = Raised(Failure(type="ValueError", message="ill"), (("ValueError",),))


@pytest.fixture
def lines() -> Iterator[Lines]:
    with Lines() as lines:
        yield lines


class Ward:
    """One task, its checks, its breaker, and jobs that come to it."""

    def __init__(self, *checks: HealthCheck, **policy: Any) -> None:
        self.app = App("clinic")
        self.task = self.app.task(name="treat", breaker=BreakerPolicy(**policy), checks=checks)(_nothing)
        self.circuits = CircuitBreakers(tasks=self.app.tasks, log=Log(worker="w1", app="clinic"))

    def job(self, **more: Any) -> Delivery:
        command = Command(v=1, id="a", task="treat", **more)
        return Delivery(queue="q", entry=b"1-0", message=b"", command=command, kind="trio")

    def comes(self, **more: Any) -> tuple[Delivery, CircuitBlocked | None]:
        """A job comes: it, and what bars its way, if anything does."""
        job = self.job(**more)
        return job, self.circuits.try_bar(job, "treat") if "treat" in self.circuits.not_closed else None

    def ends(self, job: Delivery, outcome: Outcome) -> None:
        self.circuits.record_outcome(job, "treat", outcome)

    def run(self, outcome: Outcome) -> bool:
        """A job comes and, if it may run, ends. Whether it ran."""
        job, barred = self.comes()
        if barred is None:
            self.ends(job, outcome)
        return barred is None


async def _nothing() -> None: ...


async def test_the_example_of_the_proposal(autojump_clock: MockClock, lines: Lines) -> None:
    """At most 2 Unhealthy and 10 Degraded within 10 s; closed after 30 s; 3 trips in 5 minutes are errors, for 30
    minutes."""
    check = HealthCheck("bank", states=("unhealthy", "degraded", "healthy"))
    ward = Ward(check, threshold=None, allowed={"unhealthy": 2, "degraded": 10})

    async def seen(state: str, times: int, pause: float = 0.0) -> None:
        for _ in range(times):
            ward.circuits.record_check(check, state)
            await trio.sleep(pause)

    def is_open() -> bool:
        return bool(ward.circuits.not_closed)

    await seen("degraded", 10, pause=0.9)
    await seen("unhealthy", 2)
    assert not is_open()  # as many as are allowed
    await seen("degraded", 1)
    assert is_open()  # one more, 9 s after the first
    await trio.sleep(30)
    assert ward.run(WELL)
    assert not is_open()

    await trio.sleep(60)
    await seen("unhealthy", 30, pause=5.1)  # never three of them in 10 s
    assert not is_open()

    for _ in range(2):  # two trips in five minutes: with the first, long ago, no three
        await trio.sleep(60)
        await seen("unhealthy", 3)
        assert is_open()
        await trio.sleep(29.9)
        assert not ward.run(WELL)
        await trio.sleep(0.1)
        assert ward.run(WELL)
        assert not is_open()
    await seen("unhealthy", 3)  # the third
    loud = trio.current_time()
    await trio.sleep(30)
    assert ward.run(WELL)
    await trio.sleep(loud + 1799 - trio.current_time())
    await seen("unhealthy", 3)  # 29:59 after it
    await trio.sleep(30)
    assert ward.run(WELL)
    await seen("unhealthy", 3)  # more than 30 minutes after it
    levels = [line["level"] for line in told(lines, "breaker:tripped")]
    assert levels == ["warning", "warning", "warning", "error", "error", "warning"]
    assert {line["seconds"] for line in told(lines, "breaker:tripped")} == {30}


async def test_thresholds_are_the_checks_own_or_those_of_the_task(autojump_clock: MockClock) -> None:
    check = HealthCheck("bank", allowed={"unhealthy": 1}, window=60)
    own, patient = Ward(check), Ward(check, allowed={"unhealthy": 3}, within=5)
    for ward in (own, patient):
        ward.circuits.record_check(check, "degraded")  # which nobody counts
        ward.circuits.record_check(check, "unhealthy")
        assert not ward.circuits.not_closed
        await trio.sleep(10)
        ward.circuits.record_check(check, "unhealthy")
    assert own.circuits.not_closed
    assert not patient.circuits.not_closed  # its window is shorter
    for _ in range(3):
        patient.circuits.record_check(check, "unhealthy")
    assert patient.circuits.not_closed


async def test_states_of_different_checks_are_counted_each_by_itself(autojump_clock: MockClock) -> None:
    bank, disk = HealthCheck("bank", allowed={"unhealthy": 1}), HealthCheck("disk", allowed={"unhealthy": 1})
    ward = Ward(bank, disk)
    ward.circuits.record_check(bank, "unhealthy")
    ward.circuits.record_check(disk, "unhealthy")
    assert not ward.circuits.not_closed
    ward.circuits.record_check(disk, "unhealthy")
    assert ward.circuits.not_closed


async def test_one_probe_goes_ahead_and_the_others_wait_about_as_long_again(
    autojump_clock: MockClock,
) -> None:
    ward = Ward(threshold=1, reset=30)
    ward.run(ILL)
    await trio.sleep(30)
    probe, free = ward.comes()
    assert free is None
    waits: list[float] = []
    for _ in range(4):
        _, barred = ward.comes()
        assert barred is not None
        assert barred.delay is not None
        waits.append(barred.delay)
        await trio.sleep(barred.delay)
    assert waits == [1, 1, 2, 4]
    await trio.sleep(1000)
    _, barred = ward.comes()
    assert barred is not None
    assert barred.delay == 30  # and no longer than it was open
    ward.ends(probe, WELL)
    assert ward.run(WELL)


async def test_a_breaker_that_is_hardly_open_lets_no_job_turn_in_circles(autojump_clock: MockClock) -> None:
    ward = Ward(threshold=1, reset=0)
    ward.run(ILL)
    _, free = ward.comes()
    assert free is None
    _, barred = ward.comes()
    assert barred is not None
    assert barred.delay == MIN_HOLD


async def test_the_first_that_was_held_comes_first_and_the_others_after_it(autojump_clock: MockClock) -> None:
    ward = Ward(threshold=1, reset=30)
    ward.run(ILL)
    await trio.sleep(10)
    delays = [barred.delay for _, barred in (ward.comes() for _ in range(20)) if barred]
    assert delays[0] == 20
    assert all(
        delay is not None and 20 + AFTER_PROBE_DELAY <= delay <= 20 + 2 * AFTER_PROBE_DELAY
        for delay in delays[1:]
    )
    assert len(set(delays[1:])) > 10  # not all at once


async def test_a_probe_that_learns_nothing_leaves_the_way_to_the_next(autojump_clock: MockClock) -> None:
    ward = Ward(threshold=1, reset=30)
    ward.run(ILL)
    await trio.sleep(30)
    probe, _ = ward.comes()
    ward.ends(probe, Interrupted())
    assert ward.run(WELL)
    assert not ward.circuits.not_closed


async def test_what_began_before_the_trip_says_nothing_when_it_ends(autojump_clock: MockClock) -> None:
    ward = Ward(threshold=1, reset=30)
    early = [ward.comes()[0] for _ in range(2)]
    ward.run(ILL)
    ward.ends(early[0], WELL)
    assert ward.circuits.not_closed
    await trio.sleep(30)
    probe, _ = ward.comes()
    ward.ends(early[1], ILL)
    assert ward.circuits.get_readings()["treat"].trips == 1
    ward.ends(probe, WELL)
    assert not ward.circuits.not_closed


async def test_a_state_reported_during_the_probe_trips_it_whatever_the_probe_says(
    autojump_clock: MockClock,
) -> None:
    check = HealthCheck("bank", allowed={"unhealthy": 0})
    ward = Ward(check, threshold=1)
    ward.run(ILL)
    await trio.sleep(30)
    probe, _ = ward.comes()
    ward.circuits.record_check(check, "unhealthy", "it said so itself")
    ward.ends(probe, WELL)
    reading = ward.circuits.get_readings()["treat"]
    assert (reading.state, reading.trips, reading.probe_in) == ("open", 2, 30)
    assert reading.why == "health check bank is unhealthy: it said so itself"


TRIPS: dict[str, Callable[["Ward", HealthCheck], Awaitable[object]]] = {}


def trip(way: Callable[["Ward", HealthCheck], Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    """Add one of the ways in which a breaker trips."""
    TRIPS[way.__name__] = way
    return way


@trip
async def by_failures(ward: Ward, _check: HealthCheck) -> None:
    for _ in range(2):
        ward.run(ILL)


@trip
async def by_a_check(ward: Ward, check: HealthCheck) -> None:
    for _ in range(2):
        ward.circuits.record_check(check, "unhealthy")


@trip
async def by_a_probe_that_fails(ward: Ward, check: HealthCheck) -> None:
    await by_failures(ward, check)
    await trio.sleep(31)
    ward.run(ILL)


@trip
async def by_a_check_during_the_probe(ward: Ward, check: HealthCheck) -> None:
    await by_failures(ward, check)
    await trio.sleep(31)
    ward.comes()
    await by_a_check(ward, check)


@trip
async def by_a_service(ward: Ward, check: HealthCheck) -> None:
    circuit = ward.circuits.add_service("treat", BreakerPolicy(threshold=1), [check])
    assert circuit is not None
    circuit.record_result("run", succeeded=False, why="it crashed")


@pytest.mark.parametrize("mode", ["delay", "fail", "watch"])
@pytest.mark.parametrize("way", TRIPS)
async def test_each_trip_is_a_warning_in_the_log_whatever_trips(
    autojump_clock: MockClock, lines: Lines, way: str, mode: Literal["delay", "fail", "watch"]
) -> None:
    check = HealthCheck("bank", allowed={"unhealthy": 1})
    ward = Ward(check, threshold=2, mode=mode)
    await TRIPS[way](ward, check)
    trips = sum(reading.trips for reading in ward.circuits.get_readings().values())
    tripped = told(lines, "breaker:tripped")
    assert trips == (2 if "probe" in way else 1)
    assert [line["level"] for line in tripped] == ["warning"] * trips
    assert all(line["why"] for line in tripped)


@pytest.mark.parametrize("mode", ["delay", "fail"])
async def test_no_probe_goes_ahead_while_a_health_check_is_bad(
    autojump_clock: MockClock, mode: Literal["delay", "fail"]
) -> None:
    check = HealthCheck("bank", lambda: False, period=10, allowed={"unhealthy": 0})
    ward = Ward(check, threshold=None, mode=mode)
    for _ in range(12):
        ward.circuits.record_check(check, "unhealthy")
        await trio.sleep(10)
        assert not ward.run(WELL)
    reading = ward.circuits.get_readings()["treat"]
    assert (reading.state, reading.trips, reading.why) == ("open", 1, "health check bank is unhealthy")
    ward.circuits.record_check(check, "healthy")
    await trio.sleep(10)
    assert ward.run(WELL)
    assert not ward.circuits.not_closed


async def test_a_probe_goes_ahead_when_the_bad_state_is_stale_or_is_degraded(
    autojump_clock: MockClock,
) -> None:
    check = HealthCheck("bank", lambda: False, period=10, allowed={"unhealthy": 0, "degraded": 0})
    stale, slow = Ward(check, threshold=None), Ward(check, threshold=None)
    stale.circuits.record_check(check, "unhealthy")
    slow.circuits.record_check(check, "degraded")
    await trio.sleep(30)
    slow.circuits.record_check(check, "degraded")
    assert slow.run(WELL)
    assert not stale.run(WELL)  # 30 s are three periods: it is believed until they are over
    await trio.sleep(11)
    assert stale.run(WELL)


async def test_a_check_that_only_jobs_report_bars_no_probe(autojump_clock: MockClock) -> None:
    check = HealthCheck("printer", allowed={"unhealthy": 0})
    ward = Ward(check, threshold=None)
    ward.circuits.record_check(check, "unhealthy")
    await trio.sleep(30)
    assert ward.run(WELL)


async def test_open_periods_grow_as_wished_while_probes_fail(autojump_clock: MockClock, lines: Lines) -> None:
    ward = Ward(threshold=1, reset=10, growth="exponential", longest=35)
    ward.run(ILL)
    for _ in range(3):
        await trio.sleep(ward.circuits.get_readings()["treat"].probe_in)
        assert ward.run(ILL)
    assert [line["seconds"] for line in told(lines, "breaker:tripped")] == [10, 20, 35, 35]


async def test_waiter_hears_when_a_held_job_expires(
    autojump_clock: MockClock,
) -> None:
    import time

    ward = Ward(threshold=1, reset=30)
    ward.run(ILL)
    _, barred = ward.comes(expires=time.time() + 5)
    assert barred is not None
    assert barred.delay == pytest.approx(5, abs=1)


async def test_a_healthy_task_has_no_breaker_at_all(autojump_clock: MockClock) -> None:
    ward = Ward()
    assert ward.run(WELL)
    assert (ward.circuits.get_readings(), ward.circuits.not_closed, ward.circuits.needing_success) == (
        {},
        {},
        set(),
    )
    ward.run(ILL)
    assert ward.circuits.needing_success == {"treat"}  # a success would say something now
    ward.run(WELL)
    assert ward.circuits.needing_success == set()
    assert ward.circuits.get_readings()["treat"].failures == 0


def test_a_breaker_that_allows_what_no_check_says_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"allows 'unhealty', but bad states .* are: degraded, unhealthy"):
        Ward(HealthCheck("bank"), allowed={"unhealty": 1})
    with pytest.raises(Misconfigured, match="allows 'unhealthy', but it has no checks"):
        Ward(allowed={"unhealthy": 1})


async def test_breakers_of_tasks_are_among_the_metrics(autojump_clock: MockClock, lines: Lines) -> None:
    ward = Ward(threshold=2, reset=30.0)

    def measured() -> dict[str, dict[str, float]]:
        metric_families = BreakerMetrics(ward.circuits).metric_families()
        return {
            family.name: {sample.labels["of"]: sample.value for sample in family.samples}
            for family in metric_families
        }

    assert measured() == {"celery5_breaker_state": {}, "celery5_breaker_trips_total": {}}
    for _ in range(2):
        assert ward.run(ILL)
    assert measured() == {"celery5_breaker_state": {"treat": 2}, "celery5_breaker_trips_total": {"treat": 1}}
    await trio.sleep(30)
    probe, _barred = ward.comes()
    assert measured()["celery5_breaker_state"] == {"treat": 1}
    ward.ends(probe, WELL)
    assert measured() == {"celery5_breaker_state": {"treat": 0}, "celery5_breaker_trips_total": {"treat": 1}}


@pytest.mark.parametrize(
    ("mode", "effect"),
    [
        ("watch", "none: it only watches, its jobs run on"),
        ("delay", "its jobs wait in Redis"),
        ("fail", "its jobs fail at once"),
    ],
)
async def test_a_breaker_says_everywhere_what_it_does_with_its_jobs(
    autojump_clock: MockClock, lines: Lines, mode: Any, effect: str
) -> None:
    ward = Ward(threshold=1, mode=mode)
    ward.run(ILL)
    reading = ward.circuits.get_readings()["treat"]
    assert (reading.state, reading.mode, reading.effect) == ("open", mode, effect)
    state, _ = BreakerMetrics(ward.circuits).metric_families()
    assert [sample.labels for sample in state.samples] == [{"of": "treat", "mode": mode}]
    await trio.sleep(30)
    assert ward.run(WELL)
    assert ward.circuits.get_readings()["treat"].effect == ""
    (tripped,) = told(lines, "breaker:tripped")
    assert tripped["effect"] == effect
    assert [told(lines, f"breaker:{event}")[0]["mode"] for event in ("half-opened", "closed")] == [mode, mode]


async def test_breaker_with_frequent_probes_logs_them_at_debug(
    autojump_clock: MockClock, lines: Lines
) -> None:
    policy = BreakerPolicy(threshold=1, reset=1.0)
    circuit = CircuitBreaker(name="publisher", policy=policy, log=Log(worker="w", app="a"), logs_probes=False)
    circuit.record_result("it", succeeded=False, why="away")
    for succeeded in (*[False] * 10, True):
        await trio.sleep(1.0)
        assert circuit.begin_probe("it")
        circuit.record_result("it", succeeded=succeeded, why="away")
    levels = [line["level"] for line in told(lines, "breaker:tripped")]
    assert levels == ["warning", "debug", "error", *["debug"] * 8]
    assert {line["level"] for line in told(lines, "breaker:half-opened")} == {"debug"}
    assert [line["level"] for line in told(lines, "breaker:closed")] == ["info"]
