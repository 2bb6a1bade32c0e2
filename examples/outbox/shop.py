"""Take orders, and send a receipt for each."""

import sqlite3

from celery5 import task
from celery5.examples.outbox.table import put


@task
async def send_receipt(order: int, customer: str) -> str:
    """Send a receipt; this example only returns it."""
    return f"receipt for order {order} of {customer}"


def place_order(db: sqlite3.Connection, customer: str) -> int:
    """Store an order, and the job that sends its receipt, in one transaction. Return the number of the order."""
    with db:
        cursor = db.execute("INSERT INTO orders (customer) VALUES (?)", (customer,))
        number = cursor.lastrowid or 0
        # The job is created now, with its id and its arguments checked. The relay sends it.
        put(db, send_receipt.job(number, customer))
    return number
