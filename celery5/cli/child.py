"""Child: what a process owes to the Controller that has started it: not to outlive it.

Floor: cli. Reads: CELERY5_PARENT, which it takes out of the environment. Writes: nothing.
"""

import os
import signal
import sys

from celery5.protocol.members import PARENT_VARIABLE


def end_with_parent() -> None:
    """Be told to end (SIGTERM) when the parent dies; end now if it is dead already.

    What this process starts itself is no child of that parent, so nobody else may find the variable.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if sys.platform == "linux" and parent.isdecimal():
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            sys.exit(1)
