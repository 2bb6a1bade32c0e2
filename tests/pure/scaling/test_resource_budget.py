"""Resource budgets: amounts are exact, nothing is exceeded, nobody starves, and only what is idle is closed."""

import random
from collections import Counter
from fractions import Fraction
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.protocol.scaling.resource_budget import (
    BEGIN,
    LOOKAHEAD,
    UNIT,
    WAIT,
    Evict,
    Grant,
    Needs,
    ResourceBudget,
    SizedThing,
    parse_capacity,
    parse_needs,
    parse_size,
    share_capacity,
    show,
    to_numbers,
)


def needs(shared: tuple[SizedThing, ...] = (), **amounts: float) -> Needs:
    return Needs(parse_needs(amounts, "task t"), shared)


def having(**amounts: Any) -> ResourceBudget:
    return ResourceBudget(parse_capacity(amounts))  # type: ignore[arg-type]


# amounts


@given(st.integers(1, 200))
def test_fractions_fit_as_often_as_decimal_arithmetic_says(count: int) -> None:
    """Of a need that is a part of the whole, exactly that many fit, however floats add up."""
    each = round(1 / count, 4)
    while Fraction(repr(each)) * count > 1:
        each = round(each - 0.0001, 4)
    budget, need = having(vram_gb=1), needs(vram_gb=each)
    begun = 0
    while budget.decide("t", need) == BEGIN:
        budget.take("t", need)
        begun += 1
    assert begun == Fraction(1) // Fraction(repr(each))
    assert begun >= count


@given(st.lists(st.floats(0.0001, 1000, allow_nan=False), min_size=1, max_size=50))
def test_returning_all_grants_frees_the_whole_capacity(amounts: list[float]) -> None:
    budget = having(vram_gb=1_000_000)
    grants = [budget.take("t", needs(vram_gb=amount)) for amount in amounts]
    random.Random(0).shuffle(grants)
    for grant in grants:
        budget.give_back(grant)
    assert budget.taken == {"vram_gb": 0}


def test_a_tenth_fits_ten_times() -> None:
    budget, tenth = having(gpu=1), needs(gpu=0.1)
    for _ in range(10):
        assert budget.decide("t", tenth) == BEGIN
        budget.take("t", tenth)
    assert budget.decide("t", tenth) == WAIT
    assert budget.taken == budget.capacity


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"gpu": -1}, "gpu is -1: give a number from 0"),
        ({"gpu": "1"}, "gpu is '1': give a number"),
        ({"gpu": True}, "gpu is True: give a number"),
        ({"gpu": float("nan")}, "gpu is nan: give a number"),
        ({"gpu": float("inf")}, "gpu is inf: give a number"),
        ({"gpu": 0}, "gpu is 0: leave it out"),
        ({"gpu": 1.5}, "gpu is 1.5: give a part of one, or a whole number"),
        ({"gpu": 1e-9}, "gpu is 1e-09: the smallest amount is 0.0001"),
        ({"GPU": 1}, "'GPU' is no name of a resource"),
        ({3: 1}, "3 is no name of a resource"),
        ([1], "is [1]: give numbers by name"),
    ],
)
def test_invalid_needs_of_a_task_are_refused_in_one_line(value: Any, wrong: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        parse_needs(value, "task t: resources")
    assert str(caught.value).startswith("task t: resources")
    assert wrong in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["gpu=x", "gpu=1.5", {"gpu": -1}, "3", "gpu=1 gpu=2", {"": 3}, "G=1"])
def test_an_invalid_capacity_is_refused(value: Any) -> None:
    with pytest.raises(Misconfigured):
        parse_capacity(value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"gpu": -1}', """'{"gpu": -1}' is JSON, which is not read here: write gpu=2"""),
        ('{"gpu":2}', """'{"gpu":2}' is JSON"""),
        ("auto auto", "'auto auto' has two values without a name: write gpu=2"),
        ("x", "capacity: x is not a number"),
    ],
)
def test_a_text_of_capacity_in_another_form_is_refused_with_the_form_to_write(text: str, wrong: str) -> None:
    with pytest.raises(Misconfigured, match="write gpu=2 vram_gb=24 or gpu=auto") as caught:
        parse_capacity(text)
    assert wrong in str(caught.value)


def test_a_capacity_is_written_as_a_text_or_a_table() -> None:
    assert parse_capacity("gpu=2, vram_gb=auto") == {"gpu": 2 * UNIT, "vram_gb": "auto"}
    assert parse_capacity({"gpu": 2, "vram_gb": "auto"}) == parse_capacity("gpu=2 vram_gb=auto")
    assert parse_capacity("auto") == {"": "auto"}
    assert parse_capacity("") == {}


