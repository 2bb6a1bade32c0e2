"""Refuse names in filters that the application's code does not have, where nothing was found by them.

Such a name is likely misspelt. A task or sink that was removed from the code, and of which jobs are kept, is found.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from celery5.errors import UnknownTask
from celery5.operations.operation import NotFound
from celery5.similar_names import suggest_known

if TYPE_CHECKING:
    from celery5.app import App


def refuse_unknown_tasks(app: "App", names: Collection[str]) -> None:
    """Raise UnknownTask for a name that is no task's, but for patterns such as `shop.*`. Not without the code."""
    for name in names if app.tasks else ():
        if name not in app.tasks and not set(name) & set("*?["):
            raise UnknownTask(name, app.tasks)


def refuse_unknown_sinks(app: "App", names: Collection[str]) -> None:
    """Raise NotFound for a name that no task's sink has. Not without the code."""
    from celery5.protocol.events.sinks import get_sink_names  # when a name is checked, and not for help

    sinks = get_sink_names(app.tasks.values())
    for name in names if app.tasks else ():
        if name not in sinks:
            raise NotFound(f"no sink {name!r} here; {suggest_known(name, sinks)}")
