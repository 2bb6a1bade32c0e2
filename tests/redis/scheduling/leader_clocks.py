"""Leader clocks: an application whose leader runs timers, and that notes which process ran what."""

import os

import trio

from celery5 import App
from celery5.services.process import exclusive_lease

exclusive_lease.LEASE = 1.0  # seconds: what takes it over is awaited by tests
app = App(os.environ.get("HISTORY_APP", "leader-clocks"))


def note(what: str) -> None:
    """Append a line to the file that all processes share."""
    with open(os.environ["HISTORY"], "a") as file:
        print(what, os.getpid(), file=file)


@app.on_start
def warm_up() -> None:
    """Note the start of this process."""
    note("warm")


@app.on_start(on_leader=True)
async def migrate() -> None:
    """Note the start of the cluster."""
    note("migrated")


@app.timer(0.02, on_leader=True)
async def sync() -> None:
    """Note a run on the leader, which takes longer than the interval."""
    note("begun")
    await trio.sleep(0.1)
    note("ended")


@app.task
async def work() -> None:
    """Do nothing."""
