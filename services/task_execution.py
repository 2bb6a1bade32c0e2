"""Task Execution: runs jobs within the budget and hands their outcomes on (C54).

Floor: services. Reads: the Internal Tasks Queues. Writes: the Internal Results Queue, one log message for each job.

Executors are tasks that stay and take job after job: spawning one for each job costs twice as much. A straight line
leads through one job: run, judge, hand on, log.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import trio

from celery5.errors import BadArguments
from celery5.log import Level, Log
from celery5.protocol.delivery import Delivery, settlement
from celery5.protocol.envelope import Envelope, Failure
from celery5.protocol.prefetch import Pace
from celery5.protocol.verdict import (
    Bury,
    Complete,
    Expire,
    Lapsed,
    Outcome,
    Reason,
    Refused,
    Release,
    Retry,
    Returned,
    Verdict,
    judge,
)
from celery5.runners.context import CURRENT, CurrentJob
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.internal_queues import ResultsQueue, TasksQueue
from celery5.services.lease import Lease
from celery5.task import Task

YIELD = 0.005
"""Seconds that one executor may go on with jobs that never wait, before it lets others run."""
CANCEL_LIMIT = 5.0
"""Seconds that cancelled jobs get to end."""


class Runner(Protocol):
    """Runs one function to its outcome."""

    async def execute(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], scope: trio.CancelScope
    ) -> Outcome: ...


class TaskExecution:
    """Executors for each kind of task. Stopping it lets running jobs finish for `grace_period` seconds."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, TasksQueue],
        runners: Mapping[str, Runner],
        paces: Mapping[str, Pace],
        results: ResultsQueue,
        budget: ConcurrencyBudget,
        lease: Lease,
        log: Log,
        worker: str,
        grace_period: float,
        results_ttl: float,
        message_limit: int,
    ) -> None:
        self._tasks = tasks
        self._queues = queues
        self._runners = runners
        self._paces = paces
        self._results = results
        self._budget = budget
        self._lease = lease
        self._log = log
        self._worker = worker
        self._grace_period = grace_period
        self._ttl = results_ttl
        self._limit = message_limit
        self._running: dict[Delivery, trio.CancelScope] = {}
        self._idle = trio.Event()

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run jobs until cancelled; then let those that run finish, and give back those that do not in time."""
        async with trio.open_nursery() as nursery:
            executors: trio.CancelScope = await nursery.start(self._executors)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await self._wind_up()
                executors.cancel()

    async def _executors(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope(shield=True) as scope:
            async with trio.open_nursery() as nursery:
                for kind, queue in self._queues.items():
                    for _ in range(self._budget.slots(kind)):
                        nursery.start_soon(self._work, queue, self._runners[kind], self._paces[kind])
                task_status.started(scope)

    async def _work(self, queue: TasksQueue, runner: Runner, pace: Pace) -> None:
        """One executor: job after job."""
        yielded = time.perf_counter()
        while True:
            delivery = await queue.take()
            now = await self._execute(delivery, runner, pace)
            if now - yielded > YIELD:
                await trio.lowlevel.checkpoint()
                yielded = time.perf_counter()

    async def _execute(self, delivery: Delivery, runner: Runner, pace: Pace) -> float:
        envelope = delivery.envelope
        assert envelope is not None, "the Consumer hands on only what it could read"
        delivery.started = time.time()
        began = time.perf_counter()
        outcome = await self._outcome(delivery, envelope, runner)
        ended = time.perf_counter()
        seconds = ended - began
        delivery.finished = delivery.started + seconds
        pace.ran(seconds)
        self._conclude(delivery, outcome)
        return ended

    async def _outcome(self, delivery: Delivery, envelope: Envelope, runner: Runner) -> Outcome:
        if envelope.expires is not None and envelope.expires <= delivery.started:
            return Lapsed()
        task = self._tasks[envelope.task]
        try:
            args, kwargs = task.parameters.decode(envelope.args, envelope.kwargs)
        except BadArguments as error:
            return Refused(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
        CURRENT.set(CurrentJob(envelope.id, envelope.task, delivery.queue, envelope.attempt, self._worker))
        scope = self._running[delivery] = trio.CancelScope()
        try:
            return await runner.execute(task.function, args, kwargs, scope)
        finally:
            del self._running[delivery]
            if not self._running:
                self._idle.set()

    def _conclude(self, delivery: Delivery, outcome: Outcome) -> None:
        envelope = delivery.envelope
        assert envelope is not None
        policy = envelope.retry or self._tasks[envelope.task].policy
        outcome = self._within_limit(outcome)
        verdict = judge(outcome, attempt=envelope.attempt, policy=policy, random=random.random)
        words = settlement(verdict, delivery, worker=self._worker, ttl=self._ttl)
        self._results.put((delivery, words))
        self._tell(delivery, envelope, verdict)

    def _within_limit(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Returned) and len(outcome.value) > self._limit:
            text = f"the result has {len(outcome.value)} bytes, over the limit of {self._limit}: return a reference"
            return Refused(Reason.RESULT_TOO_LARGE, Failure(type="MessageTooLarge", message=text))
        return outcome

    def _tell(self, delivery: Delivery, envelope: Envelope, verdict: Verdict) -> None:
        level, state, more = _SAID[type(verdict)]
        failure: Failure | None = getattr(verdict, "failure", None)
        fields: dict[str, Any] = {} if failure is None else {"error": f"{failure.type}: {failure.message}"}
        for name in more:
            fields[name] = getattr(verdict, name)
        self._log.job(
            level,
            job=envelope.id,
            task=envelope.task,
            queue=delivery.queue,
            state=state,
            attempt=envelope.attempt,
            seconds=round(delivery.finished - delivery.started, 6),
            **fields,
        )

    async def _wind_up(self) -> None:
        if not self._lease.lost:
            with trio.move_on_after(self._grace_period):
                await self._drained()
        for delivery, scope in self._running.items():
            self._log.event("job:interrupted", "warning", job=delivery.envelope and delivery.envelope.id)
            scope.cancel()
        with trio.move_on_after(CANCEL_LIMIT):
            await self._drained()

    async def _drained(self) -> None:
        while self._running:
            self._idle = trio.Event()
            await self._idle.wait()


_SAID: Mapping[type, tuple[Level, str, tuple[str, ...]]] = {
    Complete: ("info", "SUCCESS", ()),
    Retry: ("warning", "RETRY", ("delay",)),
    Bury: ("error", "DEAD", ("reason",)),
    Release: ("warning", "SENT", ()),
    Expire: ("warning", "EXPIRED", ()),
}
