"""Service breakers: a service that keeps crashing, or whose health checks are bad, is left alone for a while (C37)."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5 import BootStep, Misconfigured, RetryPolicy, service
from celery5.health import BreakerPolicy, HealthCheck
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import Desk, told

ALWAYS = RetryPolicy(max_retries=1000, backoff=1.0, cap=1.0, jitter=False)
NAME = "service:ticker"


class Ticks:
    """When a service began, and whether it is to crash, and after how long."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.crashes = True
        self.after = 0.0
        self.began = trio.current_time()

    async def ticker(self) -> None:
        self.at.append(round(trio.current_time() - self.began, 3))
        await trio.sleep(self.after)
        if self.crashes:
            raise ValueError("ticked off")
        await trio.sleep_forever()


def of(desk: Desk, ticks: Ticks, **said: Any) -> Any:
    """What runs it."""
    return desk.boot(services=(service(ticks.ticker, name="ticker", **{"retry": ALWAYS} | said),)).run


async def test_box_is_tried_once_a_period_after_three_crashes(
    desk: Desk, lines: Lines, autojump_clock: MockClock
) -> None:
    ticks = Ticks()
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks))
        await trio.sleep(100)
        assert ticks.at == [0, 1, 2, 32, 62, 92]
        reading = desk.circuits.get_readings()[NAME]
        assert (reading.state, reading.trips, reading.probe_in) == ("open", 4, 22)
        ticks.crashes = False
        await trio.sleep(30)
        assert desk.circuits.get_readings()[NAME].state == "half-open"  # it is up, and has to prove itself
        await trio.sleep(60)
        assert desk.circuits.get_readings()[NAME].state == "closed"
        nursery.cancel_scope.cancel()
    assert len(told(lines, "breaker:half-opened")) == 4
    tripped = told(lines, "breaker:tripped")
    assert [line["level"] for line in tripped] == ["warning", "warning", "error", "error"]
    assert {line["why"] for line in tripped} == {"ValueError: ticked off"}
    assert {line["breaker"] for line in tripped} == {NAME}


async def test_one_that_was_up_for_long_before_it_crashed_begins_anew(
    desk: Desk, lines: Lines, autojump_clock: MockClock
) -> None:
    ticks = Ticks()
    ticks.after = 61
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks))
        await trio.sleep(1000)
        assert len(ticks.at) == 1 + 1000 // 62
        nursery.cancel_scope.cancel()
    assert told(lines, "breaker:tripped") == []


async def test_a_breaker_of_its_own_says_when_and_how_long(desk: Desk, autojump_clock: MockClock) -> None:
    ticks = Ticks()
    policy = BreakerPolicy(threshold=1, reset=5, growth="linear", longest=20)
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks, breaker=policy))
        await trio.sleep(60)
        assert ticks.at == [0, 5, 15, 30, 50]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("mode", ["watch", "off"])
async def test_one_that_watches_or_is_off_holds_it_up_never(
    desk: Desk, lines: Lines, autojump_clock: MockClock, mode: Any
) -> None:
    ticks = Ticks()
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks, breaker=BreakerPolicy(threshold=1, mode=mode)))
        await trio.sleep(5.5)
        assert ticks.at == [0, 1, 2, 3, 4, 5]
        nursery.cancel_scope.cancel()
    assert bool(told(lines, "breaker:tripped")) == (mode == "watch")


async def test_health_checks_prevent_restarts_only(desk: Desk, autojump_clock: MockClock) -> None:
    ticks = Ticks()
    ticks.after = 10
    check = HealthCheck("feed", allowed={"unhealthy": 0})
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks, checks=[check]))
        await trio.sleep(5)
        desk.circuits.record_check(check, "unhealthy")
        await trio.sleep(29)
        assert ticks.at == [0]  # crashed at 10
        await trio.sleep(2)
        assert ticks.at == [0, 35]
        nursery.cancel_scope.cancel()


async def test_whoever_asks_for_it_by_the_command_asks_no_breaker(
    desk: Desk, autojump_clock: MockClock
) -> None:
    ticks = Ticks()
    policy = BreakerPolicy(threshold=1, reset=500)
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks, breaker=policy, optional=True))
        await trio.sleep(7)
        ticks.crashes = False
        await desk.retry("ticker")
        await trio.sleep(1)
        assert ticks.at == [0, 7]
        await trio.sleep(60)
        assert desk.circuits.get_readings()[NAME].state == "closed"
        nursery.cancel_scope.cancel()


async def test_a_service_may_be_stopped_while_its_breaker_holds_it_up(
    desk: Desk, autojump_clock: MockClock
) -> None:
    ticks = Ticks()
    async with trio.open_nursery() as nursery:
        await nursery.start(of(desk, ticks, breaker=BreakerPolicy(threshold=1, reset=600)))
        await trio.sleep(5)
        before = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - before < 1


def test_what_has_no_jobs_and_what_does_not_stay_is_refused() -> None:
    async def tick() -> None: ...

    with pytest.raises(Misconfigured, match="breaker and checks are for services"):
        BootStep("tick", tick, checks=[HealthCheck("a")])
    with pytest.raises(Misconfigured, match="service 'tick' has no jobs to fail"):
        service(tick, breaker=BreakerPolicy(mode="fail"))
    wrong: Any = "disk"
    with pytest.raises(Misconfigured, match="checks has 'disk'"):
        service(tick, checks=[wrong])
