"""Again: a process that nobody would start anew becomes the next one itself.

Floor: processes. Reads: the command line and the environment that this process was started with. Writes: nothing.

The program is executed anew in the same process: it keeps its id, so that whoever watches it (systemd, a container, a
terminal) has nothing to do, and all of its memory is gone.
"""

import atexit
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from celery5.protocol.masking import escape_text
from celery5.protocol.recycling import SUPERVISED_VARIABLE
from celery5.services.recycling import RestartMode
from celery5.services.systemd_notify import notify, read_notify_settings

RESTART_FOLDER_VARIABLE = "CELERY5_BEGUN_AGAIN"
"""In the environment of a program that this process was before: the folder that it was started in."""

ORPHAN_GRACE = 2.0
"""Seconds for which a member of a Controller that has died takes signals for one: the kernel tells it of that once for
each thread which its parent had, as these die one after the other, and the second SIGTERM would mean: at once."""


def get_restart_mode(environ: MutableMapping[str, str], *, processes: int) -> RestartMode:
    """How this process begins, and will begin anew: in place, unless it is one of several `processes` under one parent
    or a Controller has started it. Takes what it was told about that out of the environment."""
    folder = environ.pop(RESTART_FOLDER_VARIABLE, "")
    supervised = bool(environ.pop(SUPERVISED_VARIABLE, ""))
    alone = processes == 1 and not supervised
    return RestartMode(
        is_requested=True,
        in_place=alone,
        is_restarted=bool(folder),
        start_folder=folder or os.getcwd(),
        duplicate_window=ORPHAN_GRACE if supervised else 0.0,
    )


def re_execute(folder: str) -> None:
    """Execute the program that this process began with, from the `folder` where it did. Nothing of it may be left: no
    thread that matters, no handler of a signal. Its exit handlers run first. Returns only when that cannot be."""
    # systemd has to wait for the next one.
    notify(read_notify_settings(os.environ, os.getpid())["address"], "WATCHDOG=1")
    exits: Any = atexit
    exits._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(folder)  # a job may have left it
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            {**os.environ, RESTART_FOLDER_VARIABLE: folder},
        )
    except OSError as error:
        sys.stderr.write(f"this worker cannot begin anew: {escape_text(str(error))}; start it again\n")
