"""Report the error that ended a command as one line for people and an exit code for scripts.

Exit codes: 0 success; 1 failure; 2 wrong usage or configuration; 73 another process has what is for one only;
130 interrupted. An error that celery5 raises on purpose shows no traceback; an unexpected one always does.
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
"""What to write instead of Celery's flags."""
_USAGE_ERRORS = (Misconfigured, BadBrokerURL, UnknownTask, BadArguments)


def run_reporting_errors(
    command: Callable[[], Any], on_failure: Callable[[str], object] = lambda _why: None
) -> int:
    """Run `command` and return the exit code.

    `on_failure` is called with the error in one line before the process ends with it. Raises unexpected errors.
    """
    try:
        code = command()
    except BaseException as error:
        explanation = explain_error(error)
        if explanation is None:
            if not isinstance(error, SystemExit):
                on_failure(_named(next(_leaves(error))))
            raise
        on_failure(explanation[0].removeprefix("Error: "))
        if _is_unwritable(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        line, code = explanation
        echo(line, err=True)
    return code if isinstance(code, int) else 0


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """Return the line to show and the exit code; None for an unexpected error.

    Trio's nurseries wrap errors in groups: the first error of celery5 inside a group counts.
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
                leaf, _USAGE_ERRORS
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
    """Return whether the command's output cannot be written: the disk is full, or fails."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(child)
    else:
        yield error


def _named(error: BaseException) -> str:
    return describe_error(error)


def _hint(error: click.ClickException) -> str:
    """Return what to write instead, or how to show the usage, for an error that click raised."""
    if isinstance(error, click.NoSuchOption) and error.option_name in CELERY_FLAG_HINTS:
        return f"; {CELERY_FLAG_HINTS[error.option_name]}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"; try '{error.ctx.command_path} --help'"
    return ""
