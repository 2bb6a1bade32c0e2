"""Store jobs in the outbox, a table beside the application's own, until they are sent.

A job is written in the same transaction as the data that it belongs to: either both are stored, or neither.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from celery5.tasks import Job


def opened(file: Path | str) -> sqlite3.Connection:
    """Open the database in `file`, and create its tables."""
    db = sqlite3.connect(file, timeout=30.0)
    with db:
        db.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, customer TEXT NOT NULL)")
        db.execute("CREATE TABLE IF NOT EXISTS outbox (number INTEGER PRIMARY KEY, job BLOB NOT NULL)")
    return db


def put(db: sqlite3.Connection, job: Job) -> None:
    """Write a job into the outbox, in the transaction that is open."""
    db.execute("INSERT INTO outbox (job) VALUES (?)", (job.to_bytes(),))


def oldest(db: sqlite3.Connection, limit: int) -> dict[int, Job]:
    """Return the oldest jobs, by their numbers in the outbox."""
    rows = db.execute("SELECT number, job FROM outbox ORDER BY number LIMIT ?", (limit,)).fetchall()
    return {number: Job.from_bytes(raw) for number, raw in rows}


def delete(db: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Delete jobs that were sent from the outbox."""
    with db:
        db.executemany("DELETE FROM outbox WHERE number = ?", [(number,) for number in numbers])
