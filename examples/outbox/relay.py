"""Relay: sends what is in the outbox, for as long as it runs. It may be killed at any moment, and there may be
several."""

import sqlite3
import sys
import time

from celery5 import BrokerUnavailable
from celery5.examples.outbox import app
from celery5.examples.outbox.table import delete, oldest, opened

PORTION = 200
"""Jobs sent in one go."""
PAUSE = 0.1
"""Seconds between looks at an empty outbox."""


def relay(db: sqlite3.Connection) -> int:
    """Send the oldest jobs and delete them; gives how many."""
    jobs = oldest(db, PORTION)
    app.send_jobs(list(jobs.values()))
    # Killed here, it sends them again next time. That is no harm: a queue takes a job of the same id once.
    delete(db, list(jobs))
    return len(jobs)


def run(db: sqlite3.Connection) -> None:
    """Relay for ever."""
    while True:
        try:
            sent = relay(db)
        except BrokerUnavailable as error:
            sys.stderr.write(f"outbox: {error}\n")
            sent, pause = 0, 10 * PAUSE
        else:
            pause = PAUSE
        if sent < PORTION:
            time.sleep(pause)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m celery5.examples.outbox.relay DATABASE, such as shop.db")
    run(opened(sys.argv[1]))
