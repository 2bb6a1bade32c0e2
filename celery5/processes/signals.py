"""Signals: stopping a process: the first signal asks, the second insists.

Floor: processes. Reads: SIGTERM and SIGINT. Writes: log messages.
"""

import os
import signal
from collections.abc import Callable

import trio

from celery5.log import Log


def exit_at_once(number: int) -> None:
    """End this process now. What it held is recovered when its lease lapses."""
    os._exit(128 + number)


async def stop_on_signal(
    stop: Callable[[], None],
    *,
    log: Log,
    at_once: Callable[[int], None] = exit_at_once,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `stop` at the first SIGTERM or SIGINT, `at_once` with its number at the second."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        task_status.started()
        asked = False
        async for number in received:
            name = signal.Signals(number).name
            if asked:
                log.event("process:exiting", "warning", signal=name)
                at_once(number)
            asked = True
            log.event("process:stopping", signal=name, hint="finishing what runs; once more to exit at once")
            stop()
