"""How many jobs of each kind, and of single tasks, may run at once in this worker, and what they run with.

A fixed budget costs nothing while jobs run. A variable one is updated when jobs were read, and ten times a second.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import trio
from msgspec.structs import replace

from celery5.errors import CommandRefused
from celery5.health.machine import MachineReading, read_machine
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import BudgetParameters, ConcurrencyParameters
from celery5.protocol.masking import show_error
from celery5.protocol.scaling.budget import (
    CPU_ADVICE,
    Budget,
    BudgetState,
    ByLoad,
    ByMemory,
    Demand,
    Maximum,
    find_budget_error,
    find_reservation_error,
    get_max_slots,
    get_prefetch_slots,
    get_usable_slots,
    next_budget_state,
    scale_budget,
)
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.runners.user_errors import call_in_thread, call_user_code, guard_scopes, reraise_cancellation
from celery5.services.job.in_flight import InFlightJobs, RunningJobs
from celery5.services.job.internal_queues import InternalTasksQueue, get_task_name
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.job.thread_load import ThreadLoad
from celery5.tasks.task import Task

UPDATE_INTERVAL = 0.1
"""Seconds between updates of variable budgets."""
POLL_INTERVAL = 1.0
"""Seconds between readings of the machine's load, and between calls of functions that return a maximum."""
MAXIMUM_TIMEOUT = 5.0
"""Seconds that such a function may take, if it is `async`; one in a thread is waited for, however long."""
RELEASE_COOLDOWN = 5.0
"""Seconds in which no more jobs are read than there are slots, after some were released."""


class _Meter:
    """The budget of one kind or task: as configured, as it holds now, its current state, and its current maximum.

    Until a function has returned a maximum, that is the minimum.
    """

    __slots__ = ("budget", "configured", "failure", "kind", "maximum", "no_prefetch_until", "state", "task")

    def __init__(self, budget: Budget, kind: str, task: str) -> None:
        self.configured = budget
        self.budget = budget
        self.kind = kind
        self.task = task
        self.state = BudgetState(budget.least_slots)
        self.maximum = budget.least_slots if callable(budget.maximum) else budget.max_slots
        self.no_prefetch_until = 0.0
        self.failure = ""

    def set_budget(self, name: str, budget: Budget, factor: float) -> None:
        """Set the configured budget, of which a multiple of the maximum holds."""
        self.configured, self.budget = budget, scale_budget(name, budget, factor)
        if not callable(self.budget.maximum):
            self.maximum = self.budget.max_slots

    @property
    def log_fields(self) -> dict[str, str]:
        """Return the `task`, if it is the budget of one: what its log events have beside the kind."""
        return {"task": self.task} if self.task else {}


