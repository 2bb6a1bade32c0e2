"""Bake all day, and most of it before the shop opens."""

import trio

from celery5 import App
from celery5.examples.own_scaling.hours import Hours

app = App("bakery", autoscale={"minimum": 1, "maximum": 8, "strategy": Hours(3, 6)}, prioritise="shortest")


@app.task
async def bake(seconds: float) -> float:
    """Bake one loaf."""
    await trio.sleep(seconds)
    return seconds
