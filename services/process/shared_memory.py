"""Share memory with the sidecar of this process: what its executors run, its boxes, and the end of its lease.

When a worker dies, its sidecar reads from it which jobs had started: only those may have killed the worker, not the
hundreds that waited in it. It also reads which boxes the worker had, to end their processes. When a job blocks the
worker's loop, the sidecar renews the lease and writes its new end. The kernel keeps the memory while one of the two
processes is alive.
"""

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence

from celery5.protocol.job.delivery import Delivery

_LEASE = 16
"""Bytes of the end of the lease and the sidecar's process id."""
_BOX = 16
"""Bytes of the process id of a box and of its start time."""
_RECORD = struct.Struct("=H46s")
"""One slot: the number of the queue, counted from 1, and the stream entry, which has 41 digits at most."""


class SidecarMemory:
    """Memory for a number of executors (`slots`) and boxes. Make it before the process forks.

    A record is written when a job starts, and stays until the executor's next one: a job that has ended and is not
    settled may still have killed the worker, and one that is settled is not counted any more.
    """

    def __init__(self, *, slots: int, boxes: int = 0) -> None:
        self._slots = slots
        self._head = _LEASE + _BOX * boxes
        self._page = mmap.mmap(-1, self._head + slots * _RECORD.size)
        # Aligned as they are, each is written and read atomically.
        self._lease = memoryview(self._page)[:8].cast("d")
        self._sidecar = memoryview(self._page)[8:16].cast("q")
        self._boxes = memoryview(self._page)[_LEASE : self._head].cast("q")

    @property
    def lease_until(self) -> float:
        """The end of the lease that the sidecar has renewed, on the clock of `lease.now()`; 0.0 if it has not."""
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
        """The process groups of the worker's boxes, each with the start time of its first process."""
        pids, began = self._boxes[::2].tolist(), self._boxes[1::2].tolist()
        return [(pid, start) for pid, start in zip(pids, began, strict=True) if pid]

    def add_box(self, pid: int, began: int) -> None:
        """Record a box that has started. There is no record of one for which there is no space."""
        self._replace_box(0, pid, began)

    def remove_box(self, pid: int) -> None:
        """Remove the record of a box whose process group has ended."""
        self._replace_box(pid, 0, 0)

    def _replace_box(self, old_pid: int, new_pid: int, began: int) -> None:
        boxes = self._boxes
        for at in range(0, len(boxes), 2):
            if boxes[at] == old_pid:
                # In this order, so that no reader finds a process id with the start time of another process.
                boxes[at] = 0
                boxes[at + 1] = began
                boxes[at] = new_pid
                return

    def reset(self) -> None:
        """Clear the lease and the records of jobs, for the next incarnation of the worker. Boxes stay."""
        self.lease_until = 0.0
        self._page[self._head :] = bytes(self._slots * _RECORD.size)

    def make_recorder(self, slot: int, queues: Mapping[str, int]) -> Callable[[Delivery], None] | None:
        """Return the function that records the job that an executor starts; None when there is no slot for it.

        Args:
            slot: The number of the executor.
            queues: The numbers of the queues, from 1 on.
        """
        if slot >= self._slots:
            return None
        page, at, pack = self._page, self._head + slot * _RECORD.size, _RECORD.pack_into

        def record(delivery: Delivery) -> None:
            pack(page, at, queues[delivery.queue], delivery.entry)

        return record

    def get_started_entries(self, queues: Sequence[str]) -> dict[str, list[bytes]]:
        """Return the last stream entry of each executor, by queue; `queues` are in the order of their numbers."""
        entries: dict[str, list[bytes]] = {queue: [] for queue in queues}
        for slot in range(self._slots):
            record: tuple[int, bytes] = _RECORD.unpack_from(self._page, self._head + slot * _RECORD.size)
            number, entry = record
            if 0 < number <= len(queues):
                entries[queues[number - 1]].append(entry.rstrip(b"\0"))
        return entries


def number_queues(queues: Sequence[str]) -> dict[str, int]:
    """Return the numbers of queues in the shared memory."""
    return {queue: number for number, queue in enumerate(queues, 1)}
