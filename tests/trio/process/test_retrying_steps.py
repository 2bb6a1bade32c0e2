"""Meanwhile: each time that the company is alone is told of, and each time that it is so no more."""

from typing import Any

import trio
from trio.testing import MockClock

from celery5.bootsteps.retrying import BackgroundBoot
from celery5.errors import BrokerUnavailable


class Company:
    """Up for a second, and away for one, for the same reason each time."""

    def __init__(self) -> None:
        self.ups = 0

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        if self.ups % 2:
            task_status.started()
            await trio.sleep(1)
        self.ups += 1
        raise ExceptionGroup("", [BrokerUnavailable("no route")])


class Told:
    """A log."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, what: str, *_level: str, **_fields: object) -> None:
        self.said.append(what)


async def test_an_outage_for_the_same_reason_as_the_last_one_is_told_of_again(
    autojump_clock: MockClock,
) -> None:
    broker_boot: Any = Company()
    told: Any = Told()
    async with trio.open_nursery() as nursery:
        await nursery.start(BackgroundBoot(broker_boot=broker_boot, log=told).run)
        while broker_boot.ups < 6:
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert told.said[:6] == ["process:broker-lost", "process:broker-recovered"] * 3
