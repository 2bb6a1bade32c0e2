"""Find out who paused the queues that are paused, and when: the audit trail has it."""

from collections.abc import Collection, Iterable, Mapping

from celery5.broker.calls import audit as audit_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.protocol.audit import AuditEntry
from celery5.protocol.commands.definitions import PAUSE_QUEUE, RESUME_QUEUE
from celery5.protocol.observability.overview import QueuePause

ENTRIES_PER_CALL = 500
"""Entries of the audit trail that are read in one trip."""
MAX_ENTRIES = 2000
"""The most of them, the newest: a pause before them has no known author."""


class QueuePauseReader:
    """Reads who paused queues, and remembers it: each entry of the audit trail is read once."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._pauses: dict[str, QueuePause] = {}
        # The time of the newest entry that was read, in ms since 1970.
        self._read_until = 0

    async def read(self, redis: AsyncDriver, paused: Collection[str]) -> Mapping[str, QueuePause]:
        """Return who paused each of these queues, and when, as far as that is known. Reads nothing for none."""
        if not paused:
            return {}
        entries = await self._read_new(redis)
        apply_entries(self._pauses, reversed(entries))
        if entries:
            self._read_until = int(entries[0].id.partition("-")[0])
        return {queue: pause for queue, pause in self._pauses.items() if queue in paused}

    async def _read_new(self, redis: AsyncDriver) -> list[AuditEntry]:
        """Return the entries since the last reading, the newest first. The last ones may be read again."""
        found, before = list[AuditEntry](), ""
        while len(found) < MAX_ENTRIES:
            call = audit_calls.read_actions(
                self._keys, before=before, since_ms=self._read_until, count=ENTRIES_PER_CALL
            )
            page = await redis.perform(call)
            found += page
            if len(page) < ENTRIES_PER_CALL:
                break
            before = page[-1].id
        return found


def apply_entries(pauses: dict[str, QueuePause], entries: Iterable[AuditEntry]) -> None:
    """Note pauses of queues, and forget those that are over, by entries of the audit trail, the oldest first.

    A pause of single workers is none of the queue. One that was paused already keeps who paused it first. An entry that
    says that it failed may have had its effect: a worker that does not answer is a failure, too.
    """
    for entry in entries:
        queue = entry.filter.get("queue")
        if not isinstance(queue, str) or entry.filter.get("here"):
            continue
        if entry.action == f"worker:{PAUSE_QUEUE.name}":
            pauses.setdefault(queue, QueuePause(entry.who, entry.at))
        elif entry.action == f"worker:{RESUME_QUEUE.name}":
            pauses.pop(queue, None)
