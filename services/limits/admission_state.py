"""The admission rules of one worker's tasks, the jobs that await admission, and the count of admitted ones.

JobIntake adds jobs that need admission, AdmissionControl requests it from Redis, ResultPublisher reports settled jobs.
For a job of a task without a rule all of this is one look-up.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import count, takewhile
from types import MappingProxyType
from typing import Any

import trio

from celery5.broker.wall_clock import wall_time
from celery5.logs.log import Log
from celery5.protocol.cluster.canary_limit import CanaryLimit
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.limits import (
    KIND_PREFIX,
    AdmissionRule,
    LimitOverride,
    Range,
    Rate,
    Suspension,
    make_admission_rule,
)
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_type_name
from celery5.protocol.scaling.prefetch import HORIZON, DurationEstimate, count_ahead
from celery5.protocol.shards import get_queue_of_shard
from celery5.runners.user_errors import guard_scopes, reraise_cancellation
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RunningJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.reading_state import ReadingState
from celery5.services.limits.kind_rates import KindRates
from celery5.services.limits.waiting_tasks import WaitingTasks
from celery5.tasks.task import Task

AWAITING_ADMISSION = "awaiting-admission"
"""The kind under which the in-flight jobs count those that await admission."""
MAX_REQUESTED_JOBS = 32
"""The most jobs that a worker requests in one call: Redis does nothing else while it runs."""
YIELD_SECONDS = 0.01
"""Seconds in which only the Consumer takes jobs, when waiting jobs of limited tasks yield to it."""


class AdmissionState:
    """The admission rules of one worker, and its jobs under them."""

    _has_unreadable_queue = False
    yielding_until = 0.0
    """The time before which no jobs are to be taken from waiting lists."""
    _has_yielded = False
    _asked_at = 0.0
    """When the jobs that are taken now were requested (seconds since 1970); 0 when that is unknown."""
    is_used = False
    """Whether any job of this worker ever needed admission."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, InternalTasksQueue],
        duration_estimates: Mapping[str, DurationEstimate],
        budget: MaximalConcurrencyBudget,
        in_flight: InFlightJobs,
        isolated_jobs: IsolatedJobs,
        running_jobs: RunningJobs,
        reading: ReadingState,
        log: Log,
        kind_rates: Mapping[str, Rate],
        waiting_tasks: WaitingTasks,
        kind_starts: KindRates,
        canary_limit: CanaryLimit,
    ) -> None:
        self._kind_rates = kind_rates
        self._canary_limit = canary_limit
        self._tasks = tasks
        self._queues = queues
        self._duration_estimates = duration_estimates
        self._budget = budget
        self._in_flight = in_flight
        self._isolated_jobs = isolated_jobs
        self._log = log
        self._reading = reading
        self._overrides: Mapping[str, LimitOverride] = {}
        self._suspended: Mapping[str, Suspension] = {}
        self._computed: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._running_jobs = running_jobs
        self._changed_tasks: set[str] = set()
        # Only tasks that have a rule now, by name.
        self.rules: dict[str, AdmissionRule] = {}
        self.awaiting_admission: deque[Delivery] = deque()
        self.admitted: Counter[str] = Counter()
        """How many admitted jobs this worker holds, by kind."""
        self._changed = trio.Event()
        self._reserved: Counter[str] = Counter()
        self._last_served: dict[str, int] = {}
        """The turn in which each task was last requested; the larger, the later."""
        self._turns = count(1)
        self.waiting_tasks = waiting_tasks
        self.kind_starts = kind_starts
        self.saturated_kinds: AbstractSet[str] = frozenset()
        """The kinds whose jobs all go through admission, because this worker has too many of them: jobs that cannot
        start go to the waiting lists of their tasks, whether these have limits or not."""
        self.compute_limits()
        self._changed_tasks.clear()  # at the start, heartbeats report the tasks that have waiting jobs

    def get_queue(self, task: str) -> str:
        """Return the queue on which a task's limit is counted."""
        return self._tasks[task].queue

    def get_kind(self, task: str) -> str:
        """Return the kind whose slots a task's jobs take, or its name if it has its own budget."""
        return self._budget.get_name(self._tasks[task])

    def get_limited_kinds(self) -> set[str]:
        """Return the kinds of the tasks that have rules."""
        return {self.get_kind(task) for task in self.rules}

    def set_saturated_kinds(self, kinds: AbstractSet[str]) -> None:
        """Set the kinds whose jobs go through admission from now on."""
        self.saturated_kinds = kinds

    def compute_limits(self) -> None:
        """Compute the limits that are functions, and derive the rules."""
        for name, task in self._tasks.items():
            limit = task.declared_limits.limit if task.declared_limits else None
            if isinstance(limit, Range):
                try:
                    with guard_scopes():
                        self._computed[name] = limit.clamp(limit.compute())
                    self._failures.pop(name, None)
                except BaseException as error:  # the user's code
                    reraise_cancellation(error)
                    self._note_failure(name, limit, error)
        self._update_rules()

    def _note_failure(self, name: str, limit: Range, error: BaseException) -> None:
        """Log a failure once: again for another kind of error, or when the limit was computed in between."""
        stays, kind = self._computed.setdefault(name, limit.least), get_type_name(error)
        if self._failures.get(name) != kind:
            self._failures[name] = kind
            self._log.event(
                "limit:compute-failed",
                "error",
                task=name,
                stays=stays,
                why=describe_error(error, MAX_ERROR_LENGTH),
            )

    def set_overrides(
        self, overrides: Mapping[str, LimitOverride], suspended: Mapping[str, Suspension]
    ) -> None:
        """Set the limits and suspensions that operators or circuit breakers have imposed."""
        self._overrides, self._suspended = overrides, suspended
        self._update_rules()

    def notify(self) -> None:
        """Wake AdmissionControl: jobs wait for admission, or may be admitted now."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Wait for `notify`, also for one since the last call."""
        await self._changed.wait()
        self._changed = trio.Event()

    def take_changed_tasks(self) -> set[str]:
        """Return the tasks whose rules have changed since the last call."""
        tasks, self._changed_tasks = self._changed_tasks, set()
        return tasks

    def _update_rules(self) -> None:
        before, rules = dict(self.rules), dict[str, AdmissionRule]()
        for name, task in self._tasks.items():
            rule = make_admission_rule(
                name,
                task.declared_limits,
                computed=self._computed.get(name),
                override=self._overrides.get(name),
                suspended=name in self._suspended,
                kind=task.kind,
                kind_rate=self._find_kind_rate(task.kind),
            )
            if rule is not None:
                rules[name] = rule
        changed = {name for name in before.keys() | rules.keys() if before.get(name) != rules.get(name)}
        self.rules.clear()  # the dictionary stays: others hold it
        self.rules.update(rules)
        if changed:
            self._changed_tasks |= changed
            self._apply_rule_changes(changed)

    def _find_kind_rate(self, kind: str) -> Rate | None:
        """Return the rate of a kind of task: what operators have set, else what the setting says."""
        override = self._overrides.get(KIND_PREFIX + kind)
        return Rate(override.rate) if override is not None and override.rate else self._kind_rates.get(kind)

    def get_rule(self, task: str) -> AdmissionRule:
        """Return the rule of a task, or an empty one."""
        return self.rules.get(task) or AdmissionRule(task)

    def receive(self, delivery: Delivery, task: str) -> str:
        """Take a job of a task with a rule, or one that was admitted and has its slot.

        Returns:
            Why the job is rejected: the caller dead-letters it then. '' when it is taken.
        """
        rule, is_admitted, self.is_used = self.get_rule(task), delivery.is_admitted, True
        if is_admitted:
            delivery.take_slot(rule)
        if rule.rejects_all or not (is_admitted or self._is_on_counting_queue(delivery, rule)):
            self.admitted[delivery.kind] += is_admitted
            return self._explain_rejection(delivery, rule)
        if is_admitted:
            if rule.slack is not None:
                delivery.take_slot(rule, self._asked_at + rule.slack if self._asked_at else 1.0)
            self._in_flight.add(delivery)
            self.admit([delivery])
        else:
            delivery.set_kind(AWAITING_ADMISSION)
            self._in_flight.add(delivery)
            self.awaiting_admission.append(delivery)
            self.notify()
        return ""

    @contextmanager
    def receiving_since(self, asked_at: float) -> Generator[None]:
        """While this lasts, received jobs count as requested at `asked_at` (seconds since 1970)."""
        self._asked_at = asked_at
        try:
            yield
        finally:
            self._asked_at = 0.0

    def set_unreadable(self, has_unreadable_queue: bool) -> None:
        """Note whether there is a queue that the Consumer has no capacity to read."""
        self._has_unreadable_queue = has_unreadable_queue

    def _explain_rejection(self, delivery: Delivery, rule: AdmissionRule) -> str:
        if rule.rejects_all:
            return f"the limit of {rule.task} is 0"
        return (
            f"the limit of {rule.task} is counted on queue {self.get_queue(rule.task)!r}, and "
            f"this is {delivery.queue!r}"
        )

    def _is_on_counting_queue(self, delivery: Delivery, rule: AdmissionRule) -> bool:
        """Return whether the limit is counted on the queue of the job. An imposed limit is counted on each queue.

        Each shard counts a limit separately: a job is sent to the shard that counts its limit.
        """
        limits = self._tasks[rule.task].limits
        if limits is None or rule.suspended or delivery.queue == self.get_queue(rule.task):
            return True
        return get_queue_of_shard(delivery.queue) == self.get_queue(rule.task)

    def admit(self, deliveries: Iterable[Delivery]) -> None:
        """Queue jobs that have slots: those whose slots are scarce before all others."""
        for delivery in deliveries:
            self.admitted[delivery.kind] += 1
            if delivery.deliveries < self._isolated_jobs.min_deaths:
                queue = self._queues[delivery.kind]
                if delivery.rule is None or delivery.rule.is_empty:
                    queue.put(delivery)
                else:
                    queue.insert_at(sum(1 for _ in takewhile(_has_scarce_slot, queue.items)), delivery)
            else:
                self._isolated_jobs.add(delivery)

    def assume_slot(self, delivery: Delivery, task: str) -> None:
        """Record a slot that a call with a lost reply may have taken for this job. Settling the job frees it."""
        delivery.take_slot(self.get_rule(task))
        self.admitted[delivery.kind] += 1

    def on_settled(self, deliveries: Iterable[Delivery]) -> None:
        """Note that jobs were settled."""
        for delivery in deliveries:
            if delivery.rule is not None and delivery.kind:
                self.admitted[delivery.kind] -= 1

    def count_free_slots(self, kind: str, *, leaving: int = 0, in_order: bool = False) -> int:
        """Return how many more jobs of one kind would begin at once, after `leaving` admitted ones were settled.

        Where jobs are short, those that wait in this worker without a slot do not count, since admitted ones go first;
        but they do while the kind is saturated, since then all others are admitted, too. Jobs without limits, which
        are admitted in order, are taken for slots that the kind does not have yet: they make its budget grow.
        """
        is_saturated, mean = kind in self.saturated_kinds, self._duration_estimates[kind].mean
        count_slots = (
            self._budget.get_prefetch_slots if in_order and is_saturated else self._budget.get_usable_slots
        )
        slots, taken = count_slots(kind), self._in_flight.count(kind)
        if mean is not None and mean < HORIZON:
            slots += count_ahead(slots, mean) // 2
            taken = taken if is_saturated else self.admitted[kind]
        begun = len(self._in_flight) - self._in_flight.count(AWAITING_ADMISSION) + self._reserved.total()
        free_of_canary = self._canary_limit.count_free(begun - leaving)
        return int(max(min(slots - taken - self._reserved[kind] + leaving, free_of_canary), 0))

    @contextmanager
    def reserving_slots(self, rules: Iterable[tuple[AdmissionRule, int]]) -> Generator[None]:
        """While this lasts, keep capacity for the jobs that are requested from Redis."""
        reserved = Counter({self.get_kind(rule.task): want for rule, want in rules if not rule.rejects_all})
        self._reserved += reserved
        try:
            yield
        finally:
            self._reserved -= reserved

    def plan_requests(
        self,
        queue: str,
        tasks: Iterable[str],
        *,
        settled: Iterable[Delivery] = (),
        starts: Mapping[str, int] = MappingProxyType({}),
    ) -> list[tuple[AdmissionRule, int]]:
        """Return the rules of tasks, and how many jobs of each to request from a queue once `settled` are gone.

        Tasks of one kind share the capacity evenly, and the `starts` that were taken of the rate of their kind.
        """
        leaving_by_kind = Counter(delivery.kind for delivery in settled if delivery.rule is not None)
        names = [name for name in tasks if name in self._tasks]
        kinds = {self.get_kind(name) for name in names}
        if self._reading.is_closed(queue) or self._yields(leaving_by_kind):
            return [(self.get_rule(name), 0) for name in names]
        free, free_in_order = (
            {
                kind: self.count_free_slots(kind, leaving=leaving_by_kind[kind], in_order=in_order)
                for kind in kinds
            }
            for in_order in (False, True)
        )
        shares = self._share_out(names, free, free_in_order, Counter(starts))
        return [(self.get_rule(name), shares[name]) for name in names]

    def _share_out(
        self,
        names: Iterable[str],
        free: dict[str, int],
        free_in_order: dict[str, int],
        starts: Counter[str],
    ) -> Counter[str]:
        """Return how many jobs of each task to request: one of each in turn, up to MAX_REQUESTED_JOBS and what is free.

        These are `free` slots by kind, `free_in_order` for tasks without limits, and `starts` where the kind has a
        rate. The task that was served longest ago is first, so that what does not divide evenly goes to each of them in
        turn. A job that will be rejected takes no slot and no start.
        """
        shares = Counter[str]()
        waiting_tasks = deque(sorted(names, key=lambda name: (self._last_served.get(name, 0), name)))
        while waiting_tasks and shares.total() < MAX_REQUESTED_JOBS:
            name = waiting_tasks.popleft()
            rule, kind = self.get_rule(name), self.get_kind(name)
            available = free_in_order if rule.is_empty else free
            if rule.suspended or not (rule.rejects_all or available[kind] > 0):
                continue
            if rule.needs_start:
                if not starts[rule.kind]:
                    continue
                starts[rule.kind] -= 1
            free[kind] -= not rule.rejects_all
            free_in_order[kind] -= not rule.rejects_all
            shares[name] += 1
            self._last_served[name] = next(self._turns)
            waiting_tasks.append(name)
        return shares

    def _yields(self, leaving_by_kind: Counter[str]) -> bool:
        """Return whether the capacity that is free now is for jobs without limits.

        It is every second time, while the Consumer has no capacity to read some queue. Else waiting jobs of limited
        tasks would keep all others from running.
        """
        self._has_yielded = bool(leaving_by_kind) and self._has_unreadable_queue and not self._has_yielded
        if self._has_yielded:
            self.yielding_until = trio.current_time() + YIELD_SECONDS
        return self._has_yielded

    def _apply_rule_changes(self, tasks: set[str]) -> None:
        """Apply changed rules of tasks: jobs that wait for an executor await admission, running ones take a slot."""
        for queue in self._queues.values():
            for delivery in [item for item in queue.items if _task_of(item) in tasks]:
                rule = self.rules.get(_task_of(delivery))
                if rule is None or (delivery.rule is not None and not rule.suspended):
                    continue
                queue.remove(delivery)
                self.on_settled([delivery])
                delivery.lose_slot()
                self._in_flight.change_kind(delivery, AWAITING_ADMISSION)
                self.awaiting_admission.append(delivery)
        for delivery in list(self._running_jobs):
            rule = self.rules.get(_task_of(delivery)) if _task_of(delivery) in tasks else None
            if rule is not None and delivery.rule is None:
                delivery.take_slot(rule)
                self.is_used = True
                self.admitted[delivery.kind] += 1
                self.awaiting_admission.append(delivery)
        self.notify()


def _task_of(delivery: Delivery) -> str:
    return delivery.command.task if delivery.command else ""


def _has_scarce_slot(delivery: Delivery) -> bool:
    return delivery.rule is not None and not delivery.rule.is_empty


def is_expired(delivery: Delivery) -> bool:
    """Return whether a job must not be started any more."""
    command = delivery.command
    return command is not None and command.expires is not None and command.expires <= wall_time()
