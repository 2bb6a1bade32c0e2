"""Coming back: the pauses of a worker that waits for Redis are short enough for the two seconds that it promises."""

import pytest

from celery5.broker.timing import Timing
from celery5.protocol.job.retry_policy import exponential
from celery5.services.process.broker_outages import RETRY_INTERVAL, SHORT_RETRY_INTERVAL

BACK = 2.0
"""Seconds after the return of Redis within which a worker works again."""


@pytest.mark.parametrize("outage", [1, 10, 3600])
def test_no_pause_is_so_long_that_a_worker_comes_back_late(outage: float) -> None:
    timing, attempt, waited, pause = Timing(), 0, 0.0, 0.0
    while waited < outage:  # the longest that jitter allows
        pause = max(
            exponential(attempt, start=timing.backoff_start, cap=timing.backoff_cap), timing.breaker_reset
        )
        attempt, waited = attempt + 1, waited + pause
    assert pause + max(RETRY_INTERVAL, SHORT_RETRY_INTERVAL) < BACK
