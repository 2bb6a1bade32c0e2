"""Turnstile: what this worker knows of gates: the rule of each task that has one, who is on the way to a gate, and who
has come through.

The Consumer sends to it whoever has to pass a gate, the Gates service asks Redis for them, the Result Publisher says
who has left. A task without a rule is looked for here, not found, and goes its way.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import count, takewhile

import trio

from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.states import ADMITTED
from celery5.protocol.limits import AdmissionRule, LimitOverride, Range, Suspension, make_admission_rule
from celery5.protocol.scaling.prefetch import HORIZON, count_ahead
from celery5.services.worker.in_flight import HeldJobs
from celery5.services.worker.reading import ReadingState
from celery5.services.worker.resources import TaskResources

AWAITING_ADMISSION = "gate"
"""The kind under which the ledger counts who is on the way to a gate."""
MAX_REQUESTED_JOBS = 32
"""Jobs that a worker asks for in one trip: Redis does nothing else meanwhile."""
A_MOMENT = 0.01
"""Seconds that the Consumer has for itself when those at gates give way."""


class AdmissionState:
    """The gates of one worker. `rules` has those of the tasks that have one now, by the tasks' names."""

    _has_unreadable_queue = False
    yielding_until = 0.0
    """The time before which nobody is to be taken out of a waiting room."""
    _gave_way = False
    _asked_at = 0.0
    """When Redis was asked for what is taken now; 0 when nobody knows."""
    is_used = False
    """Whether any job of this worker ever had to do with a gate."""

    def __init__(
        self,
        *,
        resources: TaskResources,
        held: HeldJobs,
        reading: ReadingState,
        log: Log,
    ) -> None:
        self._tasks = resources.tasks
        self._queues = resources.queues
        self._paces = resources.duration_estimates
        self._budget = resources.budget
        self._ledger = held.in_flight
        self._suspects = held.isolated_jobs
        self._log = log
        self._reading = reading
        self._imposed: Mapping[str, LimitOverride] = {}
        self._suspended: Mapping[str, Suspension] = {}
        self._computed: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        self._followers: list[Callable[[set[str]], None]] = []
        self.rules: dict[str, AdmissionRule] = {}
        self.awaiting_admission: deque[Delivery] = deque()
        self.admitted: Counter[str] = Counter()
        """How many have come through, by kind."""
        self.changed = trio.Event()
        self._promised: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        """The turn in which each task was last asked for; the larger, the later."""
        self._serving = count(1)
        self.compute_limits()

    def get_queue(self, task: str) -> str:
        """The queue on which a task's limit is counted."""
        return self._tasks[task].queue

    def compute_limits(self) -> None:
        """Work out the limits that are computed, and the rules."""
        for name, task in self._tasks.items():
            limit = task.limits.declared.limit if task.limits else None
            if isinstance(limit, Range):
                try:
                    self._computed[name] = limit.clamp(limit.compute())
                    self._faults.pop(name, None)
                except Exception as error:  # the user's code
                    self._not_computed(name, limit, error)
        self._work_out()

    def _not_computed(self, name: str, limit: Range, error: Exception) -> None:
        """Said once for each fault: until it is another kind of error, or the limit was computed in between."""
        stays, kind = self._computed.setdefault(name, limit.least), type(error).__name__
        if self._faults.get(name) != kind:
            self._faults[name] = kind
            self._log.event("limit:compute-failed", "error", task=name, stays=stays, why=f"{kind}: {error}")

    def set_overrides(
        self, overrides: Mapping[str, LimitOverride], suspended: Mapping[str, Suspension]
    ) -> None:
        """This is what was imposed from outside."""
        self._imposed, self._suspended = overrides, suspended
        self._work_out()

    def add_listener(self, callback: Callable[[set[str]], None]) -> None:
        """Have `follower` called with the tasks whose rules have changed."""
        self._followers.append(callback)

    def _work_out(self) -> None:
        before, rules = dict(self.rules), dict[str, AdmissionRule]()
        for name, task in self._tasks.items():
            rule = make_admission_rule(
                name,
                task.limits.declared if task.limits else None,
                computed=self._computed.get(name),
                override=self._imposed.get(name),
                suspended=name in self._suspended,
            )
            if rule is not None:
                rules[name] = rule
        changed = {name for name in before.keys() | rules.keys() if before.get(name) != rules.get(name)}
        self.rules.clear()  # the dictionary stays: others hold it
        self.rules.update(rules)
        for tell in self._followers if changed else ():
            tell(changed)

    def get_rule(self, task: str) -> AdmissionRule:
        """The rule of a task, or one that says nothing."""
        return self.rules.get(task) or AdmissionRule(task)

    def receive(self, delivery: Delivery, task: str) -> str:
        """A job of a task with a rule was read, or one was handed over, which has its slot. Gives why it is rejected:
        then whoever read it buries it. '' when it is not."""
        rule, handed, self.is_used = self.get_rule(task), delivery.lane == ADMITTED, True
        if handed:
            delivery.take_slot(rule)
        if rule.rejects_all or not (handed or self._is_home(delivery, rule)):
            self.admitted[delivery.kind] += handed
            return self._why_not(delivery, rule)
        if handed:
            if rule.rate is not None:
                delivery.take_slot(rule, self._asked_at + rule.rate.slack if self._asked_at else 1.0)
            self._ledger.add(delivery)
            self.admit([delivery])
        else:
            delivery.set_kind(AWAITING_ADMISSION)
            self._ledger.add(delivery)
            self.awaiting_admission.append(delivery)
            self.changed.set()
        return ""

    @contextmanager
    def receiving_since(self, asked_at: float) -> Generator[None]:
        """While this lasts, jobs are received that Redis was asked for at that time (seconds since 1970)."""
        self._asked_at = asked_at
        try:
            yield
        finally:
            self._asked_at = 0.0

    def set_unreadable(self, has_unreadable_queue: bool) -> None:
        """Note whether there is a queue that the Consumer has no capacity to read."""
        self._has_unreadable_queue = has_unreadable_queue

    def _why_not(self, delivery: Delivery, rule: AdmissionRule) -> str:
        if rule.rejects_all:
            return f"the limit of {rule.task} is 0"
        return (
            f"the limit of {rule.task} is counted on queue {self.get_queue(rule.task)!r}, and "
            f"this is {delivery.queue!r}"
        )

    def _is_home(self, delivery: Delivery, rule: AdmissionRule) -> bool:
        """Whether a job is where its limit is counted. One that was imposed is counted on each queue by itself."""
        gated = self._tasks[rule.task].limits
        return gated is None or rule.suspended or delivery.queue == self.get_queue(rule.task)

    def admit(self, deliveries: Iterable[Delivery]) -> None:
        """These have slots, so they go before all others."""
        for delivery in deliveries:
            self.admitted[delivery.kind] += 1
            if delivery.deliveries < self._suspects.min_deaths:
                queue = self._queues[delivery.kind]
                queue.insert_at(sum(1 for _ in takewhile(_has_slot, queue.items)), delivery)
            else:
                self._suspects.add(delivery)

    def on_settled(self, deliveries: Iterable[Delivery]) -> None:
        """These are settled."""
        for delivery in deliveries:
            if delivery.rule is not None and delivery.kind:
                self.admitted[delivery.kind] -= 1

    def count_free_slots(self, kind: str, *, leaving: int = 0) -> int:
        """How many jobs more of one kind would begin at once, if `without` so many of those that have come through.
        Those that wait here without a slot are no hindrance where jobs are short: they are passed."""
        slots, mean = self._budget.get_slots(kind), self._paces[kind].mean
        if mean is None or mean >= HORIZON:
            taken = self._ledger.count(kind)
        else:
            slots, taken = slots + count_ahead(slots, mean) // 2, self.admitted[kind]
        return max(slots - taken - self._promised[kind] + leaving, 0)

    @contextmanager
    def reserving_slots(self, rules: Iterable[tuple[AdmissionRule, int]]) -> Generator[None]:
        """While this lasts Redis is asked to hand so many jobs to this worker: the room is theirs."""
        promised = Counter(
            {self._tasks[rule.task].kind: want for rule, want in rules if not rule.rejects_all}
        )
        self._promised += promised
        try:
            yield
        finally:
            self._promised -= promised

    def plan_requests(
        self, queue: str, tasks: Iterable[str], *, settled: Iterable[Delivery] = ()
    ) -> list[tuple[AdmissionRule, int]]:
        """The rules of tasks, and how many jobs of each are wanted of a queue once those that `left` are gone. Tasks of
        one kind share the room evenly."""
        gone = Counter(delivery.kind for delivery in settled if delivery.rule is not None)
        names = [name for name in tasks if name in self._tasks]
        kinds = {self._tasks[name].kind for name in names}
        if self._reading.is_closed(queue) or self._gives_way(gone):
            return [(self.get_rule(name), 0) for name in names]
        shares = self._share_out(
            names, {kind: self.count_free_slots(kind, leaving=gone[kind]) for kind in kinds}
        )
        return [(self.get_rule(name), shares[name]) for name in names]

    def _share_out(self, names: Iterable[str], free: dict[str, int]) -> Counter[str]:
        """Return how many jobs of each task to ask for: one of each in turn until MAX_REQUESTED_JOBS or the `free`
        slots of
        their kinds are spent. The task that got its last one longest ago is first, so that what does not divide evenly
        goes to each of them in turn. What is rejected takes no slot."""
        shares = Counter[str]()
        asking = deque(sorted(names, key=lambda name: (self._served.get(name, 0), name)))
        while asking and shares.total() < MAX_REQUESTED_JOBS:
            name = asking.popleft()
            rule, kind = self.get_rule(name), self._tasks[name].kind
            if rule.suspended or not (rule.rejects_all or free[kind]):
                continue
            free[kind] -= not rule.rejects_all
            shares[name] += 1
            self._served[name] = next(self._serving)
            asking.append(name)
        return shares

    def _gives_way(self, gone: Counter[str]) -> bool:
        """Whether the room that is free now is for those without a gate: where the Consumer has none to read for, every
        other time. Else who waits at gates would keep all others from running."""
        self._gave_way = bool(gone) and self._has_unreadable_queue and not self._gave_way
        if self._gave_way:
            self.yielding_until = trio.current_time() + A_MOMENT
        return self._gave_way

    def apply_rule_changes(self, tasks: set[str], active: Iterable[Delivery]) -> None:
        """The rules of these tasks have changed: what waits here for an executor comes to the gate, what has begun
        without a slot takes one."""
        for queue in self._queues.values():
            for delivery in [each for each in queue.items if _task_of(each) in tasks]:
                rule = self.rules.get(_task_of(delivery))
                if rule is None or (delivery.rule is not None and not rule.suspended):
                    continue
                queue.remove(delivery)
                self.on_settled([delivery])
                delivery.lose_slot()
                self._ledger.change_kind(delivery, AWAITING_ADMISSION)
                self.awaiting_admission.append(delivery)
        for delivery in active:
            rule = self.rules.get(_task_of(delivery)) if _task_of(delivery) in tasks else None
            if rule is not None and delivery.rule is None:
                delivery.take_slot(rule)
                self.is_used = True
                self.admitted[delivery.kind] += 1
                self.awaiting_admission.append(delivery)
        self.changed.set()


def _task_of(delivery: Delivery) -> str:
    return delivery.envelope.task if delivery.envelope else ""


def _has_slot(delivery: Delivery) -> bool:
    return delivery.rule is not None


def is_expired(delivery: Delivery) -> bool:
    """Whether a job must not be begun any more."""
    envelope = delivery.envelope
    return envelope is not None and envelope.expires is not None and envelope.expires <= time.time()
