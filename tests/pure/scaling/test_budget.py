"""Budget: the proposal's algorithm by its worked numbers, and what holds whatever the strategy says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App, Misconfigured
from celery5.config.settings import read_settings
from celery5.processes.options import resolve_budgets
from celery5.protocol.scaling.budget import (
    DEFAULT_MAXIMUM,
    GROWTH_WINDOW,
    Budget,
    BudgetState,
    ByLoad,
    ByMemory,
    Demand,
    Growth,
    fixed_budget,
    get_max_slots,
    get_prefetch_slots,
    next_budget_state,
    parse_budgets,
)
from celery5.protocol.task_kinds import TASK_KINDS


def demand(queued: int, executing: int, current: int, **more: Any) -> Demand:
    """What is known, of a kind between 1 and 100."""
    fields: dict[str, Any] = {"kind": "trio", "minimum": 1, "maximum": 100, **more}
    return Demand(queued=queued, executing=executing, current=current, **fields)


@pytest.mark.parametrize(
    ("queued", "current", "increases", "exponent", "slots"),
    [
        # C65: more are queued than there are slots: by the excess.
        (7, 4, 0, 1.0, 7),
        (5, 4, 0, 1.0, 5),
        (40, 1, 0, 3.0, 40),
        # C66: still more after the cool-down: current * exponent * k, k = 2 for the second increase, rounded up.
        (9, 4, 1, 1.0, 8),
        (9, 4, 1, 1.5, 12),
        (9, 5, 1, 1.25, 13),  # 12.5
        (9, 3, 1, 1.1, 7),  # 6.6
        (9, 5, 1, 1.1, 11),  # 11.0, which floats make 11.000000000000002
        (30, 12, 2, 1.5, 54),  # k = 3
        (30, 10, 3, 2.0, 80),  # k = 4
        # ... and by one at least.
        (9, 4, 1, 0.1, 5),
        (9, 4, 1, 0.5, 5),
        # C67: as many as there are slots, or fewer, let nothing grow.
        (4, 4, 0, 1.0, 4),
        (4, 4, 3, 2.0, 4),
    ],
)
def test_it_grows_by_the_excess_then_by_exponent_times_increases(
    queued: int, current: int, increases: int, exponent: float, slots: int
) -> None:
    known = demand(queued, current, current, increases=increases)
    assert Growth(exponent=exponent)(known) == slots


@pytest.mark.parametrize(
    ("queued", "executing", "current", "slots"),
    [
        (0, 3, 8, 3),
        (0, 0, 8, 0),  # the minimum is kept by whoever asks
        (2, 3, 8, 3),
        (5, 3, 8, 8),  # together they are no fewer than the slots
        (0, 8, 8, 8),
        (0, 9, 8, 8),  # one is over the limit and about to end
    ],
)
def test_it_shrinks_to_what_runs(queued: int, executing: int, current: int, slots: int) -> None:
    assert Growth()(demand(queued, executing, current)) == slots


def test_a_whole_story_with_a_cool_down() -> None:
    budget = Budget(minimum=2, maximum=60, cooldown=10.0, strategy=Growth(exponent=1.5))
    course = BudgetState(2)
    # Seconds, queued, executing: the slots after it.
    story = [
        (0.0, 5, 2, 5),  # excess: growth begins, k = 1
        (1.0, 50, 5, 5),  # it cools down
        (9.9, 50, 5, 5),
        (10.0, 50, 5, 15),  # 5 * 1.5 * 2
        (15.0, 50, 15, 15),
        (20.0, 50, 15, 60),  # 15 * 1.5 * 3 = 67.5, and 60 is the most: growth ends
        (25.0, 0, 0, 60),  # it cools down, and does not shrink either
        (30.1, 0, 0, 60),  # the queue is given a moment to show what it has
        (30.5, 0, 12, 12),
        (30.6, 0, 0, 2),
        (31.0, 9, 2, 9),  # growth begins again, by the excess
    ]
    for now, queued, executing, slots in story:
        known = demand(queued, executing, course.current, minimum=2, maximum=60, increases=course.increases)
        course = next_budget_state(course, budget, known, now)
        assert course.current == slots, now


def test_growth_is_over_when_fewer_are_queued_than_there_are_slots() -> None:
    budget, course = Budget(maximum=100, cooldown=1.0), BudgetState(4, 2, 0.0)
    known = demand(3, 4, 4, increases=2)
    assert next_budget_state(course, budget, known, 1.0) == course  # not sure yet
    assert next_budget_state(course, budget, known, 1.0 + GROWTH_WINDOW) == BudgetState(4, 0, 0.0)
    assert next_budget_state(course, budget, demand(4, 4, 4, increases=2), 9.0) == course  # as many: not over


def test_limits_that_move_hold_at_once_even_while_it_cools_down() -> None:
    budget = Budget(maximum=lambda _demand: 3, cooldown=60.0)
    assert next_budget_state(BudgetState(9, 1, 0.0), budget, demand(50, 9, 9, maximum=3), 0.1).current == 3
    assert next_budget_state(BudgetState(1, 0, 0.0), budget, demand(0, 0, 1, minimum=4), 0.1).current == 4
    assert next_budget_state(BudgetState(9), budget, demand(0, 9, 9, minimum=4, maximum=2), 0.1).current == 4


numbers = st.integers(0, 700)
courses = st.builds(BudgetState, st.integers(1, 700), st.integers(0, 9), st.floats(-100, 100))
limits = st.tuples(st.integers(1, 600), st.integers(-5, 600))


@given(courses, limits, numbers, numbers, st.integers(-1000, 10000), st.floats(0, 200), st.floats(0, 20))
def test_budget_stays_between_minimum_and_maximum(
    course: BudgetState,
    between: tuple[int, int],
    queued: int,
    executing: int,
    says: int,
    now: float,
    cooldown: float,
) -> None:
    minimum, maximum = between
    budget = Budget(minimum=minimum, cooldown=cooldown, strategy=lambda _demand: says)
    known = demand(queued, executing, course.current, minimum=minimum, maximum=maximum)
    after = next_budget_state(course, budget, known, now)
    assert minimum <= after.current <= max(minimum, maximum)
    assert after.increases >= 0


@given(courses, limits, numbers, numbers, st.floats(0.01, 8), st.floats(0, 200))
def test_proposed_budget_grows_with_a_queue_and_shrinks_without_one(
    course: BudgetState, between: tuple[int, int], queued: int, executing: int, exponent: float, now: float
) -> None:
    minimum, maximum = min(between[0], course.current), max(between[1], course.current)
    budget = Budget(minimum=minimum, strategy=Growth(exponent=exponent))
    known = demand(
        queued, executing, course.current, minimum=minimum, maximum=maximum, increases=course.increases
    )
    after = next_budget_state(course, budget, known, now)
    if after.current > course.current:
        assert queued > course.current
        assert after.grown_at == now
        assert now - course.grown_at >= budget.cooldown
    if after.current < course.current:
        assert queued + executing < course.current
        assert after.current >= min(executing, course.current)
    if queued > course.current and now - course.grown_at >= budget.cooldown:
        assert after.current > course.current or course.current == maximum


@given(st.integers(1, 50), st.integers(1, 600), st.floats(0.1, 5), st.floats(0.05, 3))
def test_full_queue_raises_the_budget_and_an_empty_one_lowers_it(
    minimum: int, more: int, exponent: float, cooldown: float
) -> None:
    maximum = minimum + more
    budget = Budget(minimum=minimum, maximum=maximum, cooldown=cooldown, strategy=Growth(exponent=exponent))
    course, now = BudgetState(minimum), 0.0
    for _ in range(more + 1):
        # Just as many more as are read for a budget that may grow.
        queued = get_prefetch_slots(course, budget, maximum, now) - course.current
        known = demand(
            queued,
            course.current,
            course.current,
            minimum=minimum,
            maximum=maximum,
            increases=course.increases,
        )
        course, now = next_budget_state(course, budget, known, now), now + 1.01 * cooldown
    assert course.current == maximum
    known = demand(0, 0, course.current, minimum=minimum, maximum=maximum)
    course = next_budget_state(course, budget, known, now + GROWTH_WINDOW)
    assert course.current == minimum


@given(courses, st.integers(1, 600), st.floats(0, 200))
def test_reads_exceed_the_slots_only_while_the_budget_may_grow(
    course: BudgetState, maximum: int, now: float
) -> None:
    budget = Budget(maximum=maximum)
    slots = get_prefetch_slots(course, budget, maximum, now)
    may_grow = course.current < maximum and now - course.grown_at >= budget.cooldown
    assert slots > 2 * course.current if may_grow else slots == course.current


def test_a_fixed_budget_never_moves() -> None:
    budget = fixed_budget(7)
    assert budget.is_fixed
    assert (budget.max_slots, get_max_slots(budget)) == (7, DEFAULT_MAXIMUM)
    for queued, executing in [(0, 0), (700, 7), (3, 5)]:
        known = demand(queued, executing, 7, minimum=7, maximum=7)
        assert next_budget_state(BudgetState(7), budget, known, 5.0) == BudgetState(7)
    assert get_prefetch_slots(BudgetState(7), budget, 7, 5.0) == 7


def test_a_budget_without_a_maximum_has_one_all_the_same() -> None:
    assert Budget(minimum=3).max_slots == DEFAULT_MAXIMUM
    assert Budget(minimum=DEFAULT_MAXIMUM + 1).max_slots == DEFAULT_MAXIMUM + 1
    assert not Budget().is_fixed


def test_a_maximum_by_load_leaves_what_the_cores_have_left() -> None:
    by_load = ByLoad()
    assert by_load(demand(0, 3, 3, cores=8, load=5.5)) == 5
    assert by_load(demand(0, 3, 3, cores=8, load=9.5)) == 1
    assert ByLoad(per_core=2)(demand(0, 0, 1, cores=4, load=0.0)) == 8


def test_a_maximum_by_memory_leaves_what_is_to_be_spared() -> None:
    by_memory = ByMemory(per_job=100, spare=1000)
    assert by_memory(demand(0, 2, 2, memory=1550)) == 7
    assert by_memory(demand(0, 2, 2, memory=700)) == -1


@pytest.mark.parametrize(
    ("budgets", "says"),
    [
        ({"thraed": Budget()}, "budgets has 'thraed', which is no kind of task: did you mean 'thread'?"),
        ({"gpu": Budget()}, "which is no kind of task: there are trio, asyncio, thread, boxed"),
        ({"thread": 4}, "budgets['thread'] is 4: give a Budget(minimum=..., maximum=...)"),
        ({"thread": Budget(minimum=0)}, "minimum is 0: give a whole number, 1 or more"),
        (
            {"shop.resize": Budget(minimum=-1)},
            "budgets['shop.resize']: minimum is -1: give a whole number, 0 or more",
        ),
        ({"thread": Budget(minimum=5, maximum=4)}, "the minimum, 5, is over the maximum, 4"),
        ({"thread": Budget(maximum="many")}, "maximum is 'many': give a whole number, a function"),  # type: ignore[arg-type]
        ({"thread": Budget(maximum=ByLoad)}, "give a whole number, a function that takes a Demand"),  # type: ignore[arg-type]
        ({"thread": Budget(cooldown=-1)}, "cooldown is -1: give seconds, 0 or more"),
        ({"thread": Budget(strategy=None)}, "strategy is None: give a function"),  # type: ignore[arg-type]
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_in_one_line(budgets: Any, says: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        App("shop", budgets=budgets)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("", {}),
        ("thread=4", {"thread": fixed_budget(4)}),
        ("thread=2..8 trio=10..500", {"thread": Budget(minimum=2, maximum=8), "trio": Budget(minimum=10, maximum=500)}),
        ("shop.resize=0..2, boxed=3", {"shop.resize": Budget(minimum=0, maximum=2), "boxed": fixed_budget(3)}),
        ("thread=2..8, boxed=3", {"thread": Budget(minimum=2, maximum=8), "boxed": fixed_budget(3)}),
        ("asyncio=1..", {"asyncio": Budget(minimum=1)}),
        ("thread=1..load", {"thread": Budget(maximum=ByLoad())}),
        ("thread=1..load*1.5", {"thread": Budget(maximum=ByLoad(per_core=1.5))}),
        ("boxed=1..memory/200MB", {"boxed": Budget(maximum=ByMemory(per_job=200_000_000))}),
        ("boxed=1..memory/1G", {"boxed": Budget(maximum=ByMemory(per_job=10**9))}),
        ("boxed=1..memory/512", {"boxed": Budget(maximum=ByMemory(per_job=512))}),
    ],
)  # fmt: skip
def test_budgets_are_said_in_one_line_of_text(text: str, budgets: dict[str, Budget]) -> None:
    assert parse_budgets(text) == budgets


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thread", "'thread' is not understood: write thread=4, thread=2..8"),
        ("thread=-1", "'thread=-1' is not a budget"),
        ("thread=1..fast", "'thread=1..fast' is not a budget"),
        ("thread=1..memory/", "'thread=1..memory/' is not a budget"),
        ("thread=1..9999999999", "is not a budget"),
        ("thread=0", "budgets['thread']: minimum is 0: give a whole number, 1 or more"),
        ("thread=5..2", "the minimum, 5, is over the maximum, 2"),
        ("threads=5", "budgets has 'threads', which is no kind of task: did you mean 'thread'?"),
        ("thread=5 thread=6", "has 'thread' twice"),
    ],
)
def test_text_that_is_no_budget_is_refused_with_where_it_stands(text: str, says: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        read_settings({}, {"CELERY5_BUDGETS": text})
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"CELERY5_BUDGETS={text!r}: ")
    assert "\n" not in str(refused.value)


@given(st.text(max_size=30))
def test_any_text_is_either_budgets_or_refused(text: str) -> None:
    try:
        found = parse_budgets(text)
    except Misconfigured:
        return
    assert all(kind in TASK_KINDS for kind in found)


def test_code_overrides_the_environment_which_overrides_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CELERY5_BUDGETS", "thread=1..3 boxed=2")
    app = App("shop", cpu_slots=9, concurrency=7, budgets={"boxed": Budget(minimum=3)})
    assert resolve_budgets(app) == {
        "trio": fixed_budget(7),
        "asyncio": fixed_budget(7),
        "thread": Budget(maximum=3),
        "boxed": Budget(minimum=3),
    }
