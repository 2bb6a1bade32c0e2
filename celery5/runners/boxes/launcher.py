"""Box launcher: becomes the command of a box, after it has made sure that it ends with its worker.

It is run by its path, with nothing imported but what it names, so that it starts in some milliseconds.
"""

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1
"""PR_SET_PDEATHSIG: which signal the kernel sends when the parent's thread that made this process has ended."""


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent` ends, whatever ends it, where the kernel knows how (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def launch(parent: int, command: list[str]) -> None:
    """Be `command` from now on, which ends with `parent`."""
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
