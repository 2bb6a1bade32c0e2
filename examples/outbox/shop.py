"""Shop: takes orders, and has a receipt sent for each."""

import sqlite3

from celery5 import task
from celery5.examples.outbox.table import put


@task
async def send_receipt(order: int, customer: str) -> str:
    """Send a receipt; here it is only made."""
    return f"receipt for order {order} of {customer}"


def place_order(db: sqlite3.Connection, customer: str) -> int:
    """Take an order: the order and the job that sends its receipt are one transaction. Gives the order's number."""
    with db:
        cursor = db.execute("INSERT INTO orders (customer) VALUES (?)", (customer,))
        number = cursor.lastrowid or 0
        # The job is made here, with its id and its arguments checked, and sent by the relay.
        put(db, send_receipt.job(number, customer))
    return number
