"""What an operation has read is shared by all who ask for the same."""

import anyio
import msgspec
import pytest
import trio

from celery5 import App
from celery5.dashboard import performing
from celery5.dashboard.access import User
from celery5.dashboard.performing import Performer
from celery5.errors import BrokerUnavailable
from celery5.operations.operation import Operation

VIEWER = User("anna", "viewer")


class Filter(msgspec.Struct, frozen=True):
    """Parameters that are not looked at."""

    queue: str = ""


class SlowReading:
    """An operation that waits until it is let go on, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = anyio.Event()

        async def read(app: App, asked: Filter) -> int:
            self.calls += 1
            if self.calls > 1:
                await self.go_on.wait()
            return self.calls

        self.operation = Operation("queue:list", read)


async def test_running_read_delays_nobody_who_may_get_the_last_result(
    autojump_clock: trio.testing.MockClock,
) -> None:
    reading = SlowReading()
    performer = Performer({"shop": App("shop")})

    async def look() -> int:
        result: int = await performer.perform("shop", reading.operation, {}, VIEWER)
        return result

    assert [await look(), await look()] == [1, 1]
    await trio.sleep(1.5)  # it is not shared any more
    found: list[int] = []

    async def look_anew() -> None:
        found.append(await look())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look_anew)
        await trio.testing.wait_all_tasks_blocked()
        assert await look() == 1  # at once, though the other one waits
        await trio.sleep(1)  # too old by now: this one waits as well
        nursery.start_soon(look_anew)
        await trio.testing.wait_all_tasks_blocked()
        reading.go_on.set()
    assert found == [2, 2]
    assert reading.calls == 2


async def test_after_a_change_everything_is_read_again(autojump_clock: trio.testing.MockClock) -> None:
    reading = SlowReading()
    reading.go_on.set()
    performer = Performer({"shop": App("shop")})
    assert await performer.perform("shop", reading.operation, {}, VIEWER) == 1
    performer.forget_reads("shop")
    assert await performer.perform("shop", reading.operation, {}, VIEWER) == 2


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_a_result_is_shared_by_users_of_different_roles(role: str) -> None:
    reading = SlowReading()
    performer = Performer({"shop": App("shop")})
    await performer.perform("shop", reading.operation, {}, VIEWER)
    assert await performer.perform("shop", reading.operation, {}, User("bea", role)) == 1  # type: ignore[arg-type]
    assert reading.calls == 1


async def test_after_an_outage_nobody_gets_what_was_before(autojump_clock: trio.testing.MockClock) -> None:
    reads = 0

    async def read(app: App, asked: Filter) -> int:
        nonlocal reads
        reads += 1
        if reads > 1:
            await trio.sleep(0.1)
            raise BrokerUnavailable("the broker cannot be reached")
        return reads

    performer, operation = Performer({"shop": App("shop")}), Operation("queue:list", read)
    assert await performer.perform("shop", operation, {}, VIEWER) == 1
    await trio.sleep(1.5)
    for number in range(2):
        results: list[object] = []

        async def ask(results: list[object] = results) -> None:
            try:
                results.append(await performer.perform("shop", operation, {}, VIEWER))
            except BrokerUnavailable as error:
                results.append(type(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask)
        # The first outage is not known yet when the second one asks.
        assert number == 0 or results == [BrokerUnavailable, BrokerUnavailable]


async def test_looks_are_forgotten_by_age_and_by_size(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(app: App, asked: Filter) -> str:
        return asked.queue * 1000

    monkeypatch.setattr(performing, "MAX_SHARED_SIZE", 10_000)
    performer, operation = Performer({"shop": App("shop")}), Operation("queue:list", read)
    for number in range(30):
        assert (
            len(await performer.perform("shop", operation, {"queue": chr(97 + number % 26)}, VIEWER)) == 1000
        )
    assert performer.shared_size <= 11_000
    large = await performer.perform("shop", operation, {"queue": "abc" * 20}, VIEWER)
    assert len(large) == 60_000
    await performer.perform("shop", operation, {"queue": "z"}, VIEWER)
    assert performer.shared_size <= 11_000
    await trio.sleep(performing.MAX_SHARED_AGE + 1)
    await performer.perform("shop", operation, {"queue": "y"}, VIEWER)
    assert performer.shared_size == 1002
