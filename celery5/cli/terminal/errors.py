"""Report errors: the one that ended a command, as one line and an exit code, and the brokers that are unreachable.

Exit codes: 0 success; 1 failure, also for a name that nothing has; 2 wrong usage or configuration; 73 another process
has what is for one only; 130 interrupted. An error that celery5 raises on purpose shows no traceback; an unexpected
one always does.

While some brokers are unreachable, the result lacks what those have: a line on stderr, a field for programs and the
exit code report that.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from celery5.cli.terminal.output import echo, echo_hint, format_cell, to_json
from celery5.errors import (
    EXIT_ALREADY_IN_USE,
    AlreadyInUse,
    BadArguments,
    BadBrokerURL,
    BrokerError,
    BrokerUnavailable,
    CeleryError,
    Misconfigured,
    UnknownName,
)
from celery5.protocol.masking import collapse_whitespace, describe_error, get_error_text, get_outage_text

if TYPE_CHECKING:
    from celery5.app import App


class RichMissing(CeleryError):
    """rich, which draws tables and screens, is not installed."""


def require_rich(what: str, *, extra: str) -> None:
    """Raise RichMissing when rich is not installed."""
    if find_spec("rich") is None:
        from celery5.extras import describe_installation  # only where something is missing

        raise RichMissing(f"{what} needs rich: {describe_installation(extra)}, or use --json")


EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_BEFORE_COMMAND = "it comes before the command: celery5 -A module[:app] COMMAND"
CELERY_FLAG_HINTS = {
    "-A": _BEFORE_COMMAND,
    "--app": _BEFORE_COMMAND,
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
CLICK_WORDS = {
    " is not a valid float range": " is not a number",
    " is not a valid float": " is not a number",
    " is not a valid integer range": " is not a whole number",
    " is not a valid integer": " is not a whole number",
}
"""Words of click's errors that name a type of its code, longer ones first, and what is said instead."""
_USAGE_ERRORS = (Misconfigured, BadBrokerURL, BadArguments)


