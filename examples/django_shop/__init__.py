"""A Django project: orders with receipts, which jobs write after the transaction of the order has been committed.

Begin with `views.py`, which takes orders, go on to `tasks.py`, and to `tests.py`. By hand, with Redis on this host or
CELERY5_BROKER set, and with SQLite, or PostgreSQL where DATABASE_URL names it:

    alias manage="python -m celery5.examples.django_shop.manage"
    manage migrate --run-syncdb
    manage celery5 worker start --log-format console
    manage runserver
    curl -d customer=ada http://127.0.0.1:8000/orders/
"""
