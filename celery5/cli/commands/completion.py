"""Completion: the command that prints what makes a shell complete our commands, and the names that it completes.

Names are those that the code has, found within a moment, or none: nobody is to wait for a broker with a finger on Tab.
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
"""Seconds that the application may take to be imported, on a machine that is busy."""
CPU_LIMIT = 2.0
"""Seconds of processor time that it may."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete celery5's commands.

    bash: eval "$(celery5 completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc. fish: celery5 completion fish >
    ~/.config/fish/completions/celery5.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "celery5", "_CELERY5_COMPLETE").source())


def add_name_completion(command: click.Command) -> None:
    """Have the parameters of a command, and of those below it, complete names of the application's."""
    for parameter in command.params:
        called = (parameter.metavar or parameter.name or "").lower().rstrip("s")
        names = _NAMES.get(called)
        if names is not None and isinstance(parameter.type, click.types.StringParamType):
            parameter.type = _Names(names)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_name_completion(each)


class _Names(Text):
    """A text, one of some names that the application knows."""

    name = "text"

    def __init__(self, names: "Callable[[App], Iterable[str]]") -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Those that begin so; none when there is no application, or it is not to be had soon."""
        said: Any = ctx.find_root().params.get("target") or os.environ.get("CELERY5_APP", "")
        with _quietly():
            return [
                CompletionItem(each)
                for each in sorted(set(self._names(Target(said).load())))
                if each.startswith(incomplete)
            ]
        return []


def _queues(app: "App") -> Iterable[str]:
    return {app.settings.default_queue, *(each.queue for each in app.tasks.values())}


_NAMES: "dict[str, Callable[[App], Iterable[str]]]" = {
    "task": lambda app: app.tasks,
    "queue": _queues,
    "event": lambda app: app.events,
}
"""By what a parameter is called."""


class _TooLate(BaseException):
    """No `except Exception` of the user's module is to swallow it."""


def _too_late(_number: int, _frame: object) -> None:
    raise _TooLate


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Within the limit, without a word on the terminal, and whatever goes wrong."""
    timers = (
        (signal.ITIMER_REAL, signal.SIGALRM, IMPORT_TIMEOUT),
        (signal.ITIMER_PROF, signal.SIGPROF, CPU_LIMIT),
    )
    before = {number: signal.signal(number, _too_late) for _, number, _ in timers}
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        with (
            suppress(CeleryError, _TooLate),
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            yield
    finally:
        for timer, number, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
