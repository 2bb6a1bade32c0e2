"""How many jobs of each kind may run at once in this worker, and what they run with.

A fixed budget costs nothing while jobs run. A variable one is updated when jobs were read, and ten times a second.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import trio
from msgspec.structs import replace

from celery5.errors import CommandRefused
from celery5.health.machine import MachineReading, read_machine
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import BudgetParameters, ConcurrencyParameters
from celery5.protocol.job.verdict import Outcome
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
    scale_budget,
)
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.runners.running_job import RunningJob
from celery5.services.worker.in_flight import InFlightJobs, RunningJobs
from celery5.services.worker.internal_queues import InternalTasksQueue
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
    """The budget of one kind: as configured, as it holds now, its current state, and its current maximum.

    Until a function has returned a maximum, that is the minimum.
    """

    __slots__ = ("budget", "configured", "failure", "maximum", "no_prefetch_until", "state")

    def __init__(self, budget: Budget) -> None:
        self.configured = budget
        self.budget = budget
        self.state = BudgetState(budget.minimum)
        self.maximum = budget.minimum if callable(budget.maximum) else budget.max_slots
        self.no_prefetch_until = 0.0
        self.failure = ""

    def set_budget(self, kind: str, budget: Budget, factor: float) -> None:
        """Set the configured budget, of which so many times the maximum holds."""
        self.configured, self.budget = budget, scale_budget(kind, budget, factor)
        if not callable(self.budget.maximum):
            self.maximum = self.budget.max_slots


class MaximalConcurrencyBudget:
    """The slots of each kind of task."""

    def __init__(
        self,
        *,
        budgets: Mapping[str, Budget],
        queues: Mapping[str, InternalTasksQueue],
        in_flight: InFlightJobs,
        running_jobs: RunningJobs,
        log: Log,
    ) -> None:
        self._meters = {kind: _Meter(budget) for kind, budget in budgets.items()}
        self._ceilings = {kind: get_max_slots(budget) for kind, budget in budgets.items()}
        self._queues = queues
        self._in_flight = in_flight
        self._log = log
        # Set when the slots of a kind have changed; then another event takes its place.
        self.slots_changed = trio.Event()
        self._running_jobs = running_jobs
        self._machine = MachineReading(1, 0.0, 0)
        self._changed = trio.Event()
        self._warned_slots = 0
        self._is_variable = self._has_variable()
        self.factor: float = 1.0
        """The factor on the maxima of I/O-bound kinds, which an autoscaler sets."""
        self._factor_ends_at = math.inf

    def get_slots(self, kind: str) -> int:
        """Return how many jobs of this kind may run at once."""
        return self._meters[kind].state.current

    def get_prefetch_slots(self, kind: str) -> int:
        """Return for how many slots to read jobs of this kind: more than it has, when it may get more."""
        meter = self._meters[kind]
        if not self._is_variable:
            return meter.state.current
        now = trio.current_time()
        if now < meter.no_prefetch_until:
            return meter.state.current
        return get_prefetch_slots(meter.state, meter.budget, meter.maximum, now)

    def record_release(self, kind: str) -> None:
        """Read no more jobs of this kind than there are slots for a while: some waited for too long.

        Unless they waited for a cool-down.
        """
        meter, now = self._meters[kind], trio.current_time()
        if now - meter.state.grown_at > meter.budget.cooldown:
            meter.no_prefetch_until = now + RELEASE_COOLDOWN

    def on_first_duration(self) -> None:
        """Note that the duration of a kind is known for the first time: jobs may be read ahead now."""
        self._in_flight.notify()

    def update(self) -> None:
        """Update the variable budgets."""
        if self._is_variable:
            now = trio.current_time()
            for kind, meter in self._meters.items():
                if not meter.budget.is_fixed:
                    self._update_kind(kind, meter, now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Update the variable budgets until cancelled."""
        self._warn_of_too_many_threads()
        async with trio.open_nursery() as nursery:
            for kind, meter in self._meters.items():
                if callable(meter.budget.maximum):
                    nursery.start_soon(self._poll_maximum, kind, meter, meter.budget.maximum)
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
        """Return for each kind its slots, its running and waiting jobs, and the range of its slots."""
        return {kind: self._count(kind) for kind in self._meters}

    async def handle_command(self, parameters: BudgetParameters) -> object:
        """Perform the command `budget`: set `minimum` and `maximum` of a `kind` until this worker ends.

        Returns its counts, those of all kinds if none is named. Raises CommandRefused.
        """
        kind = parameters.kind
        limits = {
            name: slots
            for name, slots in (("minimum", parameters.minimum), ("maximum", parameters.maximum))
            if slots is not None
        }
        if kind is None and not limits:
            return self.get_counts()
        if kind is None or kind not in self._meters:
            raise CommandRefused(f"budget: kind is {kind!r}; there are {', '.join(self._meters)}")
        if limits:
            self._set(kind, self._meters[kind], limits)
        return {"kind": kind, **self._count(kind)}

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
        for kind, meter in self._meters.items():
            meter.set_budget(kind, meter.configured, factor)
        self._is_variable = self._has_variable()
        for kind, meter in self._meters.items():
            self._update_kind(kind, meter, now)
        self._changed.set()
        self._in_flight.notify()

    def _set(self, kind: str, meter: _Meter, limits: Mapping[str, int]) -> None:
        budget, ceiling = replace(meter.configured, **limits), self._ceilings[kind]
        error = find_budget_error(budget)
        if error:
            raise CommandRefused(f"budget of {kind}: {error}")
        if budget.max_slots > ceiling:
            raise CommandRefused(
                f"budget of {kind}: this worker can have {ceiling} at most without a new start"
            )
        meter.set_budget(kind, budget, self.factor)
        self._is_variable = self._has_variable()
        self._log.event("budget:set", kind=kind, **limits)
        self._warn_of_too_many_threads()
        self._update_kind(kind, meter, trio.current_time())
        self._changed.set()
        self._in_flight.notify()

    def _has_variable(self) -> bool:
        return not all(meter.budget.is_fixed for meter in self._meters.values())

    def _warn_of_too_many_threads(self) -> None:
        slots = self._meters["thread"].maximum
        if slots > max(CPU_ADVICE, self._warned_slots):
            self._warned_slots = slots
            self._log.event("budget:oversized", "warning", slots=slots, advised=CPU_ADVICE)

    def _count(self, kind: str) -> dict[str, int]:
        meter = self._meters[kind]
        return {
            "current": meter.state.current,
            "executing": self._running_jobs.count(kind),
            "queued": len(self._queues[kind]),
            "minimum": meter.budget.minimum,
            "maximum": meter.maximum,
        }

    def _make_demand(self, kind: str, meter: _Meter) -> Demand:
        cores, load, memory = self._machine
        counts, increases = self._count(kind), meter.state.increases
        return Demand(kind=kind, increases=increases, cores=cores, load=load, memory=memory, **counts)

    def _update_kind(self, kind: str, meter: _Meter, now: float) -> None:
        before, demand = meter.state.current, self._make_demand(kind, meter)
        try:
            meter.state = next_budget_state(meter.state, meter.budget, demand, now)
        except (Exception, SystemExit) as error:  # the user's strategy
            self._log_failure(kind, meter, f"its strategy failed: {error!r}")
        slots = meter.state.current
        if slots != before:
            fields = {"before": before, "queued": demand.queued, "executing": demand.executing}
            self._log.event("budget:changed", "info", kind=kind, slots=slots, **fields)
            self.slots_changed.set()
            self.slots_changed = trio.Event()

    async def _poll_maximum(self, kind: str, meter: _Meter, maximum: Maximum) -> None:
        """Call the function for the maximum at intervals, until a command replaces it by a number."""
        while meter.budget.maximum is maximum:
            try:
                slots = int(await _call_user_function(maximum, self._make_demand(kind, meter)))
            except (Exception, SystemExit) as error:  # the user's function
                self._log_failure(kind, meter, f"its maximum stays {meter.maximum}: {error!r}")
            else:
                if meter.budget.maximum is maximum:
                    meter.maximum = min(max(slots, meter.budget.minimum), self._ceilings[kind])
                    meter.failure = ""
                    self._warn_of_too_many_threads()
            await trio.sleep(POLL_INTERVAL)

    def _log_failure(self, kind: str, meter: _Meter, why: str) -> None:
        """Log a failure, once for each reason."""
        if meter.failure != why:
            meter.failure = why
            self._log.event("budget:failed", "warning", kind=kind, why=why)


async def _call_user_function(maximum: Maximum, demand: Demand) -> int:
    """Call a user's function where it does not block the loop, and return its result."""
    result: Any
    if isinstance(maximum, (ByLoad, ByMemory)) or inspect.iscoroutinefunction(maximum):
        result = maximum(demand)
    else:
        result = await trio.to_thread.run_sync(maximum, demand, abandon_on_cancel=True)
    if inspect.isawaitable(result):
        with trio.fail_after(MAXIMUM_TIMEOUT):
            result = await result
    return cast("int", result)


class Runner(Protocol):
    """Runs one function to its outcome."""

    async def execute(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], running_job: RunningJob
    ) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """The tasks of a worker, and what it has to run their jobs, by kind of task."""

    # The tasks, by name.
    tasks: Mapping[str, Task[..., Any]]
    # Where jobs wait for an executor.
    queues: Mapping[str, InternalTasksQueue]
    runners: Mapping[str, Runner]
    # How long the jobs take.
    duration_estimates: Mapping[str, DurationEstimate]
    # How many jobs may run at once.
    budget: MaximalConcurrencyBudget
