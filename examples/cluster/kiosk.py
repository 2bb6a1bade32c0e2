"""Kiosk: sells papers. Workers run its tasks, a Router makes jobs of its events, a Scheduler opens it each morning."""

import trio

from celery5 import App, Event

app = App("kiosk")


@app.event
class Sold(Event):
    """A paper was sold."""

    paper: str


@app.task
async def sell(paper: str, seconds: float = 0.0) -> str:
    """Sell one."""
    await trio.sleep(seconds)
    return f"sold {paper}"


@Sold.subscribe
@app.task
async def order_another(paper: str) -> str:
    """Order what was sold."""
    return f"ordered {paper}"


@app.task(schedule="0 6 * * *")
async def open_up() -> None:
    """Each morning."""
