"""Run a small online shop, with everything in one: orders, payments, mails, stock, and a report each night.

Begin with `store.py`, the application and its sinks; then `orders.py`: orders are paid, one payment at a time for each
customer, and payments go to two sinks; `mails.py`, which sends no more than the provider takes; `stock.py`, where the
warehouse reports by a webhook that something runs low; `night.py`, the report. By hand, everything in one process:

    export WEBHOOK_SECRETS=whsec_$(head -c 24 /dev/urandom | base64)
    celery5 -A celery5.examples.shop controller start --development --log-format console

and in another terminal, with the CELERY5_BROKER that this prints:

    python -c "from celery5.examples.shop.orders import place; place(1, 'ann', 'tea', 990)"
    celery5 -A celery5.examples.shop schedule trigger nightly-report
"""

from celery5.examples.shop.mails import mail
from celery5.examples.shop.night import nightly_report
from celery5.examples.shop.orders import OrderPlaced, charge, place
from celery5.examples.shop.stock import LowStock, reorder
from celery5.examples.shop.store import app

__all__ = ["LowStock", "OrderPlaced", "app", "charge", "mail", "nightly_report", "place", "reorder"]
