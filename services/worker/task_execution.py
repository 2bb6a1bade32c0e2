"""Task Execution: runs jobs within the budget and hands their outcomes on (C54).

Executors are tasks that stay and take job after job: spawning one for each job costs twice as much. A straight line
leads through one job: take, run, and on to the Judgement.
"""

import math
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from heapq import heappop, heappush

import trio

from celery5.broker.calls import jobs
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.errors import BadArguments, BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery, check_start_deadline
from celery5.protocol.job.envelope import Failure
from celery5.protocol.job.verdict import (
    INTERRUPTED,
    JOB_REVOKED,
    BrokerLost,
    Outcome,
    PermanentFailure,
    Raised,
    Reason,
)
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.runners.context import CURRENT_JOB, LOG_EVENT, CurrentJob
from celery5.runners.outcome import get_error_outcome, make_failure
from celery5.runners.running_job import RunningJob
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.shared_memory import SidecarMemory, number_queues
from celery5.services.worker.in_flight import HeldJobs
from celery5.services.worker.internal_queues import TasksQueue
from celery5.services.worker.judgement import OutcomeHandler
from celery5.services.worker.lease import MARGIN_FRACTION, WorkerIdentity, now
from celery5.services.worker.resources import Runner, TaskResources
from celery5.services.worker.time_limits import Deadlines
from celery5.tasks.deduplication import get_rejection

YIELD_INTERVAL = 0.005
"""Seconds that one executor may go on with jobs that never wait, before it lets others run."""
CANCEL_TIMEOUT = 5.0
"""Seconds that cancelled jobs get to end."""


