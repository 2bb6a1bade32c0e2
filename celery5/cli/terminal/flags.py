"""Define the flags that several commands share, and the types of flags with a unit.

Flags that are settings have no default: without them the environment or the application decides.
"""

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.errors import Misconfigured
from celery5.lazy_modules import without_garbage_collection
from celery5.protocol.durations import format_range
from celery5.protocol.text_values import parse_seconds

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.processes.foreground import ServeOptions

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.FloatRange):
    """The type of a flag that takes seconds, or a text such as `15m`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds. Raises BadParameter."""
        written = value
        if isinstance(value, str):
            try:
                value = parse_seconds(value)
            except Misconfigured as error:
                self.fail(str(error), param, ctx)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{written} is not in the range {self._describe_range()}", param, ctx)

    def _describe_range(self) -> str:
        """Return the bounds, for help and errors."""
        if self.min is None or self.max is None:
            return super()._describe_range() if self.min != self.max else ""
        return format_range(self.min, self.max)


class BoundedText(click.types.StringParamType):
    """The type of a flag that takes a text with a number of characters."""

    def __init__(self, shortest: int | None, longest: int | None) -> None:
        self.shortest, self.longest = shortest or 0, longest or math.inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text. Raises BadParameter."""
        text: str = super().convert(value, param, ctx)
        if not self.shortest <= len(text) <= self.longest:
            bound = f"at least {self.shortest}" if len(text) < self.shortest else f"at most {self.longest}"
            self.fail(f"it has {len(text)} characters: give {bound}", param, ctx)
        return text


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies; exit now if it is dead already. Linux only.

    Processes that this one starts are no children of that parent, so the variable is removed from the environment.
    """
    from celery5.protocol.cluster.members import PARENT_VARIABLE

    parent = os.environ.pop(PARENT_VARIABLE, "")
    if sys.platform == "linux" and parent.isdecimal():
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            sys.exit(1)


SETTING_FLAGS = (
    "broker",
    "concurrency",
    "cpu_slots",
    "capacity",
    "max_jobs",
    "max_memory",
    "grace_period",
    "status_port",
    "status_host",
    "inbox",
    "inbox_signatures",
    "keys",
    "log_format",
    "log_level",
)


broker_flag = click.option(
    "--broker", metavar="URL", help="Redis or Valkey: redis://, rediss://, unix:// or redis+sentinel://."
)
"""Not one of the shared flags, since a development controller has a private server."""
_OF_JOBS: Sequence[Callable[[Any], Any]] = (
    click.option("--concurrency", type=int, metavar="N", help="Async jobs that one process runs at once."),
    click.option(
        "--cpu-slots",
        metavar="N",
        help="Jobs in threads that one process runs at once; default: auto, by how much they compute.",
    ),
    click.option(
        "--capacity",
        metavar="WHAT",
        help="What tasks with resources= may take: 'gpu=2 vram_gb=auto', or auto; default: nothing.",
    ),
    click.option(
        "--max-jobs", type=int, metavar="N", help="Jobs after which a process is recycled; default: never."
    ),
    click.option(
        "--max-memory", metavar="SIZE", help="Memory with which it is recycled: '500 MiB'; default: never."
    ),
    click.option("--queues", metavar="A,B", help="Queues to work on; default: all that the tasks name."),
    click.option(
        "--processors",
        metavar="A,B",
        help="Processors of streams to run, or none; default: all of the application.",
    ),
    click.option("--burst", is_flag=True, help="End when all is done, scheduled jobs and retries included."),
    click.option(
        "--grace-period",
        type=Duration(),
        metavar="SECONDS",
        help="How long running jobs may go on after a stop.",
    ),
)
_OF_LOG: Sequence[Callable[[Any], Any]] = (
    click.option(
        "--log-format",
        type=click.Choice(["auto", "json", "console", "journal"]),
        help="auto, the default: the systemd journal if stderr is it, console on a terminal, else JSON lines.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="The lowest level that is logged; default: info.",
    ),
)
_FLAGS: Sequence[Callable[[Any], Any]] = (
    click.option(
        "--config",
        metavar="WHERE",
        help="Where settings are: a module, a .toml file, or 'redis'; default: CELERY5_CONFIG.",
    ),
    click.option(
        "--reload/--no-reload",
        default=True,
        help="Take up a configuration that changes; or not. Default: do.",
    ),
    click.option("--inbox/--no-inbox", default=None, help="Whether it takes commands; default: it does."),
    click.option(
        "--inbox-signatures/--no-inbox-signatures",
        default=None,
        help="Whether commands must be signed; default: they must.",
    ),
    click.option("--keys", metavar="FOLDER", help="Where the keys are that commands are signed with."),
    click.option("--name", default="", help="The process' name; default: host, process and a new word."),
    click.option(
        "--status-port", type=int, metavar="N", help="Answer /livez, /readyz and /metrics on this port."
    ),
    click.option("--status-host", metavar="ADDRESS", help="Where that port is opened; default: 127.0.0.1."),
    *_OF_LOG,
)


def serving_flags(command: F) -> F:
    """Add the flags that `worker start` and `controller start` share."""
    return _add_flags((*_OF_JOBS, *_FLAGS), command)


def auxiliary_process_flags(command: F) -> F:
    """Add the flags of a process that runs no jobs: `scheduler start` and `router start`."""
    return _add_flags((broker_flag, *_FLAGS), command)


def log_flags(command: F) -> F:
    """Add the flags of the log, for a process that has none of the others: `dashboard start`."""
    return _add_flags(_OF_LOG, command)


def processes_flag(kind: str) -> Callable[[F], F]:
    """Add the flag for several processes of a `kind`."""
    return click.option(
        "--processes",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"{kind} processes, under one parent that replaces those that die; default: 1.",
    )


def _add_flags(flags: Sequence[Callable[[Any], Any]], command: F) -> F:
    for flag in reversed(flags):
        command = flag(command)
    return command


def configure(app: "App", flags: dict[str, Any]) -> "ServeOptions":
    """Apply the flags that are settings to `app`, and return the others. Raises Misconfigured.

    The flag `processes` stays one of the others: it is a setting of workers alone.
    """
    with without_garbage_collection():
        from celery5.processes.foreground import ServeOptions

    config = flags.pop("config")
    if config:
        app.use_config(config)
    app.configure(**{name: flags.pop(name) for name in SETTING_FLAGS if name in flags})
    processes = flags.pop("processes", None) or 1
    processors = flags.pop("processors", None)
    return ServeOptions(
        queues=queue_names(flags.pop("queues", None)),
        processors=None if processors is None else app.streams.parse_processors(processors),
        processes=processes,
        **flags,
    )


def queue_names(text: str | None) -> tuple[str, ...]:
    """Return the queues in the list of --queues; none for no list, which means all queues. Raises Misconfigured."""
    if text is None:
        return ()
    from celery5.protocol.job.job import parse_queue_names  # when queues are named, and not for help

    return tuple(parse_queue_names(text, "--queues"))
