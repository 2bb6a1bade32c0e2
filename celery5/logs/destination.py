"""Log runtime: which runtime this process lives under, and so where its log goes (C14, C15).

A detector looks around and gives an outlet if it knows the runtime, else None. They are asked in order, an
application's own (`App(log_detectors=[...])`) first. If none finds any, lines go to stdout: for people if that is a
terminal, else JSON.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO, cast

from celery5.errors import Misconfigured
from celery5.logs.journald import JOURNAL_SOCKET, JournaldDestination
from celery5.logs.lines import LineWriter
from celery5.logs.log import Format, LogDestination


@dataclass(frozen=True, slots=True)
class RuntimeEnvironment:
    """What a detector may look at: the environment, the standard streams, and what the `process` is called."""

    environ: Mapping[str, str]
    stdout: TextIO
    stderr: TextIO
    process: str = ""

    def make_line_writer(self, form: Literal["json", "console"] = "json") -> LineWriter:
        """Lines on stdout."""
        return LineWriter(self.stdout, form=form, process=self.process)

    @property
    def journal_socket(self) -> str:
        """Where the journal listens."""
        return self.environ.get("CELERY5_JOURNAL_SOCKET") or JOURNAL_SOCKET


Detector = Callable[[RuntimeEnvironment], LogDestination | None]
"""Gives the outlet of a runtime that it finds, else None."""


def detect_journal(around: RuntimeEnvironment) -> LogDestination | None:
    """The systemd journal, if stderr really is it.

    JOURNAL_STREAM is the device and the inode of the stream that systemd made. Children inherit the variable, and
    their stderr may lead elsewhere: so it is compared with stderr itself.
    """
    if not is_journal_stream(around.environ.get("JOURNAL_STREAM", ""), around.stderr):
        return None
    try:
        return JournaldDestination(around.journal_socket)
    except OSError:  # the journal's stream without its socket: a container with half of it, say
        return None


def is_journal_stream(named: str, stream: TextIO) -> bool:
    """Whether `stream` is the one that JOURNAL_STREAM has `named`."""
    if not named:
        return False
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


BUILT_IN_DETECTORS: tuple[Detector, ...] = (detect_journal,)


def make_destination(
    form: Format, around: RuntimeEnvironment, own: Sequence[Detector] = ()
) -> LogDestination:
    """Where the log goes: as `form` says, or, with `auto`, as the first detector that finds something.

    Raises Misconfigured when the journal was asked for by name and does not answer.
    """
    if form == "journal":
        try:
            return JournaldDestination(around.journal_socket)
        except OSError as error:
            raise Misconfigured(
                f"--log-format journal: no journal listens at {around.journal_socket} ({error.strerror or error}); "
                "use --log-format json, or auto"
            ) from None
    if form != "auto":
        return around.make_line_writer(form)
    for detect in (*own, *BUILT_IN_DETECTORS):
        try:
            found = detect(around)
        except Exception as error:  # the user's code: the log must not keep the worker from working
            _tell(
                around.stderr, f"celery5: log detector {detect!r} failed: {type(error).__name__}: {error}\n"
            )
            continue
        if found is not None:
            return found
    return around.make_line_writer("console" if _is_terminal(around.stdout) else "json")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return False


def check_detectors(detectors: object) -> tuple[Detector, ...]:
    """An application's detectors. Raises Misconfigured for what cannot be called."""
    if not isinstance(detectors, Sequence) or not all(map(callable, cast("Sequence[object]", detectors))):
        raise Misconfigured(f"log_detectors is {detectors!r}: give a list of functions")
    return tuple(cast("Sequence[Detector]", detectors))


def _tell(stderr: TextIO, line: str) -> None:
    try:
        stderr.write(line)
        stderr.flush()
    except (OSError, ValueError):
        return
