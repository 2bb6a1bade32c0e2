"""Run jobs within the budget, and pass their outcomes to the OutcomeHandler.

Executors are Trio tasks that stay and take job after job: spawning one for each job costs twice as much.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from heapq import heappop, heappush
from types import MethodType
from typing import Any

import msgspec
import trio

from celery5.broker.calls import jobs
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.broker.wall_clock import wall_time
from celery5.errors import BadArguments, BrokerError
from celery5.logs.fence import FENCE
from celery5.logs.log import Log
from celery5.middleware.jobs import IncomingJob
from celery5.protocol.job.delivery import Delivery, check_start_deadline
from celery5.protocol.job.messages import Command, Failure
from celery5.protocol.job.verdict import (
    INTERRUPTED,
    JOB_REVOKED,
    BrokerLost,
    Outcome,
    PermanentFailure,
    Raised,
    Reason,
)
from celery5.protocol.masking import describe_error
from celery5.protocol.process.frozen import name_slot
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.runners.context import (
    CURRENT_JOB,
    JOB_ERRORS,
    JOB_PLACE,
    LOG_EVENT,
    PROGRESS_RECEIVER,
    CurrentJob,
)
from celery5.runners.on_trio import run_in_context
from celery5.runners.open_resources import REPLACED_RESOURCES, RESOURCES, ResourceAccess
from celery5.runners.outcome import get_error_outcome, make_failure
from celery5.runners.running_job import JobCall, Runner, RunningJob
from celery5.runners.thread_pool import NotBegun
from celery5.runners.user_errors import ScopeGuard, find_cancellation, reraise_cancellation
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import IsolatedJobs, RunningJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.job_middleware import EnteredBlock, JobMiddleware
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.job.thread_load import ThreadLoad
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.lease import MARGIN_FRACTION, Lease, now
from celery5.services.process.shared_memory import MemorySlot, SidecarMemory, number_queues
from celery5.services.worker.foreign_jobs import ForeignJobs
from celery5.services.worker.progress_reports import ProgressReports
from celery5.services.worker.time_limits import Deadlines
from celery5.services.workflows.member_jobs import MemberJobs, needs_preparing
from celery5.tasks.deduplication import get_rejection
from celery5.tasks.task import Task

YIELD_INTERVAL = 0.005
"""Seconds that one executor may run jobs that never wait, before it lets other tasks run."""
CANCEL_TIMEOUT = 5.0
"""Seconds that cancelled jobs get to end."""
PING_TIMEOUT = 1.0
"""Seconds that Redis gets to answer a PING, when a job reports that it is unreachable."""
STABLE_CONNECTION = 2.0
"""Seconds after a reconnection in which a job may still report an unreachable Redis: its own breaker is open."""


class TaskExecution:
    """The executors of each kind of task. When stopped it lets running jobs finish for `grace_period` seconds."""

    def __init__(
        self,
        *,
        worker: str,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        incarnation_end: IncarnationEnd,
        redis: TrioRedis,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, InternalTasksQueue],
        runners: Mapping[str, Runner],
        duration_estimates: Mapping[str, DurationEstimate],
        budget: MaximalConcurrencyBudget,
        thread_load: ThreadLoad,
        member_jobs: MemberJobs,
        progress_reports: ProgressReports,
        job_middleware: JobMiddleware,
        isolated_jobs: IsolatedJobs,
        running_jobs: RunningJobs,
        deadlines: Deadlines,
        circuit_breakers: CircuitBreakers,
        sidecar_memory: SidecarMemory | None,
        foreign_jobs: ForeignJobs,
        resources: ResourceAccess,
        outcome_handler: OutcomeHandler,
        grace_period: float,
        is_restarting: Callable[[], bool],
        log: Log,
    ) -> None:
        self._tasks = tasks
        self._queues = queues
        self._runners = runners
        self._redis = redis
        self._duration_estimates = duration_estimates
        self._outcome_handler = outcome_handler
        self._foreign_jobs = foreign_jobs
        self._member_jobs = member_jobs
        self._budget = budget
        self._lease = lease
        self._deadlines = deadlines
        self._circuit_breakers = circuit_breakers
        self._sidecar_memory = sidecar_memory
        self._isolated_jobs = isolated_jobs
        self._receive_progress = progress_reports.receive
        self._resources = resources
        self._queue_numbers = number_queues([keys.queue for keys in consumed])
        self._log = log
        self._worker = worker
        self._grace_period = grace_period
        self._is_restarting = is_restarting
        self._waits_for_jobs = False
        self._running = running_jobs
        self._idle = trio.Event()
        self._stuck = False
        self._is_stopping = False
        self._grace = trio.CancelScope()
        self._executors = self._executor_nursery = trio.CancelScope()
        self._incarnation_end = incarnation_end
        self._latest: RunningJob | None = None
        self._job_middleware = job_middleware
        self._run_job = self._run_in_middleware if self._job_middleware.runs else self._run_task
        self._thread_load = thread_load
        if not self._job_middleware.runs:
            thread_load.allow_waiting(self._is_plain)
        self._executor_counts: dict[str, int] = {}
        self._slot_count = 0
        self._free_slots: list[int] = []

    @property
    def running_count(self) -> int:
        """The number of jobs that run now."""
        return sum(1 for delivery in self._running if delivery.started)

    @property
    def running_deliveries(self) -> list[Delivery]:
        """The jobs that run now."""
        return list(self._running)

    @property
    def running_jobs(self) -> dict[Delivery, RunningJob]:
        """The jobs that run now, and how."""
        return dict(self._running)

    def cancel_now(self) -> None:
        """Grant no grace period: cancel and release running jobs when this stops, at once if it is stopping."""
        self._grace.deadline = -math.inf
        self._grace_period = 0.0
        if self._waits_for_jobs:
            self._interrupt_all(timeout=None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run jobs until cancelled; then let running jobs finish, and release those that do not finish in time."""
        executors, ended_event = trio.CancelScope(shield=True), trio.Event()
        errors: list[BaseException] = []
        self._executors = executors

        async def work() -> None:
            try:
                await self._run_executors(executors)
                errors.append(RuntimeError("a job has cancelled the executors of this worker"))
            except BaseException as error:  # raised again below, in the caller's task
                errors.append(error)
            finally:
                ended_event.set()

        # Not in a nursery here: it could not be left while a job ignores its cancellation.
        system_task = trio.lowlevel.spawn_system_task(work, context=copy_context())
        task_status.started()
        try:
            await ended_event.wait()
            raise errors[0]
        finally:
            system_nursery = system_task.parent_nursery
            if system_nursery is not None and system_nursery.cancel_scope.cancel_called:
                # The Trio run itself has failed: a system task that a job has started, for example.
                self._incarnation_end.note(RuntimeError("the event loop of this worker has failed"))
            with trio.CancelScope(shield=True):
                await self._finish_jobs()
                executors.cancel()
                if not self._stuck:
                    await ended_event.wait()

    async def _run_executors(self, scope: trio.CancelScope) -> None:
        LOG_EVENT.set(self._log.event)
        JOB_PLACE.set(self._log.get_place)
        PROGRESS_RECEIVER.set(self._receive_progress)
        RESOURCES.set(self._resources)
        try:
            with scope, self._log.surround_jobs():
                async with trio.open_nursery() as nursery:
                    self._executor_nursery = nursery.cancel_scope
                    nursery.start_soon(self._watch_lease)
                    nursery.start_soon(self._add_spare_executors, nursery)
                    while True:
                        slots_changed = self._budget.slots_changed
                        for kind in self._queues:
                            self._resize(kind, self._budget.get_slots(kind), nursery)
                        await slots_changed.wait()
        finally:
            for queue in self._queues.values():
                queue.reset_executors()
            self._executor_counts.clear()
            self._free_slots.clear()
            self._slot_count = 0
            # No executor is left, for whatever reason: there is no job to wait for.
            self._running.clear()
            self._idle.set()

    async def _add_spare_executors(self, nursery: trio.Nursery) -> None:
        """Start executors for jobs that wait for a thread, once a task is known whose jobs may."""
        if self._job_middleware.runs:
            return
        await self._thread_load.wait_for_short_tasks()
        for kind in self._queues:
            self._resize(kind, self._budget.get_slots(kind), nursery)

    def _resize(self, kind: str, slots: int, nursery: trio.Nursery) -> None:
        """Set the number of executors of one kind. A surplus one ends after its job, or at once if it has none."""
        queue = self._queues[kind]
        slots += queue.spare_executors
        missing = slots - self._executor_counts.get(kind, 0)
        self._executor_counts[kind] = slots
        if missing < 0:
            queue.remove_executors(-missing)
            return
        for _ in range(queue.add_executors(missing)):
            if not self._free_slots:
                self._free_slots.append(self._slot_count)
                self._slot_count += 1
            nursery.start_soon(self._run_executor, kind, heappop(self._free_slots))

    def _get_memory_slot(self, slot: int) -> MemorySlot | None:
        return (
            None if self._sidecar_memory is None else self._sidecar_memory.get_slot(slot, self._queue_numbers)
        )

    async def _run_executor(self, kind: str, slot: int) -> None:
        """Run one executor, in its own nursery.

        User code can reach the nursery above its task: what it does to that, or starts in it, ends this executor's
        Trio task only, and not the jobs of others. Then another task goes on in its place.
        """
        memory_slot, run = self._get_memory_slot(slot), self._run_executor_task
        if memory_slot is not None:
            # On a stack its frames say whose job runs, also where nothing but the stack can be read.
            run = MethodType(name_slot(TaskExecution._run_executor_task, memory_slot.number), self)
        executor = _Executor(
            queue=self._queues[kind],
            runner=self._runners.get(kind) or self._runners[self._budget.task_kinds.get(kind, kind)],
            estimate=self._duration_estimates[kind],
            memory_slot=memory_slot,
            on_begin=self._begin if self._begins_late(kind) else None,
        )
        if self._budget.task_kinds.get(kind, kind) in _GOING_ON and not self._job_middleware.runs:
            go_on = TaskExecution._go_on_in_slot
            if memory_slot is not None:
                go_on = name_slot(go_on, memory_slot.number)
            executor.go_on = partial(go_on, self, executor)
        while not executor.is_surplus:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run, executor, nursery)
            except BaseException as error:
                if self._is_ending or find_cancellation(error) is not None:
                    raise
                self._log.event(
                    "job:nursery-failed", "warning", why=describe_error(error), hint=_NURSERY_HINT
                )
            if executor.error is not None:
                raise executor.error
            if self._is_ending:
                await trio.sleep_forever()
            executor.queue.drop_executor(executor.task)
            if executor.running_job is not None:
                await self._end_cancelled(executor, executor.running_job)
        heappush(self._free_slots, slot)

    def _begins_late(self, kind: str) -> bool:
        """Return whether jobs of a kind begin when their runner says so: in a thread, unless middleware comes first."""
        return self._budget.task_kinds.get(kind, kind) == "thread" and not self._job_middleware.runs

    @staticmethod
    def _begin(running_job: RunningJob) -> None:
        """Record that a job begins now, in whatever thread that is."""
        delivery, slot, limits = running_job.delivery, running_job.slot, running_job.limits
        if delivery is None:
            return
        if slot is not None:
            slot.record(delivery)
            if limits is not None and limits.hard is not None:
                slot.set_deadline(now() + limits.hard)
        delivery.start(wall_time())

    def _is_plain(self, delivery: Delivery) -> bool:
        """Return whether a job may begin when it is taken, or about a millisecond later: in a thread, behind others.

        Not one for which it is decided now that it may begin, or that something happens before.
        """
        command = delivery.command
        return (
            command is not None
            and command.expires is None
            and not delivery.start_before
            and delivery.rule is None
            and not self._log.has_action(command.trace)
            and ("~" not in command.id or not needs_preparing(command, self._tasks[command.task]))
            and command.task not in self._circuit_breakers.not_closed
            and self._tasks[command.task].deduplicate is None
            and not _leaves_box(self._tasks[command.task])
        )

    async def _run_executor_task(self, executor: "_Executor", nursery: trio.Nursery) -> None:
        """Run jobs until the executor is surplus, or one of them has left its Trio task in disorder.

        The jobs share a cancel scope until one of them is cancelled: a scope for each job would cost a quarter of a
        short job's time.
        """
        executor.task = trio.lowlevel.current_task()
        running_job = None
        try:
            while not executor.is_surplus and (running_job is None or not running_job.is_task_disordered):
                running_job = executor.begin()
                try:
                    with running_job.scope:
                        executor.is_surplus = not await self._run_jobs(running_job, executor)
                except* Exception:
                    if not (running_job.must_end or running_job.scope.cancel_called):
                        raise
                await self._end_cancelled(executor, running_job)
        except trio.Cancelled:
            raise
        except BaseException as error:
            executor.error = error  # ours, and not one of what user code has started in the nursery
        finally:
            nursery.cancel_scope.cancel()

    async def _end_cancelled(self, executor: "_Executor", running_job: RunningJob) -> None:
        """Handle the end of a job that was cancelled, if one was; wait for its thread if that has not ended."""
        executor.running_job = None
        delivery = running_job.delivery
        if delivery is not None:
            executor.queue.finish_waiting(delivery)
            ended = wall_time()
            if delivery.started:
                executor.estimate.record(max(ended - delivery.started, 0.0))
            self._handle_end(running_job, delivery, ended, running_job.get_cancel_outcome())
        if running_job.thread_ended is not None:
            if executor.memory_slot is not None:
                executor.memory_slot.set_deadline(now())  # it should have ended by now
            await self._wait_for_thread(running_job.thread_ended, delivery)

    @property
    def _is_ending(self) -> bool:
        """Whether all executors are cancelled: this stops, or one of them has failed."""
        return self._executors.cancel_called or self._executor_nursery.cancel_called

    async def _wait_for_thread(self, end: trio.Event, delivery: Delivery | None) -> None:
        """Wait for a thread that ignores its cancellation: it keeps the slot until it ends."""
        command = delivery.command if delivery else None
        job, task = (command.id, command.task) if command else ("", "")
        self._log.event("job:abandoned", "warning", job=job, task=task, hint=_ABANDONED)
        await end.wait()

    async def _run_jobs(self, running_job: RunningJob, executor: "_Executor") -> bool:
        """Run job after job until one of them is cancelled. Return False when there are more executors than slots."""
        clock, lease = time.perf_counter, self._lease
        queue, runner, estimate = executor.queue, executor.runner, executor.estimate
        yielded = clock()
        while not running_job.must_end:
            delivery = await queue.take_next()
            if delivery is None:
                return False
            running_job.set_delivery(delivery)
            self._running[delivery] = running_job
            if now() >= lease.expires_at:
                await lease.confirm()
            self._begin_or_hand_over(running_job, delivery, executor)
            executor.began = began = clock()
            command = delivery.command
            assert command is not None, "the Consumer passes on only what it could read"
            if (
                command.expires is not None
                or delivery.start_before
                or command.task in self._circuit_breakers.not_closed
            ) and (barred := self._check_start(delivery, command)):
                outcome = barred
            else:
                self._set_current_job(delivery, command)
                try:
                    outcome = await self._run_job(delivery, command, runner, running_job)
                except NotBegun:
                    self._put_back(running_job, executor.get_current()[0], queue)
                    continue
            ended = clock()
            if running_job.delivery is not delivery:  # the runner has gone on to others
                delivery, began = executor.get_current()
            seconds = self._measure_run(running_job, delivery, executor, began, ended)
            if type(outcome) in _RESOLVED or running_job.cancel_outcome is not None:
                outcome = await self._resolve(outcome, delivery, running_job)
            self._record_end(running_job, delivery, outcome, seconds, estimate)
            if self._latest is not running_job:
                # Another executor has ended a job since: the loop turns without a checkpoint of this one.
                self._latest, yielded = running_job, ended
            elif ended - yielded > YIELD_INTERVAL:
                await trio.lowlevel.checkpoint()
                yielded = clock()
        return True

    def _record_end(
        self,
        running_job: RunningJob,
        delivery: Delivery,
        outcome: Outcome,
        seconds: float,
        estimate: DurationEstimate,
    ) -> None:
        """Record how long a job took, and handle its outcome."""
        if estimate.mean is None:  # the Consumer may read ahead before these are settled
            self._budget.on_first_duration()
        estimate.record(seconds)
        self._handle_end(running_job, delivery, delivery.started + seconds, outcome)

    def _go_on_in_slot(self, executor: "_Executor", outcome: Outcome) -> JobCall | Outcome:
        """Go on from a job that has ended with `outcome`: return the call of the next one, which has begun.

        Or return an outcome, if the executor itself must go on: that of the job, or of the next one, which cannot be
        called. Nothing was done with it then.
        """
        try:
            return self._go_on(executor, outcome)
        except BaseException as error:  # ours: the executor raises it, and that ends the worker
            executor.fail(error)
            return INTERRUPTED

    def _go_on(self, executor: "_Executor", outcome: Outcome) -> JobCall | Outcome:
        running_job, delivery = executor.get_running()
        queue = executor.queue
        if (
            not running_job.may_go_on
            or running_job.must_end
            or type(outcome) in _RESOLVED
            or now() >= self._lease.expires_at
            or (following := queue.get_next(executor.task, self._is_plain)) is None
        ):
            return outcome
        command = following.command
        assert command is not None, "it is plain"
        if self._deadlines.get_limits(command) is not None:
            return outcome
        ended = time.perf_counter()
        seconds = self._measure_run(running_job, delivery, executor, executor.began, ended)
        self._record_end(running_job, delivery, outcome, seconds, executor.estimate)
        delivery = queue.take_following(executor.task)
        executor.began = ended
        running_job.set_delivery(delivery)
        self._running[delivery] = running_job
        self._begin_or_hand_over(running_job, delivery, executor)
        self._set_current_job(delivery, command)
        task = self._tasks[command.task]
        decoded = _decode_arguments(task, command)
        if isinstance(decoded, PermanentFailure):
            return decoded
        running_job.allow_going_on()
        return JobCall(task.function, *decoded)

    def _set_current_job(self, delivery: Delivery, command: Command) -> None:
        job = CurrentJob(
            command.id, command.task, delivery.queue, command.attempt, self._worker, command.sections, command.trace,
            delivery.assigned,
        )  # fmt: skip
        CURRENT_JOB.set(job)
        if self._log.has_action(command.trace):
            self._log.begin_job(job)

    def _begin_or_hand_over(self, running_job: RunningJob, delivery: Delivery, executor: "_Executor") -> None:
        """Record that a job begins, unless its thread does that; then note whether it may wait for one."""
        if executor.on_begin is None:
            self._begin(running_job)
        else:
            running_job.set_ahead(executor.queue.is_ahead(delivery))

    @staticmethod
    def _measure_run(
        running_job: RunningJob, delivery: Delivery, executor: "_Executor", began: float, ended: float
    ) -> float:
        """Return for how many seconds a job has run. If it may have waited for a thread, note that it does no more."""
        if executor.on_begin is None:
            return ended - began
        began, ended = running_job.began_at or began, running_job.ended_at or ended
        executor.queue.finish_waiting(delivery)
        running_job.begin_late()  # it may not have come to a thread
        return ended - began

    def _put_back(self, running_job: RunningJob, delivery: Delivery, queue: InternalTasksQueue) -> None:
        """Put a job back that has not begun, since those before it take long; when this stops, release it."""
        running_job.set_delivery(None)
        if delivery not in self._running:
            return  # it was stuck, and is left to recovery
        if self._is_stopping:
            queue.finish_waiting(delivery)
            self._handle_end(running_job, delivery, wall_time(), INTERRUPTED)
            return
        del self._running[delivery]
        queue.put_back(delivery)

    def _check_start(self, delivery: Delivery, command: Command) -> Outcome | None:
        """Return why a job may not begin; None when it may."""
        if missed := check_start_deadline(delivery, command, wall_time()):
            return missed
        if command.task in self._circuit_breakers.not_closed:
            return self._circuit_breakers.try_bar(delivery, command.task)
        return None

    async def _resolve(self, outcome: Outcome, delivery: Delivery, running_job: RunningJob) -> Outcome:
        """Return the outcome of a job that could not reach the broker or be run by this code, or that was cancelled."""
        if type(outcome) is PermanentFailure:
            outcome = await self._foreign_jobs.resolve(delivery, outcome)
        if type(outcome) is BrokerLost and not outcome.is_refused and await self._is_redis_reachable():
            outcome = outcome.raised or Raised(outcome.failure)
        return outcome if running_job.cancel_outcome is None else running_job.get_outcome(outcome)

    def _run_in_middleware(
        self, delivery: Delivery, command: Command, runner: Runner, running_job: RunningJob
    ) -> Awaitable[Outcome]:
        """Run a job inside of the middleware, in its own context."""
        return run_in_context(self._run_observed(delivery, command, runner, running_job), copy_context())

    async def _run_observed(
        self, delivery: Delivery, command: Command, runner: Runner, running_job: RunningJob
    ) -> Outcome:
        """Run a job inside of the middleware, which learns what becomes of it before it is settled."""
        middleware, job = self._job_middleware, IncomingJob(delivery, self._worker)
        entered: list[EnteredBlock] = []
        guard = ScopeGuard()
        JOB_ERRORS.set(job)
        try:
            if (rest := middleware.enter(job, entered)) is not None:
                await rest
            running_job.set_scope_guard(None)  # a block may have opened a cancel scope around the job
            outcome = await self._run_task(delivery, command, runner, running_job)
            if type(outcome) in _RESOLVED or running_job.cancel_outcome is not None:
                outcome = await self._resolve(outcome, delivery, running_job)
            if entered or middleware.notes_unstarted:
                self._decide(delivery, job, outcome)
                if (rest := middleware.exit(entered)) is not None:
                    await rest
        except BaseException:
            if self._is_ending:
                raise
            self._decide(delivery, job, running_job.get_cancel_outcome())
            await middleware.exit_cancelled(entered)
            raise
        finally:
            if job.carried:
                with FENCE("middleware"):
                    delivery.add_headers(job.carried)
            if not guard.is_intact:  # a block of the middleware has left a scope open, say
                guard.restore()
                running_job.leave_task()
        return outcome

    def _decide(self, delivery: Delivery, job: IncomingJob, outcome: Outcome) -> None:
        """Decide what becomes of a job, unless that is decided already, and tell its middleware."""
        if delivery.verdict is None:
            verdict = self._outcome_handler.decide(delivery, outcome)
            delivery.set_verdict(verdict)
            job.finish(verdict)

    async def _run_task(
        self, delivery: Delivery, command: Command, runner: Runner, running_job: RunningJob
    ) -> Outcome:
        task = self._tasks[command.task]
        member = needs_preparing(command, task) if "~" in command.id else None
        decoded = _NO_ARGUMENTS if member is not None else _decode_arguments(task, command)
        if isinstance(decoded, PermanentFailure):
            return decoded
        usual, runner = runner, self._choose_runner(task, runner)
        limits = self._deadlines.get_limits(command)
        if limits is not None:
            self._deadlines.start(running_job, limits)
        try:
            if member is not None:
                return await self._member_jobs.run_member(
                    delivery, command, member, task, runner, running_job
                )
            if task.deduplicate is not None:
                duplicate = get_rejection(await runner.execute(task.deduplicate, *decoded, running_job))
                if duplicate is not None:
                    return duplicate
            if limits is None and running_job.go_on is not None and runner is usual:
                running_job.allow_going_on()
            return await runner.execute(task.function, *decoded, running_job)
        except NotBegun:
            raise
        except BaseException as error:  # no thread could be started, say
            reraise_cancellation(error)
            return get_error_outcome(error)
        finally:
            if limits is not None:
                self._deadlines.stop(running_job)

    def _choose_runner(self, task: Task[..., Any], usual: Runner) -> Runner:
        """Return the runner of a job: the usual one of its kind, but for boxed tasks in some tests."""
        return self._runners[task.loop] if _leaves_box(task) else usual

    async def _is_redis_reachable(self) -> bool:
        """Return whether this worker has reached Redis for a while: then a job that does not has failed by itself."""
        with trio.move_on_after(PING_TIMEOUT):
            try:
                await self._redis.perform(jobs.PING)
            except BrokerError:
                return False
            up = self._redis.connected_since
            return up is not None and trio.current_time() - up >= STABLE_CONNECTION
        return False

    def _handle_end(
        self, running_job: RunningJob, delivery: Delivery, finished: float, outcome: Outcome
    ) -> None:
        """Handle the outcome of a job that has left its executor."""
        running_job.set_delivery(None)
        if self._running.pop(delivery, None) is None:
            return  # it was stuck, and is left to recovery
        if not self._running:
            self._idle.set()
        if outcome is INTERRUPTED and self._incarnation_end.has_failed:
            return  # it may be what has ended this worker: recovery puts it back, and counts that
        delivery.finish(finished)
        self._outcome_handler.handle_outcome(delivery, outcome)

    def revoke(self, delivery: Delivery) -> None:
        """End a revoked job if it runs, drop it if it waits in this worker.

        A running job is waited for without limit, unless its task has `abandon_on_cancel`.
        """
        running_job = self._running.get(delivery)
        queue = self._queues.get(delivery.kind)
        if running_job is not None and delivery.command is not None:
            task = self._tasks[delivery.command.task]
            running_job.cancel(JOB_REVOKED, 0.0 if task.abandon_on_cancel else math.inf)
        elif self._isolated_jobs.remove(delivery) or (queue is not None and queue.remove(delivery)):
            delivery.finish(wall_time())
            self._outcome_handler.handle_outcome(delivery, JOB_REVOKED)

    async def _finish_jobs(self) -> None:
        self._is_stopping = True
        for queue in self._queues.values():
            for delivery in queue.take_returned():
                delivery.finish(wall_time())
                self._outcome_handler.handle_outcome(delivery, INTERRUPTED)
        if not self._lease.is_lost:
            with trio.move_on_after(self._grace_period) as self._grace:
                await self._wait_until_idle()
        # A job that ignores cancellation in a thread ends with the process. If the process goes on as another
        # incarnation, the job is waited for: released, it would run in two workers at once.
        self._waits_for_jobs = self._is_restarting() and not self._lease.is_lost
        self._interrupt_all(timeout=math.inf if self._waits_for_jobs else None)
        with trio.move_on_after(CANCEL_TIMEOUT):
            await self._wait_until_idle()
        if self._waits_for_jobs and self._running:
            self._log.event("job:awaited", "warning", jobs=self._list_running_ids(), hint=_AWAITED_HINT)
            await self._wait_until_idle()
        self._waits_for_jobs = False
        self._stuck = bool(self._running)
        if self._stuck:
            # They are not settled: they stay pending in Redis, for recovery.
            self._log.event("job:stuck", "error", count=len(self._running), jobs=self._list_running_ids())
            self._running.clear()

    def _interrupt_all(self, *, timeout: float | None) -> None:
        for delivery, running_job in list(self._running.items()):
            self._log.event("job:interrupted", "warning", job=delivery.command and delivery.command.id)
            running_job.cancel(INTERRUPTED, timeout)

    async def _watch_lease(self) -> None:
        """Interrupt the jobs that another worker may begin as soon as this worker's lease has ended.

        Those are asynchronous jobs that have a slot of a limit. They are released if this worker can settle again
        before others take it for dead.
        """
        while True:
            await self._lease.wait_for_expiry()
            while self._lease.is_valid():  # the margin: a job that begins in it is interrupted, too
                self._interrupt_limited()
                await trio.sleep(self._lease.seconds * MARGIN_FRACTION / 4)
                if self._lease.expires_at - now() > self._lease.seconds * MARGIN_FRACTION:
                    break  # it was renewed at last
            else:
                self._interrupt_limited()
                await self._lease.wait_until_valid()

    def _interrupt_limited(self) -> None:
        for delivery, running_job in list(self._running.items()):
            if running_job.cancel_outcome is None and self._must_end_with_lease(delivery):
                job = delivery.command and delivery.command.id
                self._log.event("job:interrupted", "warning", job=job, why="the lease of this worker is over")
                running_job.cancel(INTERRUPTED)

    def _must_end_with_lease(self, delivery: Delivery) -> bool:
        rule, command = delivery.rule, delivery.command
        if rule is None or command is None or rule.max_running is None or rule.per != "all":
            return False
        task = self._tasks[command.task]
        return task.kind in ("trio", "asyncio") and not task.continue_without_lease

    def _list_running_ids(self) -> list[str]:
        return [delivery.command.id for delivery in self._running if delivery.command][:20]

    async def _wait_until_idle(self) -> None:
        while self._running:
            self._idle = trio.Event()
            await self._idle.wait()

    EXECUTOR_CODES = frozenset((_run_jobs.__code__, _go_on.__code__))
    """The code of an executor, to find it on a stack; its local variable `delivery` is the job."""


