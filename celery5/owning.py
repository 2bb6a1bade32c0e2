"""Owning: which free tasks and events, those that were declared without an application, an application has.

Floor: domain. Reads: modules that are imported. Writes: the tasks and events of an application.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from celery5.event import adopt_events
from celery5.include import find_modules
from celery5.task import Task

if TYPE_CHECKING:
    from celery5.app import App


def adopt_declarations(app: "App") -> None:
    """Have `app` own what is free in its included modules and in its own."""
    for each in find_tasks(app):
        if each.has_no_app:
            each.adopt(app)
            app.tasks.add(each)
    adopt_events(app, (*find_modules(app.include), app.module))


def find_tasks(app: "App") -> Iterator[Task[Any, Any]]:
    """All tasks in the included modules and in the application's own, whoever owns them."""
    for module in (*find_modules(app.include), app.module):
        for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
            if isinstance(value, Task):
                yield cast("Task[Any, Any]", value)
