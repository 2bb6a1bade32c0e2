"""Charge each order, one payment at a time for each customer, and send a mail then."""

import time

import trio

from celery5 import Event, Reject
from celery5.examples.shop.mails import mail
from celery5.examples.shop.store import app, journal, ledger, note


@app.event
class OrderPlaced(Event):
    """A customer has ordered something."""

    order: int
    customer: str
    item: str
    cents: int


@app.event
class OrderPaid(Event):
    """An order was paid."""

    order: int
    customer: str
    cents: int


def place(order: int, customer: str, item: str, cents: int) -> None:
    """Place an order, as the shop's page does. It does not know the subscribers of the event."""
    OrderPlaced.delay(order=order, customer=customer, item=item, cents=cents)


@OrderPlaced.subscribe
@app.task(limit=1, concurrency_key="customer", sinks=[journal, ledger], max_retries=0)
async def charge(order: int, customer: str, cents: int) -> dict[str, object]:
    """Charge the customer's card. Never twice at once, since the bank would block the card."""
    if cents <= 0:
        raise Reject(f"order {order} costs nothing")
    note("charges.jsonl", order=order, customer=customer, begins=time.time())
    await trio.sleep(0.05)  # the bank
    note("charges.jsonl", order=order, customer=customer, ends=time.time())
    await OrderPaid.adelay(order=order, customer=customer, cents=cents)
    return {"order": order, "customer": customer, "cents": cents}


@OrderPaid.subscribe
@app.task
async def thank(order: int, customer: str) -> None:
    """Send the customer a mail."""
    await mail.adelay(f"{customer}@example.com", f"Your order {order} is paid. Thank you!")