PING_TIMEOUT = 1.0
"""Seconds that TrioRedis gets to show that it is there, when a job says that it is not."""
STABLE_CONNECTION = 2.0
"""Seconds after its return in which a job may still say that Redis is away: a breaker of the job's own is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSafeguards:
    """What protects a worker and its jobs from a job that runs too long, always fails, or kills the process."""

    deadlines: Deadlines
    circuit_breakers: CircuitBreakers
    # What runs is recorded there, so that the sidecar knows which jobs a dead worker had begun. None: no sidecar.
    sidecar_memory: SidecarMemory | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """What becomes of running jobs when a worker stops."""

    # Seconds that they may go on.
    grace_period: float
    # Returns whether the process goes on as another incarnation, which must not run the same jobs again.
    is_restarting: Callable[[], bool]


class TaskExecution:
    """Executors for each kind of task. Stopping it lets running jobs finish for `grace_period` seconds."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        redis: TrioRedis,
        resources: TaskResources,
        held: HeldJobs,
        safeguards: JobSafeguards,
        outcome_handler: OutcomeHandler,
        stop_policy: StopPolicy,
        log: Log,
    ) -> None:
        self._tasks = resources.tasks
        self._queues = resources.queues
        self._runners = resources.runners
        self._redis = redis
        self._paces = resources.duration_estimates
        self._judgement = outcome_handler
        self._budget = resources.budget
        self._lease = identity.lease
        self._deadlines = safeguards.deadlines
        self._circuits = safeguards.circuit_breakers
        self._black_box = safeguards.sidecar_memory
        self._suspects = held.isolated_jobs
        self._numbers = number_queues([keys.queue for keys in identity.consumed])
        self._log = log
        self._worker = identity.worker
        self._grace_period = stop_policy.grace_period
        self._another = stop_policy.is_restarting
        self._patient = False
        self._running = held.running_jobs
        self._idle = trio.Event()
        self._stuck = False
        self._grace = trio.CancelScope()
        self._latest: RunningJob | None = None
        self._nursery: trio.Nursery | None = None
        self._crews: dict[str, int] = {}
        self._pens = 0
        self._unused: list[int] = []
        self._budget.add_listener(self.resize)

    @property
    def running_count(self) -> int:
        """How many jobs run now."""
        return len(self._running)

    def resize(self, kind: str, slots: int) -> None:
        """Have so many executors for one kind. One too many goes when its job has ended, or at once if it has none."""
        if self._nursery is None:
            return
        queue, more = self._queues[kind], slots - self._crews.get(kind, 0)
        self._crews[kind] = slots
        if more < 0:
            queue.remove_executors(-more)
            return
        for _ in range(queue.add_executors(more)):
            if not self._unused:
                self._unused.append(self._pens)
                self._pens += 1
            self._nursery.start_soon(self._work, kind, heappop(self._unused))

    @property
    def running_deliveries(self) -> list[Delivery]:
        """What runs now."""
        return list(self._running)

    def cancel_now(self) -> None:
        """When this stops, or if it is stopping, what runs is cancelled at once and given back."""
        self._grace.deadline = -math.inf
        self._grace_period = 0.0
        if self._patient:
            self._interrupt(patience=None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run jobs until cancelled; then let those that run finish, and give back those that do not in time."""
        executors, gone = trio.CancelScope(shield=True), trio.Event()
        broken: list[BaseException] = []

        async def work() -> None:
            try:
                await self._keep_executors(executors)
            except BaseException as error:  # whatever it is, it is for whoever runs us
                broken.append(error)
            finally:
                gone.set()

        # Not in a nursery of our own, which could not be left while a job takes no notice of being cancelled.
        trio.lowlevel.spawn_system_task(work, context=copy_context())
        task_status.started()
        try:
            await gone.wait()
            raise broken[0]
        finally:
            with trio.CancelScope(shield=True):
                await self._wind_up()
                executors.cancel()
                if not self._stuck:
                    await gone.wait()

    async def _keep_executors(self, scope: trio.CancelScope) -> None:
        LOG_EVENT.set(self._log.event)
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._watch_lease)
                    for kind, queue in self._queues.items():
                        queue.surplus_executors = 0
                        self.resize(kind, self._budget.get_slots(kind))
        finally:
            self._nursery = None
            for queue in self._queues.values():
                queue.reset_executors()
            self._crews.clear()
            self._unused.clear()
            self._pens = 0
            # Nobody works any more, for whatever reason: nobody need be waited for.
            self._running.clear()
            self._idle.set()

    def _pen(self, slot: int) -> "_Pen":
        return None if self._black_box is None else self._black_box.make_recorder(slot, self._numbers)

    async def _work(self, kind: str, number: int) -> None:
        """One executor. Its jobs share a cancel scope for as long as none of them is cancelled: a scope for each job
        would cost a quarter of a short job's time."""
        queue, runner, pace, pen = (
            self._queues[kind],
            self._runners[kind],
            self._paces[kind],
            self._pen(number),
        )
        wanted = True
        while wanted:
            hand = RunningJob()
            try:
                with hand.scope:
                    wanted = await self._work_on(hand, queue, runner, pace, pen)
            except* Exception:
                if not hand.scope.cancel_called:
                    raise
            delivery = hand.delivery
            if delivery is not None:
                ended = time.time()
                if delivery.started:
                    pace.record(max(ended - delivery.started, 0.0))
                self._ended(hand, delivery, ended, hand.cancel_outcome or INTERRUPTED)
            if hand.thread_ended is not None:
                await self._left_behind(hand.thread_ended, delivery)
        heappush(self._unused, number)

    async def _left_behind(self, end: trio.Event, delivery: Delivery | None) -> None:
        """A thread goes on that takes no notice of being told to stop: it has the slot until it ends."""
        job = delivery.envelope.id if delivery and delivery.envelope else ""
        self._log.event("job:abandoned", "warning", job=job)
        await end.wait()

    async def _work_on(
        self, hand: RunningJob, queue: TasksQueue, runner: Runner, pace: DurationEstimate, pen: "_Pen"
    ) -> bool:
        """Job after job, until one of them is cancelled. False when there are more executors than slots."""
        clock, lease = time.perf_counter, self._lease
        yielded = clock()
        while hand.cancel_outcome is None:
            delivery = await queue.take_next()
            if delivery is None:
                return False
            hand.delivery = delivery
            self._running[delivery] = hand
            if now() >= lease.expires_at:
                await lease.wait_until_valid()
            if pen is not None:
                pen(delivery)
            delivery.start(time.time())
            began = clock()
            outcome = await self._outcome(delivery, runner, hand)
            ended = clock()
            if type(outcome) is BrokerLost and await self._redis_is_here():
                outcome = outcome.raised or Raised(outcome.failure)
            if hand.cancel_outcome is not None:
                outcome = hand.get_outcome(outcome)
            if pace.mean is None:  # reading on need not wait until these are settled
                self._budget.on_first_duration()
            pace.record(ended - began)
            self._ended(hand, delivery, delivery.started + ended - began, outcome)
            if self._latest is not hand:
                # Another executor ended a job since our last one: the loop goes round without our help.
                self._latest, yielded = hand, ended
            elif ended - yielded > YIELD_INTERVAL:
                await trio.lowlevel.checkpoint()
                yielded = clock()
        return True

    async def _outcome(self, delivery: Delivery, runner: Runner, hand: RunningJob) -> Outcome:
        envelope = delivery.envelope
        assert envelope is not None, "the Consumer hands on only what it could read"
        if (envelope.expires is not None or delivery.start_before) and (
            late := check_start_deadline(delivery, envelope)
        ):
            return late
        if envelope.task in self._circuits.not_closed and (
            barred := self._circuits.try_bar(delivery, envelope.task)
        ):
            return barred
        task = self._tasks[envelope.task]
        try:
            args, kwargs = task.parameters.decode(envelope.args, envelope.kwargs)
        except BadArguments as error:
            return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
        except (Exception, SystemExit) as error:  # the user's code: __post_init__, a validator
            return PermanentFailure(Reason.BAD_ARGUMENTS, make_failure(error))
        CURRENT_JOB.set(
            CurrentJob(
                envelope.id,
                envelope.task,
                delivery.queue,
                envelope.attempt,
                self._worker,
                envelope.sections,
                envelope.trace,
            )
        )
        limits = self._deadlines.get_limits(envelope)
        if limits is not None:
            self._deadlines.start(hand, limits)
        try:
            if task.deduplicate is not None:
                unwanted = get_rejection(await runner.execute(task.deduplicate, args, kwargs, hand))
                if unwanted is not None:
                    return unwanted
            return await runner.execute(task.function, args, kwargs, hand)
        except Exception as error:  # no thread could be started, say
            return get_error_outcome(error)
        finally:
            if limits is not None:
                self._deadlines.stop(hand)

    async def _redis_is_here(self) -> bool:
        """Whether this worker reaches Redis, and has for a while: a job that does not has failed by itself then."""
        with trio.move_on_after(PING_TIMEOUT):
            try:
                await self._redis.perform(jobs.PING)
            except BrokerError:
                return False
            up = self._redis.connected_since
            return up is not None and trio.current_time() - up >= STABLE_CONNECTION
        return False

    def _ended(self, hand: RunningJob, delivery: Delivery, finished: float, outcome: Outcome) -> None:
        """The job is out of the executor's hands: judge, hand on, log."""
        hand.delivery = None
        if self._running.pop(delivery, None) is None:
            return  # it was stuck, and nobody waits for it any more
        if not self._running:
            self._idle.set()
        delivery.finish(finished)
        self._judgement.handle_outcome(delivery, outcome)

    def revoke(self, delivery: Delivery) -> None:
        """The job was revoked: end it if it runs, drop it if it waits here. Its end is waited for, for as long as it
        takes, unless its task says otherwise."""
        hand = self._running.get(delivery)
        queue = self._queues.get(delivery.kind)
        if hand is not None and delivery.envelope is not None:
            task = self._tasks[delivery.envelope.task]
            hand.cancel(JOB_REVOKED, 0.0 if task.abandon_on_cancel else math.inf)
        elif self._suspects.remove(delivery) or (queue is not None and queue.remove(delivery)):
            delivery.finish(time.time())
            self._judgement.handle_outcome(delivery, JOB_REVOKED)

    async def _wind_up(self) -> None:
        if not self._lease.is_lost:
            with trio.move_on_after(self._grace_period) as self._grace:
                await self._drained()
        # What goes on in a thread ends with the process. When that goes on, too, as another incarnation, it is waited
        # for: given back, the job would run here and elsewhere at once.
        self._patient = self._another() and not self._lease.is_lost
        self._interrupt(patience=math.inf if self._patient else None)
        with trio.move_on_after(CANCEL_TIMEOUT):
            await self._drained()
        if self._patient and self._running:
            self._log.event("job:awaited", "warning", jobs=self._ids(), hint=_WAITED_FOR)
            await self._drained()
        self._patient = False
        self._stuck = bool(self._running)
        if self._stuck:
            # Nobody settles them: they stay where they are, for recovery.
            self._log.event("job:stuck", "error", count=len(self._running), jobs=self._ids())
            self._running.clear()

    def _interrupt(self, *, patience: float | None) -> None:
        for delivery, hand in list(self._running.items()):
            self._log.event("job:interrupted", "warning", job=delivery.envelope and delivery.envelope.id)
            hand.cancel(INTERRUPTED, patience)

    async def _watch_lease(self) -> None:
        """Interrupt the jobs that another worker may begin as soon as this one's lease has ended: asynchronous jobs
        that have a slot of a limit. They are given back if this worker can settle again before others take it for
        dead."""
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
        for delivery, hand in list(self._running.items()):
            if hand.cancel_outcome is None and self._must_end_with_lease(delivery):
                job = delivery.envelope and delivery.envelope.id
                self._log.event("job:interrupted", "warning", job=job, why="the lease of this worker is over")
                hand.cancel(INTERRUPTED)

    def _must_end_with_lease(self, delivery: Delivery) -> bool:
        rule, envelope = delivery.rule, delivery.envelope
        if rule is None or envelope is None or rule.max_running is None or rule.per != "all":
            return False
        return delivery.kind in ("trio", "asyncio") and not self._tasks[envelope.task].continue_without_lease

    def _ids(self) -> list[str]:
        return [each.envelope.id for each in self._running if each.envelope][:20]

    async def _drained(self) -> None:
        while self._running:
            self._idle = trio.Event()
            await self._idle.wait()

    EXECUTOR_CODE = _work_on.__code__
    """The function that runs one job after another, as it is found on a stack; its `delivery` is the job."""


_Pen = Callable[[Delivery], None] | None
_WAITED_FOR = (
    "they take no notice of being cancelled, and run here: this worker begins anew when they have ended"
)
