"""Decide by a strategy of the application's own how many workers it has: by the hour of the day and by the load.

Begin with `hours.py`, the strategy, and go on to `bakery.py`, which uses it. By hand, on a Redis of your own, in two
terminals:

    celery5 -A celery5.examples.own_scaling.bakery worker start --log-format console
    celery5 -A celery5.examples.own_scaling.bakery scheduler start --log-format console
"""
