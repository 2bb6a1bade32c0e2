"""Budget: how many jobs of one kind may run at once in one worker, and how that grows and shrinks (C63 to C69).

Two numbers: the maximum is what may be, a number or what a function says now; the current one is what may run now. It
lies between the minimum and the maximum, and a strategy moves it. A fixed budget, minimum = maximum, never moves.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.similar_names import did_you_mean

KINDS = ("trio", "asyncio", "thread", "boxed")
"""The kinds of tasks, by where their code runs."""
DEFAULT_MAXIMUM = 512
"""Slots of a kind whose maximum nobody named, and the most that a worker can be told to have while it runs."""
GROWTH_WINDOW = 0.25
"""Seconds after a cool-down in which it can only grow: so long a queue has to show whether there are still more."""
CPU_ADVICE = 10
"""More slots than this for CPU-bound tasks get a warning (C64)."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a budget is decided.

    Of one `kind` of task: the jobs that are `queued` in this worker and those `executing`, the slots it has now
    (`current`), between `minimum` and `maximum`; how often it has grown since growth began (`increases`). Of the
    machine: its `cores`, the `load` (average of the last minute), the `memory` that is left, in bytes.
    """

    kind: str
    queued: int
    executing: int
    current: int
    minimum: int
    maximum: int
    increases: int = 0
    cores: int = 1
    load: float = 0.0
    memory: int = 0


Maximum = Callable[[Demand], int | Awaitable[int]]
"""Says how many jobs may run at once now. It may be `async`, for Trio; a plain one is called in a thread."""


class BudgetStrategy(Protocol):
    """Moves the current number of slots (C69): gives the new one. It is kept between minimum and maximum, whatever it
    says, and is asked often, whenever jobs came and ten times a second: it must be quick."""

    def __call__(self, demand: Demand, /) -> int: ...


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The proposal's way to grow and shrink (C65 to C68).

    When more jobs are queued than there are slots, growth begins: the slots are raised by the excess, queued - current.
    If after the cool-down there still are more, they become current * `exponent` * k, rounded up and one more at least;
    k counts the increases, this one included, so it is 2 now, then 3. When fewer jobs are here than slots, the slots
    become the number of jobs that run.
    """

    exponent: float = 1.0

    def __call__(self, demand: Demand) -> int:
        """The new number of slots."""
        current = demand.current
        if demand.queued > current:
            if not demand.increases:
                return current + (demand.queued - current)
            # What a float adds to a whole number is no reason to round up.
            product = round(current * self.exponent * (demand.increases + 1), 6)
            return max(current + 1, math.ceil(product))
        if demand.queued + demand.executing < current:
            return demand.executing
        return current


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of one kind may run at once in one worker process (C63).

    At least `minimum`; at most `maximum`: a number, a function that takes a `Demand` and gives one, or None for 512. In
    between, the `strategy` decides. After each growth nothing changes for `cooldown` seconds (C66).
    """

    minimum: int = 1
    maximum: int | Maximum | None = None
    cooldown: float = 1.0
    strategy: BudgetStrategy = Growth()

    @property
    def max_slots(self) -> int:
        """The largest number that the maximum can be."""
        return max(self.minimum, self.maximum if isinstance(self.maximum, int) else DEFAULT_MAXIMUM)

    @property
    def is_fixed(self) -> bool:
        """Whether it never moves."""
        return self.maximum == self.minimum


def fixed_budget(slots: int) -> Budget:
    """A budget that never moves."""
    return Budget(minimum=slots, maximum=slots)


class BudgetState(NamedTuple):
    """Where a budget is: the `current` number of slots, how often it has grown in a row, and when it did so last."""

    current: int
    increases: int = 0
    grown_at: float = -math.inf


def next_budget_state(state: BudgetState, budget: Budget, demand: Demand, now: float) -> BudgetState:
    """One step, at the time `now` (seconds on any clock). Never below the minimum, never above the maximum."""
    least, most = demand.minimum, max(demand.minimum, demand.maximum)
    if not least <= state.current <= most:  # the limits have moved
        return BudgetState(min(max(state.current, least), most), 0, state.grown_at)
    passed = now - state.grown_at
    if least == most or passed < budget.cooldown:
        return state
    current = min(max(int(budget.strategy(demand)), least), most)
    if current > state.current:
        return BudgetState(current, 0 if current == most else state.increases + 1, now)
    if passed < budget.cooldown + GROWTH_WINDOW:
        return state
    ended = demand.queued < state.current or state.current == most  # growth is over (C67)
    increases = 0 if ended else state.increases
    return state if (current, increases) == state[:2] else BudgetState(current, increases, state.grown_at)


def get_prefetch_slots(state: BudgetState, budget: Budget, maximum: int, now: float) -> int:
    """How many slots to read jobs for. A budget that may grow asks for more jobs than it has slots, or it would never
    learn that there are more: when growth may begin all that there may be slots for, later as many as show that growth
    must go on; and no more than it has slots while it cools down, since they would only wait."""
    current = state.current
    if current >= maximum or now - state.grown_at < budget.cooldown:
        return current
    enough = 2 * current + 1
    return enough if state.increases else max(maximum, enough)


class ByLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A maximum by the machine's load: more jobs may run while its average per core is below `per_core`, fewer while it
    is above."""

    per_core: float = 1.0

    def __call__(self, demand: Demand) -> int:
        """The maximum now."""
        return demand.executing + math.floor(demand.cores * self.per_core - demand.load)


class ByMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A maximum by the memory that is left: as many more jobs as fit into it with `per_job` bytes each, when `spare`
    bytes are left alone."""

    per_job: int
    spare: int = 256 * 1024 * 1024

    def __call__(self, demand: Demand) -> int:
        """The maximum now."""
        return demand.executing + (demand.memory - self.spare) // max(self.per_job, 1)


def get_max_slots(budget: Budget) -> int:
    """The most slots that a kind with this budget can be told to have while its worker runs."""
    return max(budget.max_slots, DEFAULT_MAXIMUM)


def check_budgets(budgets: Mapping[str, Budget]) -> dict[str, Budget]:
    """The budgets of an application, by kind. Raises Misconfigured for what makes no sense."""
    for kind, budget in budgets.items():
        if kind not in KINDS:
            meant = did_you_mean(str(kind), KINDS, otherwise=f"there are {', '.join(KINDS)}")
            raise Misconfigured(f"budgets has {kind!r}, which is no kind of task: {meant}")
        if not isinstance(cast("object", budget), Budget):
            raise Misconfigured(f"budgets[{kind!r}] is {budget!r}: give a Budget(minimum=..., maximum=...)")
        wrong = find_budget_error(budget)
        if wrong:
            raise Misconfigured(f"budgets[{kind!r}]: {wrong}")
    return dict(budgets)


def find_budget_error(budget: Budget) -> str:
    """What is wrong with a budget, in one line; '' when nothing is."""
    minimum, maximum, cooldown = budget.minimum, budget.maximum, budget.cooldown
    if not _is_count(minimum):
        return f"minimum is {minimum!r}: give a whole number, 1 or more"
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


def _is_function(value: object) -> bool:
    return callable(value) and not inspect.isclass(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


_ONE = re.compile(r"(?P<kind>[^=\s]+)=(?P<minimum>\d{1,9})(?P<range>\.\.(?P<maximum>\S*))?")
_LOAD = re.compile(r"load(?:\*(\d{1,6}(?:\.\d{1,6})?))?")
_MEMORY = re.compile(r"memory/(\d{1,15})([kMG]?)B?")
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_HINT = "write thread=4, thread=2..8, thread=2.., thread=2..load or boxed=1..memory/200MB"


def parse_budgets(text: str) -> dict[str, Budget]:
    """The budgets, by kind: `KIND=SLOTS` or `KIND=MINIMUM..MAXIMUM`, with spaces or commas between them.

    A maximum is a number; nothing; `load` or `load*1.5`, as `ByLoad` with so much per core; `memory/200MB`, as
    `ByMemory` with so much for each job. Raises Misconfigured.
    """
    found: dict[str, Budget] = {}
    for word in text.replace(",", " ").split():
        match = _ONE.fullmatch(word)
        if match is None:
            raise Misconfigured(f"{word!r} is no budget: {_HINT}")
        kind, minimum = match["kind"], int(match["minimum"])
        if kind in found:
            raise Misconfigured(f"there are two budgets for {kind!r}")
        ranged = match["range"] is not None
        found[kind] = (
            Budget(minimum=minimum, maximum=_maximum(word, match["maximum"]))
            if ranged
            else fixed_budget(minimum)
        )
    return check_budgets(found)


def _maximum(word: str, text: str) -> int | Maximum | None:
    if not text:
        return None
    if text.isdecimal() and len(text) < 10:
        return int(text)
    if match := _LOAD.fullmatch(text):
        return ByLoad(per_core=float(match[1] or 1))
    if match := _MEMORY.fullmatch(text):
        return ByMemory(per_job=int(match[1]) * _TIMES[match[2]])
    raise Misconfigured(f"{word!r} is no budget: {_HINT}")
