"""Thread runner: runs `def` tasks in worker threads.

Floor: runners. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from celery5.protocol.verdict import Outcome
from celery5.runners.context import own_decimals
from celery5.runners.ending import raised, returned


class ThreadRunner:
    """Runs CPU-bound tasks (C61), at most `slots` at once.

    A thread cannot be killed. When it is cancelled the job counts as interrupted and the thread is left to
    itself; it sees that through `trio.from_thread.check_cancelled()`.
    """

    def __init__(self, *, slots: int) -> None:
        self._limiter = trio.CapacityLimiter(slots)

    async def execute(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Run to the end. Cancellation goes through at once and leaves the thread behind."""
        work = partial(_work, function, args, kwargs)
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)


def _work(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    """In the thread: the result is encoded here too, off the loop."""
    own_decimals()
    try:
        return returned(function(*args, **kwargs))
    except trio.Cancelled:
        raise  # the task asked check_cancelled()
    except BaseException as error:
        return raised(error)
