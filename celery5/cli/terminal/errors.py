"""Boundary: what ended a command, as one line for people and an exit code for scripts.

0 it did what it says; 1 it failed; 2 it was asked for in a way that cannot work; 73 another process has its place; 130
it was interrupted. What celery5 raises on purpose never shows a traceback; what nobody foresaw always does.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import click

from celery5.cli.terminal.output import echo
from celery5.errors import (
    EXIT_ALREADY_IN_USE,
    AlreadyInUse,
    BadArguments,
    BadBrokerURL,
    CeleryError,
    Misconfigured,
    UnknownTask,
)
from celery5.protocol.masking import collapse_whitespace, describe_error

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_FIRST = "it comes before the command: celery5 -A module[:app] COMMAND"
CELERY_FLAG_HINTS = {
    "-A": _FIRST,
    "--app": _FIRST,
    "-c": "here it is --concurrency (async jobs), --cpu-slots (jobs in threads) or --processes",
    "-l": "here it is --log-level",
    "--loglevel": "here it is --log-level",
    "-Q": "here it is --queues",
    "-n": "here it is --name",
    "--hostname": "here it is --name",
    "-b": "here it is --broker",
    "-P": "there are no pools: async def runs in the event loop, def in a thread",
    "--pool": "there are no pools: async def runs in the event loop, def in a thread",
}
"""Where Celery's flags went."""
_ASKED_WRONGLY = (Misconfigured, BadBrokerURL, UnknownTask, BadArguments)


def run_reporting_errors(
    command: Callable[[], Any], on_failure: Callable[[str], object] = lambda _why: None
) -> int:
    """Run `command` and return the exit code. Unexpected errors pass through. `failing` is called with the error in one
    line before the process ends with it."""
    try:
        code = command()
    except BaseException as error:
        told = explain_error(error)
        if told is None:
            if not isinstance(error, SystemExit):
                on_failure(_named(next(_leaves(error))))
            raise
        on_failure(told[0].removeprefix("Error: "))
        if _is_unwritable(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        line, code = told
        echo(line, err=True)
    return code if isinstance(code, int) else 0


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """The line to show and the exit code; None for an error that nobody foresaw.

    Trio's nurseries wrap what was raised in groups: the first error of ours inside one is what counts.
    """
    leaves = list(_leaves(error))
    if _is_unwritable(error):
        return (
            f"Error: what there is to say cannot be written: {cast('OSError', error).strerror}",
            EXIT_FAILED,
        )
    for leaf in leaves:
        if isinstance(leaf, AlreadyInUse):
            return f"Error: {collapse_whitespace(str(leaf))}", EXIT_ALREADY_IN_USE
        if isinstance(leaf, CeleryError):
            return f"Error: {collapse_whitespace(str(leaf))}", EXIT_USAGE if isinstance(
                leaf, _ASKED_WRONGLY
            ) else EXIT_FAILED
    for leaf in leaves:
        if isinstance(leaf, click.ClickException):
            return (
                f"Error: {collapse_whitespace(leaf.format_message()).removesuffix('.')}{_hint(leaf)}",
                leaf.exit_code,
            )
    if any(isinstance(leaf, (KeyboardInterrupt, click.Abort)) for leaf in leaves):
        return "Interrupted.", EXIT_INTERRUPTED
    return None


def _is_unwritable(error: BaseException) -> bool:
    """Whether a disk is full, or fails, on which the command's words were to be."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(each)
    else:
        yield error


def _named(error: BaseException) -> str:
    return describe_error(error)


def _hint(error: click.ClickException) -> str:
    """What to write instead, or where to look the usage up, for a mistake that click found."""
    if isinstance(error, click.NoSuchOption) and error.option_name in CELERY_FLAG_HINTS:
        return f"; {CELERY_FLAG_HINTS[error.option_name]}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"; try '{error.ctx.command_path} --help'"
    return ""
