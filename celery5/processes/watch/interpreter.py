"""Interpreter: show the sidecar that this worker's interpreter runs, where its threads stand, and what signals it got.

All of it works while C code holds the interpreter's lock, but for the pulse, whose stopping says just that. The stacks
and the signals are written by `faulthandler`, whose handlers need no lock. The stacks are asked for by a signal to the
thread of the pulse: no system call of a job is interrupted.
"""

import faulthandler
import os
import signal
import tempfile
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from celery5.processes.lifecycle.signals import Interruption
from celery5.protocol.process.frozen import LOOK_INTERVAL
from celery5.services.process.lease import now
from celery5.services.process.shared_memory import SidecarMemory

STACK_SIGNAL: int | None = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else None
"""The signal by which the sidecar asks for the stacks; None where the system has none to spare."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNAL_MARK = b"Stack (most recent call first)"
"""What `faulthandler` writes once for each signal."""
COMMAND_MARK = b"\0"
"""What stands for a stop that no signal asked for."""


class SharedFiles:
    """The files that a worker process and its sidecar share. Make it before the process forks."""

    def __init__(self) -> None:
        self.stacks = _make_file()
        """The stacks of all threads."""
        self.stops, self._stops_end = os.pipe()
        """What was asked of the worker; readable."""
        os.set_blocking(self._stops_end, False)

    @property
    def stops_end(self) -> int:
        """The end of the pipe in the worker."""
        return self._stops_end

    def note_command(self) -> None:
        """Tell the sidecar that the worker is to stop, though no signal came."""
        with suppress(OSError):
            os.write(self._stops_end, COMMAND_MARK)

    def close(self) -> None:
        """Close them in the worker."""
        for descriptor in (self.stacks, self.stops, self._stops_end):
            with suppress(OSError):  # a job may have closed all files that it found open
                os.close(descriptor)


class InterpreterPulse:
    """A context manager for the main thread: while the block lasts, the sidecar can watch the interpreter.

    Enter it inside of the block of the `interruption`, whose signal handlers it extends.
    """

    def __init__(self, memory: SidecarMemory, files: SharedFiles, interruption: Interruption) -> None:
        self._memory = memory
        self._files = files
        self._interruption = interruption
        self._signals = tuple(STOP_SIGNALS) + (() if STACK_SIGNAL is None else (STACK_SIGNAL,))
        # Free when the thread is to end.
        self._end = threading.Lock()
        self._end.acquire()
        self._thread = threading.Thread(target=self._beat, name="celery5-pulse", daemon=True)

    def __enter__(self) -> Self:
        for signal_number in STOP_SIGNALS:
            faulthandler.register(signal_number, file=self._files.stops_end, all_threads=False, chain=True)
        if STACK_SIGNAL is not None:
            faulthandler.register(STACK_SIGNAL, file=self._files.stacks, all_threads=True)
        self._interruption.on_fork(self._release_signals)
        self._interruption.on_deadline(self._files.note_command)
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.release()
        self._thread.join(LOOK_INTERVAL)
        self._memory.pulse = 0.0
        self._release_signals()

    def _release_signals(self) -> None:
        for signal_number in self._signals:
            faulthandler.unregister(signal_number)

    def _beat(self) -> None:
        self._memory.set_threads(pulse=threading.get_native_id(), main=threading.main_thread().ident or 0)
        while True:
            self._memory.pulse = now()
            if self._end.acquire(timeout=LOOK_INTERVAL):
                return


def _make_file() -> int:
    """Return a file in memory: however much is written, nobody waits for a reader."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.memfd_create("celery5-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
