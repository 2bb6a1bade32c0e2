"""Ask Redis to admit jobs of tasks with limits, and take admitted jobs from the waiting lists.

A job that may not run now waits in Redis. The worker asks for it when it could run: when a slot of the limit or of the
worker has become free, or when the rate allows the next one. A worker that frees a slot gets the next job in the same
call (`settle_limited.lua`); this service is for all other cases.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import trio

from celery5.broker.calls import limits
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.calls.limits import AdmissionReply, AdmissionRequest, AdmittedJobs
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.broker.wall_clock import wall_time
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import JOB_EXPIRED, JOB_REVOKED, JobExpired, JobRevoked, Release
from celery5.protocol.limits import AdmissionRule, Rate, format_expiry, get_waiting_list, unescape_word
from celery5.services.job.in_flight import InFlightJobs, RecentJobs
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.unstarted_jobs import UnstartedJobs
from celery5.services.limits.admission_state import AdmissionState, is_expired
from celery5.services.limits.waiting_tasks import QueueTask
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL, OutageLog, retry_until_available
from celery5.services.process.lease import Lease
from celery5.services.process.wake_ups import WakeUps
from celery5.services.worker.job_intake import JobIntake
from celery5.tasks.task import Task

ADMISSION_BATCH = 64
"""The most jobs in one admission call: Redis does nothing else while it runs."""
MAX_RULES_PER_CALL = 32
"""The most tasks whose jobs are requested in one call."""
RETURN_TIMEOUT = 1.0
"""Seconds that a stopping worker has to return the starts of rates that it did not use."""
JUST_AFTER = 0.002
"""Seconds to wait beyond the time at which a rate allows the next job, before that is requested."""


class AdmissionControl:
    """Admission of the jobs of one worker by the limits of their tasks."""

    def __init__(
        self,
        *,
        worker: str,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        redis: TrioRedis,
        tasks: Mapping[str, Task[..., Any]],
        admission: AdmissionState,
        intake: JobIntake,
        in_flight: InFlightJobs,
        recent: RecentJobs,
        unstarted: UnstartedJobs,
        reading: ReadingState,
        outcome_handler: OutcomeHandler,
        wake_ups: WakeUps,
        log: Log,
    ) -> None:
        self._redis = redis
        self._consumed: Mapping[str, QueueKeys] = {keys.queue: keys for keys in consumed}
        self._channels = {keys.slots_freed.encode(): keys.queue for keys in consumed}
        self._tasks = tasks
        self._admission = admission
        self._starts = admission.kind_starts
        self._in_flight = in_flight
        self._recent = recent
        self._intake = intake
        self._unstarted = unstarted
        self._reading = reading
        self._outcome_handler = outcome_handler
        self._wake_ups = wake_ups
        self._lease = lease
        self._log = log
        self._worker = worker
        self._outages = OutageLog(log, "admission:interrupted", "admission:resumed")
        self._connects = 1
        self._wanted = admission.waiting_tasks
        self._due: dict[QueueTask, float] = {}

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.slots_freed for keys in self._consumed.values()]

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """Request waiting jobs of the task that `payload` names: a slot of its limit was freed.

        Every worker of the queue is told. A few of many request at once. The others do so a little later, since those
        few may have no capacity; further messages until then make no further request.
        """
        queue, task = self._channels[channel], payload.decode(errors="replace")
        delay, name = self._wake_ups.get_delay(queue), unescape_word(task)
        if not delay:
            self._request(queue, task)
        elif name in self._tasks:
            when = trio.current_time() + delay
            self._due[queue, name] = min(when, self._due.get((queue, name), when))
            self._admission.notify()

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """Request jobs of the tasks that have waiting ones, in case a message was lost, and compute limits again."""
        for task in pulse.limited_tasks:
            self._request(keys.queue, task)
        if keys.queue == next(iter(self._consumed)):
            self._admission.compute_limits()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Request admission until cancelled; then release the jobs that await it.

        Raises:
            LeaseLost: This worker counts as dead.
        """
        task_status.started()
        try:
            while True:
                with trio.move_on_at(self._get_next_time()):
                    await self._admission.wait_changed()
                await retry_until_available(self._request_and_admit, self._outages, SHORT_RETRY_INTERVAL)
        finally:
            self.release_unadmitted()
            with trio.move_on_after(RETURN_TIMEOUT, shield=True):
                await self._starts.give_back()

    async def _request_and_admit(self) -> None:
        # Where a rule has changed, jobs that wait may be admitted now.
        changed_tasks = self._admission.take_changed_tasks()
        for queue in self._consumed:
            for task in changed_tasks:
                self._wanted.add(queue, task)
        await self.request_admission()
        await self.admit_waiting()
        await self._starts.give_back()

    def release_unadmitted(self) -> None:
        """Release the jobs that await admission."""
        while self._admission.awaiting_admission:
            delivery = self._admission.awaiting_admission.popleft()
            if delivery.rule is None:
                self._admission.assume_slot(delivery, _get_task(delivery))
                self._unstarted.settle(delivery, Release())

    async def request_admission(self) -> None:
        """Ask Redis for each job that awaits admission whether it may run."""
        while self._admission.awaiting_admission:
            queue = self._admission.awaiting_admission[0].queue
            jobs = [delivery for delivery in self._admission.awaiting_admission if delivery.queue == queue][
                :ADMISSION_BATCH
            ]
            await self._request_for(self._consumed[queue], jobs)

    async def admit_waiting(self) -> None:
        """Take as many jobs from the waiting lists as this worker has capacity for."""
        now = trio.current_time()
        for queue_task, when in list(self._due.items()):
            if when <= now:
                del self._due[queue_task]
                self._wanted.add(*queue_task)
        if self._admission.yielding_until > now:
            return
        for queue in self._wanted.get_queues():
            await self._take_waiting(self._consumed[queue])

    def receive_jobs(
        self, queue: str, rules: Iterable[AdmissionRule], admitted: AdmittedJobs, requested_at: float
    ) -> None:
        """Take admitted jobs that this worker requested at `asked` (seconds since 1970)."""
        self._note_delays(queue, rules, admitted.delays)
        if admitted.entries:
            with self._admission.receiving_since(requested_at):
                self._intake.accept_new(admitted.entries)
        self._audit_new_connection()

    async def _request_for(self, keys: QueueKeys, jobs: Sequence[Delivery]) -> None:
        expired = [delivery for delivery in jobs if delivery.rule is None and is_expired(delivery)]
        jobs = [delivery for delivery in jobs if delivery not in expired]
        rules = {task: self._admission.get_rule(task) for task in {_get_task(delivery) for delivery in jobs}}
        for delivery in jobs:
            # Before the call, not after: it may come again by another connection.
            self._recent.forget(delivery)
        requested_at, outcomes = 0.0, list[int]()
        if jobs:
            starts, requested_at = await self._take_starts(Counter(_get_task(delivery) for delivery in jobs))
            requests = self._make_requests(keys.queue, jobs, rules, starts)
            call = limits.admit(keys, self._worker, requests, [(rule, 0) for rule in rules.values()])
            admitted = await self._redis.perform(call)
            outcomes = self._read_reply(keys.queue, rules.values(), admitted)
            self._use_starts(_count_begun(jobs, requests, outcomes, rules))
        handled = {*jobs, *expired}
        still_waiting = [
            delivery for delivery in self._admission.awaiting_admission if delivery not in handled
        ]
        self._admission.awaiting_admission.clear()
        self._admission.awaiting_admission.extend(still_waiting)
        for delivery in expired:
            self._end(delivery, JOB_EXPIRED)
        self._handle_outcomes(jobs, outcomes, rules, requested_at)
        self._audit_new_connection()

    def _make_requests(
        self,
        queue: str,
        jobs: Sequence[Delivery],
        rules: Mapping[str, AdmissionRule],
        starts: Counter[str],
    ) -> list[AdmissionRequest]:
        """Return the request for each job: to run, as far as there is capacity, else to wait."""
        used, requests = Counter[str](), list[AdmissionRequest]()
        for delivery in jobs:
            rule, kind = rules[_get_task(delivery)], self._admission.get_kind(_get_task(delivery))
            remaining = (
                0
                if self._reading.is_closed(queue)
                else self._admission.count_free_slots(kind, in_order=rule.is_empty) - used[kind]
            )
            if rule.needs_start:
                remaining = min(remaining, starts[rule.kind])
            action = (
                "count"
                if delivery.rule is not None
                else "run"
                if remaining > 0 and not rule.suspended
                else "wait"
            )
            used[kind] += action == "run"
            starts[rule.kind] -= action == "run"
            if action == "wait" and not rule.suspended:
                self._wanted.add(queue, rule.task)
            requests.append(_make_request(delivery, rule, action, self._tasks[rule.task]))
        return requests

    def _read_reply(self, queue: str, rules: Iterable[AdmissionRule], admitted: AdmissionReply) -> list[int]:
        if admitted.outcomes is None:
            raise self._lease.mark_lost(f"{self._worker} was taken for dead; its jobs were given to others")
        self._note_delays(queue, rules, admitted.delays)
        return admitted.outcomes

    def _handle_outcomes(
        self,
        jobs: Sequence[Delivery],
        outcomes: Sequence[int],
        rules: Mapping[str, AdmissionRule],
        requested_at: float,
    ) -> None:
        """Handle each job by the reply of Redis."""
        admitted_jobs: list[Delivery] = []
        for delivery, outcome in zip(jobs, outcomes, strict=True):
            if delivery.rule is not None:  # it runs already, and is counted from now on
                continue
            if outcome == limits.ADMITTED:
                admitted_jobs.append(delivery)
                self._take_slot(delivery, rules[_get_task(delivery)], requested_at)
            elif outcome == limits.REVOKED:
                self._end(delivery, JOB_REVOKED)
            else:
                self._in_flight.remove([delivery])
                self.on_capacity()
        self._admission.admit(admitted_jobs)

    def _take_slot(self, delivery: Delivery, rule: AdmissionRule, requested_at: float) -> None:
        self._in_flight.change_kind(delivery, self._admission.get_kind(rule.task))
        if delivery.command is not None:
            self._recent.check_and_add(delivery, delivery.command)
        delivery.take_slot(rule, 0.0 if rule.slack is None else requested_at + rule.slack)

    def _end(self, delivery: Delivery, outcome: JobExpired | JobRevoked) -> None:
        delivery.finish(wall_time())
        self._admission.assume_slot(delivery, _get_task(delivery))
        self._outcome_handler.handle_outcome(delivery, outcome)

    async def _take_waiting(self, keys: QueueKeys) -> None:
        """Take jobs from the waiting lists of one queue, as long as there are some and capacity for them."""
        while True:
            tasks = self._wanted.get_tasks(keys.queue)
            self._wanted.discard(
                keys.queue, (task for task in tasks if self._admission.get_rule(task).suspended)
            )
            starts, requested_at = await self._take_starts(await self._count_waiting(keys, tasks))
            planned = self._admission.plan_requests(keys.queue, tasks, starts=starts)
            rules = [(rule, want) for rule, want in planned if want and not rule.suspended]
            rules = rules[:MAX_RULES_PER_CALL]
            if not rules:
                return
            with self._admission.reserving_slots(rules):
                admitted = await self._redis.perform(limits.admit_waiting(keys, self._worker, rules))
            if admitted.owned == limits.LEASE_LOST:
                raise self._lease.mark_lost(
                    f"{self._worker} was taken for dead; its jobs were given to others"
                )
            self._use_starts(
                [rule for (rule, _), got in zip(rules, admitted.counts, strict=True) for _ in range(got)]
            )
            self._note_admitted(keys.queue, rules, admitted)
            self.receive_jobs(keys.queue, [rule for rule, _ in rules], admitted, requested_at)

    async def _count_waiting(self, keys: QueueKeys, tasks: Iterable[str]) -> Counter[str]:
        """Return how many jobs wait on a queue, of those tasks whose kind has a rate and may begin some now.

        So no more starts are taken than are used. Those without waiting jobs are not asked for again.
        """
        rules = [self._admission.get_rule(task) for task in tasks]
        now = trio.current_time()
        names = [
            rule.task
            for rule in rules
            if rule.needs_start
            and self._starts.get_next_time(rule.kind) <= now
            and self._admission.count_free_slots(self._admission.get_kind(rule.task))
        ]
        if not names:
            return Counter()
        counts = await self._redis.perform(limits.count_waiting(keys, names))
        self._wanted.discard(keys.queue, [task for task, count in counts.items() if not count])
        return Counter(counts)

    async def _take_starts(self, jobs: Counter[str]) -> tuple[Counter[str], float]:
        """Take starts of the rates of kinds for this many jobs of tasks, as far as there are free slots for them.

        Returns:
            The starts by kind, and the time from which the jobs that are requested now have to begin in time (seconds
            since 1970).
        """
        requested_at, wanted, rates = wall_time(), Counter[str](), dict[str, Rate]()
        for task, count in jobs.items():
            rule = self._admission.get_rule(task)
            if rule.needs_start and rule.kind_rate is not None:
                free = self._admission.count_free_slots(self._admission.get_kind(task))
                wanted[rule.kind] += min(count, free)
                rates[rule.kind] = rule.kind_rate
        starts = Counter[str]()
        for kind, want in wanted.items():
            starts[kind] = await self._starts.take(kind, rates[kind], want)
            requested_at = min(requested_at, self._starts.get_requested_at(kind))
        return starts, requested_at

    def _use_starts(self, rules: Iterable[AdmissionRule]) -> None:
        """Use a start for each job that was admitted, by the rule of its task."""
        for rule in rules:
            if rule.needs_start and rule.kind_rate is not None:
                self._starts.use(rule.kind, rule.kind_rate, 1)

    def plan_settlement(self, queue: str, settled: Sequence[Delivery]) -> list[tuple[AdmissionRule, int]]:
        """Return the rules of which waiting jobs are to be requested in the call that settles jobs of a queue.

        These are the tasks of the settled jobs, and others that have waiting jobs of the same kinds on that queue. If
        it is the turn of another queue, its jobs are requested by the next call.
        """
        tasks = dict.fromkeys(_get_task(delivery) for delivery in settled if delivery.command)
        kinds = {self._admission.get_kind(task) for task in tasks if task in self._tasks}
        rivals = self._wanted.get_rivals(queue, kinds)
        waiting = [task for task in self._wanted.get_tasks(queue) if self._admission.get_kind(task) in kinds]
        names = list({**tasks, **dict.fromkeys(waiting)})[:MAX_RULES_PER_CALL]
        planned = self._admission.plan_requests(queue, names, settled=settled)
        if not rivals:
            return planned
        for rule, want in planned:
            if want and self._admission.get_kind(rule.task) in rivals:
                self._wanted.add(queue, rule.task)
        return [
            (rule, 0 if self._admission.get_kind(rule.task) in rivals else want) for rule, want in planned
        ]

    def receive_settled(
        self,
        queue: str,
        rules: Sequence[tuple[AdmissionRule, int]],
        admitted: AdmittedJobs,
        requested_at: float,
    ) -> None:
        """Take the jobs that were admitted by the call that settled others, as `plan_settlement` requested them."""
        self._note_admitted(queue, rules, admitted)
        self.receive_jobs(queue, [rule for rule, _ in rules], admitted, requested_at)

    def _note_admitted(
        self, queue: str, rules: Sequence[tuple[AdmissionRule, int]], admitted: AdmittedJobs
    ) -> None:
        """Note which tasks have no more waiting jobs: those of which fewer came than were requested.

        Tasks without limits share what they request.
        """
        self._wanted.note_served(queue, sum(admitted.counts))
        missing = [want - got for (_, want), got in zip(rules, admitted.counts, strict=True)]
        in_order = [rule.is_empty for rule, _ in rules]
        missing_in_order = sum(left for left, is_shared in zip(missing, in_order, strict=True) if is_shared)
        self._wanted.discard(
            queue,
            [
                rule.task
                for (rule, _), left, is_shared in zip(rules, missing, in_order, strict=True)
                if (missing_in_order if is_shared else left) > 0
            ],
        )

    def _note_delays(self, queue: str, rules: Iterable[AdmissionRule], delays: Sequence[float]) -> None:
        for rule, delay in zip(rules, delays, strict=True):
            if delay:
                self._due[queue, rule.task] = trio.current_time() + delay + JUST_AFTER
                self._admission.notify()

    def _request(self, queue: str, task: str) -> None:
        name = unescape_word(task)
        if name in self._tasks:
            self._wanted.add(queue, name)
            self._admission.notify()

    def on_capacity(self) -> None:
        """Look for waiting jobs: one was settled, so there may be capacity."""
        if self._wanted:
            self._admission.notify()

    def _audit_new_connection(self) -> None:
        """Request an audit when the connection is new: a reply with admitted jobs may have been lost."""
        connects = self._redis.statistics().connects
        if connects != self._connects:
            self._connects = connects
            self._reading.request_audit()
            self._reading.interrupt()

    def _get_next_time(self) -> float:
        after = self._admission.yielding_until
        rules = [self._admission.get_rule(task) for task in self._wanted.get_all_tasks()]
        rated = [self._starts.get_next_time(rule.kind) + JUST_AFTER for rule in rules if rule.needs_start]
        now = trio.current_time()
        first = min([*self._due.values(), *(when for when in rated if when > now)], default=math.inf)
        return min(first, after) if self._wanted and after > trio.current_time() else first


def _get_task(delivery: Delivery) -> str:
    assert delivery.command is not None
    return delivery.command.task


def _count_begun(
    jobs: Sequence[Delivery],
    requests: Sequence[AdmissionRequest],
    outcomes: Sequence[int],
    rules: Mapping[str, AdmissionRule],
) -> list[AdmissionRule]:
    """Return the rules of the jobs that were admitted."""
    return [
        rules[_get_task(delivery)]
        for delivery, request, outcome in zip(jobs, requests, outcomes, strict=True)
        if request.mode == "run" and outcome == limits.ADMITTED
    ]


def _make_request(
    delivery: Delivery, rule: AdmissionRule, action: str, task: Task[..., Any]
) -> AdmissionRequest:
    command = delivery.command
    assert command is not None
    slot, turn = command.concurrency_key, command.fair_key
    if task.limits is not None:

        def arguments() -> tuple[Any, Any]:
            return task.parameters.decode(command.args, command.kwargs)

        slot, turn = task.limits.complete_keys(slot, turn, arguments)
    waiting_list = get_waiting_list(rule, slot, turn)
    return AdmissionRequest(
        delivery.entry,
        command.id,
        waiting_list,
        delivery.deliveries,
        format_expiry(command.expires),
        action,
    )
