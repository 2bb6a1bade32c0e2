"""Add a boot step and a service to an application, a small bureau de change.

Begin with `rates.py`, which is read before the first job runs, and go on to `watch.py`, which runs beside the jobs
and sends some. By hand, on a Redis of your own:

    celery5 -A celery5.examples.own_steps worker start
"""

from celery5 import App, BootStep, service
from celery5.examples.own_steps.rates import forget_rates, greet, read_rates
from celery5.examples.own_steps.watch import RateWatch

app = App(
    "bureau",
    include=["celery5.examples.own_steps.rates"],
    bootsteps=[
        BootStep("rates", read_rates, undo=forget_rates),
        BootStep("greeting", greet, requires=["rates"], optional=True),
    ],
    services=[service(RateWatch, requires=["rates", "publishing"])],
)
