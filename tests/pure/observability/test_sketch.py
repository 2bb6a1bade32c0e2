"""Sketches: percentiles within 5 %, whichever process has counted what."""

import math
import random
from functools import partial
from typing import Any

import pytest

from celery5.protocol.observability.sketch import HIGHEST, LOWEST, Sketch

FRACTIONS = (0.5, 0.95, 0.99)


def sketch_of(values: list[float]) -> Sketch:
    """A sketch that has counted these."""
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


def draw(name: str, count: int, seed: int) -> list[float]:
    """Durations as they come: of one size, of many sizes, and of two kinds of jobs."""
    rng = random.Random(seed)
    one: Any = {
        "uniform": partial(rng.uniform, 0.01, 0.02),
        "lognormal": partial(rng.lognormvariate, -3, 1.5),
        "exponential": partial(rng.expovariate, 0.2),
        "two kinds": lambda: rng.uniform(0.001, 0.002) if rng.random() < 0.9 else rng.uniform(50, 60),
    }[name]
    return [one() for _ in range(count)]


@pytest.mark.parametrize("name", ["uniform", "lognormal", "exponential", "two kinds"])
def test_percentiles_are_within_five_percent(name: str) -> None:
    for seed in range(5):
        values = draw(name, 5000, seed)
        sketch = sketch_of(values)
        for fraction in FRACTIONS:
            exact = sorted(values)[max(0, round(fraction * len(values)) - 1)]
            estimate = sketch.quantile(fraction)
            assert estimate is not None
            assert abs(estimate - exact) <= 0.05 * exact, (name, seed, fraction)
        assert sketch.count == len(values)
        assert sketch.total == pytest.approx(math.fsum(values))


def test_what_several_have_counted_is_what_one_would_have() -> None:
    values = draw("lognormal", 900, 1)
    merged = Sketch()
    for start in range(0, 900, 300):
        merged.add_all(Sketch.from_wire(sketch_of(values[start : start + 300]).to_wire()))
    assert merged.counts == sketch_of(values).counts
    assert merged.total == pytest.approx(sum(values))


def test_a_sketch_tells_what_has_come_since_a_copy_of_it() -> None:
    sketch = sketch_of([0.1, 3.0])
    copy = sketch.copy()
    sketch.add(3.0)
    assert copy.count == 2
    assert sketch.since(copy).counts == sketch_of([3.0]).counts
    assert sketch.since(None).count == 3
    assert sketch.since(sketch.copy()).counts == {}


def test_nothing_and_next_to_nothing_have_percentiles() -> None:
    assert Sketch().quantile(0.5) is None
    assert sketch_of([0.0, 1e-9]).quantile(0.99) == 0.0
    assert sketch_of([0.0, 1.0]).quantile(1.0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        None,
        [],
        "x",
        [1.0, 3],
        [1.0, "3", 4],
        [1.0, 3, -4],
        [1.0, 3, 2**60],
        {"a": 1},
        [1.0, 3.5, 1],
        [1.0, True, 1],
    ],
)
def test_words_that_are_no_sketch_are_left_out(words: Any) -> None:
    assert Sketch.from_wire(words).count == 0


def test_buckets_out_of_bounds_are_left_out() -> None:
    words = [1.0, -(10**6), 1, LOWEST, 2, HIGHEST, 3, 10**6, 1]
    assert Sketch.from_wire(words).counts == {LOWEST: 2, HIGHEST: 3}
