"""Looks at Redis are shared by all who look at the same thing."""

import anyio
import msgspec
import pytest
import trio

from celery5 import App
from celery5.dashboard.access import User
from celery5.dashboard.operation import Operation
from celery5.dashboard.performing import Performer

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


async def test_whoever_comes_while_another_one_looks_anew_gets_the_last_look(
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


async def test_after_a_change_nobody_gets_what_was_before(autojump_clock: trio.testing.MockClock) -> None:
    reading = SlowReading()
    reading.go_on.set()
    performer = Performer({"shop": App("shop")})
    assert await performer.perform("shop", reading.operation, {}, VIEWER) == 1
    performer.forget_reads("shop")
    assert await performer.perform("shop", reading.operation, {}, VIEWER) == 2


@pytest.mark.parametrize("role", ["viewer", "operator"])
async def test_a_look_is_shared_by_users_of_different_roles(role: str) -> None:
    reading = SlowReading()
    performer = Performer({"shop": App("shop")})
    await performer.perform("shop", reading.operation, {}, VIEWER)
    assert await performer.perform("shop", reading.operation, {}, User("bea", role)) == 1  # type: ignore[arg-type]
    assert reading.calls == 1
