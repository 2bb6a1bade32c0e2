"""Decide whether this worker acts on a message that all workers of a queue receive."""

from collections.abc import Callable
from random import random

from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import QueueKeys
from celery5.protocol.process.wake_ups import does_answer, get_spread


class WakeUps:
    """The number of workers of each queue, and a random decision whether this worker acts."""

    def __init__(self, *, draw: Callable[[], float] = random) -> None:
        self._draw = draw
        self._workers: dict[str, int] = {}

    def on_heartbeat(self, keys: QueueKeys, reply: HeartbeatReply) -> None:
        """Take the number of workers of one queue from the reply to a heartbeat."""
        self._workers[keys.queue] = reply.workers

    def does_answer(self, queue: str) -> bool:
        """Return whether this worker acts on a message for all workers of a queue. Each call decides at random."""
        return does_answer(self._workers.get(queue, 1), self._draw())

    def get_delay(self, queue: str) -> float:
        """Return the seconds until this worker acts on a message that all workers of a queue act on in the end.

        About as many as with `does_answer` act at once. If these cannot help, for lack of capacity, others do later.
        """
        workers = self._workers.get(queue, 1)
        return 0.0 if does_answer(workers, self._draw()) else get_spread(workers, self._draw())
