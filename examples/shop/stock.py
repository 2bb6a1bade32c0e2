"""Order more when the warehouse reports by a webhook that something runs low."""

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
    """There is little left of an item."""

    item: str
    left: int


@app.task(source=warehouse)
async def hear(document: SourceDocument) -> None:
    """Make an event of a message from the warehouse."""
    message = document.json()
    await LowStock.adelay(item=str(message["item"]), left=int(message["left"]))


@LowStock.subscribe
@app.task(priority="high")
async def reorder(item: str, left: int) -> None:
    """Order more of an item."""
    note("reorders.jsonl", item=item, more=100 - left)


@LowStock.subscribe
@app.task
async def tell_the_buyer(item: str, left: int) -> None:
    """Send the buyer a mail."""
    await mail.adelay("buyer@example.com", f"{left} {item} left")
