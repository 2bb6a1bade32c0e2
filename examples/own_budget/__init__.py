"""Decide by a strategy and a maximum of the application's own how many jobs run at once.

Begin with `careful.py`, the strategy and the maximum, and go on to `kitchen.py`, which uses them. By hand, on a Redis
of your own:

    celery5 -A celery5.examples.own_budget.kitchen worker start --log-format console
    python -c "from celery5.examples.own_budget.kitchen import app, bake; app.send_many([bake.s(1.0)] * 50)"
"""
