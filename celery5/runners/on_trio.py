"""Trio runner: runs `async def` tasks in the worker's own loop.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery5.protocol.verdict import Outcome
from celery5.runners.ending import raised, returned


class TrioRunner:
    """Runs I/O-bound tasks (C60). They must not block; `def` tasks are for that."""

    async def execute(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Run to the end. Cancellation goes through: the executor knows what it means."""
        try:
            return returned(await function(*args, **kwargs))
        except (Exception, SystemExit) as error:
            return raised(error)
