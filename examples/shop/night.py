"""Report the payments of the day, each night at two o'clock in the shop's time zone."""

import sqlite3
from contextlib import closing

from celery5.examples.shop.store import FOLDER, app, note
from celery5.scheduling import Periodic


@app.task(schedule=Periodic("0 2 * * *", name="nightly-report", overlap="skip"))
def nightly_report() -> dict[str, int]:
    """Add up all payments."""
    query = "SELECT count(*), coalesce(sum(json_extract(value, '$.cents')), 0) FROM payments"
    with closing(sqlite3.connect(FOLDER / "ledger.db")) as db:
        try:
            payments, cents = db.execute(query).fetchone()
        except sqlite3.OperationalError:  # the first payment creates the table
            payments, cents = 0, 0
    note("reports.jsonl", payments=payments, cents=cents)
    return {"payments": payments, "cents": cents}
