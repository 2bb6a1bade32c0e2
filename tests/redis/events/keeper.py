"""Keeper: keeps so many workers of the historian's application alive, without end, as tests of deaths need it."""

import os
import signal
import sys

from celery5.processes.foreground import ServeOptions, serve
from tests.redis.events.historian import app


def keep(count: int) -> None:
    """Until SIGTERM: then all of them are told to stop."""
    signal.signal(signal.SIGTERM, _stop)
    alive = 0
    while True:
        while alive < count:
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os._exit(serve(app, ServeOptions()))
            alive += 1
        os.wait()
        alive -= 1


def _stop(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        os._exit(0)


if __name__ == "__main__":
    keep(int(sys.argv[1]))
