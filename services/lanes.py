"""Lanes: which lanes of its queues this worker reads.

Floor: services. Reads: the Heartbeat's news; the channels that wake workers. Writes: nothing.

A queue whose jobs never had a priority has one lane, and is read as if there were no others. The first job on another
lane is announced, and the heart then beats at once: a beat tells which lanes there are, and makes their groups. An
announcement that was lost is made good by the next beat.
"""

from collections.abc import Callable, Sequence

from celery5.broker.calls import HeartbeatReply
from celery5.broker.keys import QueueKeys
from celery5.protocol.lanes import HIGH, LOW, NORMAL

NEW_LANE = b"lane"
"""What is said on the channel that wakes workers when a lane has its first job."""


class QueueLanes:
    """The lanes of one worker's queues, as far as they are in use."""

    def __init__(self, *, consumed: Sequence[QueueKeys]) -> None:
        self._used: dict[str, str] = {keys.queue: "" for keys in consumed}
        self._read: dict[str, tuple[QueueKeys, ...]] = {keys.queue: (keys,) for keys in consumed}
        self._followers: list[Callable[[], None]] = []

    def get_read_lanes(self, queue: str) -> tuple[QueueKeys, ...]:
        """The lanes of a queue from which jobs are read, the most urgent first: one, unless its jobs had priorities."""
        return self._read[queue]

    def get_held_lanes(self, keys: QueueKeys) -> list[QueueKeys]:
        """The lanes on which this worker may have jobs of a queue."""
        return [keys, *(keys.on_lane(lane) for lane in self._used[keys.queue])]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """The Heartbeat's news of one queue."""
        if pulse.lanes != self._used[keys.queue]:
            self._used[keys.queue] = pulse.lanes
            self._read[keys.queue] = tuple(
                keys.on_lane(lane) for lane in (HIGH, NORMAL, LOW) if lane in pulse.lanes
            )
            for tell in self._followers:
                tell()

    def add_listener(self, follower: Callable[[], None]) -> None:
        """Have `follower` called when a lane comes into use."""
        self._followers.append(follower)
