"""Decide how many jobs of one kind, or of one task, may run at once in one worker.

A budget has a maximum, which is a number or a function of the current demand, and a current number of slots.
The current number lies between the minimum and the maximum, and a strategy moves it. A fixed budget, minimum =
maximum, never moves. A task may have its own budget: its slots are some of those of its kind.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.task_kinds import IO_KINDS, TASK_KINDS
from celery5.protocol.text_values import COUNT, RANGE, SIZE, parse_assignments
from celery5.similar_names import did_you_mean

DEFAULT_MAXIMUM = 512
"""The default maximum of a kind, and the most slots that a running worker can be given."""
GROWTH_WINDOW = 0.25
"""Seconds after a cool-down in which a budget can only grow: a queue has that long to show more jobs."""
CPU_ADVICE = 10
"""More slots than this for CPU-bound tasks cause a warning."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a budget's decision, for one `kind` of task, or for one `task` of that kind."""

    kind: str
    queued: int  # jobs that wait in this worker
    executing: int
    current: int  # slots now
    minimum: int
    maximum: int
    increases: int = 0  # since growth began
    cores: int = 1
    load: float = 0.0  # the load average of the last minute
    memory: int = 0  # free bytes
    task: str = ""  # whose own budget it is; '' for the budget of a kind
    fitting: int = 0  # jobs in threads that may run at once by what they compute; 0 where that does not count


Maximum = Callable[[Demand], int | Awaitable[int]]
"""Returns how many jobs may run at once now.

An `async` function runs in Trio; a plain one is called in a thread.
"""


class BudgetStrategy(Protocol):
    """Returns the new number of slots.

    The result is kept between minimum and maximum. The strategy is called whenever jobs arrive and ten times a
    second, so it must be quick.
    """

    def __call__(self, demand: Demand, /) -> int: ...


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The default strategy.

    Growth begins when more jobs are queued than there are slots: the slots are raised by the excess, queued -
    current. If there still are more after the cool-down, the slots become current * `exponent` * k, rounded up,
    and at least one more; k counts the increases, this one included, so it is 2, then 3. When there are fewer
    jobs than slots, the slots become the number of running jobs.
    """

    exponent: float = 1.0

    def __call__(self, demand: Demand) -> int:
        """Return the new number of slots."""
        current = demand.current
        if demand.queued > current:
            if not demand.increases:
                return current + (demand.queued - current)
            # a rounding error is no reason to round up
            product = round(current * self.exponent * (demand.increases + 1), 6)
            return max(current + 1, math.ceil(product))
        if demand.queued + demand.executing < current:
            return demand.executing
        return current


class ByCpuShare(msgspec.Struct, frozen=True):
    """The strategy of `cpu_slots="auto"`: as many slots as `celery5.protocol.scaling.cpu_shares` finds."""

    def __call__(self, demand: Demand) -> int:
        """Return the new number of slots."""
        return demand.fitting


def take_all(demand: Demand) -> int:
    """Return the maximum: the strategy of tasks whose jobs are limited by the resources that they take."""
    return demand.maximum


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of one kind, or of one task, may run at once in one worker process.

    Between the limits, the `strategy` decides. The minimum of a task is reserved for it among the slots of its kind.
    """

    minimum: int = 1  # of a task: 0 reserves none
    maximum: int | Maximum | None = None  # None: 512
    cooldown: float = 1.0  # seconds after each growth without a change
    strategy: BudgetStrategy = Growth()

    @property
    def max_slots(self) -> int:
        """Return the largest value that the maximum can have."""
        return max(self.least_slots, self.maximum if isinstance(self.maximum, int) else DEFAULT_MAXIMUM)

    @property
    def least_slots(self) -> int:
        """Return the fewest slots: one at least, also where none is reserved."""
        return max(self.minimum, 1)

    @property
    def is_fixed(self) -> bool:
        """Return whether it never moves."""
        return self.maximum == self.least_slots

    @property
    def is_separate(self) -> bool:
        """Return whether it is of a task whose slots are not some of its kind: what its jobs take limits them."""
        return self.strategy is take_all

    @property
    def is_by_share(self) -> bool:
        """Return whether it follows what the jobs compute."""
        return isinstance(self.strategy, ByCpuShare) and not self.is_fixed


def automatic_budget(cores: int, concurrency: int) -> Budget:
    """Return the budget of threads that follows what the jobs compute: from the cores to the concurrency."""
    maximum = max(cores, min(concurrency, DEFAULT_MAXIMUM))
    return Budget(minimum=cores, maximum=maximum, cooldown=0.0, strategy=ByCpuShare())


def fixed_budget(slots: int) -> Budget:
    """Return a budget that never moves."""
    return Budget(minimum=slots, maximum=slots)


