"""Take the starts of the rates of kinds of tasks, which hold for the jobs of all queues, brokers and workers together.

The starts of an application are counted in one place, on its default broker. The scripts that admit jobs cannot look
there, for each touches the keys of one queue only. So this worker takes as many starts as it has jobs to begin, before
it requests their admission, and returns those that it did not use. A start that is neither used nor returned, since its
worker died, counts as used: the rate is never exceeded.
"""

import math

import msgspec
import trio

from celery5.broker.calls import limits
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.broker.wall_clock import wall_time
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.limits import Rate
from celery5.services.process.broker_outages import OutageLog

MAX_TAKEN = 64
"""The most starts that are taken in one call."""
MAX_WAIT = 2.0
"""The most seconds until starts are requested again: others may have returned some, or the rate may have changed."""
RETRY_DELAY = 1.0
"""Seconds until starts are requested again when the default broker is unreachable."""
STALE_SHARE = 0.8
"""The share of a rate's slack after which a start is returned: the rest would hardly do for a job to begin."""


class _Starts(msgspec.Struct):
    """Starts that were taken together, and are left."""

    rate: Rate
    # By Redis, in ms since 1970.
    noted_at: int
    # By this machine, before they were requested, in seconds since 1970.
    requested_at: float
    count: int

    @property
    def is_stale(self) -> bool:
        return wall_time() - self.requested_at > STALE_SHARE * self.rate.slack


class KindRates:
    """The starts of one worker, by kind of task."""

    def __init__(self, *, kind_rates_redis: AsyncDriver, keys: Keys, log: Log) -> None:
        self._redis = kind_rates_redis
        self._keys = keys
        self._outages = OutageLog(log, "kind-rates:interrupted", "kind-rates:resumed")
        self._starts: dict[str, list[_Starts]] = {}
        self._next_times: dict[str, float] = {}

    def count(self, kind: str, rate: Rate) -> int:
        """Return how many jobs of a kind may begin now, with the starts that were taken."""
        return sum(start.count for start in self._starts.get(kind, ()) if self._is_usable(start, rate))

    def get_requested_at(self, kind: str) -> float:
        """Return when the oldest usable start of a kind was requested: infinity without any."""
        return min(
            (start.requested_at for start in self._starts.get(kind, ()) if not start.is_stale),
            default=math.inf,
        )

    def get_next_time(self, kind: str) -> float:
        """Return the time on Trio's clock from which further starts of a kind can be requested."""
        return self._next_times.get(kind, -math.inf)

    async def take(self, kind: str, rate: Rate, want: int) -> int:
        """Return how many jobs of a kind may begin now, up to `want`. Takes what is missing if it can be had."""
        missing = min(want - self.count(kind, rate), MAX_TAKEN)
        if missing > 0 and trio.current_time() >= self.get_next_time(kind):
            requested_at = wall_time()
            call = limits.take_starts(self._keys, kind, missing, rate)
            try:
                taken = await self._redis.perform(call)
            except BrokerError as error:  # jobs without such a rate are not to wait for that broker
                self._outages.record_error(error)
                self._next_times[kind] = trio.current_time() + RETRY_DELAY
            else:
                self._outages.record_recovery()
                if taken.count:
                    starts = _Starts(rate, taken.noted_at, requested_at, taken.count)
                    self._starts.setdefault(kind, []).append(starts)
                if taken.count < missing:
                    self._next_times[kind] = trio.current_time() + min(taken.delay, MAX_WAIT)
        return min(want, self.count(kind, rate))

    def use(self, kind: str, rate: Rate, count: int) -> None:
        """Use starts for jobs that were admitted, the oldest first."""
        for start in self._starts.get(kind, ()):
            if start.rate == rate:
                used = min(start.count, count)
                start.count -= used
                count -= used

    async def give_back(self) -> None:
        """Return all starts that were not used. Those that cannot be returned now are kept for the next time."""
        for kind in list(self._starts):
            unused = [start for start in self._starts[kind] if start.count and not self._is_over(start)]
            self._starts[kind] = unused
            if not unused:
                self._starts.pop(kind)
                continue
            call = limits.return_starts(self._keys, kind, [(start.noted_at, start.count) for start in unused])
            with self._outages.suppressing():
                await self._redis.perform(call)
                for start in unused:
                    start.count = 0
                self._starts.pop(kind)

    def _is_usable(self, starts: _Starts, rate: Rate) -> bool:
        return starts.rate == rate and not starts.is_stale

    def _is_over(self, starts: _Starts) -> bool:
        """Return whether the period of these starts has passed."""
        return wall_time() - starts.requested_at > starts.rate.span + starts.rate.slack
