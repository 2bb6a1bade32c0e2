"""Context: which job the code that runs now belongs to.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from contextvars import ContextVar

import msgspec


class CurrentJob(msgspec.Struct, frozen=True):
    """The job that is running: its id, its task's name, its queue, the attempt (from 1), and the worker's name."""

    id: str
    task: str
    queue: str
    attempt: int
    worker: str


CURRENT: ContextVar[CurrentJob | None] = ContextVar("celery5_current_job", default=None)


def current_job() -> CurrentJob | None:
    """The job that this code runs for; None outside of a worker. Works in async tasks and in threads."""
    return CURRENT.get()
