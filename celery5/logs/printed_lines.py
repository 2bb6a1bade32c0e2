"""Carry what a member of a cluster prints to stdout and stderr as lines that name it.

All members on a host have the streams of their Controller. Where the log is JSON, each printed line is a message of the
log, and so is the traceback of the error that ends the process. Elsewhere a printed line begins with the member's name.
What is written past Python's streams, such as by a library in C, stays as it is.
"""

import atexit
import sys
import time
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TextIO, cast

from celery5.logs.lines import WholeLines, to_json
from celery5.protocol.cluster.members import LAST_FAILURE_VARIABLE, format_failure
from celery5.protocol.masking import escape_json, mask_lines

LOG_FORMAT_FLAG = "--log-format"
LOG_FORMAT_VARIABLE = "CELERY5_LOG_FORMAT"
"""How the setting `log_format` is given where it is known before the application is loaded."""


class PrintedLines(WholeLines):
    """Stands for stdout or stderr of the member `name`. What is printed comes in whole lines."""

    def __init__(self, stream: TextIO, *, name: str, member: str, is_json: bool) -> None:
        super().__init__(stream)
        self._stream_name = name
        self._member = member
        self._is_json = is_json

    @property
    def stream(self) -> TextIO:
        """Return the stream itself: the log writes to it."""
        return self._stream

    def set_format(self, form: str) -> None:
        """Write as the log does, whose format is known by now."""
        if form != "auto":
            self._is_json = form == "json"

    def write_whole(self, text: str, /) -> None:
        """Write lines that have ended."""
        super().write_whole("".join(map(self.format_line, text.removesuffix("\n").split("\n"))))
        self._stream.flush()

    def format_line(self, line: str) -> str:
        """Return a printed line as it is written."""
        message = {
            "message_type": "celery5:process:printed",
            "level": "info",
            "line": line,
            "stream": self._stream_name,
        }
        return self._format(message, line)

    def write_error(self, why: str, trace: str) -> None:
        """Write the error that ends this process, without passwords."""
        trace = mask_lines(trace)
        message = {
            "message_type": "celery5:process:crashed",
            "level": "error",
            "why": mask_lines(why),
            "traceback": trace,
        }
        super().write_whole(self._format(message, trace))
        self._stream.flush()

    def _format(self, message: Mapping[str, str], text: str) -> str:
        if not self._is_json:
            return "".join(f"{self._member}: {line}\n" for line in text.removesuffix("\n").split("\n"))
        line = to_json({"worker": self._member, **message, "timestamp": time.time()})
        return f"{line if line.isascii() else escape_json(line)}\n"


class MemberOutput:
    """What this process, the member `name`, writes besides its log.

    Args:
        name: Its name.
        words: Its command.
        environ: Its environment. The variable that says why its last start failed is removed.
    """

    def __init__(self, name: str, words: Sequence[str], environ: MutableMapping[str, str]) -> None:
        self._last_failure: str = environ.pop(LAST_FAILURE_VARIABLE, "")
        self._why = ""
        is_json = _writes_json(words, environ)
        self._stdout = PrintedLines(sys.stdout, name="stdout", member=name, is_json=is_json)
        self._stderr = PrintedLines(sys.stderr, name="stderr", member=name, is_json=is_json)

    def start(self) -> None:
        """Carry what is printed from now on, until the process ends."""
        sys.stdout, sys.stderr = cast("TextIO", self._stdout), cast("TextIO", self._stderr)
        sys.excepthook = self._write_crash
        atexit.register(self._stdout.end_line)
        atexit.register(self._stderr.end_line)

    def note_failure(self, why: str) -> None:
        """Note the error with which this process ends, in one line: its Controller logs it."""
        self._why = why

    def _write_crash(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> None:
        """Write an unexpected error with its traceback, unless the last start ended with the same one."""
        if not self._why or format_failure(self._why) != self._last_failure:
            self._stderr.write_error(self._why, "".join(traceback.format_exception(kind, error, trace)))


def _writes_json(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the log is JSON, as far as that is known before the application is loaded."""
    given = next((value for flag, value in pairwise(words) if flag == LOG_FORMAT_FLAG), "")
    form = given or environ.get(LOG_FORMAT_VARIABLE) or "auto"
    return form == "json" or (form == "auto" and not sys.stdout.isatty())


def format_printed(line: str) -> str:
    """Return a line as this process prints it to stderr, for what writes to the descriptor itself."""
    printed: object = sys.stderr
    return printed.format_line(line) if isinstance(printed, PrintedLines) else f"{line}\n"


def get_streams(form: str) -> tuple[TextIO, TextIO]:
    """Return stdout and stderr for the log, which has this format, below what stands for them in a member."""
    found: list[TextIO] = []
    for stream in (sys.stdout, sys.stderr):
        printed: object = stream
        if isinstance(printed, PrintedLines):
            printed.set_format(form)
        found.append(printed.stream if isinstance(printed, PrintedLines) else stream)
    return found[0], found[1]
