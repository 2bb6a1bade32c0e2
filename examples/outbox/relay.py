"""Send the jobs in the outbox until stopped. It may be killed at any time, and several may run at once."""

import sqlite3
import sys
import time

from celery5 import BrokerUnavailable
from celery5.examples.outbox import app
from celery5.examples.outbox.table import delete, oldest, opened

PORTION = 200
"""Jobs sent at once."""
PAUSE = 0.1
"""Seconds between two reads of an empty outbox."""


def relay(db: sqlite3.Connection) -> int:
    """Send the oldest jobs, delete them, and return how many there were."""
    jobs = oldest(db, PORTION)
    app.send_jobs(list(jobs.values()))
    # If it is killed now it sends them again next time. That is safe: a queue takes a job of the same id once.
    delete(db, list(jobs))
    return len(jobs)


def run(db: sqlite3.Connection) -> None:
    """Send jobs until stopped."""
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