def test_a_size_with_a_device_is_refused() -> None:
    with pytest.raises(Misconfigured, match="gpu has no place in a size"):
        parse_size({"gpu": 1}, "resource 'model': size")


@given(st.integers(0, 16), st.integers(1, 7))
def test_processes_share_devices_and_amounts(gpus: int, processes: int) -> None:
    whole = parse_capacity({"gpu": gpus, "vram_gb": 24.5})
    shares = [share_capacity(whole, number, processes) for number in range(1, processes + 1)]  # type: ignore[arg-type]
    assert sum(share["gpu"] for share in shares) == gpus * UNIT
    assert all(share["gpu"] % UNIT == 0 for share in shares)
    assert sum(share["vram_gb"] for share in shares) <= 24.5 * UNIT


# who begins


def test_two_jobs_never_have_the_same_whole_device() -> None:
    budget, one = having(gpu=2), needs(gpu=1)
    first, second = (budget.take("t", one) for _ in range(2))
    assert {first.devices, second.devices} == {(0,), (1,)}
    assert budget.decide("t", one) == WAIT
    budget.give_back(first)
    assert budget.take("t", one).devices == first.devices


def test_fractions_fill_a_shared_device_before_an_unused_one() -> None:
    budget = having(gpu=2)
    parts = [budget.take("t", needs(gpu=0.4)).devices for _ in range(2)]
    assert parts == [(0,), (0,)]
    assert budget.take("u", needs(gpu=1)).devices == (1,)
    assert budget.decide("t", needs(gpu=0.4)) == WAIT, "0.2 of one and nothing of the other"


def test_the_part_goes_where_the_least_is_left() -> None:
    budget = having(gpu=2)
    first = budget.take("t", needs(gpu=0.6))
    budget.take("t", needs(gpu=0.5))
    budget.give_back(first)
    assert budget.take("t", needs(gpu=0.5)).devices == (1,)
    assert budget.decide("u", needs(gpu=1)) == BEGIN, "one is whole again"


def test_only_a_few_jobs_begin_before_an_earlier_one_that_does_not_fit() -> None:
    budget, small, large = having(vram_gb=8), needs(vram_gb=2), needs(vram_gb=8)
    running = [budget.take("small", small)]
    assert budget.decide("large", large) == WAIT
    for _ in range(LOOKAHEAD):
        assert budget.decide("small", small) == BEGIN
        running.append(budget.take("small", small))
        budget.give_back(running.pop(0))
    assert budget.decide("small", small) == WAIT, "it fits, and what it needs is kept free for the large one"
    while running:
        assert budget.decide("large", large) == WAIT
        budget.give_back(running.pop())
    assert budget.decide("large", large) == BEGIN
    budget.give_back(budget.take("large", large))
    assert budget.decide("small", small) == BEGIN


def test_a_waiting_job_does_not_delay_jobs_that_take_other_resources() -> None:
    budget = having(vram_gb=8, cpu=100)
    budget.take("first", needs(vram_gb=1))
    assert budget.decide("large", needs(vram_gb=8)) == WAIT
    for _ in range(5 * LOOKAHEAD):
        assert budget.decide("cpu", needs(cpu=1)) == BEGIN
        budget.take("cpu", needs(cpu=1))


def test_only_jobs_that_take_what_one_waits_for_pass_it_and_are_held_up_for_it() -> None:
    budget = having(vram_gb=8, cpu=100)
    small, large, other = needs(vram_gb=1), needs(vram_gb=8), needs(cpu=1)
    budget.take("small", small)
    assert budget.decide("large", large) == WAIT
    for _ in range(5 * LOOKAHEAD):
        budget.take("cpu", other)
    for _ in range(LOOKAHEAD):
        assert budget.decide("small", small) == BEGIN, "no job that takes a CPU has passed"
        budget.give_back(budget.take("small", small))
    assert budget.decide("small", small) == WAIT
    assert budget.decide("cpu", other) == BEGIN


def test_resources_that_a_worker_lacks_are_named() -> None:
    budget = having(gpu=1, vram_gb=8)
    assert budget.find_lacking(needs(gpu=1)) == {}
    lacking = budget.find_lacking(needs((SizedThing("m", {"vram_gb": 4 * UNIT}),), vram_gb=5, disk=1))
    assert to_numbers(lacking) == {"vram_gb": 9, "disk": 1}


# what is open


def model(key: str, size: float) -> SizedThing:
    return SizedThing(key, parse_size({"vram_gb": size}, "m"))


