"""Signals: stopping a process: the first signal asks, the second insists, and so does a clock.

Floor: processes. Reads: SIGTERM and SIGINT. Writes: log messages; the last one on stderr.

The second signal is dealt with in the handler itself: it ends even a process whose event loop a job has blocked.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import trio

from celery5.log import Log

_WATCHED = (signal.SIGTERM, signal.SIGINT)


def exit_at_once(number: int, why: str) -> None:
    """End this process now. What it held is recovered when its lease lapses."""
    os.write(2, f"{why}: exiting at once\n".encode())
    os._exit(128 + number)


@contextmanager
def stopping_on_signal(
    stop: Callable[[], None],
    *,
    log: Log,
    limit: float,
    at_once: Callable[[int, str], None] = exit_at_once,
) -> Generator[None, None, None]:
    """In the main thread of a Trio run: call `stop` at the first SIGTERM or SIGINT, `at_once` at the second.

    Who has not ended `limit` seconds after the first is ended `at_once` too: nothing waits for ever on a job that takes
    no notice of being cancelled.
    """
    token = trio.lowlevel.current_trio_token()
    clocks: list[threading.Timer] = []

    def asked(number: int) -> None:
        name = signal.Signals(number).name
        log.event("process:stopping", signal=name, hint="finishing what runs; once more to exit at once")
        clock = threading.Timer(limit, at_once, (number, f"not stopped {limit:g} s after {name}"))
        clock.daemon = True
        clock.start()
        clocks.append(clock)
        stop()

    times = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        if times == 1:
            token.run_sync_soon(asked, number)
        else:
            at_once(number, f"{signal.Signals(number).name} for the second time")

    before = {each: signal.signal(each, handle) for each in _WATCHED}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for clock in clocks:
            clock.cancel()
