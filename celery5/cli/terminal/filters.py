"""Warn of names in filters that the application's code does not have.

Such a name may be misspelt. It may also have been removed from the code while jobs of it are kept, so this is no error.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from celery5.cli.terminal.output import echo, format_cell
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.app import App


def warn_of_unknown_tasks(app: "App", names: Collection[str]) -> None:
    """Warn of each name that is no task's, but for patterns such as `shop.*`. Not without the code."""
    for name in names if app.tasks else ():
        if name not in app.tasks and not set(name) & set("*?["):
            hint = did_you_mean(name, app.tasks, otherwise="celery5 task search shows jobs of all tasks")
            echo(f"Warning: no task here is named {format_cell(name)}; {hint}", err=True)


def warn_of_unknown_sinks(app: "App", names: Collection[str]) -> None:
    """Warn if no task has a sink of a name. Not without the code."""
    from celery5.protocol.events.sinks import get_sink_names  # when a name is checked, and not for help

    sinks = get_sink_names(app.tasks.values())
    unknown = [name for name in names if name not in sinks]
    if unknown and app.tasks:
        hint = f"the sinks are {', '.join(map(format_cell, sinks))}" if sinks else "no task has a sink"
        echo(f"Warning: no sink is named {', '.join(map(format_cell, unknown))}; {hint}", err=True)
