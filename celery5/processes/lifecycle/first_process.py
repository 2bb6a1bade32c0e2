"""The first process of a container (PID 1): it passes signals on and ends orphans, and a child does the work.

Linux makes the first process the parent of every orphan, and leaves an orphan that has ended as a *zombie* until its
parent has waited for it. A worker may not wait for processes that it did not start: so that a parent above it does, as
`tini` and `dumb-init` do.
"""

import os
import signal
import time
from contextlib import suppress

_OF_THIS_PROCESS = {
    signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP
}  # fmt: skip
"""Signals of an error in this process itself: they are neither held back nor passed on."""
_BY_KERNEL = 0x80
"""SI_KERNEL, which the terminal's signals have."""
_NAMES_OF_PID = ("LISTEN_PID", "WATCHDOG_PID")
"""Variables of systemd that name the process which they are for."""
SIDECAR_LIMIT = 2.0
"""Seconds that a killed child's other processes get: the sidecar of a worker puts its jobs back."""


def stand_above() -> None:
    """As the first process of a container, fork: return in the child, and never in the parent.

    The parent exits with the child's exit code, or with 128 and the number of the signal that killed it. Whatever still
    runs then is killed by the kernel. In any other process nothing happens. Call it before threads are started.
    """
    if os.getpid() != 1:
        return
    signals = signal.valid_signals() - _OF_THIS_PROCESS
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        for name in _NAMES_OF_PID:
            if os.environ.get(name) == "1":
                os.environ[name] = str(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    status = None
    while status is None:
        found = signal.sigwaitinfo(signals)
        if found.si_signo == signal.SIGCHLD:
            status = _reap(child)
        elif not _has_reached_child(found):
            with suppress(ProcessLookupError):
                os.kill(child, found.si_signo)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _await_others()
    os._exit(code if code >= 0 else 128 - code)


def _has_reached_child(found: signal.struct_siginfo) -> bool:
    """Return whether the terminal has sent a signal to all processes in front of it, and so to the child, too.

    That it was closed it tells the leader of the session alone.
    """
    is_to_leader = found.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    return found.si_code == _BY_KERNEL and not is_to_leader


def _reap(child: int) -> int | None:
    """Wait for all processes that have ended. Return the status of the child if it is one of them."""
    child_status = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                child_status = status
    return child_status


def _await_others() -> None:
    """Wait until no process is left, at most SIDECAR_LIMIT seconds."""
    end = time.monotonic() + SIDECAR_LIMIT
    with suppress(ChildProcessError):
        while (left := end - time.monotonic()) > 0:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                signal.sigtimedwait({signal.SIGCHLD}, left)
