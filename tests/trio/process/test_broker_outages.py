"""Retrying until the broker is available again, in virtual time."""

import pytest
import trio
import trio.testing

from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.process.broker_outages import LAST_TRY_LIMIT, OutageLog, last_try, retry_until_available
from tests.redis.worker.workers import Lines


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


async def test_an_outage_of_tries_at_intervals_is_logged_once_and_not_raised() -> None:
    outages, errors = make_outages(), [BrokerUnavailable("a"), BrokerUnavailable("b"), None]
    with Lines() as lines:
        for error in errors:
            with outages.suppressing():
                if error is not None:
                    raise error
    assert [line["why"] for line in lines.of("consumer:interrupted")] == ["a"]
    assert len(lines.of("consumer:resumed")) == 1


async def test_other_errors_than_of_the_broker_are_not_suppressed() -> None:
    with pytest.raises(ValueError, match="mine"), make_outages().suppressing():
        raise ValueError("mine")


async def test_a_last_try_is_made_also_when_its_service_is_cancelled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log, done = Log(worker="w1", app="shop"), []
    with trio.CancelScope() as scope:
        scope.cancel()
        with last_try(log, "presence:leave-failed"):
            await trio.sleep(LAST_TRY_LIMIT / 2)
            done.append("left")
        await trio.sleep(1)
        done.append("not cancelled")
    assert done == ["left"]


async def test_a_last_try_ends_at_its_limit_and_logs_an_error_at_level_debug(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log, began = Log(worker="w1", app="shop"), trio.current_time()
    with Lines() as lines:
        with last_try(log, "source:release-failed", source="files"):
            await trio.sleep_forever()
        assert trio.current_time() - began == pytest.approx(LAST_TRY_LIMIT)
        with last_try(log, "source:release-failed", source="files"):
            raise BrokerUnavailable("refused")
    (line,) = lines.of("source:release-failed")
    assert (line["level"], line["why"], line["source"]) == ("debug", "refused", "files")
