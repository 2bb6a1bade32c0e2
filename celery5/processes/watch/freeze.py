"""Freeze: in the sidecar, watch whether the worker's interpreter runs; report when it does not, end it if need be.

`protocol/process/frozen.py` decides; what the worker does for it is in `interpreter.py`.
"""

import ctypes
import math
import os
import platform
import signal
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from celery5.processes.watch.interpreter import SIGNAL_MARK, STACK_SIGNAL, SharedFiles
from celery5.processes.watch.sidecar_log import SidecarLog
from celery5.protocol.process.frozen import (
    FROZEN_AFTER,
    MAX_LOOK_GAP,
    MAX_REPORT_INTERVAL,
    MAX_SHOWN,
    FreezeCause,
    StopRequest,
    ThreadStack,
    ThreadUse,
    find_end_reason,
    find_lock_holders,
    index_stacks,
    parse_stacks,
)
from celery5.protocol.process.liveness import ProcessSample
from celery5.services.process.lease import now
from celery5.services.process.shared_memory import SidecarMemory, SlotRecord

STACKS_TIMEOUT = 1.0
"""Seconds that the stacks of the worker's threads may take to be written: mostly it is a millisecond."""
STACKS_INTERVAL = 0.02
"""Seconds between two looks at what is written of them."""
MAX_STACKS_BYTES = 4 << 20
"""The most bytes of stacks that are read."""
_STOPPED = "Tt"
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the system call, for C libraries that have no function for it."""


class StopTimes(msgspec.Struct, frozen=True):
    """How long a process may take to stop, in seconds."""

    # After the first request.
    limit: float
    # Within which signals count as one.
    duplicate_window: float = 0.0


class FreezeWatch:
    """Watches the interpreter of the process `pid`.

    Args:
        pid: The worker process.
        pidfd: A handle of it; -1 for none.
        memories: What it shares with its sidecars: of each broker one, that of this sidecar first.
        files: Where its stacks and requests to stop are written.
        stop_times: How long it may take to stop.
        log: The log of the sidecar.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        memories: Sequence[SidecarMemory],
        files: SharedFiles,
        stop_times: StopTimes,
        log: SidecarLog,
    ) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._memories = memories
        self._files = files
        self._times = stop_times
        self._log = log
        self._libraries = tuple(sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}))
        self._stop = StopRequest()
        self._pulse = 0.0
        self._seen_since = self._looked_at = -math.inf
        self._uses: dict[int, ThreadUse] = {}
        self._used_at = 0.0
        self._cause: FreezeCause | None = None
        self._report_at = 0.0
        self.end_reason = ""
        """Why the worker was ended; '' when it was not."""

    @property
    def stop_requested(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._stop.asked_at < math.inf

    @property
    def is_looking(self) -> bool:
        """Whether it looks again although a heartbeat has come: the worker is to stop, or a freeze is to be ended."""
        return self.stop_requested or self._cause is not None

    @property
    def requests_file(self) -> int:
        """The file that is readable when the worker was asked to stop."""
        return self._files.stops

    def read_requests(self) -> bool:
        """Read what the worker was asked. Return False when its end of the file is closed."""
        data = os.read(self._files.stops, 1 << 16)
        if data:
            signals = data.count(SIGNAL_MARK)
            self._stop = self._stop.note(now(), signals, duplicate_window=self._times.duplicate_window)
        return bool(data)

    def look(self, sample: ProcessSample) -> None:
        """Look at a silent worker; report a freeze, and kill the process if it must be ended."""
        at, pulse = now(), self._memories[0].pulse
        gap, self._looked_at = at - self._looked_at, at
        if not pulse or pulse != self._pulse or gap > MAX_LOOK_GAP or sample.state in _STOPPED:
            self._end_freeze(at, pulse)
            return
        frozen_for = at - self._seen_since
        holders = self._find_holders(at)
        if frozen_for < FROZEN_AFTER or self.end_reason:
            return
        if self._cause is None or at >= self._report_at:
            self._cause = self._find_cause(holders)
            for memory in self._memories:
                memory.blame(self._cause.slots or None)
            seconds = at - pulse
            self._report_at = at + min(seconds, MAX_REPORT_INTERVAL)
            self._log.event(
                "interpreter:blocked", "warning", pid=self._pid, seconds=round(seconds), why=self._cause.text
            )
        reason = find_end_reason(
            frozen_for=frozen_for,
            now=at,
            deadline=self._find_deadline(self._cause),
            stop=self._stop,
            stop_limit=self._times.limit,
        )
        if reason:
            self._kill(reason, at - pulse, self._cause)

    def _end_freeze(self, at: float, pulse: float) -> None:
        """Start again: the interpreter has run, or nobody can tell."""
        if self._cause is not None:
            self._cause = None
            for memory in self._memories:
                memory.blame(None)
            self._log.event("interpreter:resumed", "warning", pid=self._pid)
        self._pulse, self._seen_since, self._uses = pulse, at, {}

    def _find_holders(self, at: float) -> frozenset[int]:
        """Return which threads may have held the lock since the last look."""
        before, since = self._uses, self._used_at
        self._uses, self._used_at = _read_uses(self._pid), at
        return find_lock_holders(before, self._uses, max(at - since, 0.001))

    def _find_cause(self, holders: frozenset[int]) -> FreezeCause:
        """Find out which jobs may hold the lock, and where they stand."""
        records = {slot.slot: slot for memory in self._memories for slot in memory.read_slots()}
        main, stacks = self._memories[0].main_thread, self._read_stacks()
        found = {
            slot: stack
            for slot, stack in index_stacks(stacks).items()
            if slot in records and (records[slot].thread or self._pid) in holders
        }
        unknown = [
            stack
            for stack in stacks
            if stack.slot not in records and stack.identity == main and self._pid in holders
        ]
        if not found:
            where = f": the main thread is at {unknown[0].format_place(self._libraries)}" if unknown else ""
            return FreezeCause(text=f"no job is known to hold it{where}")
        jobs = [self._describe(records[slot], stack) for slot, stack in sorted(found.items())[:MAX_SHOWN]]
        more = f" (or {len(found) - MAX_SHOWN} more)" if len(found) > MAX_SHOWN else ""
        # A thread of no job may hold it as well as they do: then whatever has begun counts.
        slots = frozenset[int]() if unknown else frozenset(found)
        return FreezeCause(slots, f"{' or '.join(jobs)}{more}")

    def _describe(self, record: SlotRecord, stack: ThreadStack) -> str:
        return f"job {record.job} at {stack.format_place(self._libraries)}"

    def _find_deadline(self, cause: FreezeCause) -> float:
        """Return the earliest end of a hard limit among the jobs that may hold the lock; of all if that is unknown."""
        return min(
            (
                slot.deadline
                for memory in self._memories
                for slot in memory.read_slots()
                if slot.deadline and (not cause.slots or slot.slot in cause.slots)
            ),
            default=math.inf,
        )

    def _read_stacks(self) -> list[ThreadStack]:
        """Have the worker's threads written, and return them."""
        file, thread = self._files.stacks, self._memories[0].pulse_thread
        with suppress(OSError):
            os.lseek(file, 0, os.SEEK_SET)
            os.ftruncate(file, 0)
            if not _send_stack_signal(self._pid, thread):
                return []
            written, end = b"", now() + STACKS_TIMEOUT
            while True:
                before, written = written, os.pread(file, MAX_STACKS_BYTES, 0)
                stacks = parse_stacks(written.decode("utf-8", "replace"))
                if (written == before and self._are_complete(stacks)) or now() > end:
                    return stacks
                time.sleep(STACKS_INTERVAL)
        return []

    def _are_complete(self, stacks: list[ThreadStack]) -> bool:
        """Whether all stacks are there: the main thread's is the last, and a busy machine may stop before it."""
        main = self._memories[0].main_thread
        return any(stack.identity == main for stack in stacks)

    def _kill(self, reason: str, seconds: float, cause: FreezeCause) -> None:
        self.end_reason = f"the interpreter had not run for {seconds:.0f} s, {cause.text}; {reason}"
        self._log.event("worker:killed", "error", pid=self._pid, why=self.end_reason)
        self._log.flush()  # in a container this process may end with the worker
        with suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)


def _send_stack_signal(pid: int, thread: int) -> bool:
    """Ask one thread of a process for the stacks of all. Return False where that is impossible."""
    if STACK_SIGNAL is None or not thread:
        return False
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        return bool(libc.tgkill(pid, thread, STACK_SIGNAL) == 0)
    number = _TGKILL.get(platform.machine())
    return number is not None and bool(libc.syscall(number, pid, thread, STACK_SIGNAL) == 0)


def _read_uses(pid: int) -> dict[int, ThreadUse]:
    """Return what the kernel reports of the threads of a process; nothing where it reports nothing."""
    found: dict[int, ThreadUse] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError, IndexError):  # it has ended
                with open(f"/proc/{pid}/task/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                with open(f"/proc/{pid}/task/{name}/status") as file:
                    wakeups = next(line for line in file if line.startswith("voluntary_ctxt_switches"))
                found[int(name)] = ThreadUse(
                    (int(fields[11]) + int(fields[12])) / ticks, int(wakeups.split()[1])
                )
    return found
