"""Context: which job the code that runs now belongs to.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from contextvars import Context, ContextVar
from decimal import getcontext, setcontext

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


def own_decimals() -> None:
    """Give the context that this is called in a decimal context of its own, if it has inherited one: the one value
    that is changed in place, so that copies of a context share it."""
    if _DECIMALS.get(None) is not None:
        setcontext(getcontext().copy())


def _decimals() -> ContextVar[object]:
    """The variable that `decimal` keeps its context in. It has no name there."""
    empty = Context()
    empty.run(getcontext)
    return next(iter(empty))


_DECIMALS = _decimals()
