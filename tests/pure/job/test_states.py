"""States: the table is complete, its ends are ends, and every state can be reached."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.job.states import (
    FINISHED,
    PLACES,
    TRANSITIONS,
    IllegalTransition,
    JobState,
    Move,
    Place,
    advance,
    get_state,
)
from tests.house import diagram
from tests.house.diagram import PAGE


def test_the_table_has_a_row_for_every_state_and_uses_every_move() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert {move for row in TRANSITIONS.values() for move in row} == set(Move)


def test_every_state_can_be_reached_from_nothing() -> None:
    reached, new = set[JobState](), {JobState.UNKNOWN}
    while new:
        reached |= new
        new = {after for state in new for after in TRANSITIONS[state].values()} - reached
    assert reached == set(JobState)


def test_every_job_can_still_end() -> None:
    ends = set(FINISHED)
    while more := {state for state, row in TRANSITIONS.items() if set(row.values()) & ends} - ends:
        ends |= more
    assert ends == set(JobState)


def test_a_job_that_has_ended_stays_so_and_a_dead_one_leaves_only_by_replay() -> None:
    for state in FINISHED - {JobState.DEAD}:
        assert not TRANSITIONS[state]
    assert set(TRANSITIONS[JobState.DEAD]) == {Move.REPLAY}
    assert {state for state, row in TRANSITIONS.items() if not row} == FINISHED - {JobState.DEAD}


def test_nothing_leads_back_to_knowing_nothing() -> None:
    assert not any(JobState.UNKNOWN in row.values() for row in TRANSITIONS.values())


@given(st.sampled_from(JobState), st.sampled_from(Move))
def test_advance_does_what_the_table_says_and_refuses_the_rest(state: JobState, move: Move) -> None:
    if move in TRANSITIONS[state]:
        assert advance(state, move) is TRANSITIONS[state][move]
    else:
        with pytest.raises(IllegalTransition, match=f"a job in state {state.value} cannot {move.value}"):
            advance(state, move)


@given(st.lists(st.sampled_from(Move), max_size=30))
def test_a_job_starts_only_from_its_queue(moves: list[Move]) -> None:
    state = JobState.UNKNOWN
    for move in moves:
        try:
            after = advance(state, move)
        except IllegalTransition:
            continue
        assert (after is JobState.EXECUTING) == (move is Move.START)
        assert move is not Move.START or state is JobState.SENT
        state = after


def test_the_diagram_in_the_documentation_is_this_table() -> None:
    again = "run: python -m tests.house.diagram"
    assert diagram.PICTURE.read_text() == diagram.picture(), again
    assert diagram.table() in PAGE.read_text(), again
    assert f"]({diagram.PICTURE.name})" in PAGE.read_text()


def test_the_diagram_shows_every_state_and_every_move() -> None:
    text = diagram.picture()
    assert [state for state in JobState if f">{state.value}</text>" not in text] == []
    drawn = [move for moves in diagram.lines().values() for move in moves]
    by_all = len(diagram.living()) * len(diagram.shared())
    assert len(drawn) + by_all == sum(map(len, TRANSITIONS.values()))
    assert [move for move in {*drawn, *diagram.shared()} if move.value not in text] == []
    assert text.count("marker-end") == len(diagram.lines()) + len(diagram.shared())


def test_the_documentation_explains_every_state() -> None:
    explained, found, _ = PAGE.read_text().partition(
        "<!-- transitions:start -->"
    )  # where each of them is named, too
    assert found
    kept = dict(re.findall(r"(?m)^\| `([A-Z]+)` \| .{10,} \| (.+) \|$", explained))
    assert sorted(kept) == sorted(JobState)


def test_every_state_has_its_places_and_every_place_is_of_a_state() -> None:
    assert set(PLACES) == set(JobState)
    assert {place for places in PLACES.values() for place in places} == set(Place)
    ended = FINISHED - {JobState.DEAD} | {JobState.UNKNOWN}
    assert {state for state, places in PLACES.items() if not places} == ended


def test_state_follows_from_the_place_and_whether_a_worker_has_the_job() -> None:
    for place in Place:
        states = {get_state(place), get_state(place, has_worker=True)}
        assert states == {state for state, places in PLACES.items() if place in places}
    assert get_state("") is get_state("Q1-0", has_worker=True) is JobState.UNKNOWN


def test_the_page_of_keys_explains_every_place() -> None:
    page = (PAGE.parent / "keys.md").read_text()
    assert [place for place in Place if f"`{place}`" not in page] == []
