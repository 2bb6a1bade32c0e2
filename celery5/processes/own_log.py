"""Own log: the log of a process that is ours alone: where it goes, and what comes to it.

Floor: processes. Reads: the environment; what stderr is. Writes: the log.
"""

import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

from celery5.app import App
from celery5.log import Format, Journal, Level
from celery5.log_runtime import Surroundings, checked, outlet
from celery5.stdlib_log import routed


@contextmanager
def own_log(app: App, form: Format, level: Level, *, name: str = "") -> Generator[Journal, None, None]:
    """Write the log of this process as `form` says, else as the setting `log_format` says or detectors find, while the
    block lasts. The process is called `name`. Raises Misconfigured."""
    form = app.settings.log_format if form == "auto" else form
    process = name or f"{socket.gethostname()}:{os.getpid()}"
    around = Surroundings(os.environ, sys.stdout, sys.stderr, process=process)
    with (
        Journal(outlet(form, around, checked(app.log_detectors)), level=level) as journal,
        routed(journal, level) as follow,
    ):
        journal.followed_by(follow)
        yield journal
