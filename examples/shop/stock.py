"""Stock: the warehouse says by a webhook that something runs low, and more is ordered."""

import os

from celery5 import Event, source
from celery5.events import SourceDocument
from celery5.examples.shop.mails import mail
from celery5.examples.shop.store import app, note
from celery5.examples.webhooks.receiver import Receiver

warehouse = source(
    Receiver(os.environ.get("WEBHOOK_SECRETS", "").split(), port=int(os.environ.get("WEBHOOK_PORT", "8400"))),
    name="warehouse",
)


@app.event
class LowStock(Event):
    """There is little left of something."""

    item: str
    left: int


@app.task(source=warehouse)
async def hear(document: SourceDocument) -> None:
    """The warehouse has said something: make an event of it."""
    said = document.json()
    await LowStock.adelay(item=str(said["item"]), left=int(said["left"]))


@LowStock.subscribe
@app.task(priority="high")
async def reorder(item: str, left: int) -> None:
    """Have more of it sent."""
    note("reorders.jsonl", item=item, more=100 - left)


@LowStock.subscribe
@app.task
async def tell_the_buyer(item: str, left: int) -> None:
    """Somebody wants to know."""
    await mail.adelay("buyer@example.com", f"{left} {item} left")
