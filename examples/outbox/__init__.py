"""Write orders and jobs in one transaction, so that neither exists without the other.

Begin with `shop.py`, which takes orders, go on to `table.py`, where jobs wait, and to `relay.py`, which sends them. By
hand, on a Redis of your own:

    celery5 -A celery5.examples.outbox worker start --log-format console
    python -m celery5.examples.outbox.relay shop.db
    python -c "from celery5.examples.outbox import shop, table; shop.place_order(table.opened('shop.db'), 'ada')"
"""

from celery5 import App

app = App("outbox", include=["celery5.examples.outbox.shop"])
