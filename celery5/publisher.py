"""Publisher: turns jobs into the fewest trips that publish them. Pure; a driver of any colour performs the calls.

Floor: domain. Reads: nothing. Writes: what the calls it makes say (streams, scheduled jobs, the set of queues).
"""

from collections.abc import Iterator, Sequence

from celery5.broker import calls
from celery5.broker.call import Call
from celery5.broker.keys import Keys, QueueKeys
from celery5.protocol.job import Job

PORTION = 200
"""Jobs in one trip: long scripts would hold the server up."""
PORTION_BYTES = 4 * 1024 * 1024
"""Bytes of messages in one trip, unless one message alone has more."""


class Publisher:
    """Where jobs go, as calls. One for an application."""

    def __init__(self, *, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[str, QueueKeys] = {}
        self._announced: set[str] = set()

    def queue(self, name: str) -> QueueKeys:
        """The keys of a queue, made once."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._keys.of(name)
        return found

    def publish(self, jobs: Sequence[Job]) -> list[Call[int]]:
        """The calls that publish `jobs`, in their order for each queue."""
        groups: dict[tuple[str, bool], list[Job]] = {}
        if len(jobs) == 1:
            groups = {(jobs[0].queue, bool(jobs[0].at)): list(jobs)}
        else:
            for job in jobs:
                groups.setdefault((job.queue, bool(job.at)), []).append(job)
        queues = dict.fromkeys(name for name, _ in groups)
        made = [calls.announce(self._keys, name) for name in queues if name not in self._announced]
        for (name, scheduled), group in groups.items():
            keys = self.queue(name)
            for part in _portions(group):
                if scheduled:
                    made.append(calls.schedule(keys, [(job.id, job.message, job.at) for job in part]))
                else:
                    made.append(calls.publish(keys, [(job.id, job.message) for job in part]))
        return made

    def published(self, jobs: Sequence[Job]) -> None:
        """The calls for `jobs` went through: their queues are announced and need not be again."""
        if len(jobs) == 1:
            self._announced.add(jobs[0].queue)
        else:
            self._announced.update({job.queue for job in jobs})


def _portions(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """The jobs in their order, as many at a time as go in one trip."""
    part: list[Job] = []
    size = 0
    for job in jobs:
        if part and (len(part) == PORTION or size + len(job.message) > PORTION_BYTES):
            yield part
            part, size = [], 0
        part.append(job)
        size += len(job.message)
    yield part
