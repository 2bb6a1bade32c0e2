"""Share memory with the sidecar of this process: what its executors run, its boxes, its pulse, its lease's end.

When a worker dies, its sidecar reads from it which jobs had started: only those may have killed the worker, not the
hundreds that waited in it. It also reads which boxes the worker had, to end their processes. When a job blocks the
worker's loop, the sidecar renews the lease and writes its new end. When C code holds the interpreter's lock, nothing of
the worker can answer: the sidecar sees that the pulse has stopped, and whose time is over. The kernel keeps the memory
while one of the two processes is alive.
"""

import mmap
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from celery5.protocol.job.delivery import Delivery

_HEAD = 48
"""Bytes of the end of the lease, the sidecar's process id, the pulse and its two threads, whether jobs are blamed."""
_BOX = 16
"""Bytes of the process id of a box and of its start time."""
_RECORD = struct.Struct("=H46s64sdq")
"""One slot: the number of the queue, counted from 1; the stream entry, which has 41 digits at most; the beginning of
the job's id; when its hard limit ends, 0 for never; and the kernel's id of its thread, 0 for the main thread."""
_DEADLINE = 112
"""Where the last two begin in a record."""


class SlotRecord(msgspec.Struct, frozen=True):
    """The last job of one executor."""

    slot: int
    """The number of the executor."""
    queue: int
    """The number of the job's queue, counted from 1."""
    entry: bytes
    """Its stream entry."""
    job: str
    """Its id, of which 64 bytes are kept."""
    deadline: float
    """The end of its hard time limit, on the clock of `lease.now()`; 0.0 when it has none, or has ended."""
    thread: int
    """The kernel's id of the thread that runs it; 0 for the main thread."""


class MemorySlot:
    """The record of one executor, which the executor writes."""

    __slots__ = ("_deadlines", "_index", "_record", "_threads", "number")

    def __init__(
        self,
        number: int,
        record: Callable[[Delivery], None],
        times: "memoryview[float]",
        ids: "memoryview[int]",
        index: int,
    ) -> None:
        self.number = number
        """Its number, which no other executor of the process has."""
        self._record = record
        self._deadlines, self._threads, self._index = times, ids, index

    def record(self, delivery: Delivery, /) -> None:
        """Record the job that the executor starts."""
        self._record(delivery)

    def set_deadline(self, end: float) -> None:
        """Record when the hard time limit of the job ends, on the clock of `lease.now()`; 0.0 for no limit."""
        self._deadlines[self._index] = end

    def set_thread(self, thread: int) -> None:
        """Record the kernel's id of the thread that runs the job."""
        self._threads[self._index + 1] = thread


class SidecarMemory:
    """Memory for a number of executors (`slots`) and boxes. Make it before the process forks.

    A record is written when a job starts, and stays until the executor's next one: a job that has ended and is not
    settled may still have killed the worker, and one that is settled is not counted any more. The executors have the
    numbers from `first_slot` on.
    """

    def __init__(self, *, slots: int, boxes: int = 0, first_slot: int = 0) -> None:
        self._slots = slots
        self._first_slot = first_slot
        self._head = _HEAD + _BOX * boxes
        self._blames = self._head + slots * _RECORD.size
        self._page = mmap.mmap(-1, self._blames + -(-slots // 8) * 8)
        # Aligned as they are, each is written and read atomically.
        whole = memoryview(self._page)
        self._times, self._ids = whole.cast("d"), whole.cast("q")
        self._boxes = whole[_HEAD : self._head].cast("q")

    @property
    def lease_until(self) -> float:
        """The end of the lease that the sidecar has renewed, on the clock of `lease.now()`; 0.0 if it has not."""
        return float(self._times[0])

    @lease_until.setter
    def lease_until(self, end: float) -> None:
        self._times[0] = end

    @property
    def sidecar_pid(self) -> int:
        """The process id of the sidecar."""
        return int(self._ids[1])

    @sidecar_pid.setter
    def sidecar_pid(self, pid: int) -> None:
        self._ids[1] = pid

    @property
    def pulse(self) -> float:
        """When a thread of the worker last ran Python code, on the clock of `lease.now()`; 0.0 before that."""
        return float(self._times[2])

    @pulse.setter
    def pulse(self, at: float) -> None:
        self._times[2] = at

    @property
    def pulse_thread(self) -> int:
        """The kernel's id of that thread."""
        return int(self._ids[3])

    @property
    def main_thread(self) -> int:
        """Python's identity of the main thread."""
        return int(self._ids[4])

    def set_threads(self, *, pulse: int, main: int) -> None:
        """Record the kernel's id of the thread of the pulse, and Python's identity of the main thread."""
        self._ids[3], self._ids[4] = pulse, main

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
        self._page[self._head :] = bytes(len(self._page) - self._head)
        self._ids[5] = 0

    def get_slot(self, slot: int, queues: Mapping[str, int]) -> MemorySlot | None:
        """Return the record of an executor; None when there is no space for it.

        Args:
            slot: The number of the executor among those of its worker.
            queues: The numbers of the queues, from 1 on.
        """
        if slot >= self._slots:
            return None
        page, at, pack = self._page, self._head + slot * _RECORD.size, _RECORD.pack_into

        def record(delivery: Delivery) -> None:
            command = delivery.command
            job = b"" if command is None else command.id.encode("utf-8", "replace")
            pack(page, at, queues[delivery.queue], delivery.entry, job, 0.0, 0)

        return MemorySlot(self._first_slot + slot, record, self._times, self._ids, (at + _DEADLINE) // 8)

    def read_slots(self) -> Iterator[SlotRecord]:
        """Yield the last job of each executor that has had one."""
        for slot in range(self._slots):
            record: tuple[int, bytes, bytes, float, int] = _RECORD.unpack_from(
                self._page, self._head + slot * _RECORD.size
            )
            number, entry, job, deadline, thread = record
            if number:
                text = job.rstrip(b"\0").decode("utf-8", "ignore")
                yield SlotRecord(self._first_slot + slot, number, entry.rstrip(b"\0"), text, deadline, thread)

    def blame(self, slots: Collection[int] | None) -> None:
        """Record, in the sidecar, that the jobs of these executors alone are the cause if the worker dies now.

        None: any job that has begun may be.
        """
        numbers = range(self._first_slot, self._first_slot + self._slots)
        self._page[self._blames : self._blames + self._slots] = bytes(
            number in slots if slots is not None else 0 for number in numbers
        )
        self._ids[5] = slots is not None

    def get_started_entries(self, queues: Sequence[str]) -> dict[str, list[bytes]]:
        """Return the last stream entry of each executor that may have killed the worker, by queue; `queues` are in the
        order of their numbers."""
        entries: dict[str, list[bytes]] = {queue: [] for queue in queues}
        blames = bool(self._ids[5])
        for record in self.read_slots():
            if blames and not self._page[self._blames + record.slot - self._first_slot]:
                continue
            if record.queue <= len(queues):
                entries[queues[record.queue - 1]].append(record.entry)
        return entries


def number_queues(queues: Sequence[str]) -> dict[str, int]:
    """Return the numbers of queues in the shared memory."""
    return {queue: number for number, queue in enumerate(queues, 1)}
