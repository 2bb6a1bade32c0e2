"""Choose where the log of this process goes, by its runtime environment.

A detector returns a destination if it recognizes the runtime, else None. Those of the application
(`App(log_detectors=[...])`) are called first. If none does, lines go to stdout: for people on a terminal, else as
JSON.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.logs.journald import JOURNAL_SOCKET, JournaldDestination
from celery5.logs.lines import LineWriter
from celery5.logs.log import Format, LogDestination


class RuntimeEnvironment(msgspec.Struct, frozen=True):
    """The environment that detectors read."""

    environ: Mapping[str, str]
    stdout: TextIO
    stderr: TextIO
    # The name of the process.
    process: str = ""

    def make_line_writer(self, form: Literal["json", "console"] = "json") -> LineWriter:
        """Return a destination that writes lines to stdout."""
        return LineWriter(self.stdout, form=form, process=self.process, stderr=self.stderr)

    @property
    def journal_socket(self) -> str:
        """Return the path of the journal's socket."""
        return self.environ.get("CELERY5_JOURNAL_SOCKET") or JOURNAL_SOCKET


Detector = Callable[[RuntimeEnvironment], LogDestination | None]
"""Returns the destination of the runtime that it knows, else None."""


def detect_journal(environment: RuntimeEnvironment) -> LogDestination | None:
    """Return the systemd journal, if stderr really leads there.

    JOURNAL_STREAM is the device and the inode of the stream that systemd made. Children inherit the variable, and
    their stderr may lead elsewhere: so it is compared with stderr itself.
    """
    if not is_journal_stream(environment.environ.get("JOURNAL_STREAM", ""), environment.stderr):
        return None
    try:
        return JournaldDestination(environment.journal_socket)
    except OSError:  # the journal's stream without its socket: a container with half of it, say
        return None


def is_journal_stream(named: str, stream: TextIO) -> bool:
    """Return whether `stream` is the one that JOURNAL_STREAM names."""
    if not named:
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def has_journal(environ: Mapping[str, str]) -> bool:
    """Return whether systemd's journal is on this host, so that `journalctl` may find something."""
    socket = environ.get("CELERY5_JOURNAL_SOCKET") or JOURNAL_SOCKET
    return bool(environ.get("JOURNAL_STREAM")) or os.path.exists(socket)


BUILT_IN_DETECTORS: tuple[Detector, ...] = (detect_journal,)


def make_destination(
    form: Format, environment: RuntimeEnvironment, detectors: Sequence[Detector] = ()
) -> LogDestination:
    """Return the destination that `form` names; with `auto`, that of the first detector which recognizes the runtime.

    Args:
        detectors: Those of the application.

    Raises:
        Misconfigured: `form` is `journal`, and no journal listens.
    """
    if form == "journal":
        try:
            return JournaldDestination(environment.journal_socket)
        except OSError as error:
            raise Misconfigured(
                f"--log-format journal: no journal listens at {environment.journal_socket} "
                f"({error.strerror or error}); use --log-format json, or auto"
            ) from None
    if form != "auto":
        return environment.make_line_writer(form)
    for detect in (*detectors, *BUILT_IN_DETECTORS):
        try:
            destination = detect(environment)
        except Exception as error:  # the user's code: the log must not keep the worker from working
            _write_error(
                environment.stderr,
                f"celery5: log detector {detect!r} failed: {type(error).__name__}: {error}\n",
            )
            continue
        if destination is not None:
            return destination
    return environment.make_line_writer("console" if _is_terminal(environment.stdout) else "json")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return False


def check_detectors(detectors: object) -> tuple[Detector, ...]:
    """Return an application's detectors. Raises Misconfigured for what cannot be called."""
    if not isinstance(detectors, Sequence) or not all(map(callable, cast("Sequence[object]", detectors))):
        raise Misconfigured(f"log_detectors is {detectors!r}: give a list of functions")
    return tuple(cast("Sequence[Detector]", detectors))


def _write_error(stderr: TextIO, line: str) -> None:
    try:
        stderr.write(line)
        stderr.flush()
    except (OSError, ValueError):
        return
