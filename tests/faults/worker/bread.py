"""Bread: the historian's application with an event and a periodic task, so that a cluster of it has work for each
kind."""

import os
import time
from pathlib import Path

from celery5 import Event, every
from tests.redis.events.historian import app, note

TICK = 0.5
"""Seconds between two runs of the periodic task."""
DOOR_VARIABLE = "BREAD_DOOR"
"""Names a file. While it is there, processes that begin with this variable wait; if it says `closed`, they fail."""


def pass_door(door: Path) -> None:
    """Return when the file is gone."""
    while door.exists():
        if door.read_text() == "closed":
            raise ImportError("the bakery is closed")
        time.sleep(0.05)


if DOOR_VARIABLE in os.environ:
    pass_door(Path(os.environ[DOOR_VARIABLE]))


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
