"""Webhooks: a small shop that is told by its bank, over HTTP, what was paid.

Begin with `receiver.py`, the Data Source, and go on to `signature.py`, which says who may be believed. By hand:

    export WEBHOOK_SECRETS=whsec_$(head -c 24 /dev/urandom | base64)
    celery5 -A celery5.examples.webhooks controller start --development
"""

import os
from pathlib import Path

from celery5 import App, source
from celery5.events import SourceDocument
from celery5.examples.webhooks.receiver import Receiver
from celery5.health import HealthCheck
from celery5.results import FileSink

app = App("webhook-shop")
bank = source(
    Receiver(os.environ.get("WEBHOOK_SECRETS", "").split(), port=int(os.environ.get("WEBHOOK_PORT", "8400"))),
    name="bank",
)
payments = FileSink(Path(os.environ.get("PAYMENTS", "payments.jsonl")), name="payments")
line = app.health_check.add(HealthCheck("bank-line", states=("down", "up")))


@app.task(source=bank, sinks=[payments])
async def book(document: SourceDocument) -> dict[str, object]:
    """Book a payment. What it returns goes into the file of payments."""
    payment = document.json()
    return {"order": payment["order"], "amount": payment["amount"]}


@app.task(source=bank)
async def note_the_line(_document: SourceDocument) -> None:
    """Whatever the bank sends shows that it can: so says a health check (C29)."""
    line.report("up", "the bank has sent something")
