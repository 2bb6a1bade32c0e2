"""Promptly: who asks several brokers does not wait long for one that is silent."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.errors import BrokerUnavailable
from celery5.services.scaling.observer import REPLY_TIMEOUT, UNREACHABLE_PAUSE, TimeLimitedDriver

T = TypeVar("T")
PING = Call(("PING",), bool, repeatable=True)


class Silent:
    """A broker that answers after this many seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.asked = 0

    async def perform(self, call: Call[T], /) -> T:
        """Answer, some time."""
        self.asked += 1
        await trio.sleep(self.seconds)
        return call.decode(1)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Answer, some time."""
        return [await self.perform(call) for call in calls]


async def test_one_that_answers_in_time_is_heard(autojump_clock: MockClock) -> None:
    redis = Silent()
    redis.seconds = REPLY_TIMEOUT / 2
    promptly = TimeLimitedDriver(redis=redis, broker="mails")
    assert await promptly.perform(PING) is True
    redis.seconds = REPLY_TIMEOUT / 4
    assert await promptly.perform_all([PING, PING]) == [True, True]


async def test_silent_broker_costs_its_limit_once_then_rests(
    autojump_clock: MockClock,
) -> None:
    redis = Silent()
    redis.seconds = 1000
    promptly = TimeLimitedDriver(redis=redis, broker="mails")
    before = trio.current_time()
    for _ in range(5):
        with pytest.raises(BrokerUnavailable, match="broker mails has not answered within 2 s"):
            await promptly.perform(PING)
    assert trio.current_time() - before == REPLY_TIMEOUT
    assert redis.asked == 1
    await trio.sleep(UNREACHABLE_PAUSE)
    redis.seconds = 0
    assert await promptly.perform(PING) is True


async def test_what_the_broker_itself_says_is_raised_as_it_is() -> None:
    class Away(Silent):
        async def perform(self, call: Call[T], /) -> T:
            raise BrokerUnavailable("it is down")

    promptly = TimeLimitedDriver(redis=Away(), broker="mails")
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="it is down"):
            await promptly.perform(PING)
