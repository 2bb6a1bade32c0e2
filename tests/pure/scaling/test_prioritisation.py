"""Prioritisation: the strategies by worked numbers, and what holds whatever a strategy says."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import Misconfigured
from celery5.errors import CommandRefused
from celery5.protocol.commands.definitions import PREFER
from celery5.protocol.scaling.prioritisation import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    STRATEGIES,
    Preference,
    Saturation,
    compute_preference,
    longest,
    rarest,
    shortest,
    sort_by_weight,
)
from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker, TaskLoad
from celery5.protocol.task_kinds import TASK_KINDS


def line(
    task: str, waiting: int = 1, mean: float | None = None, queue: str = "q", kind: str = "trio"
) -> TaskLoad:
    """Jobs of one task."""
    return TaskLoad(queue=queue, task=task, kind=kind, waiting=waiting, mean=mean)


def snapshot(*lines: TaskLoad, **busy: tuple[int, int]) -> ClusterSnapshot:
    """These lines, and one worker with so many of so many slots taken, by kind."""
    executing, most = ({kind: places[place] for kind, places in busy.items()} for place in (0, 1))
    return ClusterSnapshot(
        task_loads=lines, workers=(ClusterWorker(name="w", slots=most, max_slots=most, executing=executing),)
    )


def test_shortest_first_weighs_by_one_over_the_mean() -> None:
    preference = compute_preference(
        shortest, snapshot(line("a", mean=0.5), line("b", mean=2.0), line("c", mean=500.0))
    )
    assert preference.tasks == {"b": 0.25, "c": MIN_WEIGHT}


def test_longest_first_weighs_by_the_mean() -> None:
    preference = compute_preference(
        longest, snapshot(line("a", mean=0.5), line("b", mean=2.0), line("c", mean=0.001))
    )
    assert preference.tasks == {"a": 0.25, "c": MIN_WEIGHT}


def test_a_task_that_never_ran_is_preferred_so_that_its_time_becomes_known() -> None:
    lines = snapshot(line("a", mean=0.5), line("b", mean=2.0), line("new"))
    for strategy in (shortest, longest):
        assert "new" not in compute_preference(strategy, lines).tasks


def test_rarest_first_counts_a_task_on_all_queues_together() -> None:
    lines = (line("a", 100), line("a", 100, queue="p"), line("b", 50), line("c", 20, queue="p"), line("d", 0))
    preference = compute_preference(rarest, snapshot(*lines))
    assert preference.tasks == {"a": 0.1, "b": 0.4}
    # 100 jobs of 0.1 and 50 of 0.4 are 0.2 in the mean; 100 of 0.1 and 20 of 1.0 are 0.25, which is the best.
    assert preference.queues == {"q": 0.8}


@pytest.mark.parametrize(
    ("cpu", "io", "held_back"),
    [
        ((7, 10), (10, 100), set[str]()),
        (
            (8, 10),
            (10, 100),
            {"cpu", "box"},
        ),  # C100: I/O-bound ones when the CPU's slots are nearly all taken
        ((10, 10), (79, 100), {"cpu", "box"}),
        ((7, 10), (80, 100), {"io", "loop"}),  # ... and the other way round
        ((8, 10), (80, 100), set[str]()),
        ((0, 0), (80, 100), {"io", "loop"}),
        ((0, 0), (0, 0), set[str]()),
    ],
)
def test_what_needs_what_is_nearly_used_up_is_held_back(
    cpu: tuple[int, int], io: tuple[int, int], held_back: set[str]
) -> None:
    lines = (line("cpu", kind="thread"), line("box", kind="boxed"), line("io"), line("loop", kind="asyncio"))
    preference = compute_preference(Saturation(), snapshot(*lines, thread=cpu, trio=io))
    assert preference.tasks == dict.fromkeys(held_back, 0.1)


def test_capacity_in_use_is_that_of_all_workers_and_kinds_together() -> None:
    one = ClusterWorker(
        name="1", max_slots={"thread": 4, "boxed": 4, "trio": 10}, executing={"thread": 4, "trio": 1}
    )
    other = ClusterWorker(
        name="2", max_slots={"thread": 2, "asyncio": 10}, executing={"thread": 1, "asyncio": 11}
    )
    both = ClusterSnapshot(workers=(one, other))
    assert (both.cpu_utilization, both.io_utilization) == (0.5, 0.55)


def test_threshold_can_be_changed_and_nonsense_is_refused() -> None:
    lines = snapshot(line("cpu", kind="thread"), line("io"), thread=(5, 10), trio=(0, 10))
    assert compute_preference(Saturation(threshold=0.5), lines).tasks == {"cpu": 0.1}
    with pytest.raises(Misconfigured, match="threshold is 80: give a share of slots"):
        Saturation(threshold=80)


def test_custom_strategy_weights_tasks_by_ratio() -> None:
    def vip_first(seen: ClusterSnapshot) -> Mapping[str, float]:
        return {load.task: 500 if load.task == "vip" else 100 for load in seen.task_loads}

    preference = compute_preference(
        vip_first, snapshot(line("vip", 30), line("a", 10), line("b", 10, queue="p"))
    )
    assert preference.tasks == {"a": 0.2, "b": 0.2}
    assert preference.queues == {"p": 0.25}  # 0.2 against (30 * 1.0 + 10 * 0.2) / 40


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "much", None, True])
def test_a_strategy_that_gives_no_weight_is_found_out(weight: Any) -> None:
    with pytest.raises(ValueError, match="the weight of 'a' is"):
        compute_preference(lambda _seen: {"a": weight, "b": 1.0}, snapshot(line("a")))


def test_nothing_to_prefer_is_neutral() -> None:
    for strategy in STRATEGIES.values():
        assert compute_preference(strategy, ClusterSnapshot()).is_neutral
    assert compute_preference(lambda _seen: {"a": 0, "b": 0}, snapshot(line("a"))).is_neutral


def test_what_is_in_order_has_the_heaviest_first_and_equals_as_they_came() -> None:
    weights = {"a": 0.1, "d": 0.5}
    assert sort_by_weight("abcd", lambda task: weights.get(task, MAX_WEIGHT)) == ["b", "c", "d", "a"]


def test_a_small_difference_is_not_worth_telling() -> None:
    known = Preference({"a": 0.5}, {"q": 0.4})
    assert not known.differs_from(known)
    assert not known.differs_from(Preference({"a": 0.45, "b": 0.9}, {"q": 0.4}))
    assert known.differs_from(Preference({"a": 0.39}, {"q": 0.4}))
    assert known.differs_from(Preference({}, {"q": 0.4}))
    assert known.differs_from(Preference({"a": 0.5}, {"q": 0.4, "p": 0.7}))


def test_what_the_command_says_is_read_and_lasts_for_a_while() -> None:
    said = {"tasks": {"a": 0.5, "b": 0.0001}, "queues": {}, "seconds": 30}
    parameters = PREFER.parse(said)
    assert (parameters.preference, parameters.seconds) == (Preference({"a": 0.5, "b": MIN_WEIGHT}, {}), 30.0)
    assert (PREFER.parse({}).preference, PREFER.parse({}).seconds) == (Preference(), 60.0)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"task": {}}, "prefer does not take 'task': it takes tasks, queues and seconds"),
        ({"tasks": ["a"]}, "tasks is ['a']: give weights by name"),
        ({"queues": {"q": 2}}, "queues: the weight of 'q' is 2: give more than 0 and at most 1"),
        ({"tasks": {"a": 0}}, "the weight of 'a' is 0"),
        ({"tasks": {"a": "1"}}, "the weight of 'a' is '1'"),
        ({"seconds": 0}, "seconds is 0: give more than 0 and at most 3600"),
        ({"seconds": True}, "seconds is True"),
        ({"seconds": 1e9}, "seconds is 1000000000.0"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_one_line(said: Any, says: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        PREFER.parse(said)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


loads = st.builds(
    TaskLoad,
    queue=st.sampled_from("pqr"),
    task=st.sampled_from("abcdef"),
    kind=st.sampled_from(TASK_KINDS),
    waiting=st.integers(0, 10**9),
    mean=st.none() | st.floats(0, 1e9),
)
counts = st.dictionaries(st.sampled_from(TASK_KINDS), st.integers(0, 1000))
workers = st.builds(ClusterWorker, name=st.just("w"), max_slots=counts, executing=counts)
situations = st.builds(
    ClusterSnapshot,
    task_loads=st.lists(loads, max_size=9).map(tuple),
    workers=st.lists(workers, max_size=3).map(tuple),
)
own = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, allow_infinity=False)).map(
    lambda weights: lambda _seen: weights
)


@given(situations, st.sampled_from(list(STRATEGIES.values())) | own)
def test_no_weight_is_out_of_bounds_and_somebody_has_the_best(seen: ClusterSnapshot, strategy: Any) -> None:
    preference = compute_preference(strategy, seen)
    weights = [*preference.tasks.values(), *preference.queues.values()]
    assert all(MIN_WEIGHT <= weight <= MAX_WEIGHT for weight in weights)
    if preference.queues:
        assert preference.queues.keys() < {load.queue for load in seen.task_loads if load.waiting}
    # What is told is what the command takes.
    said = {"tasks": dict(preference.tasks), "queues": dict(preference.queues)}
    assert PREFER.parse(said).preference == preference


@given(situations)
def test_shortest_and_longest_are_opposites(seen: ClusterSnapshot) -> None:
    means = {load.task: load.mean for load in seen.task_loads if load.mean is not None}
    if len(means) != sum(load.mean is not None for load in seen.task_loads):
        return  # a task on two queues has the mean of both
    short, long = compute_preference(shortest, seen).tasks, compute_preference(longest, seen).tasks
    for task, a in means.items():
        for other, b in means.items():
            if a < b:
                assert short.get(task, MAX_WEIGHT) >= short.get(other, MAX_WEIGHT)
                assert long.get(task, MAX_WEIGHT) <= long.get(other, MAX_WEIGHT)


@given(situations)
def test_limited_and_suspended_tasks_ask_for_no_more_slots_than_allowed(seen: ClusterSnapshot) -> None:
    for load in seen.task_loads:
        limited = TaskLoad(queue="q", task="t", kind="trio", waiting=load.waiting, running=3, limit=5)
        assert limited.demand <= max(5, limited.running)
        suspended = TaskLoad(
            queue="q", task="t", kind="trio", waiting=load.waiting, running=3, suspended=True
        )
        assert suspended.demand == 3
