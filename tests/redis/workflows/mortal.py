"""Mortal: tasks that say where they ran, and a worker of them that kills itself at one of its calls to Redis.

    python -m tests.redis.workflows.mortal APP URL NOTES AT MOMENT

It dies at its call number AT from when it consumes: `before` it, `after` it, or `within` a pipeline, whose first call
alone is sent. With 0 it does not die.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery5 import App, RetryPolicy, current_job, group
from celery5.broker.call import Call
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.logs.log import Log
from celery5.processes.foreground import ServeOptions, serve
from celery5.services.workflows import run_progress
from tests.redis.worker.workers import LEASE

QUEUES = ("default", "far")


class MortalShop:
    """An application whose jobs note in a file that they have run."""

    def __init__(self, name: str, url: str, notes: Path) -> None:
        self.app = app = App(
            name,
            broker=url,
            lease=LEASE,
            concurrency=20,
            log_level="info",
            retry_policy=RetryPolicy(max_retries=0),
        )
        self._notes = notes

        @app.task(name="undo", queue="far")
        async def undo(number: int) -> None:
            self._note()

        @app.task(name="near")
        async def near(number: int) -> int:
            self._note()
            return number + 1

        @app.task(name="far", queue="far", undo=undo)
        async def far(number: int) -> int:
            self._note()
            return number * 2

        @app.task(name="total")
        async def total(numbers: list[int]) -> int:
            self._note()
            return sum(numbers)

        @app.task(name="grow", queue="far", dynamic=True)
        async def grow(number: int) -> Any:
            self._note()
            return group(near.s(number), far.s(number)) | total.s()

        @app.task(name="fail")
        async def fail(number: int) -> int:
            self._note()
            raise ValueError(number)

        @app.task(name="tell", queue="far")
        async def tell() -> None:
            self._note()

        self.near, self.far, self.total, self.grow, self.fail = near, far, total, grow, fail
        self.tell = tell

    def _note(self) -> None:
        job = current_job()
        assert job is not None
        with self._notes.open("a") as notes:
            notes.write(f"{job.task} {job.id}\n")

    def count_runs(self) -> Counter[str]:
        """Return how often each job has run: its task and its id."""
        return Counter(self._notes.read_text().splitlines()) if self._notes.exists() else Counter()


def die_at(at: int, moment: str) -> None:
    """Have this process kill itself at a call."""
    perform_all = TrioRedis.perform_all
    calls_made, is_armed = 0, False
    event = Log.event

    def note_event(self: Log, name: str, level: Any = "info", /, **fields: Any) -> None:
        nonlocal is_armed
        is_armed = is_armed or name == "worker:started"
        event(self, name, level, **fields)

    async def make_all(self: TrioRedis, calls: Sequence[Call[Any]]) -> Any:
        nonlocal calls_made
        calls_made += is_armed
        is_last = is_armed and calls_made == at
        if is_last and moment == "within" and len(calls) > 1:
            await perform_all(self, calls[:1])
        if is_last and moment != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        replies = await perform_all(self, calls)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return replies

    async def make_one(self: TrioRedis, call: Call[Any]) -> Any:
        return (await make_all(self, [call]))[0]

    patched: Any = TrioRedis
    patched.perform_all, patched.perform, patched.begin = make_all, make_one, lambda _self, _call: None
    Log.event = note_event  # type: ignore[method-assign]


if __name__ == "__main__":
    app_name, broker, notes_path, number, moment_of_death = sys.argv[1:]
    run_progress.STALE_AFTER = 0.3
    if int(number):
        die_at(int(number), moment_of_death)
    sys.exit(serve(MortalShop(app_name, broker, Path(notes_path)).app, ServeOptions(queues=QUEUES)))