def test_only_unused_resources_are_closed_least_recently_used_first() -> None:
    budget = having(vram_gb=10)
    uses = {key: needs((model(key, 4),), vram_gb=0.5) for key in "abc"}
    a, b = budget.take("a", uses["a"]), budget.take("b", uses["b"])
    assert budget.decide("c", uses["c"]) == WAIT, "both are in use"
    budget.give_back(a)
    budget.give_back(b)
    a = budget.take("a", uses["a"])
    assert budget.decide("c", uses["c"]) == Evict(("b",))
    assert budget.decide("c", uses["c"]) == WAIT, "it is being closed"
    assert budget.decide("b", uses["b"]) == WAIT, "so a job that needs it waits"
    budget.note_closed("b")
    assert budget.decide("c", uses["c"]) == BEGIN
    budget.take("c", uses["c"])
    assert show(budget.taken["vram_gb"]) == "9"


def test_of_two_that_are_idle_the_one_that_was_used_last_stays_open() -> None:
    budget = having(vram_gb=10)
    for key in "aba":
        budget.give_back(budget.take(key, needs((model(key, 4),))))
    assert budget.decide("c", needs((model("c", 4),))) == Evict(("b",))


def test_what_a_job_needs_itself_is_not_closed_for_it_nor_counted_as_space() -> None:
    budget = having(vram_gb=10)
    own = needs((model("a", 4),), vram_gb=4)
    budget.give_back(budget.take("a", own))
    budget.take("other", needs(vram_gb=3))
    assert budget.count_fitting(own) == 0, "3 are free, and its own 4 are no space for it"
    assert budget.decide("a", own) == WAIT
    assert budget.count_fitting(needs(vram_gb=4)) == 1, "another job has it closed"


def test_nothing_is_closed_when_that_would_not_free_enough() -> None:
    budget = having(vram_gb=10)
    budget.give_back(budget.take("a", needs((model("a", 4),))))
    budget.take("other", needs(vram_gb=5))
    assert budget.decide("large", needs(vram_gb=6)) == WAIT


TASKS = {
    "a": needs(gpu=1),
    "b": needs(gpu=2),
    "c": needs(gpu=0.3, vram_gb=0.7),
    "d": needs(vram_gb=10),
    "e": needs((model("m", 6),), cpu=0.1),
    "f": needs((model("n", 5.5),), vram_gb=1),
    "g": needs((model("m", 6), model("o", 3))),
    "h": needs(cpu=3),
}


class Played:
    """A worker that is played: its jobs, those that wait, and what they use."""

    capacity: ClassVar = {"gpu": 2, "vram_gb": 10, "cpu": 3}

    def __init__(self, queued: list[str]) -> None:
        self.budget = having(**self.capacity)
        self.queued = queued
        self.running: list[Grant] = []
        self._in_use: Counter[Any] = Counter()

    def begin_all(self) -> None:
        """Begin what may begin, and close what is to be closed."""
        for task in dict.fromkeys(self.queued):
            decision = self.budget.decide(task, TASKS[task])
            if isinstance(decision, Evict):
                assert not any(self._in_use[key] for key in decision.keys)
                for key in decision.keys:
                    self.budget.note_closed(key)
                decision = self.budget.decide(task, TASKS[task])
            if decision == BEGIN:
                self.running.append(self.budget.take(task, TASKS[task]))
                self._in_use.update(thing.key for thing in TASKS[task].shared)
                self.queued.remove(task)
            self.check()

    def end(self, number: int) -> None:
        """End one of the jobs that run."""
        grant = self.running.pop(number)
        self.budget.give_back(grant)
        self._in_use.subtract(thing.key for thing in grant.needs.shared)
        self.check()

    def check(self) -> None:
        """Check that nothing is exceeded, and that no device is given twice."""
        taken = to_numbers(self.budget.taken)
        assert all(0 <= taken[name] <= most for name, most in self.capacity.items())
        devices = [(device, grant.of_each) for grant in self.running for device in grant.devices]
        for device in range(2):
            assert sum(amount for number, amount in devices if number == device) <= UNIT


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=200), st.integers(0, 2**32))
def test_capacity_is_never_exceeded_and_every_job_begins_in_the_end(queued: list[str], seed: int) -> None:
    """Whatever comes: capacity and devices hold, and what is in use stays open."""
    dice, played = random.Random(seed), Played(list(queued))
    for _ in range(len(queued) * 3):
        played.begin_all()
        if played.running:
            played.end(dice.randrange(len(played.running)))
    assert not played.queued, "each has begun"
    while played.running:
        played.end(0)
    assert played.budget.taken["gpu"] == played.budget.taken["cpu"] == 0
