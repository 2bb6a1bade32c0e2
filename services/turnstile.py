"""Turnstile: what this worker knows of gates: the rule of each task that has one, who is on the way to a gate, and who
has come through.

Floor: services. Reads: nothing. Writes: the Internal Tasks Queues.

The Consumer sends to it whoever has to pass a gate, the Gates service asks Redis for them, the Result Publisher says
who has left. A task without a rule is looked for here, not found, and goes its way.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any

import trio

from celery5.broker.calls import Entry
from celery5.broker.gating import Handed
from celery5.log import Log
from celery5.protocol.delivery import Delivery
from celery5.protocol.lanes import HANDED
from celery5.protocol.limits import Imposed, Range, Rule, Suspension, rule_for
from celery5.protocol.prefetch import HORIZON, Pace, ahead
from celery5.protocol.verdict import Release
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.internal_queues import TasksQueue
from celery5.services.ledger import Ledger
from celery5.services.suspects import Suspects
from celery5.task import Task

GATE = "gate"
"""The kind under which the ledger counts who is on the way to a gate."""
MOST_AT_ONCE = 32
"""Jobs that a worker asks for in one trip: Redis does nothing else meanwhile."""
A_MOMENT = 0.01
"""Seconds that the Consumer has for itself when those at gates give way."""


class Turnstile:
    """The gates of one worker. `rules` has those of the tasks that have one now, by the tasks' names."""

    crowded = False
    """Whether there is a queue that the Consumer has no room to read."""
    after = 0.0
    """The time before which nobody is to be taken out of a waiting room."""
    _gave_way = False
    asked = 0.0
    """When Redis was asked for what is taken now; 0 when nobody knows."""
    used = False
    """Whether any job of this worker ever had to do with a gate."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, TasksQueue],
        paces: Mapping[str, Pace],
        budget: ConcurrencyBudget,
        ledger: Ledger,
        suspects: Suspects,
        log: Log,
        default_queue: str,
    ) -> None:
        self._tasks = tasks
        self._queues = queues
        self._paces = paces
        self._budget = budget
        self._ledger = ledger
        self._suspects = suspects
        self._log = log
        self._default_queue = default_queue
        self._imposed: Mapping[str, Imposed] = {}
        self._suspended: Mapping[str, Suspension] = {}
        self._computed: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        self._followers: list[Callable[[set[str]], None]] = []
        self.rules: dict[str, Rule] = {}
        self.coming: deque[Delivery] = deque()
        self.inside: Counter[str] = Counter()
        """How many have come through, by kind."""
        self.news = trio.Event()
        self.closed: Callable[[str], bool] = lambda _queue: False
        """Whether this worker takes no jobs of a queue now."""
        self.take: Callable[[Sequence[Entry]], object] = lambda _entries: None
        """Takes jobs that were handed to this worker."""
        self.handed: Callable[[str, Sequence[Rule], Handed, float], None] = (
            lambda _queue, _rules, _handed, _asked: None
        )
        """Hears what a gate has answered."""
        self.settle: Callable[[Delivery, Release], None] = lambda _delivery, _verdict: None
        """Gives a job back."""
        self.look_again: Callable[[], None] = lambda: None
        """Something may have been handed to this worker whose answer was lost."""
        self._promised: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        """The turn in which each task was last asked for; the larger, the later."""
        self._serving = count(1)
        self.compute()

    def home(self, task: str) -> str:
        """The queue on which a task's limit is counted."""
        return self._tasks[task].queue

    def compute(self) -> None:
        """Work out the limits that are computed, and the rules."""
        for name, task in self._tasks.items():
            limit = task.gated.gate.limit if task.gated else None
            if isinstance(limit, Range):
                try:
                    self._computed[name] = limit.within(limit.compute())
                    self._faults.pop(name, None)
                except Exception as error:  # the user's code
                    self._not_computed(name, limit, error)
        self._work_out()

    def _not_computed(self, name: str, limit: Range, error: Exception) -> None:
        """Said once for each fault: until it is another kind of error, or the limit was computed in between."""
        stays, kind = self._computed.setdefault(name, limit.least), type(error).__name__
        if self._faults.get(name) != kind:
            self._faults[name] = kind
            self._log.event("limit:not-computed", "error", task=name, stays=stays, why=f"{kind}: {error}")

    def impose(self, limits: Mapping[str, Imposed], suspended: Mapping[str, Suspension]) -> None:
        """This is what was imposed from outside."""
        self._imposed, self._suspended = limits, suspended
        self._work_out()

    def follow(self, follower: Callable[[set[str]], None]) -> None:
        """Have `follower` called with the tasks whose rules have changed."""
        self._followers.append(follower)

    def _work_out(self) -> None:
        before, rules = dict(self.rules), dict[str, Rule]()
        for name, task in self._tasks.items():
            rule = rule_for(
                name,
                task.gated.gate if task.gated else None,
                computed=self._computed.get(name),
                imposed=self._imposed.get(name),
                suspended=name in self._suspended,
            )
            if rule is not None:
                rules[name] = rule
        changed = {name for name in before.keys() | rules.keys() if before.get(name) != rules.get(name)}
        self.rules.clear()  # the dictionary stays: others hold it
        self.rules.update(rules)
        for tell in self._followers if changed else ():
            tell(changed)

    def rule(self, task: str) -> Rule:
        """The rule of a task, or one that says nothing."""
        return self.rules.get(task) or Rule(task)

    def came(self, delivery: Delivery, task: str) -> str:
        """A job of a task with a rule was read, or one was handed over, which has its slot. Gives why it is rejected:
        then whoever read it buries it. '' when it is not."""
        rule, handed, self.used = self.rule(task), delivery.lane == HANDED, True
        if handed:
            delivery.rule = rule
        if rule.rejects or not (handed or self._is_home(delivery, rule)):
            self.inside[delivery.kind] += handed
            return self._why_not(delivery, rule)
        if handed:
            if rule.rate is not None:
                delivery.until = self.asked + rule.rate.slack if self.asked else 1.0
            self._ledger.adopt(delivery)
            self.let_in([delivery])
        else:
            delivery.kind = GATE
            self._ledger.adopt(delivery)
            self.coming.append(delivery)
            self.news.set()
        return ""

    def _why_not(self, delivery: Delivery, rule: Rule) -> str:
        if rule.rejects:
            return f"the limit of {rule.task} is 0"
        return f"the limit of {rule.task} is counted on queue {self.home(rule.task)!r}, and this is {delivery.queue!r}"

    def _is_home(self, delivery: Delivery, rule: Rule) -> bool:
        """Whether a job is where its limit is counted. One that was imposed is counted on each queue by itself."""
        gated = self._tasks[rule.task].gated
        return gated is None or rule.suspended or delivery.queue == self.home(rule.task)

    def let_in(self, deliveries: Iterable[Delivery]) -> None:
        """These have slots, so they go before all others."""
        for delivery in deliveries:
            self.inside[delivery.kind] += 1
            if delivery.deliveries < self._suspects.deaths:
                queue = self._queues[delivery.kind]
                queue.put_behind(sum(1 for _ in takewhile(_has_slot, queue.items)), delivery)
            else:
                self._suspects.admit(delivery)

    def left(self, deliveries: Iterable[Delivery]) -> None:
        """These are settled."""
        for delivery in deliveries:
            if delivery.rule is not None and delivery.kind:
                self.inside[delivery.kind] -= 1

    def room(self, kind: str, *, without: int = 0) -> int:
        """How many jobs more of one kind would begin at once, if `without` so many of those that have come through.
        Those that wait here without a slot are no hindrance where jobs are short: they are passed."""
        slots, mean = self._budget.slots(kind), self._paces[kind].mean
        if mean is None or mean >= HORIZON:
            taken = self._ledger.held(kind)
        else:
            slots, taken = slots + ahead(slots, mean) // 2, self.inside[kind]
        return max(slots - taken - self._promised[kind] + without, 0)

    @contextmanager
    def promising(self, rules: Iterable[tuple[Rule, int]]) -> Generator[None]:
        """While this lasts Redis is asked to hand so many jobs to this worker: the room is theirs."""
        promised = Counter({self._tasks[rule.task].kind: want for rule, want in rules if not rule.rejects})
        self._promised += promised
        try:
            yield
        finally:
            self._promised -= promised

    def wants(
        self, queue: str, tasks: Iterable[str], *, left: Iterable[Delivery] = ()
    ) -> list[tuple[Rule, int]]:
        """The rules of tasks, and how many jobs of each are wanted of a queue once those that `left` are gone. Tasks of
        one kind share the room evenly."""
        gone = Counter(delivery.kind for delivery in left if delivery.rule is not None)
        names = [name for name in tasks if name in self._tasks]
        kinds = {self._tasks[name].kind for name in names}
        if self.closed(queue) or self._gives_way(gone):
            return [(self.rule(name), 0) for name in names]
        shares = self._share_out(names, {kind: self.room(kind, without=gone[kind]) for kind in kinds})
        return [(self.rule(name), shares[name]) for name in names]

    def _share_out(self, names: Iterable[str], free: dict[str, int]) -> Counter[str]:
        """Return how many jobs of each task to ask for: one of each in turn until MOST_AT_ONCE or the `free` slots of
        their kinds are spent. The task that got its last one longest ago is first, so that what does not divide evenly
        goes to each of them in turn. What is rejected takes no slot."""
        shares = Counter[str]()
        asking = deque(sorted(names, key=lambda name: (self._served.get(name, 0), name)))
        while asking and shares.total() < MOST_AT_ONCE:
            name = asking.popleft()
            rule, kind = self.rule(name), self._tasks[name].kind
            if rule.suspended or not (rule.rejects or free[kind]):
                continue
            free[kind] -= not rule.rejects
            shares[name] += 1
            self._served[name] = next(self._serving)
            asking.append(name)
        return shares

    def _gives_way(self, gone: Counter[str]) -> bool:
        """Whether the room that is free now is for those without a gate: where the Consumer has none to read for, every
        other time. Else who waits at gates would keep all others from running."""
        self._gave_way = bool(gone) and self.crowded and not self._gave_way
        if self._gave_way:
            self.after = trio.current_time() + A_MOMENT
        return self._gave_way

    def rethink(self, tasks: set[str], active: Iterable[Delivery]) -> None:
        """The rules of these tasks have changed: what waits here for an executor comes to the gate, what has begun
        without a slot takes one."""
        for queue in self._queues.values():
            for delivery in [each for each in queue.items if _task_of(each) in tasks]:
                rule = self.rules.get(_task_of(delivery))
                if rule is None or (delivery.rule is not None and not rule.suspended):
                    continue
                queue.withdraw(delivery)
                self.left([delivery])
                delivery.rule, delivery.until = None, 0.0
                self._ledger.becomes(delivery, GATE)
                self.coming.append(delivery)
        for delivery in active:
            rule = self.rules.get(_task_of(delivery)) if _task_of(delivery) in tasks else None
            if rule is not None and delivery.rule is None:
                delivery.rule, self.used = rule, True
                self.inside[delivery.kind] += 1
                self.coming.append(delivery)
        self.news.set()


def _task_of(delivery: Delivery) -> str:
    return delivery.envelope.task if delivery.envelope else ""


def _has_slot(delivery: Delivery) -> bool:
    return delivery.rule is not None


def expired(delivery: Delivery) -> bool:
    """Whether a job must not be begun any more."""
    envelope = delivery.envelope
    return envelope is not None and envelope.expires is not None and envelope.expires <= time.time()
