"""Keep what was done for each order in SQLite, once.

A job may run twice: its worker may die after it has written here and before Redis knows. So what is written has the
job's id as its key, as a payment provider takes an idempotency key: the second time changes nothing.
"""

import os
import sqlite3
from contextlib import closing
from typing import NamedTuple

from celery5 import current_job


class Entry(NamedTuple):
    """Something that was done for an order."""

    job: str
    # What was done, such as `charged`.
    what: str
    detail: str


def write(order: int, what: str, detail: str = "") -> None:
    """Write that the current job has done something, unless it is written already."""
    job = current_job()
    if job is None:
        raise RuntimeError("only tasks write to the ledger")
    with closing(_connect()) as database, database:
        database.execute(
            "INSERT OR IGNORE INTO entries (job, order_number, what, detail) VALUES (?, ?, ?, ?)",
            (job.id, order, what, detail),
        )


def read(order: int) -> list[Entry]:
    """Return what was done for an order, in order."""
    with closing(_connect()) as database:
        rows = database.execute(
            "SELECT job, what, detail FROM entries WHERE order_number = ? ORDER BY number", (order,)
        )
        return [Entry(*row) for row in rows]


def _connect() -> sqlite3.Connection:
    database = sqlite3.connect(os.environ.get("ORDERS_DB", "orders.db"), timeout=30.0)
    database.execute(
        "CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, "
        "order_number INTEGER NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL)"
    )
    return database
