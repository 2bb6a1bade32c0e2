"""Choosing: the flags that say which dead jobs are meant, and how ages and rates are written on a command line."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.cli.terminal.serving_flags import queue_names
from celery5.dead_letters.queues import parse_rate
from celery5.errors import Misconfigured

if TYPE_CHECKING:
    from celery5.protocol.job.dead_letters import DeadJobFilter

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = r"(\d+(?:\.\d+)?)([smhdw])"


def parse_age_flag(text: str) -> float:
    """A span of time, `90`, `15m`, `2h` or `1d12h`, in seconds."""
    said = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", said):
        return float(said)
    if not re.fullmatch(rf"({_SPAN})+", said):
        raise click.BadParameter(f"{text!r} is no span of time: write 90, 15m, 2h or 1d12h")
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_SPAN, said))


def parse_rate_flag(text: str) -> float:
    """Jobs in a time, `50`, `50/s`, `100/m` or `1000/h`, in jobs per second."""
    try:
        return parse_rate(text)
    except Misconfigured as error:
        raise click.BadParameter(str(error)) from None


def selection_flags(command: F) -> F:
    """Add the flags that say which dead jobs are meant."""
    flags = (
        click.option("--queue", "queues", metavar="A,B", help="Queues to look at; default: all."),
        click.option(
            "--task", "tasks", multiple=True, metavar="NAME", help="Of this task; 'shop.*' will do."
        ),
        click.option(
            "--error", "errors", multiple=True, metavar="CLASS", help="Last raised; '*Error' will do."
        ),
        click.option("--message", metavar="TEXT", help="Whose error says this."),
        click.option("--reason", "reasons", multiple=True, metavar="REASON", help="Dead for this reason."),
        click.option("--sink", "sinks", multiple=True, metavar="NAME", help="Documents for this Data Sink."),
        click.option(
            "--older-than", type=parse_age_flag, metavar="AGE", help="Dead for longer: 90, 15m, 2h, 1d12h."
        ),
        click.option("--newer-than", type=parse_age_flag, metavar="AGE", help="Dead for less."),
        click.option(
            "--id", "ids", multiple=True, metavar="ID", help="This job; or, with --queue, this entry."
        ),
    )
    for flag in reversed(flags):
        command = flag(command)
    return command


def parse_selection(said: dict[str, Any]) -> "DeadJobFilter":
    """What the flags mean. Raises Misconfigured for a name that no queue can have."""
    return {
        "queue": queue_names(said["queues"]) or None,
        "task": said["tasks"] or None,
        "error": said["errors"] or None,
        "message": said["message"],
        "reason": said["reasons"] or None,
        "sink": said["sinks"] or None,
        "older_than": said["older_than"],
        "newer_than": said["newer_than"],
        "ids": said["ids"] or None,
        "limit": said.get("limit"),
        "newest_first": said.get("newest_first") or None,
        "after": said.get("after"),
    }


def is_narrowed(choice: "DeadJobFilter") -> bool:
    """Whether a choice means less than all dead jobs of its queues."""
    return any(value is not None for name, value in choice.items() if name != "queue")
