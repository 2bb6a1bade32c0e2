"""Own log: the log of a process that is ours alone: where it goes, and what comes to it.

Floor: processes. Reads: the environment; what stderr is. Writes: the log.
"""

import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

from celery5.app import App
from celery5.log import Format, Level, LogWriter
from celery5.log_runtime import RuntimeEnvironment, check_detectors, make_destination
from celery5.stdlib_log import captured_logging


@contextmanager
def open_log(app: App, form: Format, level: Level, *, name: str = "") -> Generator[LogWriter, None, None]:
    """Write the log of this process as `form` says, else as the setting `log_format` says or detectors find, while the
    block lasts. The process is called `name`. Raises Misconfigured."""
    form = app.settings.log_format if form == "auto" else form
    process = name or f"{socket.gethostname()}:{os.getpid()}"
    around = RuntimeEnvironment(os.environ, sys.stdout, sys.stderr, process=process)
    with (
        LogWriter(make_destination(form, around, check_detectors(app.log_detectors)), level=level) as journal,
        captured_logging(journal, level) as follow,
    ):
        journal.on_level_change(follow)
        yield journal
