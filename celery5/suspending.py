"""Suspending: the events that suspend a task and have it go on (C98), which Routers act on.

Floor: domain. Reads: nothing. Writes: nothing; `app.events.send` publishes.

They are events of every application: `app.events.send([TaskSuspended(task="shop.charge")])`. Tasks may be subscribed to
them, too.
"""

from celery5.event import DeclareEvent, Event

_declare = DeclareEvent(None, of_every_application=True)


@_declare(name="celery5.TaskSuspended")
class TaskSuspended(Event):
    """Begin no job of `task` on any worker, `why` if it is said, until it is resumed; its jobs wait."""

    task: str
    why: str = ""


@_declare(name="celery5.TaskResumed")
class TaskResumed(Event):
    """Let the jobs of `task` run again."""

    task: str
