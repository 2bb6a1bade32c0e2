"""Share memory with the sidecar of this process: what its executors run, and until when its lease lasts.

When a worker dies its sidecar reads here which jobs had begun, so that only those are counted as having taken their
worker down, and not the hundreds that merely waited in it; and which boxes it had, to end what they have started.
And when a job blocks the worker's loop, the sidecar renews the lease and writes here until when. The kernel keeps
the memory for as long as one of the two lives, whatever kills the other.
"""

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence

from celery5.protocol.job.delivery import Delivery

_LEASE = 16
"""The end of the lease, and the sidecar's process id."""
_BOX = 16
"""The process id of a box, and when it was started."""
_RECORD = struct.Struct("=H46s")
"""One slot: the number of the queue, counted from 1, and the stream entry, which has 41 digits at most."""


class SidecarMemory:
    """A page for so many executors and boxes. Make it before the process forks.

    A record is written when a job begins and stays until the executor's next one: what has ended and is not settled
    may still be what brought the worker down, and what is settled cannot be counted any more.
    """

    def __init__(self, *, slots: int, boxes: int = 0) -> None:
        self._slots = slots
        self._head = _LEASE + _BOX * boxes
        self._page = mmap.mmap(-1, self._head + slots * _RECORD.size)
        # At the start of a page they are written and read in one piece.
        self._lease = memoryview(self._page)[:8].cast("d")
        self._sidecar = memoryview(self._page)[8:16].cast("q")
        self._boxes = memoryview(self._page)[_LEASE : self._head].cast("q")

    @property
    def lease_until(self) -> float:
        """Until when the sidecar has renewed the lease, on the clock of `lease.now()`; 0.0 when it has not."""
        return float(self._lease[0])

    @lease_until.setter
    def lease_until(self, end: float) -> None:
        self._lease[0] = end

    @property
    def sidecar_pid(self) -> int:
        """The process id of the sidecar."""
        return int(self._sidecar[0])

    @sidecar_pid.setter
    def sidecar_pid(self, pid: int) -> None:
        self._sidecar[0] = pid

    @property
    def box_groups(self) -> list[tuple[int, int]]:
        """The process groups of the worker's boxes, each with when its first process was started."""
        pids, began = self._boxes[::2].tolist(), self._boxes[1::2].tolist()
        return [each for each in zip(pids, began, strict=True) if each[0]]

    def add_box(self, pid: int, began: int) -> None:
        """The worker has started a box. One too many is not remembered."""
        self._replace_box(0, pid, began)

    def remove_box(self, pid: int) -> None:
        """A box has ended, and nothing is left of its group."""
        self._replace_box(pid, 0, 0)

    def _replace_box(self, one: int, other: int, began: int) -> None:
        boxes = self._boxes
        for at in range(0, len(boxes), 2):
            if boxes[at] == one:
                # Whoever reads it half written has a process id that is nobody's, or one with its own beginning.
                boxes[at] = 0
                boxes[at + 1] = began
                boxes[at] = other
                return

    def reset(self) -> None:
        """Begin anew, for a worker with a new name."""
        self.lease_until = 0.0
        self._page[self._head :] = bytes(self._slots * _RECORD.size)

    def make_recorder(self, slot: int, queues: Mapping[str, int]) -> Callable[[Delivery], None] | None:
        """What an executor calls when a job begins; None for one too many. `queues` numbers the queues, from 1 on."""
        if slot >= self._slots:
            return None
        page, at, pack = self._page, self._head + slot * _RECORD.size, _RECORD.pack_into

        def begins(delivery: Delivery) -> None:
            pack(page, at, queues[delivery.queue], delivery.entry)

        return begins

    def get_started_entries(self, queues: Sequence[str]) -> dict[str, list[bytes]]:
        """The last stream entry that each executor began, by queue; `queues` in the order of their numbers."""
        found: dict[str, list[bytes]] = {queue: [] for queue in queues}
        for slot in range(self._slots):
            record: tuple[int, bytes] = _RECORD.unpack_from(self._page, self._head + slot * _RECORD.size)
            number, entry = record
            if 0 < number <= len(queues):
                found[queues[number - 1]].append(entry.rstrip(b"\0"))
        return found


def number_queues(queues: Sequence[str]) -> dict[str, int]:
    """The numbers of queues in a black box."""
    return {queue: number for number, queue in enumerate(queues, 1)}
