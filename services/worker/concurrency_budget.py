"""Concurrency Budget: how many jobs of each kind may run at once in this worker (C57, C63 to C69).

A fixed budget costs nothing while jobs run. One that moves is looked at when jobs came, and ten times a second.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import trio
from msgspec.structs import replace

from celery5.errors import CommandRefused
from celery5.health.machine import MachineReading, read_machine
from celery5.logs.log import Log
from celery5.protocol.scaling.budget import (
    CPU_ADVICE,
    Budget,
    BudgetState,
    ByLoad,
    ByMemory,
    Demand,
    Maximum,
    find_budget_error,
    get_max_slots,
    get_prefetch_slots,
    next_budget_state,
)
from celery5.services.worker.in_flight import InFlightJobs, RunningJobs
from celery5.services.worker.internal_queues import TasksQueue

UPDATE_INTERVAL = 0.1
"""Seconds between looks at budgets that move."""
POLL_INTERVAL = 1.0
"""Seconds between looks at the machine, and questions to functions that say a maximum."""
MAXIMUM_TIMEOUT = 5.0
"""Seconds that such a function may take, if it is `async`; one in a thread is waited for, and not asked again."""
RELEASE_COOLDOWN = 5.0
"""Seconds in which no more jobs are read than there are slots, after some were given back."""

SlotsListener = Callable[[str, int], None]
"""Is told of a kind and its new number of slots."""


class _Meter:
    """One kind's budget: what was said, where it is, and what its maximum is now: while a function that says so has not
    answered, the minimum."""

    __slots__ = ("budget", "course", "failed", "maximum", "shy_until")

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.course = BudgetState(budget.minimum)
        self.maximum = budget.minimum if callable(budget.maximum) else budget.max_slots
        self.shy_until = 0.0
        self.failed = ""

    def say(self, budget: Budget) -> None:
        """This is the budget from now on."""
        self.budget = budget
        if not callable(budget.maximum):
            self.maximum = budget.max_slots


class ConcurrencyBudget:
    """The slots of each kind of task."""

    def __init__(
        self,
        *,
        budgets: Mapping[str, Budget],
        queues: Mapping[str, TasksQueue],
        in_flight: InFlightJobs,
        running_jobs: RunningJobs,
        log: Log,
    ) -> None:
        self._meters = {kind: _Meter(budget) for kind, budget in budgets.items()}
        self._ceilings = {kind: get_max_slots(budget) for kind, budget in budgets.items()}
        self._queues = queues
        self._ledger = in_flight
        self._log = log
        self._followers: list[SlotsListener] = []
        self._running_jobs = running_jobs
        self._machine = MachineReading(1, 0.0, 0)
        self._said = trio.Event()
        self._warned = 0
        self._moves = self._any_moves()

    def get_slots(self, kind: str) -> int:
        """How many jobs of this kind may run at once."""
        return self._meters[kind].course.current

    def get_prefetch_slots(self, kind: str) -> int:
        """For how many slots jobs of this kind are to be read: for more than it has, when it may get more."""
        meter = self._meters[kind]
        if not self._moves:
            return meter.course.current
        now = trio.current_time()
        if now < meter.shy_until:
            return meter.course.current
        return get_prefetch_slots(meter.course, meter.budget, meter.maximum, now)

    def add_listener(self, follower: SlotsListener) -> None:
        """Have `follower` told of each change."""
        self._followers.append(follower)

    def record_release(self, kind: str) -> None:
        """Jobs of this kind waited for too long: read no more than there are slots, for a while. Unless they waited for
        a cool-down."""
        meter, now = self._meters[kind], trio.current_time()
        if now - meter.course.grown_at > meter.budget.cooldown:
            meter.shy_until = now + RELEASE_COOLDOWN

    def on_first_duration(self) -> None:
        """The pace of a kind is known for the first time: there is room for what may be read ahead."""
        self._ledger.notify()

    def update(self) -> None:
        """Move what is to be moved."""
        if self._moves:
            now = trio.current_time()
            for kind, meter in self._meters.items():
                if not meter.budget.is_fixed:
                    self._step(kind, meter, now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move what moves until cancelled."""
        self._warn_of_threads()
        async with trio.open_nursery() as nursery:
            for kind, meter in self._meters.items():
                if callable(meter.budget.maximum):
                    nursery.start_soon(self._ask_on, kind, meter, meter.budget.maximum)
            task_status.started()
            looked = -POLL_INTERVAL
            while True:
                if not self._moves:
                    await self._said.wait()
                    self._said = trio.Event()
                    continue
                now = trio.current_time()
                if now - looked >= POLL_INTERVAL:
                    self._machine, looked = read_machine(), now
                self.update()
                # Whoever waits for room may have some, now that a cool-down is over.
                self._ledger.notify()
                await trio.sleep(UPDATE_INTERVAL)

    def get_counts(self) -> dict[str, dict[str, int]]:
        """For each kind: the slots it has, the jobs that run and that wait here, and between what its slots lie."""
        return {kind: self._told(kind) for kind in self._meters}

    async def handle_command(self, parameters: Mapping[str, Any]) -> object:
        """The command `budget`: set the `minimum` and `maximum` of a `kind` for as long as this worker lives; gives
        what it is now, of all kinds if none is named. Raises CommandRefused."""
        kind = parameters.get("kind")
        strange = sorted(parameters.keys() - {"kind", "minimum", "maximum"})
        if strange:
            raise CommandRefused(f"budget does not take {strange[0]!r}: it takes kind, minimum and maximum")
        said = {name: parameters[name] for name in ("minimum", "maximum") if parameters.get(name) is not None}
        if kind is None and not said:
            return self.get_counts()
        if not isinstance(kind, str) or kind not in self._meters:
            raise CommandRefused(f"budget: kind is {kind!r}; there are {', '.join(self._meters)}")
        if said:
            self._set(kind, self._meters[kind], said)
        return {"kind": kind, **self._told(kind)}

    def _set(self, kind: str, meter: _Meter, said: Mapping[str, Any]) -> None:
        budget, most = replace(meter.budget, **said), self._ceilings[kind]
        wrong = find_budget_error(budget)
        if wrong:
            raise CommandRefused(f"budget of {kind}: {wrong}")
        if budget.max_slots > most:
            raise CommandRefused(f"budget of {kind}: this worker can have {most} at most without a new start")
        meter.say(budget)
        self._moves = self._any_moves()
        self._log.event("budget:set", kind=kind, **said)
        self._warn_of_threads()
        self._step(kind, meter, trio.current_time())
        self._said.set()
        self._ledger.notify()

    def _any_moves(self) -> bool:
        return not all(meter.budget.is_fixed for meter in self._meters.values())

    def _warn_of_threads(self) -> None:
        slots = self._meters["thread"].maximum
        if slots > max(CPU_ADVICE, self._warned):
            self._warned = slots
            self._log.event("budget:oversized", "warning", slots=slots, advised=CPU_ADVICE)

    def _told(self, kind: str) -> dict[str, int]:
        meter = self._meters[kind]
        return {
            "current": meter.course.current,
            "executing": self._running_jobs.count(kind),
            "queued": len(self._queues[kind]),
            "minimum": meter.budget.minimum,
            "maximum": meter.maximum,
        }

    def _demand(self, kind: str, meter: _Meter) -> Demand:
        cores, load, memory = self._machine
        told, increases = self._told(kind), meter.course.increases
        return Demand(kind=kind, increases=increases, cores=cores, load=load, memory=memory, **told)

    def _step(self, kind: str, meter: _Meter, now: float) -> None:
        before, demand = meter.course.current, self._demand(kind, meter)
        try:
            meter.course = next_budget_state(meter.course, meter.budget, demand, now)
        except (Exception, SystemExit) as error:  # the user's strategy
            self._tell_failed(kind, meter, f"its strategy failed: {error!r}")
        slots = meter.course.current
        if slots != before:
            fields = {"before": before, "queued": demand.queued, "executing": demand.executing}
            self._log.event("budget:changed", "info", kind=kind, slots=slots, **fields)
            for follower in self._followers:
                follower(kind, slots)

    async def _ask_on(self, kind: str, meter: _Meter, maximum: Maximum) -> None:
        """Ask what the maximum is, until a number is said instead."""
        while meter.budget.maximum is maximum:
            try:
                slots = int(await _answer(maximum, self._demand(kind, meter)))
            except (Exception, SystemExit) as error:  # the user's function
                self._tell_failed(kind, meter, f"its maximum stays {meter.maximum}: {error!r}")
            else:
                if meter.budget.maximum is maximum:
                    meter.maximum = min(max(slots, meter.budget.minimum), self._ceilings[kind])
                    meter.failed = ""
                    self._warn_of_threads()
            await trio.sleep(POLL_INTERVAL)

    def _tell_failed(self, kind: str, meter: _Meter, why: str) -> None:
        """Once for each reason."""
        if meter.failed != why:
            meter.failed = why
            self._log.event("budget:failed", "warning", kind=kind, why=why)


async def _answer(maximum: Maximum, demand: Demand) -> int:
    """What the function says, called wherever it holds up nobody."""
    answer: Any
    if isinstance(maximum, (ByLoad, ByMemory)) or inspect.iscoroutinefunction(maximum):
        answer = maximum(demand)
    else:
        answer = await trio.to_thread.run_sync(maximum, demand, abandon_on_cancel=True)
    if inspect.isawaitable(answer):
        with trio.fail_after(MAXIMUM_TIMEOUT):
            answer = await answer
    return cast("int", answer)
