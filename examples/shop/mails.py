"""Send mails, no more per second than the provider takes, whatever sends them."""

import time

from celery5.examples.shop.store import app, note


@app.task(rate_limit="5/s", queue="mails")
async def mail(to: str, text: str) -> None:
    """Send a mail."""
    note("mails.jsonl", to=to, text=text, at=time.time())
