"""Gates: asks Redis who may pass, and takes out of the waiting rooms whom there is room for (C94, C101, I8).

What may not run now waits in Redis, so this worker asks for it only when it could run: when a slot has become
free, or
room in the worker, or when the next one may begin by its rate. Who frees a slot is handed the next job in the same trip
(`settle_limited.lua`); this service is for all other cases.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import trio

from celery5.broker.calls import limits
from celery5.broker.calls.jobs import HeartbeatReply
from celery5.broker.calls.limits import AdmissionReply, AdmissionRequest, AdmittedJobs
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import JOB_EXPIRED, JOB_REVOKED, JobExpired, JobRevoked, Release
from celery5.protocol.limits import AdmissionRule, format_expiry, get_waiting_list, unescape_word
from celery5.services.limits.admission_state import AdmissionState, is_expired
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.worker.intake import ReceivedJobs
from celery5.services.worker.judgement import OutcomeHandler
from celery5.services.worker.lease import WorkerIdentity
from celery5.services.worker.reading import ReadingState
from celery5.tasks.task import Task

ADMISSION_BATCH = 64
"""The most jobs in one trip to the gates: Redis does nothing else meanwhile."""
AGAIN = 0.1
"""Seconds between attempts while TrioRedis is away."""
MAX_RULES_PER_CALL = 32
"""Tasks whose jobs are asked for in one trip."""
JUST_AFTER = 0.002
"""Seconds after its time that the next one of a rate is asked for."""

T = TypeVar("T")
QueueTask = tuple[str, str]
"""A queue and a task that has jobs in its waiting room."""


class AdmissionControl:
    """The gates of the tasks of one worker."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        redis: TrioRedis,
        tasks: Mapping[str, Task[..., Any]],
        admission: AdmissionState,
        received: ReceivedJobs,
        reading: ReadingState,
        outcome_handler: OutcomeHandler,
        log: Log,
    ) -> None:
        self._redis = redis
        self._consumed: Mapping[str, QueueKeys] = {keys.queue: keys for keys in identity.consumed}
        self._channels = {keys.slots_freed.encode(): keys.queue for keys in identity.consumed}
        self._tasks = tasks
        self._turnstile = admission
        self._running = received.held.running_jobs
        self._ledger = received.held.in_flight
        self._recent = received.held.recent
        self._intake = received.intake
        self._unstarted = received.unstarted
        self._reading = reading
        self._judgement = outcome_handler
        self._lease = identity.lease
        self._log = log
        self._worker = identity.worker
        self._waits = OutageLog(log, "admission:interrupted", "admission:resumed")
        self._connects = 1
        self._wanted: set[QueueTask] = set()
        self._due: dict[QueueTask, float] = {}
        admission.add_listener(self._changed)
        self._ledger.add_listener(self._look)

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.slots_freed for keys in self._consumed.values()]

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """Somebody may go on who waits at the gate of that task."""
        self._want(self._channels[channel], payload.decode(errors="replace"))

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """At each beat of the heart: jobs of these tasks wait, of which we may not have heard. And it is time to work
        out the limits that are computed."""
        for task in pulse.limited_tasks:
            self._want(keys.queue, task)
        if keys.queue == next(iter(self._consumed)):
            self._turnstile.compute_limits()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask and take until cancelled. Raises LeaseLost when this worker counts as dead. What is on the way to a gate
        then goes back to its queue."""
        task_status.started()
        try:
            while True:
                with trio.move_on_at(self._next()):
                    await self._turnstile.changed.wait()
                await retry_until_available(self._request_and_admit, self._waits, AGAIN)
        finally:
            self.release_unadmitted()

    async def _request_and_admit(self) -> None:
        self._turnstile.changed = trio.Event()
        await self.request_admission()
        await self.admit_waiting()

    def release_unadmitted(self) -> None:
        """Release what is on the way to a gate."""
        while self._turnstile.awaiting_admission:
            delivery = self._turnstile.awaiting_admission.popleft()
            if delivery.rule is None:
                self._may_have_a_slot(delivery)
                self._unstarted.settle(delivery, Release())

    async def request_admission(self) -> None:
        """Ask for all who have come to a gate whether they may pass."""
        while self._turnstile.awaiting_admission:
            queue = self._turnstile.awaiting_admission[0].queue
            jobs = [each for each in self._turnstile.awaiting_admission if each.queue == queue][
                :ADMISSION_BATCH
            ]
            await self._ask(self._consumed[queue], jobs)

    async def admit_waiting(self) -> None:
        """Take out of the waiting rooms what there is room for."""
        now = trio.current_time()
        for place, when in list(self._due.items()):
            if when <= now:
                del self._due[place]
                self._wanted.add(place)
        if self._turnstile.yielding_until > now:
            return
        for queue in {queue for queue, _ in self._wanted}:
            await self._pull(self._consumed[queue])

    def receive_jobs(
        self, queue: str, rules: Iterable[AdmissionRule], handed: AdmittedJobs, asked: float
    ) -> None:
        """Redis has handed jobs to this worker, which it asked for at that time (seconds since 1970)."""
        self._note_waits(queue, rules, handed.delays)
        if handed.entries:
            with self._turnstile.receiving_since(asked):
                self._intake.accept_new(handed.entries)
        self._look_for_lost()

    async def _ask(self, keys: QueueKeys, jobs: Sequence[Delivery]) -> None:
        gone = [each for each in jobs if each.rule is None and is_expired(each)]
        jobs = [each for each in jobs if each not in gone]
        rules = {task: self._turnstile.get_rule(task) for task in {_task(each) for each in jobs}}
        for each in jobs:
            # Before the trip, not after: it may come again by another connection.
            self._recent.forget(each)
        asked, fates = time.time(), list[int]()
        if jobs:
            words = self._words(keys.queue, jobs, rules)
            call = limits.admit(keys, self._worker, words, [(rule, 0) for rule in rules.values()])
            admitted = await self._redis.perform(call)
            fates = self._read(keys.queue, rules.values(), admitted)
        done = {*jobs, *gone}
        kept = [each for each in self._turnstile.awaiting_admission if each not in done]
        self._turnstile.awaiting_admission.clear()
        self._turnstile.awaiting_admission.extend(kept)
        for each in gone:
            self._end(each, JOB_EXPIRED)
        self._sort(jobs, fates, rules, asked)
        self._look_for_lost()

    def _words(
        self, queue: str, jobs: Sequence[Delivery], rules: Mapping[str, AdmissionRule]
    ) -> list[AdmissionRequest]:
        """What is asked for each: to run, as long as there is room for that, else to wait."""
        room: dict[str, int] = {}
        words: list[AdmissionRequest] = []
        for each in jobs:
            rule, kind = rules[_task(each)], self._tasks[_task(each)].kind
            if kind not in room:
                room[kind] = 0 if self._reading.is_closed(queue) else self._turnstile.count_free_slots(kind)
            left = room[kind]
            how = "count" if each.rule is not None else "run" if left and not rule.suspended else "wait"
            room[kind] -= how == "run"
            if how == "wait" and not rule.suspended:
                self._wanted.add((queue, rule.task))
            words.append(_asked(each, rule, how, self._tasks[rule.task]))
        return words

    def _read(self, queue: str, rules: Iterable[AdmissionRule], admitted: AdmissionReply) -> list[int]:
        if admitted.outcomes is None:
            raise self._lease.mark_lost(f"{self._worker} was taken for dead; its jobs were given to others")
        self._note_waits(queue, rules, admitted.delays)
        return admitted.outcomes

    def _sort(
        self, jobs: Sequence[Delivery], fates: Sequence[int], rules: Mapping[str, AdmissionRule], asked: float
    ) -> None:
        """Each goes where TrioRedis said."""
        through: list[Delivery] = []
        for each, fate in zip(jobs, fates, strict=True):
            if each.rule is not None:  # it has begun, and is counted from now on
                continue
            if fate == limits.ADMITTED:
                through.append(each)
                self._let_in(each, rules[_task(each)], asked)
            elif fate == limits.REVOKED:
                self._end(each, JOB_REVOKED)
            else:
                self._ledger.remove([each])
        self._turnstile.admit(through)

    def _let_in(self, delivery: Delivery, rule: AdmissionRule, asked: float) -> None:
        self._ledger.change_kind(delivery, self._tasks[rule.task].kind)
        if delivery.envelope is not None:
            self._recent.check_and_add(delivery, delivery.envelope)
        delivery.take_slot(rule, 0.0 if rule.rate is None else asked + rule.rate.slack)

    def _end(self, delivery: Delivery, outcome: JobExpired | JobRevoked) -> None:
        delivery.finish(time.time())
        self._may_have_a_slot(delivery)
        self._judgement.handle_outcome(delivery, outcome)

    def _may_have_a_slot(self, delivery: Delivery) -> None:
        """It was perhaps given one by an answer that was lost: settled with its rule, it leaves none behind."""
        delivery.take_slot(self._turnstile.get_rule(_task(delivery)))
        self._turnstile.admitted[delivery.kind] += 1

    async def _pull(self, keys: QueueKeys) -> None:
        """Take jobs out of the waiting rooms of one queue, as long as there are some and room for them."""
        while True:
            tasks = [task for queue, task in self._wanted if queue == keys.queue]
            rules = [(rule, want) for rule, want in self._turnstile.plan_requests(keys.queue, tasks) if want]
            self._wanted -= {(keys.queue, task) for task in tasks if self._turnstile.get_rule(task).suspended}
            rules = [each for each in rules if not each[0].suspended][:MAX_RULES_PER_CALL]
            if not rules:
                return
            asked = time.time()
            with self._turnstile.reserving_slots(rules):
                handed = await self._redis.perform(limits.admit_waiting(keys, self._worker, rules))
            if handed.owned == limits.LEASE_LOST:
                raise self._lease.mark_lost(
                    f"{self._worker} was taken for dead; its jobs were given to others"
                )
            for (rule, want), count in zip(rules, handed.counts, strict=True):
                if count < want:
                    self._wanted.discard((keys.queue, rule.task))
            self.receive_jobs(keys.queue, [rule for rule, _ in rules], handed, asked)

    def _note_waits(self, queue: str, rules: Iterable[AdmissionRule], waits: Sequence[float]) -> None:
        for rule, wait in zip(rules, waits, strict=True):
            if wait:
                self._due[queue, rule.task] = trio.current_time() + wait + JUST_AFTER
                self._turnstile.changed.set()

    def _want(self, queue: str, task: str) -> None:
        name = unescape_word(task)
        if name in self._tasks:
            self._wanted.add((queue, name))
            self._turnstile.changed.set()

    def _changed(self, tasks: set[str]) -> None:
        """The rules of these tasks have changed: who waits may perhaps go on."""
        self._wanted |= {(queue, task) for queue in self._consumed for task in tasks}
        self._turnstile.apply_rule_changes(tasks, list(self._running))

    def _look(self) -> None:
        """Something was settled: there may be room."""
        if self._wanted:
            self._turnstile.changed.set()

    def _look_for_lost(self) -> None:
        """The connection was made anew: an answer may have been lost, and with it what was handed to this worker."""
        connects = self._redis.statistics().connects
        if connects != self._connects:
            self._connects = connects
            self._reading.request_audit()
            self._reading.interrupt()

    def _next(self) -> float:
        after = self._turnstile.yielding_until
        first = min(self._due.values(), default=math.inf)
        return min(first, after) if self._wanted and after > trio.current_time() else first


def _task(delivery: Delivery) -> str:
    assert delivery.envelope is not None
    return delivery.envelope.task


def _asked(delivery: Delivery, rule: AdmissionRule, how: str, task: Task[..., Any]) -> AdmissionRequest:
    envelope = delivery.envelope
    assert envelope is not None
    slot, turn = envelope.concurrency_key, envelope.fair_key
    if task.limits is not None:

        def arguments() -> tuple[Any, Any]:
            return task.parameters.decode(envelope.args, envelope.kwargs)

        slot, turn = task.limits.complete_keys(slot, turn, arguments)
    line = get_waiting_list(rule, slot, turn)
    return AdmissionRequest(
        delivery.entry, envelope.id, line, delivery.deliveries, format_expiry(envelope.expires), how
    )
