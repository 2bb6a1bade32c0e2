"""Print the shell code that completes celery5's commands (`completion`), and complete names of tasks and queues.

Names come from the application's code alone, never from a broker, and only if the code can be imported within a limit:
completion must not make the user wait.
"""

import os
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError

if TYPE_CHECKING:
    from celery5.app import App

    Text = click.ParamType[str]
else:
    Text = click.ParamType  # generic in newer versions only

IMPORT_TIMEOUT = 10.0
"""Seconds that importing the application may take; long enough for a busy machine."""
CPU_LIMIT = 2.0
"""Seconds of processor time that importing the application may take."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the code that makes SHELL complete celery5's commands.

    bash: eval "$(celery5 completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc. fish: celery5 completion fish >
    ~/.config/fish/completions/celery5.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "celery5", "_CELERY5_COMPLETE").source())


def add_name_completion(command: click.Command) -> None:
    """Make the parameters of a command and its subcommands complete names of the application."""
    for parameter in command.params:
        parameter_name = (parameter.metavar or parameter.name or "").lower().rstrip("s")
        names = _NAMES.get(parameter_name)
        if names is not None and isinstance(parameter.type, click.types.StringParamType):
            parameter.type = _Names(names)
    if isinstance(command, click.Group):
        command.list_commands(click.Context(command))  # which adds those that are imported late
        for subcommand in command.commands.values():
            add_name_completion(subcommand)


class _Names(Text):
    """A parameter that is completed with names from the application."""

    name = "text"

    def __init__(self, names: "Callable[[App], Iterable[str]]") -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with `incomplete`; none if the application cannot be imported in time."""
        target: Any = ctx.find_root().params.get("target") or os.environ.get("CELERY5_APP", "")
        with _limited_and_silent():
            return [
                CompletionItem(name)
                for name in sorted(set(self._names(Target(target).load())))
                if name.startswith(incomplete)
            ]
        return []


def _queues(app: "App") -> Iterable[str]:
    return {app.settings.default_queue, *(task.queue for task in app.tasks.values())}


_NAMES: "dict[str, Callable[[App], Iterable[str]]]" = {
    "task": lambda app: app.tasks,
    "queue": _queues,
    "event": lambda app: app.events,
}
"""The names to complete, by the name of the parameter."""


class _LimitReached(BaseException):
    """Raised when a limit is reached. Not an Exception, so that `except Exception` in a user's module passes it."""


def _raise_limit_reached(_number: int, _frame: object) -> None:
    raise _LimitReached


@contextmanager
def _limited_and_silent() -> Generator[None, None, None]:
    """Run the block with limits on its time, without output, and ignore its errors."""
    timers = (
        (signal.ITIMER_REAL, signal.SIGALRM, IMPORT_TIMEOUT),
        (signal.ITIMER_PROF, signal.SIGPROF, CPU_LIMIT),
    )
    old_handlers = {number: signal.signal(number, _raise_limit_reached) for _, number, _ in timers}
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        with (
            suppress(CeleryError, _LimitReached),
            open(os.devnull, "w") as devnull,
            redirect_stdout(devnull),
            redirect_stderr(devnull),
        ):
            yield
    finally:
        for timer, number, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, old_handlers[number])
