"""Sell papers: workers run the tasks, a Router makes jobs of events, a Scheduler opens the kiosk each morning."""

import trio

from celery5 import App, Event

app = App("kiosk")


@app.event
class Sold(Event):
    """A paper was sold."""

    paper: str


@app.task
async def sell(paper: str, seconds: float = 0.0) -> str:
    """Sell a paper."""
    await trio.sleep(seconds)
    return f"sold {paper}"


@Sold.subscribe
@app.task
async def order_another(paper: str) -> str:
    """Order a copy of a paper that was sold."""
    return f"ordered {paper}"


@app.task(schedule="0 6 * * *")
async def open_up() -> None:
    """Open the kiosk each morning."""
