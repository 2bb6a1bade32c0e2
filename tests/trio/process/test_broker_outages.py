"""Retrying until the broker is available again, in virtual time."""

import pytest
import trio
import trio.testing

from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.process.broker_outages import OutageLog, retry_until_available


def make_outages() -> OutageLog:
    return OutageLog(Log(worker="w1", app="shop"), "consumer:interrupted", "consumer:resumed")


async def test_an_attempt_is_made_again_until_the_broker_serves_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries = []

    async def attempt() -> str:
        tries.append(trio.current_time())
        if len(tries) < 3:
            raise BrokerUnavailable("refused")
        return "served"

    assert await retry_until_available(attempt, make_outages(), 0.5) == "served"
    assert [moment - tries[0] for moment in tries] == pytest.approx([0, 0.5, 1.0])


async def test_an_error_that_time_does_not_cure_is_raised_at_once() -> None:
    async def attempt() -> None:
        raise BrokerReplied("NOPERM no", code="NOPERM")

    with pytest.raises(BrokerReplied):
        await retry_until_available(attempt, make_outages(), 0.5)


async def test_an_error_that_time_does_not_cure_can_be_retried_as_well(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries = []

    async def attempt() -> None:
        tries.append(trio.current_time())
        if len(tries) < 2:
            raise BrokerReplied("NOPERM no", code="NOPERM")

    await retry_until_available(attempt, make_outages(), 0.5, even_refused=True)
    assert len(tries) == 2


async def test_outages_that_their_connection_logs_are_retried_without_another_log_line(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries = []

    async def attempt() -> str:
        tries.append(trio.current_time())
        if len(tries) < 3:
            raise BrokerUnavailable("refused")
        return "served"

    assert await retry_until_available(attempt, None, 1.0) == "served"
    assert [moment - tries[0] for moment in tries] == pytest.approx([0, 1.0, 2.0])
