"""The one definition of a queue's flow, how fast jobs come and leave: by differences of looks at its counters."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter

import msgspec
from msgspec.structs import replace

LONGEST_WINDOW = 75.0
"""Seconds over which rates are measured, at most, while looks are kept: older ones say nothing of now."""
SHORTEST_WINDOW = 1.0
"""Seconds between two looks, at least: over less, a rate is made of single jobs."""
MAX_LOOKS = 8
"""Looks that are kept."""
MAX_LOOKS_BYTES = 4096
"""Bytes of looks that are read, at most."""
MAX_NUMBER = 2**53
"""What the numbers of a look are below: Redis' scripts count no further."""
LOOK_INTERVAL = 10.0
"""Seconds between two looks that are kept, at most: more often where metrics are reported more often."""
LOOKS_KEPT = 86400.0
"""Seconds after which looks, and what has ended, are forgotten when nobody looks."""


class QueueLook(msgspec.Struct, frozen=True, array_like=True):
    """What was seen of a queue at one time, by the clock of its Redis."""

    # In seconds since 1970.
    at: float
    # Attempts that have ended, ever since they are counted.
    ended: int
    # Jobs that no worker has and whose time has come, and jobs that workers have.
    backlog: int
    running: int


class QueueFlow(msgspec.Struct, frozen=True):
    """How fast jobs come to a queue and leave it, in jobs per second, over the last `seconds`."""

    incoming: float
    outgoing: float
    # By how much the backlog grows per second; negative while it shrinks.
    growth: float
    # How long the window is that all of this was measured over: it ends with the look.
    seconds: float = 60.0


def merge_flows(flows: Iterable[QueueFlow | None]) -> QueueFlow | None:
    """Return how fast jobs arrive at several shards and leave them, together; None if none was measured before."""
    known = [flow for flow in flows if flow is not None]
    if not known:
        return None
    return QueueFlow(
        incoming=sum(flow.incoming for flow in known),
        outgoing=sum(flow.outgoing for flow in known),
        growth=sum(flow.growth for flow in known),
        seconds=min(flow.seconds for flow in known),
    )


class FlowReading(msgspec.Struct, frozen=True):
    """A look at a queue, and what was known before."""

    look: QueueLook
    # When the last attempt ended, in seconds since 1970; None when none did within a day.
    ended_at: float | None = None
    # Earlier looks, the oldest first.
    looks: tuple[QueueLook, ...] = ()
    # Since when attempts are counted, in seconds since 1970.
    counted_since: float | None = None

    @property
    def flow(self) -> QueueFlow | None:
        """How fast jobs come and leave; None while there was no earlier look, or nobody counts what ends."""
        if self.counted_since is None:
            return None  # its workers are of an older version, say
        return measure_flow(self.look, self.looks, self.counted_since)

    @property
    def idle(self) -> float | None:
        """Seconds since the last attempt ended; None when none did within a day."""
        return None if self.ended_at is None else max(0.0, self.look.at - self.ended_at)


def measure_flow(
    look: QueueLook, before: Sequence[QueueLook], counted_since: float | None = None
) -> QueueFlow | None:
    """Return how fast jobs come and leave, from an earlier look to this one; None without one.

    The earlier one is the first that is not too old. What comes is not counted anywhere: it is what has ended, and by
    how many the jobs have become more. The time since which attempts are counted is a look, too: how many jobs waited
    then is not known, and taken from the next one.
    """
    usable = [
        earlier
        for earlier in before
        # Where the counter has begun again, or the clock was set back, the difference says nothing.
        if _is_recent(earlier.at, look) and earlier.ended <= look.ended
    ]
    first = min(usable, key=_AT, default=look)
    if counted_since is not None and look.at - LONGEST_WINDOW <= counted_since < first.at:
        first = replace(first, at=min(counted_since, look.at - SHORTEST_WINDOW), ended=0)
    if first is look:
        return None
    seconds = look.at - first.at
    ended, growth = look.ended - first.ended, look.backlog - first.backlog
    came = ended + growth + look.running - first.running
    return QueueFlow(max(0, came) / seconds, ended / seconds, growth / seconds, seconds)


_AT = attrgetter("at")


def _is_recent(at: float, look: QueueLook) -> bool:
    return SHORTEST_WINDOW <= look.at - at <= LONGEST_WINDOW


def _is_usable(look: QueueLook) -> bool:
    """Return whether the numbers of a look can be ones of celery5: who reckons with others fails."""
    numbers = (look.at, look.ended, look.backlog, look.running)
    return all(-MAX_NUMBER < number < MAX_NUMBER for number in numbers)


def add_look(reading: FlowReading, interval: float) -> tuple[QueueLook, ...] | None:
    """Return the looks to keep, with this one; None while the last one is not `interval` seconds ago yet."""
    last = max(reading.looks, key=_AT, default=None)
    if last is not None and 0 <= reading.look.at - last.at < interval:
        return None
    past = [look for look in sorted(reading.looks, key=_AT) if look.at < reading.look.at]
    return (*past, reading.look)[-MAX_LOOKS:]


def pack_looks(looks: Sequence[QueueLook]) -> bytes:
    """Return looks as they stand in Redis."""
    return msgspec.json.encode(looks)


def read_flow(
    now_ms: int, counts: tuple[int, int, int], looks: bytes, *, backlog: int, running: int
) -> FlowReading:
    """Return a reading from what stands in Redis. What cannot be read, of another version say, counts as missing.

    Args:
        now_ms: The time, in ms since 1970.
        counts: How many attempts have ended, when the last one did, and since when they are counted, in ms.
        looks: The earlier looks.
        backlog: Jobs that no worker has and whose time has come.
        running: Jobs that workers have.
    """
    ended, at, since = counts
    before: tuple[QueueLook, ...] = ()
    if 0 < len(looks) <= MAX_LOOKS_BYTES:
        with suppress(msgspec.DecodeError, RecursionError):
            before = tuple(filter(_is_usable, msgspec.json.decode(looks, type=tuple[QueueLook, ...])))
    return FlowReading(
        QueueLook(now_ms / 1000, ended, backlog, running),
        at / 1000 if at else None,
        before[-MAX_LOOKS:],
        since / 1000 if since else None,
    )