class BudgetState(NamedTuple):
    """The state of a budget."""

    current: int  # slots
    increases: int = 0  # in a row
    grown_at: float = -math.inf  # of the last increase


def next_budget_state(state: BudgetState, budget: Budget, demand: Demand, now: float) -> BudgetState:
    """Return the state after one step at the time `now`, in seconds on any clock. It stays within the limits."""
    least, most = demand.minimum, max(demand.minimum, demand.maximum)
    if not least <= state.current <= most:  # the limits have changed
        return BudgetState(min(max(state.current, least), most), 0, state.grown_at)
    passed = now - state.grown_at
    if least == most or passed < budget.cooldown:
        return state
    current = min(max(int(budget.strategy(demand)), least), most)
    if current > state.current:
        return BudgetState(current, 0 if current == most else state.increases + 1, now)
    if passed < budget.cooldown + GROWTH_WINDOW:
        return state
    ended = demand.queued < state.current or state.current == most  # growth is over
    increases = 0 if ended else state.increases
    return state if (current, increases) == state[:2] else BudgetState(current, increases, state.grown_at)


def get_prefetch_slots(state: BudgetState, budget: Budget, maximum: int, now: float) -> int:
    """Return how many slots to read jobs for.

    A budget that may grow must read more jobs than it has slots, or it would never learn that there are more.
    When growth may begin, that is the maximum; later, as many as show that growth must go on. During a
    cool-down it is the current number, since more jobs would only wait. So it is where the slots follow the jobs that
    run, and not those that wait.
    """
    current = state.current
    if budget.is_by_share or current >= maximum or now - state.grown_at < budget.cooldown:
        return current
    enough = 2 * current + 1
    return enough if state.increases else max(maximum, enough)


class ByLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A maximum by the machine's load: it grows while the load per core is below `per_core`, and shrinks above."""

    per_core: float = 1.0

    def __call__(self, demand: Demand) -> int:
        """Return the current maximum."""
        return demand.executing + math.floor(demand.cores * self.per_core - demand.load)


class ByMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A maximum by free memory: as many more jobs as fit with `per_job` bytes each, with `spare` bytes left
    over.
    """

    per_job: int
    spare: int = 256 * 1024 * 1024

    def __call__(self, demand: Demand) -> int:
        """Return the current maximum."""
        return demand.executing + (demand.memory - self.spare) // max(self.per_job, 1)


def get_max_slots(budget: Budget) -> int:
    """Return the most slots that a kind with this budget can be given while its worker runs."""
    return max(budget.max_slots, DEFAULT_MAXIMUM)


def scale_budget(kind: str, budget: Budget, factor: float) -> Budget:
    """Return the budget with a multiple of its maximum; a fixed one stays fixed, at that number.

    That of a CPU-bound kind stays, and so does a maximum that is a function: it follows the machine.
    """
    if factor <= 1 or kind not in IO_KINDS or callable(budget.maximum):
        return budget
    maximum = min(math.ceil(budget.max_slots * factor), get_max_slots(budget))
    minimum = maximum if budget.is_fixed else budget.minimum
    return msgspec.structs.replace(budget, minimum=minimum, maximum=maximum)


def check_budgets(budgets: Mapping[str, Budget]) -> dict[str, Budget]:
    """Return the budgets of an application, by kind or by the full name of a task: one with a dot.

    Raises Misconfigured for invalid ones. `check_task_budgets` checks whether there are such tasks.
    """
    for name, budget in budgets.items():
        if name not in TASK_KINDS and not is_full_task_name(name):
            suggestion = did_you_mean(str(name), TASK_KINDS, otherwise=f"there are {', '.join(TASK_KINDS)}")
            raise Misconfigured(f"budgets has {name!r}, which is no kind of task: {suggestion}{_OR_TASKS}")
        if not isinstance(cast("object", budget), Budget):
            raise Misconfigured(f"budgets[{name!r}] is {budget!r}: give a Budget(minimum=..., maximum=...)")
        wrong = find_budget_error(budget, of_task=name not in TASK_KINDS)
        if wrong:
            raise Misconfigured(f"budgets[{name!r}]: {wrong}")
    return dict(budgets)


def is_full_task_name(name: object) -> bool:
    """Return whether this may be the name of a task with its own budget: it has a dot, as no kind has."""
    return isinstance(name, str) and "." in name


def check_task_budgets(budgets: Mapping[str, Budget], kinds_by_task: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of the tasks that have budgets of their own.

    Args:
        budgets: All budgets, by kind or task.
        kinds_by_task: The kind of each task of the application.

    Raises:
        Misconfigured: There is no such task, or tasks reserve all slots of their kind.
    """
    own = [name for name in budgets if name not in TASK_KINDS]
    for name in own:
        if name not in kinds_by_task:
            suggestion = did_you_mean(name, kinds_by_task, otherwise=f"kinds are {', '.join(TASK_KINDS)}")
            raise Misconfigured(f"budgets has {name!r}, which is no task of this application: {suggestion}")
    found = {name: kinds_by_task[name] for name in own}
    for kind in TASK_KINDS:
        minimums = {name: budgets[name].minimum for name in own if found[name] == kind}
        if minimums and (error := find_reservation_error(kind, budgets[kind].minimum, minimums)):
            raise Misconfigured(f"budgets: {error}")
    return found


