"""Trio runner: runs `async def` tasks in the worker's own loop.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from celery5.protocol.verdict import Outcome
from celery5.runners.ending import raised, returned


class TrioRunner:
    """Runs I/O-bound tasks (C60). They must not block; `def` tasks are for that."""

    async def execute(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Run to the end. Cancellation goes through: the executor knows what it means.

        So does KeyboardInterrupt, which Trio raises in whatever code runs; all else is the job's own affair, a
        SystemExit too, alone or in the group that a nursery makes of it.
        """
        try:
            return returned(await function(*args, **kwargs))
        except _NOT_ITS_OWN:
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(_NOT_ITS_OWN) is not None:
                raise
            return raised(group)
        except BaseException as error:
            return raised(error)


_NOT_ITS_OWN = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)