class MaximalConcurrencyBudget:
    """The slots of each kind of task, and of each task with its own budget.

    Each of these has a name: that of the kind or of the task. The slots of a task are some of those of its kind.
    """

    def __init__(
        self,
        *,
        budgets: Mapping[str, Budget],
        task_kinds: Mapping[str, str],
        queues: Mapping[str, InternalTasksQueue],
        in_flight: InFlightJobs,
        running_jobs: RunningJobs,
        thread_load: ThreadLoad,
        resource_slots: ResourceSlots,
        log: Log,
    ) -> None:
        self.task_kinds = task_kinds
        """The kinds of the tasks that have budgets of their own."""
        self._meters = {
            name: _Meter(budget, task_kinds.get(name, name), name if name in task_kinds else "")
            for name, budget in budgets.items()
        }
        self._ceilings = {name: get_max_slots(budget) for name, budget in budgets.items()}
        # All that share the slots of a kind: the kind itself and tasks of it, by the names of each.
        self._sharers: dict[str, tuple[str, ...]] = {}
        sharing = {task: kind for task, kind in task_kinds.items() if not budgets[task].is_separate}
        for kind in set(sharing.values()):
            names = (kind, *(task for task in sharing if sharing[task] == kind))
            self._sharers.update(dict.fromkeys(names, names))
        for task in sharing:
            queues[task].keep_slots(budgets[task].minimum)
        self._queues = queues
        self._in_flight = in_flight
        self._log = log
        # Set when the slots of a kind have changed; then another event takes its place.
        self.slots_changed = trio.Event()
        self._running_jobs = running_jobs
        self._thread_load = thread_load
        self._resource_slots = resource_slots
        self._machine = MachineReading(1, 0.0, 0)
        self._changed = trio.Event()
        self._warned_slots = 0
        self._is_variable = self._has_variable()
        self.factor: float = 1.0
        """The factor on the maxima of I/O-bound kinds, which an autoscaler sets."""
        self._factor_ends_at = math.inf
        self._limit_threads()

    def get_name(self, task: Task[..., Any]) -> str:
        """Return whose slots the jobs of a task take: its own, if it has a budget, else those of its kind."""
        return task.name if task.name in self.task_kinds else task.kind

    def get_slots(self, name: str) -> int:
        """Return how many jobs of this kind or task may run at once."""
        return self._meters[name].state.current

    def list_separate_tasks(self, kind: str) -> list[str]:
        """Return the tasks of a kind whose slots are not some of the kind: what their jobs take limits them."""
        return [
            name
            for name, meter in self._meters.items()
            if meter.kind == kind and meter.configured.is_separate and name in self._resource_slots.needs
        ]

    def count_separate_slots(self, kind: str) -> int:
        """Return how many jobs of these tasks may run at once."""
        return sum(self.get_slots(name) for name in self.list_separate_tasks(kind))

    def get_usable_slots(self, name: str) -> int:
        """Return how many jobs of this kind or task may run at once now: tasks share the slots of their kind."""
        slots = self._meters[name].state.current
        return slots if name not in self._sharers else self._share(name, slots, self.get_slots)

    def get_prefetch_slots(self, name: str) -> int:
        """Return for how many slots to read jobs of this kind or task: more than it has, when it may get more."""
        slots = self._get_own_prefetch_slots(name)
        if name in self._resource_slots.needs:
            slots = min(slots, self._resource_slots.get_read_slots(name))
        return slots if name not in self._sharers else self._share(name, slots, self._get_own_prefetch_slots)

    def get_attainable_slots(self, name: str) -> int:
        """Return to how many slots a kind or task may grow with the jobs that it has now."""
        meter = self._meters[name]
        return meter.state.current if meter.budget.is_by_share else meter.maximum

    def get_cpu_shares(self) -> dict[str, float]:
        """Return what share of its time each task in threads computes, where the slots follow that."""
        shares = self._thread_load.shares.get_known_shares() if self._thread_load.is_limiting else {}
        return {task: round(share, 4) for task, share in shares.items()}

    def _share(self, name: str, slots: int, get_slots: Callable[[str], int]) -> int:
        others = [
            (self._in_flight.count(other), self.get_slots(other), self._get_kept_slots(other))
            for other in self._sharers[name]
            if other != name
        ]
        return get_usable_slots(slots, get_slots(self._meters[name].kind), others)

    def _get_kept_slots(self, name: str) -> int:
        meter = self._meters[name]
        return meter.budget.minimum if meter.task else 0

    def _get_own_prefetch_slots(self, name: str) -> int:
        meter = self._meters[name]
        if not self._is_variable:
            return meter.state.current
        now = trio.current_time()
        if now < meter.no_prefetch_until:
            return meter.state.current
        return get_prefetch_slots(meter.state, meter.budget, meter.maximum, now)

    def record_release(self, name: str) -> None:
        """Read no more jobs of this kind or task than there are slots for a while: some waited for too long.

        Unless they waited for a cool-down.
        """
        meter, now = self._meters[name], trio.current_time()
        if now - meter.state.grown_at > meter.budget.cooldown:
            meter.no_prefetch_until = now + RELEASE_COOLDOWN

    def on_first_duration(self) -> None:
        """Note that the duration of a kind is known for the first time: jobs may be read ahead now."""
        self._in_flight.notify()

    def update(self) -> None:
        """Update the variable budgets."""
        self._update_threads()
        self._resource_slots.forget_absent()
        if self._is_variable:
            now = trio.current_time()
            for name, meter in self._meters.items():
                if not (meter.budget.is_fixed or meter.budget.is_by_share):
                    self._update_slots(name, meter, now)

    def _update_threads(self) -> None:
        """Update the slots for threads, where they follow what the jobs compute."""
        meter = self._meters.get("thread")
        if meter is None or not meter.budget.is_by_share:
            return
        names = ("thread", *self._get_tasks("thread"))
        waiting = (get_task_name(item) for name in names for item in self._queues[name].items)
        demand = Demand(
            kind="thread",
            queued=sum(len(self._queues[name]) for name in names),
            executing=self._thread_load.count(),
            current=meter.state.current,
            minimum=meter.budget.least_slots,
            maximum=meter.maximum,
            fitting=self._thread_load.count_slots(waiting, maximum=meter.maximum),
        )
        if self._apply_demand(meter, demand, trio.current_time()):
            self._in_flight.notify()

    def _limit_threads(self) -> None:
        """Let jobs in threads begin by what they compute, unless the number of slots is fixed."""
        meter = self._meters.get("thread")
        if meter is not None:
            self._thread_load.set_slots(meter.state.current)
            self._thread_load.limit(meter.budget.least_slots if meter.budget.is_by_share else None)

    async def _follow_threads(self) -> None:
        """Update the slots for threads while jobs run there."""
        while True:
            await self._thread_load.wait_for_reading()
            self._update_threads()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Update the variable budgets until cancelled."""
        self._warn_of_too_many_threads()
        async with trio.open_nursery() as nursery:
            for name, meter in self._meters.items():
                if callable(meter.budget.maximum):
                    nursery.start_soon(self._poll_maximum, name, meter, meter.budget.maximum)
            nursery.start_soon(self._follow_threads)
            task_status.started()
            read_at = -POLL_INTERVAL
            while True:
                if trio.current_time() >= self._factor_ends_at:
                    self._set_factor(1.0, math.inf)
                if not self._is_variable:
                    with trio.move_on_at(self._factor_ends_at):
                        await self._changed.wait()
                    self._changed = trio.Event()
                    continue
                now = trio.current_time()
                if now - read_at >= POLL_INTERVAL:
                    self._machine, read_at = read_machine(), now
                self.update()
                # The Consumer may have capacity, now that a cool-down is over.
                self._in_flight.notify()
                await trio.sleep(UPDATE_INTERVAL)

    def get_counts(self) -> dict[str, dict[str, int]]:
        """Return for each kind and task its slots, its running and waiting jobs, and the range of its slots.

        The jobs of a kind are those of all its tasks.
        """
        return {name: self._count(name) for name in self._meters}

    async def handle_command(self, parameters: BudgetParameters) -> object:
        """Perform the command `budget`: set `minimum` and `maximum` of a `kind` or a `task` until this worker ends.

        Returns its counts, those of all kinds and tasks if none is named. Raises CommandRefused.
        """
        kind, task = parameters.kind, parameters.task
        limits = {
            name: slots
            for name, slots in (("minimum", parameters.minimum), ("maximum", parameters.maximum))
            if slots is not None
        }
        if kind is None and task is None and not limits:
            return self.get_counts()
        if task is not None and kind is not None:
            raise CommandRefused("budget: give either a kind or a task")
        if task is not None and task not in self.task_kinds:
            own = ", ".join(self.task_kinds) or "none"
            hint = "give it one in App(budgets=...) or the setting budgets"
            raise CommandRefused(
                f"budget: task {task!r} has no budget of its own here; these have: {own}; {hint}"
            )
        if task is None and kind not in TASK_KINDS:
            raise CommandRefused(f"budget: kind is {kind!r}; there are {', '.join(TASK_KINDS)}")
        name = task or kind or ""
        meter = self._meters[name]
        if limits:
            self._set(name, meter, limits)
        return {"kind": meter.kind, **meter.log_fields, **self._count(name)}

    async def handle_factor_command(self, parameters: ConcurrencyParameters) -> object:
        """Perform the command `concurrency`: run `factor` times as many I/O-bound jobs at once, and return the factor.

        It holds for `seconds`, else until this worker ends.
        """
        if parameters.factor is not None:
            seconds = math.inf if parameters.seconds is None else parameters.seconds
            self._set_factor(parameters.factor, trio.current_time() + seconds)
        return {"factor": self.factor}

    def _set_factor(self, factor: float, ends_at: float) -> None:
        before, self.factor = self.factor, factor
        self._factor_ends_at = math.inf if factor == 1 else ends_at
        if factor == before:
            return
        self._log.event("concurrency:set", "info", factor=factor, before=before)
        now = trio.current_time()
        for name, meter in self._meters.items():
            meter.set_budget(name, meter.configured, factor)
        self._is_variable = self._has_variable()
        for name, meter in self._meters.items():
            self._update_slots(name, meter, now)
        self._changed.set()
        self._in_flight.notify()

    def _set(self, name: str, meter: _Meter, limits: Mapping[str, int]) -> None:
        budget, ceiling = replace(meter.configured, **limits), self._ceilings[name]
        error = find_budget_error(budget, of_task=bool(meter.task))
        if not error and name in self._sharers:
            error = self._find_reservation_error(name, budget)
        if error:
            raise CommandRefused(f"budget of {name}: {error}")
        if budget.max_slots > ceiling:
            raise CommandRefused(
                f"budget of {name}: this worker can have {ceiling} at most without a new start"
            )
        meter.set_budget(name, budget, self.factor)
        if meter.task:
            self._queues[name].keep_slots(budget.minimum)
        self._is_variable = self._has_variable()
        self._limit_threads()
        self._log.event("budget:set", kind=meter.kind, **meter.log_fields, **limits)
        self._warn_of_too_many_threads()
        self._update_slots(name, meter, trio.current_time())
        self._changed.set()
        self._in_flight.notify()

    def _find_reservation_error(self, name: str, budget: Budget) -> str:
        """Return why the tasks of a kind would reserve too many of its slots with this budget; '' if they would not."""
        kind, *tasks = self._sharers[name]
        budgets = {other: self._meters[other].configured for other in (kind, *tasks)} | {name: budget}
        return find_reservation_error(
            kind, budgets[kind].minimum, {task: budgets[task].minimum for task in tasks}
        )

    def _has_variable(self) -> bool:
        return bool(self._resource_slots.needs) or not all(
            meter.budget.is_fixed or meter.budget.is_by_share for meter in self._meters.values()
        )

    def _warn_of_too_many_threads(self) -> None:
        meter = self._meters["thread"]
        slots = meter.maximum
        if not meter.budget.is_by_share and slots > max(CPU_ADVICE, self._warned_slots):
            self._warned_slots = slots
            self._log.event("budget:oversized", "warning", slots=slots, advised=CPU_ADVICE)

    def _count(self, name: str) -> dict[str, int]:
        meter, tasks = self._meters[name], self._get_tasks(name)
        return {
            "current": meter.state.current,
            "executing": sum(self._running_jobs.count(task) for task in (name, *tasks)),
            "queued": sum(len(self._queues[task]) for task in (name, *tasks)),
            "minimum": meter.budget.minimum,
            "maximum": meter.maximum,
        }

    def _get_tasks(self, name: str) -> tuple[str, ...]:
        """Return the tasks with budgets of their own, if this is a kind."""
        return self._sharers.get(name, ())[1:] if name in TASK_KINDS else ()

    def _make_demand(self, name: str, meter: _Meter) -> Demand:
        cores, load, memory = self._machine
        counts, increases = self._count(name), meter.state.increases
        counts["minimum"] = meter.budget.least_slots
        for task in self._get_tasks(name):
            if self._running_jobs.count(task) >= self.get_slots(task):
                # More slots of the kind are of no use to jobs that wait for those of their task.
                counts["queued"] -= len(self._queues[task])
        return Demand(
            kind=meter.kind,
            increases=increases,
            cores=cores,
            load=load,
            memory=memory,
            task=meter.task,
            **counts,
        )

    def _update_slots(self, name: str, meter: _Meter, now: float) -> None:
        self._apply_demand(meter, self._make_demand(name, meter), now)

    def _apply_demand(self, meter: _Meter, demand: Demand, now: float) -> bool:
        """Set the slots that the strategy chooses. Return whether they have changed."""
        before = meter.state.current
        try:
            with guard_scopes():
                meter.state = next_budget_state(meter.state, meter.budget, demand, now)
        except BaseException as error:  # the user's strategy
            reraise_cancellation(error)
            self._log_failure(meter, f"its strategy failed: {show_error(error)}")
        slots = meter.state.current
        if slots != before:
            fields = {"before": before, "queued": demand.queued, "executing": demand.executing}
            self._log.event(
                "budget:changed", "debug", kind=meter.kind, slots=slots, **meter.log_fields, **fields
            )
            if demand.kind == "thread" and not demand.task:
                self._thread_load.set_slots(slots)
            self.slots_changed.set()
            self.slots_changed = trio.Event()
        return slots != before

    async def _poll_maximum(self, name: str, meter: _Meter, maximum: Maximum) -> None:
        """Call the function for the maximum at intervals, until a command replaces it by a number."""
        while meter.budget.maximum is maximum:
            try:
                slots = int(
                    await call_user_code(_call_user_function, maximum, self._make_demand(name, meter))
                )
            except BaseException as error:  # the user's function
                reraise_cancellation(error)
                self._log_failure(meter, f"its maximum stays {meter.maximum}: {show_error(error)}")
            else:
                if meter.budget.maximum is maximum:
                    meter.maximum = min(max(slots, meter.budget.least_slots), self._ceilings[name])
                    meter.failure = ""
                    self._warn_of_too_many_threads()
            await trio.sleep(POLL_INTERVAL)

    def _log_failure(self, meter: _Meter, why: str) -> None:
        """Log a failure, once for each reason."""
        if meter.failure != why:
            meter.failure = why
            self._log.event("budget:failed", "warning", kind=meter.kind, why=why, **meter.log_fields)


async def _call_user_function(maximum: Maximum, demand: Demand) -> int:
    """Call a user's function where it does not block the loop, and return its result."""
    result: Any
    if isinstance(maximum, (ByLoad, ByMemory)) or inspect.iscoroutinefunction(maximum):
        result = maximum(demand)
    else:
        result = await call_in_thread(partial(cast("Any", maximum), demand))
    if inspect.isawaitable(result):
        with trio.fail_after(MAXIMUM_TIMEOUT):
            result = await result
    return cast("int", result)
