"""Recovery: whether a worker may conclude from its heartbeats that another one, whose lease has lapsed, has died.

Floor: protocol. Pure: no clock, `now` is an argument. Reads: nothing. Writes: nothing.

A lapsed lease says that no heartbeat of a worker arrived. It does not say why: when Redis was frozen or unreachable, no
heartbeat arrived, and each lease has lapsed when it answers again, although all workers are alive. A worker tells the
two cases apart by its own heartbeats. As long as Redis answers these in time, it would have answered those of others as
well. After a gap, a worker waits until the others have had time for a heartbeat, and judges none before.

The decision is made in the moment in which a heartbeat is answered, and `recover.lua` checks it again when it runs,
by the clock of Redis: a call may arrive long after it was sent.
"""

import math

import msgspec

OUTAGE_FRACTION = 0.6
"""Part of a lease without an answer that counts as an outage. There are three heartbeats in a lease. A healthy worker
loses its lease only in an outage of more than two thirds of it, so the limit is below that."""
RECONNECT_TIME = 2.5
"""Seconds after an outage in which a heartbeat of a healthy worker arrives: its connection works again within 2 s."""
LONGEST_WAIT = 5.0
"""Seconds without a gap, at most, after which a worker judges others, however long the lease is."""


class Heartbeats(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker knows from the answers to its heartbeats on one queue. All times in seconds."""

    lease: float
    steady_since: float = math.inf
    """The first answer after the last gap, by the worker's clock."""
    heard: float = -math.inf
    """The last answer, by the worker's clock."""
    at: float = -math.inf
    """The last answer, by the clock of Redis."""

    @property
    def outage_after(self) -> float:
        """Return the seconds without an answer that count as an outage."""
        return self.lease * OUTAGE_FRACTION

    @property
    def wait(self) -> float:
        """Return the seconds after an outage before others are judged."""
        return min(max(self.lease, RECONNECT_TIME), LONGEST_WAIT)

    def with_answer(self, now: float, *, at: float) -> "Heartbeats":
        """Return what is known after an answer that arrived `now`; `at` is its time by the clock of Redis.

        Both clocks count. Only that of Redis shows that its time was set forward, which ends all leases at once.
        """
        gap = now - self.heard > self.outage_after or at - self.at > self.outage_after
        since = now if gap else self.steady_since
        return msgspec.structs.replace(self, steady_since=since, heard=now, at=at)

    def may_judge(self, now: float) -> bool:
        """Return whether the last answer is recent, and there was no gap for long enough before it."""
        return now - self.heard <= self.outage_after and self.heard - self.steady_since >= self.wait

    def seconds_until_judging(self, now: float) -> float:
        """Return the seconds after which the next answer allows to judge, if there is no gap until then."""
        return max(self.steady_since + self.wait - now, 0.0)
