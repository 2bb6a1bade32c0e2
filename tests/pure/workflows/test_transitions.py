"""Transitions of runs: the table uses all that can happen, and the documentation shows it."""

from celery5.protocol.workflows.transitions import (
    COUNTS,
    LIVE_STEPS,
    RUN_STEPS,
    STOPPED_STEPS,
    NodeMove,
    NodeStep,
    RunMove,
    list_policies,
)
from tests.house import run_tables

OF_TOTAL = ("active", "done", "bad", "skipped", "held")
"""The counters in one of which a step is."""
STEPS = [
    (pair, step)
    for table in (LIVE_STEPS, STOPPED_STEPS)
    for rows in table.values()
    for pair, row in rows.items()
    for _, step in list_policies(row)
]


def test_the_tables_in_the_documentation_are_those_of_the_code() -> None:
    assert run_tables.tables() in run_tables.PAGE.read_text(), "run: python -m tests.house.run_tables"


def test_the_tables_have_all_that_can_happen() -> None:
    assert {move for (_, move), _ in STEPS} == set(NodeMove)
    assert {move for _, move in RUN_STEPS} == set(RunMove)


def test_no_row_counts_a_step_twice_or_changes_nothing() -> None:
    for (word, move), step in STEPS:
        assert set(step.counts) <= set(COUNTS), (word, move)
        assert all(by in (-1, 1) for by in step.counts.values())
        assert sum(by for name, by in step.counts.items() if name in OF_TOTAL) in (-1, 0, 1)
        assert step != NodeStep(word, {}), (word, move)
