"""The program that starts the command of a box, so that it ends with its worker.

It is run by its path and imports little, so that it starts in some milliseconds.
"""

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG: the signal that the kernel sends when the thread that started this process has ended."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends, for whatever reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended
        os.kill(os.getpid(), signal.SIGKILL)


def launch(parent: int, command: list[str]) -> None:
    """Replace this process with `command`, which ends with the process `parent`."""
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
