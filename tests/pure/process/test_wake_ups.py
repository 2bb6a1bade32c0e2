"""Wake-ups: of many workers a few answer what all hear, of few workers all do."""

import random

import pytest

from celery5.protocol.process.wake_ups import ANSWERING, MAX_SPREAD, does_answer, get_spread


@pytest.mark.parametrize("workers", [0, 1, 2, ANSWERING])
def test_each_of_a_few_workers_answers(workers: int) -> None:
    assert all(does_answer(workers, draw / 1000) for draw in range(1000))


@pytest.mark.parametrize("workers", [20, 100, 1000, 10_000])
def test_a_few_of_many_workers_answer_and_almost_never_none(workers: int) -> None:
    generator = random.Random(workers)
    answers = [sum(does_answer(workers, generator.random()) for _ in range(workers)) for _ in range(200)]
    assert ANSWERING * 0.8 < sum(answers) / len(answers) < ANSWERING * 1.2
    assert max(answers) < 4 * ANSWERING
    assert answers.count(0) <= 1


def test_many_workers_spread_what_all_of_them_do_over_a_second_at_most() -> None:
    assert get_spread(1, 0.5) < 0.001
    assert get_spread(500, 0.5) == 0.25
    assert {get_spread(workers, 1.0) for workers in (1000, 100_000)} == {MAX_SPREAD}
