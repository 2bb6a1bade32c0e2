"""Take orders that somebody has to approve, and undo what was done for those that are refused.

Begin with `orders.py`, which has the workflow and its tasks, and go on to `ledger.py`, where each task writes what it
has done: once, although its job may run twice. By hand, on a Redis of your own:

    export ORDERS_DB=/tmp/orders.db
    celery5 -A celery5.examples.order_workflow worker start --log-format console
    celery5 -A celery5.examples.order_workflow router start --log-format console
    python -m celery5.examples.order_workflow place 7 cup pen
    python -m celery5.examples.order_workflow decide 7 yes --by Ann
    python -m celery5.examples.order_workflow show 7

Kill any of these processes at any time, and start it again: each order is charged once, and shipped or refunded.
"""

from celery5 import App

app = App("order-workflow", include=["celery5.examples.order_workflow.orders"])
