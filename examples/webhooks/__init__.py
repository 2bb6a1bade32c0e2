"""Receive payments from a bank over HTTP, in a small shop.

Begin with `receiver.py`, the Data Source, and go on to `signature.py`, which verifies the sender. By hand:

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
    """Book a payment. Its return value goes into the file of payments."""
    payment = document.json()
    return {"order": payment["order"], "amount": payment["amount"]}


@app.task(source=bank)
async def note_the_line(_document: SourceDocument) -> None:
    """Report by a health check that the bank is reachable, since it has sent something."""
    line.report("up", "the bank has sent something")
