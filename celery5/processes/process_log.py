"""Open the log of a process, as the settings of its application say."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from celery5.app import App
from celery5.logs.destination import RuntimeEnvironment, check_detectors, make_destination
from celery5.logs.lines import whole_lines
from celery5.logs.log import LogWriter
from celery5.logs.printed_lines import get_streams
from celery5.logs.stdlib_log import captured_logging


@contextmanager
def open_log(app: App, *, name: str = "") -> Generator[LogWriter, None, None]:
    """Write the log of this process as the settings `log_format` and `log_level` say, while the block lasts.

    The process is called `name`. Raises Misconfigured.
    """
    form, level = app.settings.log_format, app.settings.log_level
    process = name or f"{socket.gethostname()}:{os.getpid()}"
    around = RuntimeEnvironment(os.environ, *get_streams(form), process=process)
    with (
        LogWriter(
            make_destination(form, around, check_detectors(app.log_detectors)), level=level, process=process
        ) as journal,
        captured_logging(journal, level) as follow,
        whole_lines(),
    ):
        journal.on_level_change(follow)
        yield journal
