"""Bake in threads, as many cakes at once as there are licences for ovens."""

import os
import time
from pathlib import Path

from celery5 import App
from celery5.examples.own_budget.careful import Licences, OneByOne
from celery5.scaling import Budget

OVENS = Path(os.environ.get("OVENS", "ovens.txt"))
app = App(
    "kitchen",
    budgets={"thread": Budget(minimum=1, maximum=Licences(OVENS), cooldown=0.05, strategy=OneByOne())},
)


@app.task
def bake(seconds: float) -> float:
    """Bake one cake."""
    time.sleep(seconds)
    return seconds
