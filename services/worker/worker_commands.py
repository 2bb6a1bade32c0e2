"""Handle the commands that a worker has: `ping`, `stats`, `active`, `stack`, `revoke`, `shutdown` and others."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.jobs import Entry
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError, CommandRefused, Corrupt, NotConcerned
from celery5.protocol.commands.definitions import (
    ACTIVE,
    PAUSE_QUEUE,
    PING,
    RESUME_QUEUE,
    REVOKE,
    RUN_TASK,
    SHUTDOWN,
    STACK,
    STATS,
    NoParameters,
    RevokeParameters,
    RunTaskParameters,
    ShutdownParameters,
    StackParameters,
)
from celery5.protocol.job.arguments import format_call
from celery5.protocol.job.messages import Command, read_command
from celery5.protocol.job.states import get_lane
from celery5.protocol.masking import mask_lines
from celery5.runners.stacks import MAX_STACKS, ReadStack, format_stacks, read_job_stacks, read_main_stack
from celery5.services.commands.dispatcher import CommandHandler, handle
from celery5.services.commands.process_commands import ProcessCommands
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.scaling.preferences import Preferences
from celery5.services.scheduling.timers import TimerRuns
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.job_intake import JobIntake
from celery5.services.worker.paused_queues import PausedQueues
from celery5.services.worker.progress_reports import ProgressReports
from celery5.services.worker.recycling import Recycling
from celery5.services.worker.task_execution import TaskExecution

MAX_SHOWN_JOBS = 1000
"""The most running jobs in one answer."""
MAX_JOBS_BEFORE = 256
"""The most jobs that may wait before the job of `run-task`: all are read with it, and released again."""


class WorkerCommands:
    """The commands that act on one worker."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        in_flight: InFlightJobs,
        task_execution: TaskExecution,
        budget: MaximalConcurrencyBudget,
        resource_slots: ResourceSlots,
        preferences: Preferences,
        tasks: Mapping[str, Any],
        progress_reports: ProgressReports,
        results_ttl: float,
        consumer: Consumer,
        intake: JobIntake,
        pauses: PausedQueues,
        consumed: Sequence[QueueKeys],
        default_queue: str,
        worker: str,
        stop_requested: trio.Event,
        process_commands: ProcessCommands,
        recycling: Recycling,
        timer_runs: TimerRuns,
    ) -> None:
        self._redis = redis
        self._consumer = consumer
        self._intake = intake
        self._pauses = pauses
        self._queues = {keys.queue: keys for keys in consumed}
        self._in_flight = in_flight
        self._execution = task_execution
        self._budget = budget
        self._resource_slots = resource_slots
        self._preferences = preferences
        self._tasks = tasks
        self._progress_reports = progress_reports
        self._worker = worker
        self._results_ttl = results_ttl
        self._default_queue = default_queue
        self._stop_requested = stop_requested
        self._process_commands = process_commands
        self._recycling = recycling
        self._timer_runs = timer_runs

    @property
    def handlers(self) -> dict[str, CommandHandler]:
        """Return the handlers of the commands, by name."""
        return {
            **handle(PING, self._process_commands.ping),
            **handle(STATS, self._stats),
            **handle(ACTIVE, self._active),
            **handle(STACK, self._stack),
            **handle(PAUSE_QUEUE, self._pauses.pause),
            **handle(RESUME_QUEUE, self._pauses.resume),
            **handle(REVOKE, self._revoke),
            **handle(RUN_TASK, self._run_task),
            **handle(SHUTDOWN, self._shutdown),
        }

    async def _stats(self, _parameters: NoParameters) -> object:
        return {
            **await self._process_commands.get_stats(),
            "running": self._execution.running_count,
            "held": len(self._in_flight),
            "slots": self._budget.get_counts(),
            "resources": msgspec.to_builtins(self._resource_slots.get_use()),
            "cpu_shares": self._budget.get_cpu_shares(),
            "queues": self._pauses.list_states(),
            "preferred": self._preferences.get_weights(),
            "timers": self._timer_runs.get_status(),
            **self._recycling.get_status(),
        }

    async def _active(self, _parameters: NoParameters) -> object:
        now = time.time()
        return [
            {
                "id": delivery.command.id,
                "task": delivery.command.task,
                "queue": delivery.queue,
                "attempt": delivery.command.attempt,
                "started": delivery.started,
                "seconds": round(now - delivery.started, 3),
                "arguments": self._format_arguments(delivery.command),
                "progress": self._get_progress(delivery.queue, delivery.command),
            }
            for delivery in self._execution.running_deliveries[:MAX_SHOWN_JOBS]
            if delivery.command is not None and delivery.started
        ]

    async def _stack(self, parameters: StackParameters) -> object:
        stacks = list[ReadStack]()
        for delivery, running_job in self._execution.running_jobs.items():
            command = delivery.command
            if command is not None and delivery.started and parameters.job in (None, command.id):
                kind = self._tasks[command.task].kind
                stacks += read_job_stacks(command.id, command.task, kind, running_job)
        if parameters.job is not None and not stacks:
            raise NotConcerned(f"job {parameters.job!r} does not run on this worker now")
        if parameters.job is None:
            stacks.append(read_main_stack())
        return await trio.to_thread.run_sync(
            format_stacks, stacks[:MAX_STACKS], max(0, len(stacks) - MAX_STACKS)
        )

    def _get_progress(self, queue: str, command: Command) -> dict[str, object] | None:
        report = self._progress_reports.find(queue, command.id, command.attempt)
        return None if report is None else report._replace(note=mask_lines(report.note))._asdict()

    def _format_arguments(self, command: Command) -> str:
        return format_call(self._tasks[command.task].call_shape, command.args, command.kwargs)

    async def _revoke(self, parameters: RevokeParameters) -> object:
        job_id = parameters.id
        for delivery in self._in_flight:
            if delivery.command is not None and delivery.command.id == job_id:
                call = jobs_calls.revoke(self._queues[delivery.queue], [job_id], ttl=self._results_ttl)
                (state,) = await self._redis.perform(call)
                return {"id": job_id, "state": state}
        raise NotConcerned(
            f"this worker does not hold job {job_id!r}: use celery5 task revoke, which finds it"
        )

    async def _run_task(self, parameters: RunTaskParameters) -> object:
        message = parameters.job.encode()
        try:
            command = read_command(message)
        except Corrupt as error:
            raise CommandRefused(f"its job is none: {error}") from None
        if command.task not in self._tasks:
            raise CommandRefused(f"no task {command.task!r} on this worker")
        return await self._deliver(command, message, parameters.queue or self._default_queue)

    async def _deliver(self, command: Command, message: bytes, queue: str) -> object:
        keys = self._queues.get(queue)
        if keys is None or queue in self._consumer.paused_queues or self._consumer.is_stopping:
            known = ", ".join(self._queues)
            raise CommandRefused(f"this worker does not read queue {queue!r} now; its queues: {known}")
        name = self._budget.get_name(self._tasks[command.task])
        if self._in_flight.count(name) >= self._budget.get_usable_slots(name):
            what = f"task {name!r}" if name == command.task else f"tasks of the kind {name!r}"
            raise CommandRefused(f"all slots of this worker for {what} are taken")
        lane = keys.on_lane(get_lane(command.priority))
        call = jobs_calls.deliver_to_worker(
            lane, command.id, message, worker=self._worker, max_before=MAX_JOBS_BEFORE
        )
        entries = await self._take(call)
        if entries is None:
            raise CommandRefused(
                f"more than {MAX_JOBS_BEFORE} jobs wait before it on queue {queue!r}: send it there"
            )
        if not any(entry.message == message for entry in entries):
            raise CommandRefused(f"job {command.id!r} was sent before: it is elsewhere, or has ended")
        return {"id": command.id, "queue": queue}

    async def _take(self, call: Call[list[Entry] | None]) -> list[Entry] | None:
        entries: list[Entry] | None = None
        # No cancellation between the trip and the in-flight jobs: a job that was read must be known as held.
        with trio.CancelScope(shield=True):
            try:
                entries = await self._redis.perform(call)
            except BrokerError:
                self._consumer.recheck()
                raise
        # The job is the last one. In the reverse order it takes the free slot; the others are released without one.
        self._intake.accept_new(entries[::-1] if entries else [])
        return entries

    async def _shutdown(self, parameters: ShutdownParameters) -> object:
        if parameters.how == "cold":
            self._execution.cancel_now()
        running = self._execution.running_count
        self._stop_requested.set()
        return {"how": parameters.how, "running": running}