def _leaves_box(task: Task[..., Any]) -> bool:
    """Return whether a boxed task runs in this process: only here are a test's replacements of its resources."""
    return (
        bool(REPLACED_RESOURCES)
        and task.box is not None
        and task.box.is_python
        and any(resource.open in REPLACED_RESOURCES for resource in task.injected.values())
    )


_GOING_ON = frozenset({"asyncio", "boxed", "thread"})
"""The kinds whose runners go on to other jobs by themselves."""
_RESOLVED = frozenset({BrokerLost, PermanentFailure})
"""The outcomes that Redis is asked about before they count."""


class _Executor(msgspec.Struct, kw_only=True):
    """One executor: what it takes jobs from, and what it runs now, in one Trio task after the other."""

    queue: InternalTasksQueue
    runner: Runner
    estimate: DurationEstimate
    memory_slot: MemorySlot | None
    # Records that a job begins, in its thread; None where the executor does that.
    on_begin: Callable[[RunningJob], None] | None = None
    # Ends a job and begins the next one in its place, for a runner that need not wake the executor between them.
    go_on: Callable[[Outcome], JobCall | Outcome] | None = None
    # When the job began, by `time.perf_counter`.
    began: float = 0.0
    # Whether there are more executors than slots, so that it must end.
    is_surplus: bool = False
    task: trio.lowlevel.Task | None = None
    # None once the end of its last job was handled.
    running_job: RunningJob | None = None
    # An error of ours, which ends the worker.
    error: BaseException | None = None

    def begin(self) -> RunningJob:
        """Return what the next jobs run with."""
        self.running_job = RunningJob(
            executor_task=self.task, slot=self.memory_slot, on_begin=self.on_begin, go_on=self.go_on
        )
        return self.running_job

    def get_running(self) -> tuple[RunningJob, Delivery]:
        """Return the job that runs now."""
        running_job = self.running_job
        assert running_job is not None
        assert running_job.delivery is not None
        return running_job, running_job.delivery

    def fail(self, error: BaseException) -> None:
        """Note an error of ours at the end of a job, which is not settled then."""
        self.error = error
        if self.running_job is not None:
            self.running_job.set_delivery(None)

    def get_current(self) -> tuple[Delivery, float]:
        """Return the job to which the runner has gone on, and when that began. Raises what has gone wrong there."""
        if self.error is not None:
            raise self.error
        return self.get_running()[1], self.began


_NURSERY_HINT = (
    "a task has started something in the nursery of its worker, or closed that: open a nursery of its own"
)
_ABANDONED = "its thread keeps its slot until it ends; a task that is declared with boxed=True can be killed"

_AWAITED_HINT = (
    "they take no notice of being cancelled, and run here: this worker begins again when they have ended"
)


_Arguments = tuple[Sequence[Any], Mapping[str, Any]]
_NO_ARGUMENTS: _Arguments = ((), {})


def _decode_arguments(task: Task[..., Any], command: Command) -> _Arguments | PermanentFailure:
    """Return the arguments of a job, or why they cannot be decoded."""
    try:
        return task.parameters.decode(command.args, command.kwargs)
    except BadArguments as error:
        return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
    except BaseException as error:  # the user's code: __post_init__, a validator
        return PermanentFailure(Reason.BAD_ARGUMENTS, make_failure(error))
