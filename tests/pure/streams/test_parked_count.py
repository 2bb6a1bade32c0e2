"""How many records are parked: exact while one owner parks, whatever its commits and the answers of Redis overtake."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.streams.parking import ParkedCount, ParkedKey, ParkedRecord, ReleasedRecord

PARKED = ParkedRecord(b"a", ParkedKey("broken", 1), ("id", b"1-1"))
RELEASED = ReleasedRecord(b"a", "1-1")
REASON = ParkedRecord(b"a", ParkedKey("still broken", 1))

Change = ParkedRecord | ReleasedRecord
STEPS = (
    "park",
    "release",
    "send commit",
    "perform commit",
    "note commit",
    "ask",
    "answer",
    "update",
    "other parks",
    "other releases",
)


class Owner:
    """An owner, its Redis, and what is under way between them: each step happens when it can."""

    def __init__(self, parked: int) -> None:
        self.redis = parked
        self.own = parked
        self.of_others = 0
        self.count = ParkedCount(parked)
        self.uncommitted: list[Change] = []
        self.sent: list[Change] | None = None
        self.is_performed = False
        self.is_asked = False
        self.answer: int | None = None

    def play(self, step: str) -> None:
        match step:
            case "park":
                self.count.park()
                self.own += 1
                self.uncommitted += [PARKED, REASON]
            case "release" if self.own:
                self.count.release()
                self.own -= 1
                self.uncommitted.append(RELEASED)
            case "send commit" if self.sent is None:
                self.sent, self.uncommitted = self.uncommitted, []
            case "perform commit" if self.sent is not None and not self.is_performed:
                self.redis += count_changes(self.sent)
                self.is_performed = True
            case "note commit" if self.sent is not None and self.is_performed:
                parked = [change for change in self.sent if isinstance(change, ParkedRecord)]
                released = [change for change in self.sent if isinstance(change, ReleasedRecord)]
                self.count.note_commit(parked, released)
                self.sent, self.is_performed = None, False
            case "ask" if not self.is_asked:
                self.count.begin_update()
                self.is_asked = True
            case "answer" if self.is_asked:
                self.answer = self.redis
            case "update" if self.answer is not None:
                self.count.update(self.answer)
                self.answer, self.is_asked = None, False
            case _:
                self.play_others(step)

    def play_others(self, step: str) -> None:
        change = 1 if step == "other parks" else -1 if step == "other releases" and self.of_others else 0
        self.of_others += change
        self.redis += change


def count_changes(changes: Sequence[Change]) -> int:
    return sum(1 if change is PARKED else -1 if change is RELEASED else 0 for change in changes)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(["park", "ask", "answer", "update"], id="not committed"),
        pytest.param(["park", "send commit", "ask", "answer", "update"], id="sent, and not performed"),
        pytest.param(
            ["park", "send commit", "perform commit", "ask", "answer", "update"],
            id="performed, and not noted",
        ),
        pytest.param(
            ["park", "send commit", "ask", "answer", "perform commit", "note commit", "update"],
            id="noted before the answer that lacks it",
        ),
        pytest.param(
            ["park", "send commit", "ask", "perform commit", "answer", "note commit", "update"],
            id="noted before the answer that has it",
        ),
        pytest.param(["ask", "answer", "park", "update"], id="parked after the answer"),
    ],
)
def test_a_record_counts_once_wherever_an_answer_overtakes_its_commit(steps: list[str]) -> None:
    owner = Owner(3)
    for step in steps:
        owner.play(step)
    assert owner.count.total == 4


@given(st.integers(0, 3), st.lists(st.sampled_from(STEPS[:8]), max_size=60))
def test_the_count_is_exact_at_all_times_while_one_owner_parks(parked: int, steps: list[str]) -> None:
    owner = Owner(parked)
    for step in steps:
        owner.play(step)
        assert owner.count.total == owner.own


@given(st.integers(0, 3), st.lists(st.sampled_from(STEPS), max_size=60))
def test_the_count_is_exact_again_after_an_answer_without_changes_under_way(
    parked: int, steps: list[str]
) -> None:
    owner = Owner(parked)
    for step in steps:
        owner.play(step)
    for step in (
        "answer",
        "update",
        *("send commit", "perform commit", "note commit") * 2,
        "ask",
        "answer",
        "update",
    ):
        owner.play(step)
    assert owner.count.total == owner.own + owner.of_others == owner.redis
