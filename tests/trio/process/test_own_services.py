"""Own services: what an application keeps running in its workers is looked after."""

import pytest
import trio
from trio.testing import MockClock

from celery5.boot_step import BootStep, service
from celery5.errors import BootStepFailed, BrokerUnavailable
from tests.redis.worker.workers import Lines
from tests.trio.cluster.desk import QUICK, Desk, told


def crashing(notes: list[str], times: int, *, of: Exception | None = None, after: float = 0.0) -> type:
    """A service that crashes so often."""

    class Ticker:
        async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
            begun = len([note for note in notes if note == "ticker"])
            notes.append("ticker")
            task_status.started()
            await trio.sleep(after)
            if begun < times:
                raise of or ValueError("ticked off")
            await trio.sleep_forever()

    return Ticker


async def test_crashing_service_is_restarted_then_stops_the_process(
    desk: Desk, notes: list[str], lines: Lines, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(services=(service(crashing(notes, 3), retry=QUICK),)).run)
        await trio.sleep(60)
        assert notes.count("ticker") == 4
        nursery.cancel_scope.cancel()
    notes.clear()
    with pytest.raises(ExceptionGroup) as caught:
        await desk.boot(services=(service(crashing(notes, 99), retry=QUICK),)).run()
    assert caught.group_contains(
        BootStepFailed, match=r"boot step 'ticker' crashed 4 times in a row: ValueError: ticked off"
    )
    assert [line["level"] for line in told(lines, "step:crashed")] == ["warning"] * 6


async def test_optional_service_that_keeps_crashing_is_given_up(
    desk: Desk, notes: list[str], lines: Lines, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        one = service(crashing(notes, 99), retry=QUICK, optional=True)
        await nursery.start(desk.boot(services=(one,)).run)
        await trio.sleep(600)
        assert notes.count("ticker") == 4
        assert desk.board.to_json()["ticker"]["state"] == "given up"
        assert "consumer down" not in notes
        nursery.cancel_scope.cancel()
    assert [line["level"] for line in told(lines, "step:abandoned")] == ["warning"]


async def test_service_is_restarted_for_as_long_as_redis_is_unreachable(
    desk: Desk, notes: list[str], autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        ticker = crashing(notes, 30, of=BrokerUnavailable("away"))
        await nursery.start(desk.boot(services=(service(ticker, retry=QUICK),)).run)
        await trio.sleep(60)
        assert notes.count("ticker") == 31
        nursery.cancel_scope.cancel()


async def test_a_function_that_stays_is_a_service_too(desk: Desk, notes: list[str]) -> None:
    async def watch() -> None:
        notes.append("watch")
        try:
            await trio.sleep_forever()
        finally:
            notes.append("watched")

    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(services=(watch,)).run)
        nursery.cancel_scope.cancel()
    assert notes.index("publishing up") < notes.index("watch") < notes.index("execution up")
    assert notes.index("execution down") < notes.index("watched") < notes.index("publishing down")


async def test_a_service_may_wait_for_jobs_to_run(desk: Desk, notes: list[str]) -> None:
    async def watch() -> None:
        notes.append("watch")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(services=(service(watch, requires="consumer"),)).run)
        nursery.cancel_scope.cancel()
    assert notes.index("consumer up") < notes.index("watch")


async def test_what_fails_while_it_stops_is_told_of_and_holds_up_nobody(
    desk: Desk, notes: list[str], lines: Lines, autojump_clock: MockClock
) -> None:
    async def watch() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("no end")

    async def fill() -> None: ...

    async def empty() -> None:
        await trio.sleep_forever()

    step = BootStep("cache", fill, undo=empty, stop_limit=3)
    async with trio.open_nursery() as nursery:
        await nursery.start(desk.boot(step, services=(watch,)).run)
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began == 3
    assert notes[-1] == "publishing down"
    assert [line["why"] for line in told(lines, "step:stop-failed")] == ["ValueError: no end"]
