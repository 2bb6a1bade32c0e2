"""Shipping: an application with sinks and sources for Routers that are killed."""

import os
import time
from pathlib import Path
from typing import Any

import trio

from celery5 import App, RetryPolicy, source
from celery5.events import Emit, SourceDocument
from celery5.results import FileSink, SQLSink

FOLDER = Path(os.environ.get("HISTORY", "history")).parent
app = App(os.environ.get("HISTORY_APP", "shipping"), lease=2.0, retry_policy=RetryPolicy(max_retries=0))


class Slow(SQLSink):
    """A database that takes its time, so that a Router is all but sure to be killed in the middle."""

    def write(self, documents: Any, /) -> None:
        """As ever, with a wait before it, and one after it before anybody is told."""
        time.sleep(0.05)
        super().write(documents)
        time.sleep(0.05)


table = Slow(
    f"sqlite:///{FOLDER}/shipping.db",
    table="shipments",
    batch=10,
    engine={"connect_args": {"timeout": 10}},
)
lines = FileSink(FOLDER / "shipments.jsonl", name="lines", batch=7, on=("SUCCESS", "DEAD"))


@app.task(name="ship", sinks=[table, lines])
async def ship(number: int) -> int:
    """Ship."""
    if number % 10 == 3:
        raise ValueError("cannot be shipped")
    return number


@source(single=True, name="ticks")
async def ticks(emit: Emit) -> None:
    """Say who runs this, and publish the numbers up to 40, again each time it is begun."""
    with (FOLDER / "runs").open("a") as file:
        file.write(f"{os.getpid()}\n")
    for number in range(40):
        await emit(str(number), id=f"tick-{number}")
        await trio.sleep(0.02)
    await trio.sleep_forever()


@app.task(name="first", source=ticks)
async def first(document: SourceDocument) -> None:
    """Note it."""
    _note("first", document)


@app.task(name="second", source=ticks, queue="second")
async def second(document: SourceDocument) -> None:
    """Note it."""
    _note("second", document)


def _note(what: str, document: SourceDocument) -> None:
    with (FOLDER / what).open("a") as file:
        file.write(f"{document.text()}\n")
