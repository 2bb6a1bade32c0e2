"""Measure what middleware adds to a job in a worker: `python benchmarks/middleware.py`.

Each kind of middleware runs the same job that does nothing, from its decoded message to its queued settlement, in
turns of a few thousand jobs. The least time of all turns counts: anything more is the machine.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from random import random
from types import SimpleNamespace
from typing import Any, cast

import trio

from celery5 import App
from celery5.logs.log import Log, NullLog
from celery5.observability import IncomingJob, Middleware, OpenTelemetryMiddleware
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import add_headers, read_command
from celery5.protocol.observability.ended_jobs import EndedJobs
from celery5.protocol.observability.job_tally import JobTally
from celery5.runners.on_trio import TrioRunner
from celery5.runners.running_job import RunningJob
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.job.attempt_recorder import AttemptRecorder
from celery5.services.job.in_flight import RunningJobs
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.lease import RedisClock
from celery5.services.worker.task_execution import TaskExecution

JOBS = 3000
TURNS = 40


class ReturnsNone(Middleware):
    """Looks at each job, and surrounds none."""

    def running(self, job: IncomingJob) -> None:
        """Return nothing."""


class Raises(Middleware):
    """Fails around each job."""

    def running(self, job: IncomingJob) -> None:
        """Raise an error."""
        raise ConnectionError("no collector")


class WithBlock(Middleware):
    """A `with` block that does nothing."""

    @contextmanager
    def running(self, job: IncomingJob) -> Iterator[None]:
        """Do nothing around the job."""
        yield


class AsyncWithBlock(Middleware):
    """An `async with` block that does nothing."""

    @asynccontextmanager
    async def running(self, job: IncomingJob) -> AsyncIterator[None]:
        """Do nothing around the job."""
        yield


class _Block:
    def __enter__(self) -> None: ...
    def __exit__(self, *_exc: object) -> None: ...


class ClassBlock(Middleware):
    """A context manager that is a class, and does nothing."""

    def running(self, job: IncomingJob) -> Any:
        """Return a block that does nothing."""
        return _Block()


class Bench:
    """The part of a worker that runs jobs, without its connections."""

    def __init__(self, middleware: list[Middleware], trace: str = "") -> None:
        app = App("bench", middleware=middleware)

        @app.task
        async def noop() -> None: ...

        log, self.results = NullLog(), InternalResultsQueue()
        circuits = CircuitBreakers(tasks=app.tasks, log=log)
        job_middleware = JobMiddleware(app=app, worker="w", log=log)
        self.handler = OutcomeHandler(
            tasks=app.tasks,
            job_middleware=job_middleware,
            results=self.results,
            circuit_breakers=circuits,
            log=log,
            worker="w",
            tally=JobTally(),
            attempt_recorder=AttemptRecorder(
                tasks=app.tasks, worker="w", ended_jobs=EndedJobs("p", random), keeps_history=False
            ),
            redis_clock=RedisClock(),
            results_ttl=60,
            message_limit=10**6,
            retry_tracebacks=False,
        )
        self.execution = self._make_execution(app, job_middleware, circuits, log)
        self.message = add_headers(noop.job().message, {"traceparent": trace})
        self.command = read_command(self.message)

    def _make_execution(
        self, app: App, job_middleware: JobMiddleware, circuits: CircuitBreakers, log: Log
    ) -> TaskExecution:
        """Return what runs the jobs, with neither queues nor executors."""
        nothing: Any = None
        no_limits: Any = SimpleNamespace(get_limits=lambda _command: None)
        no_progress: Any = SimpleNamespace(receive=None)
        return TaskExecution(
            worker="w",
            lease=nothing,
            consumed=[],
            incarnation_end=IncarnationEnd(),
            redis=nothing,
            tasks=app.tasks,
            queues={},
            runners={},
            duration_estimates={},
            budget=nothing,
            member_jobs=nothing,
            progress_reports=no_progress,
            job_middleware=job_middleware,
            isolated_jobs=nothing,
            running_jobs=RunningJobs(),
            deadlines=no_limits,
            circuit_breakers=circuits,
            sidecar_memory=None,
            foreign_jobs=nothing,
            outcome_handler=self.handler,
            grace_period=1.0,
            is_restarting=lambda: False,
            log=log,
        )

    async def measure(self) -> float:
        """Return the microseconds that one job takes."""
        runner, running_job, execution = TrioRunner(), RunningJob(), cast("Any", self.execution)
        deliveries = [Delivery("default", b"1-1", self.message, command=self.command) for _ in range(JOBS)]
        began = time.perf_counter()
        for delivery in deliveries:
            outcome = await execution._run_job(delivery, self.command, runner, running_job)
            self.handler.handle_outcome(delivery, outcome)
        took = time.perf_counter() - began
        self.results.drain()
        return took / JOBS * 1e6


def make_traced_benches() -> dict[str, Bench]:
    """Return those with spans of OpenTelemetry, where its SDK is installed."""
    try:
        provider: Any = import_module("opentelemetry.sdk.trace").TracerProvider()
    except ImportError:
        return {}
    middleware = OpenTelemetryMiddleware(metrics=False, tracer_provider=provider)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
    return {
        "OpenTelemetry, not sampled": Bench([middleware], trace + "00"),
        "OpenTelemetry, a span each": Bench([middleware], trace + "01"),
    }


async def main() -> None:
    """Measure all kinds in turns, and print what each adds."""
    benches = {
        "no middleware": Bench([]),
        "running returns None": Bench([ReturnsNone()]),
        "running raises an error": Bench([Raises()]),
        "a class with __enter__ and __exit__": Bench([ClassBlock()]),
        "@contextmanager": Bench([WithBlock()]),
        "@asynccontextmanager": Bench([AsyncWithBlock()]),
        "three of @contextmanager": Bench([WithBlock(), WithBlock(), WithBlock()]),
        **make_traced_benches(),
    }
    best = dict.fromkeys(benches, 1e9)
    for _ in range(TURNS):
        for name, bench in benches.items():
            best[name] = min(best[name], await bench.measure())
    base = best["no middleware"]
    for name, took in best.items():
        print(f"{name:40} {took:6.2f} µs a job, {took - base:+.2f} µs")


if __name__ == "__main__":
    trio.run(main)
