"""Bread: the historian's application with an event and a periodic task, so that a cluster of it has work for each
kind."""

import os
import time

from celery5 import Event, every
from tests.redis.events.historian import app, note

TICK = 0.5
"""Seconds between two runs of the periodic task."""


@app.event(name="bread.Baked")
class Baked(Event):
    """A loaf is ready."""

    number: int


@Baked.subscribe
@app.task(name="smell")
async def smell(number: int) -> None:
    """Note that the event has come: by its number, since its job has its own id."""
    line = f"baked-{number} smelt {os.getpid()} 1 {time.time():.6f}\n"
    file = os.open(os.environ["HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


@app.task(name="tick")
async def tick() -> None:
    """Note that it is time."""
    note("tick")


app.schedule(tick.s(), every(TICK), name="tick")