def run_reporting_errors(
    command: Callable[[], Any],
    on_failure: Callable[[str], bool] = lambda _why: False,
) -> int:
    """Run `command` and return the exit code. Raises unexpected errors.

    `on_failure` is called with the error in one line before the process ends with it. It returns whether somebody else
    shows that line.
    """
    try:
        code = command()
    except BaseException as error:
        explanation = explain_error(error)
        if explanation is None:
            if not isinstance(error, SystemExit):
                on_failure(describe_error(next(_iterate_leaves(error))))
            raise
        line, code = explanation
        is_shown = on_failure(line.removeprefix("Error: "))
        if _is_unwritable(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not is_shown:
            echo_hint(line, err=True)
    return code if isinstance(code, int) else 0


def explain_error(error: BaseException) -> tuple[str, int] | None:
    """Return the line to show and the exit code; None for an unexpected error.

    Trio's nurseries wrap errors in groups: the first error of celery5 inside a group counts.
    """
    leaves = list(_iterate_leaves(error))
    if _is_unwritable(error):
        return (
            f"Error: what there is to say cannot be written: {cast('OSError', error).strerror}",
            EXIT_FAILED,
        )
    for leaf in leaves:
        if isinstance(leaf, AlreadyInUse):
            return f"Error: {collapse_whitespace(str(leaf))}", EXIT_ALREADY_IN_USE
        if isinstance(leaf, CeleryError):
            is_usage = isinstance(leaf, _USAGE_ERRORS) and not isinstance(leaf, UnknownName)
            code = EXIT_USAGE if is_usage else EXIT_FAILED
            text = get_outage_text(str(leaf)) if isinstance(leaf, BrokerUnavailable) else str(leaf)
            return f"Error: {collapse_whitespace(text)}", code
    for leaf in leaves:
        if isinstance(leaf, click.ClickException):
            return f"Error: {_explain_usage(leaf)}", leaf.exit_code
    if any(isinstance(leaf, (KeyboardInterrupt, click.Abort)) for leaf in leaves):
        return "Interrupted.", EXIT_INTERRUPTED
    return None


def _is_unwritable(error: BaseException) -> bool:
    """Return whether the command's output cannot be written: the disk is full, or fails."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _iterate_leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _iterate_leaves(child)
    else:
        yield error


def _explain_usage(error: click.ClickException) -> str:
    """Return the text of an error that click raised, in our words, and what to write instead."""
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Argument):
        # click's own name of an argument is its usage, such as `[KIND]` or `{debug|info}`.
        error.param_hint = f"'{error.param.human_readable_name}'"
    hint = _get_hint(error)
    text = collapse_whitespace(error.format_message())
    if isinstance(error, click.NoSuchOption) and error.option_name in CELERY_FLAG_HINTS:
        text = text.partition(" Did you mean")[0]  # what we know of it is better than a similar name
    text = text.removesuffix(".")
    for words, ours in CLICK_WORDS.items():
        text = text.replace(words, ours)
    return text if text.endswith("?") else f"{text}{hint}"


def _get_hint(error: click.ClickException) -> str:
    """Return what to write instead, or how to show the usage, for an error that click raised."""
    if isinstance(error, click.NoSuchOption):
        hint = CELERY_FLAG_HINTS.get(error.option_name, "")
        is_workers = error.ctx is not None and error.ctx.command.name == "worker" and hint != _BEFORE_COMMAND
        if is_workers:  # Celery's `worker` takes them by itself
            return f"; {hint or 'options of a worker come'} after celery5 worker start"
        if hint:
            return f"; {hint}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        flags = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
        if flags >= {"--args", "--kwargs"} and "extra argument" in error.message:
            return "; arguments of the task are given by --args '[2, 3]', or by name: --kwargs '{\"n\": 2}'"
        return f"; try '{error.ctx.command_path} --help'"
    return ""


class ReachedBrokers(NamedTuple):
    """The brokers that a command did not reach; `errors` grows while the command runs."""

    errors: Mapping[str, BrokerError]
    relevant: Collection[str]

    @property
    def relevant_errors(self) -> dict[str, BrokerError]:
        """Return the errors of relevant brokers."""
        return {name: error for name, error in self.errors.items() if name in self.relevant}

    def unreachable(self) -> list[dict[str, str]]:
        """Return the field `unreachable` for programs."""
        return [
            {"broker": name, "error": get_outage_text(get_error_text(error))}
            for name, error in self.relevant_errors.items()
        ]


@contextmanager
def skip_unreachable(
    app: "App", *, wants_json: bool = False, queues: Collection[str] = ()
) -> Generator[ReachedBrokers, None, None]:
    """Leave out unreachable brokers inside the block, and report them at its end.

    The report goes to stderr, as JSON with `wants_json`, and the command exits with EXIT_FAILED. With `queues` only
    the brokers of these queues are relevant.
    """
    relevant = {app.brokers.broker_of_queue(queue) for queue in queues} if queues else app.brokers.names
    with app.brokers.reachable() as errors:
        reached = ReachedBrokers(errors, relevant)
        try:
            yield reached
        except Exception as error:
            # An error of a broker reports it already.
            if all(error is not broker_error for broker_error in errors.values()):
                _warn_of_unreachable(reached, wants_json=wants_json)
            raise
        if reached.relevant_errors:
            _warn_of_unreachable(reached, wants_json=wants_json)
            click.get_current_context().exit(EXIT_FAILED)


@contextmanager
def interrupted_by_sigterm() -> Generator[None, None, None]:
    """Treat SIGTERM as Ctrl-C inside the block, so that an interrupted operation reports its progress either way."""
    old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def _warn_of_unreachable(reached: ReachedBrokers, *, wants_json: bool) -> None:
    brokers = reached.unreachable()
    if not brokers:
        return
    if wants_json:
        echo(to_json({"unreachable": brokers}), err=True)
        return
    descriptions = "; ".join(
        f"broker {format_cell(broker['broker'])} cannot be reached ({format_cell(broker['error'])})"
        for broker in brokers
    )
    echo(f"Warning: what is there is left out: {descriptions}", err=True)
