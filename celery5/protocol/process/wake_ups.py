"""Wake-ups: decide how many of the workers that receive the same message act on it (the "thundering herd" problem).

A message on a channel reaches every worker of a queue, and so does the time at which a job is due. One worker is
enough to act. Each decides at random, without asking the others, so that about `ANSWERING` of them act. If none does,
the next heartbeat of any worker finds the work: the more workers there are, the sooner that is.

Where a worker must have capacity to act, as for jobs that wait at a limit, those that do not act at once do so within
`MAX_SPREAD`.

For the same reason each idle worker of a large queue sends fewer heartbeats: together they send as many as before.

What it still sends, it sends at common times ("timer coalescing"). A server that sleeps in between needs more time to
wake up than for a call, so calls that come together cost it half.
"""

import math
import os

ANSWERING = 8
"""The number of workers that act, on average. With many workers, none acts once in 3,000 times (e**-8)."""
SPREAD_PER_WORKER = 0.001
"""Seconds over which the workers of a queue spread what all of them will do, multiplied by their number."""
MAX_SPREAD = 1.0
"""The most seconds over which they spread it."""
HEARTBEATS_PER_LEASE = 3
"""Heartbeats in one lease of a worker that has jobs, or is one of few."""
IDLE_HEARTBEATS = 30
"""Heartbeats in one lease of all idle workers of a queue together, where they are many."""
MAX_IDLE_INTERVAL = 60.0
"""The most seconds between two heartbeats of an idle worker, unless the usual interval of its lease is longer."""
_MAX_SHIFT = 3_600_000
"""The most ms by which the ticks of a process are shifted: more than any of its intervals."""
_ROUNDING = 1e-6
"""The part of an interval by which a time may differ from its multiple, for lack of digits."""


def get_heartbeat_interval(workers: int, *, lease: float, is_idle: bool) -> float:
    """Return the seconds between two heartbeats of one of the `workers` of a queue, with a lease of `lease` seconds."""
    usual = lease / HEARTBEATS_PER_LEASE
    return max(usual, min(workers * lease / IDLE_HEARTBEATS, MAX_IDLE_INTERVAL)) if is_idle else usual


def get_next_tick(now: float, interval: float) -> float:
    """Return when a timer with this interval fires next: after `now`, in `interval` seconds at the latest.

    Timers of a process fire together whose intervals are multiples of each other; those of other processes do not.
    """
    # Trio's clock begins at a random time, but at the same one in processes that were forked.
    shift = hash((os.getpid(),)) % _MAX_SHIFT / 1000
    return (math.floor((now + shift) / interval + _ROUNDING) + 1) * interval - shift


def does_answer(workers: int, draw: float) -> bool:
    """Return whether a worker acts on what all `workers` of its queue receive; `draw` is random, from 0 to 1."""
    return draw * workers < ANSWERING


def get_spread(workers: int, draw: float) -> float:
    """Return the seconds that a worker waits before it does what all `workers` of its queue will do."""
    return draw * min(workers * SPREAD_PER_WORKER, MAX_SPREAD)