def find_reservation_error(kind: str, minimum: int, reserved_by_task: Mapping[str, int]) -> str:
    """Return why tasks may not reserve this many slots of their kind, which has `minimum` always; '' if they may."""
    reserved = sum(reserved_by_task.values())
    if reserved < minimum:
        return ""
    tasks = ", ".join(name for name, slots in reserved_by_task.items() if slots)
    always = f"{minimum} slot{'s' * (minimum != 1)}" if minimum else "no slot"
    return (
        f"{kind} has a minimum of {always}, and {reserved} would be reserved for {tasks or 'none'}: "
        "one at least must be left for other tasks"
    )


def get_usable_slots(own: int, of_kind: int, others: Iterable[tuple[int, int, int]]) -> int:
    """Return how many of its `own` slots a task, or the rest of its kind, can use now.

    Args:
        own: Its slots.
        of_kind: The slots of the kind, which all of them share.
        others: For each of the others its jobs here, its slots, and how many of these are reserved.
    """
    taken = sum(max(min(jobs, slots), reserved) for jobs, slots, reserved in others)
    return max(min(own, of_kind - taken), 0)


def find_budget_error(budget: Budget, *, of_task: bool = False) -> str:
    """Return the error in a budget, in one line; '' for none."""
    minimum, maximum, cooldown = budget.minimum, budget.maximum, budget.cooldown
    if not _is_count(minimum) and not (of_task and type(minimum) is int and minimum == 0):
        return f"minimum is {minimum!r}: give a whole number, {0 if of_task else 1} or more"
    if not _is_function(budget.strategy):
        return f"strategy is {budget.strategy!r}: give a function that takes a Demand and gives a number"
    if not isinstance(cast("object", cooldown), (int, float)) or not 0 <= cooldown < math.inf:
        return f"cooldown is {cooldown!r}: give seconds, 0 or more"
    if maximum is None or _is_function(maximum):
        return ""
    if not _is_count(maximum):
        return f"maximum is {maximum!r}: give a whole number, a function that takes a Demand, or None"
    return (
        "" if minimum <= cast("int", maximum) else f"the minimum, {minimum}, is over the maximum, {maximum}"
    )


_OR_TASKS = "; or give the full name of a task, such as shop.resize"


def _is_function(value: object) -> bool:
    return callable(value) and not inspect.isclass(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


_LOAD = re.compile(r"load(?:\*(\d{1,6}(?:\.\d{1,6})?))?")
_MEMORY = re.compile(r"memory/(\d{1,15}[kMG]?)B?")
_HINT = "write thread=4, thread=2..8, thread=2.., thread=2..load, boxed=1..memory/200MB or shop.resize=0..2"


def parse_budgets(text: str) -> dict[str, Budget]:
    """Return the budgets by kind or task, from `KIND=SLOTS` or `TASK=MINIMUM..MAXIMUM`, separated by spaces or commas.

    A maximum is a number; nothing; `load` or `load*1.5`, for `ByLoad` with that value per core; `memory/200MB`,
    for `ByMemory` with that much per job. Raises Misconfigured.
    """
    budgets: dict[str, Budget] = {}
    for kind, slots in parse_assignments(text, _HINT).items():
        try:
            minimum, maximum = RANGE.parse(slots)
        except Misconfigured:
            raise _make_error(f"{kind}={slots}") from None
        budgets[kind] = (
            fixed_budget(minimum)
            if maximum is None
            else Budget(minimum=minimum, maximum=_parse_maximum(f"{kind}={slots}", maximum))
        )
    return check_budgets(budgets)


def _parse_maximum(budget: str, text: str) -> int | Maximum | None:
    if not text:
        return None
    if match := _LOAD.fullmatch(text):
        return ByLoad(per_core=float(match[1] or 1))
    if match := _MEMORY.fullmatch(text):
        return ByMemory(per_job=SIZE.parse(f"{match[1]}B"))  # memory/200M is 200 MB, not MiB
    try:
        return COUNT.parse(text)
    except Misconfigured:
        raise _make_error(budget) from None


def _make_error(budget: str) -> Misconfigured:
    return Misconfigured(f"{budget!r} is not a budget: {_HINT}")
