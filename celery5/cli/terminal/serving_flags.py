"""Serving: the flags of every command that serves an application.

Flags that are settings have no default here: what they leave unsaid is the environment's or the application's to say.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.errors import Misconfigured
from celery5.protocol.cluster.members import PARENT_VARIABLE
from celery5.protocol.job.job import Options

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.processes.lifecycle.foreground import ServeOptions


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


F = TypeVar("F", bound=Callable[..., Any])

SETTING_FLAGS = (
    "broker",
    "concurrency",
    "cpu_slots",
    "max_jobs",
    "max_memory",
    "grace_period",
    "status_port",
    "status_host",
    "inbox",
    "inbox_signatures",
    "keys",
)


broker_flag = click.option("--broker", metavar="URL", help="Redis or Valkey: redis://, rediss:// or unix://.")
"""Not one of the flags that all share: a development controller has a server of its own."""
_OF_JOBS: Sequence[Callable[[Any], Any]] = (
    click.option("--concurrency", type=int, metavar="N", help="Async jobs that one process runs at once."),
    click.option("--cpu-slots", type=int, metavar="N", help="Jobs in threads that one process runs at once."),
    click.option(
        "--max-jobs", type=int, metavar="N", help="Jobs after which a process is recycled; default: never."
    ),
    click.option(
        "--max-memory", metavar="SIZE", help="Memory with which it is recycled: '500 MiB'; default: never."
    ),
    click.option("--queues", metavar="A,B", help="Queues to work on; default: all that the tasks name."),
    click.option("--burst", is_flag=True, help="End when all is done, scheduled jobs and retries included."),
    click.option(
        "--grace-period",
        type=float,
        metavar="SECONDS",
        help="How long running jobs may go on after a stop.",
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
    click.option(
        "--log-format",
        type=click.Choice(["auto", "json", "console", "journal"]),
        default="auto",
        show_default=True,
        help="auto: the systemd journal if stderr is it, console on a terminal, else JSON lines.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
    ),
)


def serving_flags(command: F) -> F:
    """Add the flags that `worker start` and `controller start` share."""
    return _with((*_OF_JOBS, *_FLAGS), command)


def auxiliary_process_flags(command: F) -> F:
    """Add the flags of a process that runs no jobs: `scheduler start` and `router start`."""
    return _with((broker_flag, *_FLAGS), command)


def processes_flag(kind: str) -> Callable[[F], F]:
    """Add the flag for several processes of a `kind`."""
    return click.option(
        "--processes",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help=f"{kind} processes, under one parent that replaces those that die.",
    )


def _with(flags: Sequence[Callable[[Any], Any]], command: F) -> F:
    for flag in reversed(flags):
        command = flag(command)
    return command


def configure(app: "App", said: dict[str, Any]) -> "ServeOptions":
    """Give `app` the settings among the flags `said`; the other flags say how to serve it. Raises Misconfigured."""
    from celery5.processes.lifecycle.foreground import ServeOptions

    config = said.pop("config")
    if config:
        app.use_config(config)
    app.configure(**{name: said.pop(name) for name in SETTING_FLAGS if name in said})
    return ServeOptions(queues=queue_names(said.pop("queues", None)), **said)


def queue_names(listed: str | None) -> tuple[str, ...]:
    """The names in a list with commas; without a list none, which means all. Raises Misconfigured for one that no queue
    can have, and for a list of none: what a shell makes of a variable that is not set must not mean all."""
    names = [each.strip() for each in (listed or "").split(",") if each.strip()]
    if listed is not None and not names:
        raise Misconfigured(f"--queues {listed!r} names no queue; leave it out for all")
    for name in names:
        Options(queue=name).checked()
    return tuple(dict.fromkeys(names))
