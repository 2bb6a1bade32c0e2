"""Trio runner: runs `async def` tasks in the worker's own loop.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from celery5.protocol.verdict import Outcome
from celery5.runners.ending import INTERRUPTED, raised, returned


class TrioRunner:
    """Runs I/O-bound tasks (C60). They must not block; `def` tasks are for that."""

    async def execute(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], scope: trio.CancelScope
    ) -> Outcome:
        """Run to the end or until `scope` is cancelled, which gives Interrupted."""
        try:
            with scope:
                return returned(await function(*args, **kwargs))
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code may raise anything; it ends here
            return raised(error)
        return INTERRUPTED
