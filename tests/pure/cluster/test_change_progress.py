"""Change progress: a command that waits fails for members given up in its change, not for those given up before."""

from typing import Any

import pytest

from celery5.protocol.cluster.change_progress import (
    ChangeProgress,
    MemberVersions,
    judge_change,
    list_versions,
)
from celery5.protocol.cluster.description import build_members
from celery5.protocol.cluster.members import Ended, Phase
from tests.pure.cluster.test_foreman import Clock
from tests.pure.cluster.test_foreman_reloads import cannot_live, described

LINE = "1 of 2 members up; worker-a-1: given up: ended with 2"


def answer(*given_up_in: int, pending: tuple[str, ...] = (), taken_back: str = "") -> dict[str, Any]:
    """What the leading Controller answers: these members were given up in these changes, and another one is up."""
    members = [
        {
            "kind": "worker",
            "group": "a",
            "name": f"worker-a-{place}",
            "phase": "given up",
            "given_up_in": change,
        }
        for place, change in enumerate(given_up_in, 1)
    ]
    return {
        "members": [
            *members,
            {"kind": "worker", "group": "b", "name": "worker-b-1", "phase": "up", "given_up_in": 0},
            {"kind": "worker", "group": "a", "name": "worker-a-9", "phase": "up", "given_up_in": 0},
        ],
        "line": LINE,
        "pending": pending,
        "taken_back": taken_back,
    }


def judge(
    told: dict[str, Any],
    *,
    named: tuple[str, ...] | None = None,
    change: int | None = 5,
    has_canaries: bool = True,
) -> ChangeProgress:
    return judge_change(told, named=named, change=change, has_canaries=has_canaries)


def test_members_given_up_before_the_change_are_waited_for_while_it_goes_on() -> None:
    assert judge(answer(4, pending=("worker-a-canary",))) == ChangeProgress(pending=("worker-a-canary",))
    assert judge(answer()) == ChangeProgress(is_done=True)


@pytest.mark.parametrize("change", [5, None])
def test_member_given_up_in_the_change_ends_the_waiting_at_once(change: int | None) -> None:
    assert judge(answer(4, 5, pending=("worker-b-1",)), change=change) == ChangeProgress(failure=LINE)


def test_member_given_up_before_and_not_tried_again_is_a_failure_with_its_remedy() -> None:
    failure = judge(answer(4)).failure
    assert failure.startswith(f"{LINE}; given up before, and not tried by this change: ")
    assert failure.endswith("celery5 controller restart worker-a-1")


def test_only_members_that_the_command_names_count() -> None:
    assert judge(answer(5, pending=("worker-c-1",)), named=("worker-b-1",)).is_done


def test_member_that_was_given_up_and_is_not_named_holds_up_only_its_own_group() -> None:
    held_up = judge(answer(4, pending=("worker-a-9",)), named=("worker-a-9",))
    assert held_up.failure.startswith(f"{LINE}; worker-a-1 must be up before ")
    assert held_up.failure.endswith("celery5 controller restart worker-a-1 worker-a-9")
    for pending, named in (
        (("worker-b-1",), ("worker-b-1",)),
        (("worker-a-9",), ("worker-a-1", "worker-a-9")),
        (("worker-a-9",), None),
    ):
        assert judge(answer(4, pending=pending), named=named) == ChangeProgress(pending=pending)


def test_only_a_change_with_canaries_can_be_taken_back() -> None:
    assert judge(answer(4, taken_back="10 failed")).failure == "the change was taken back: 10 failed"
    assert judge(answer(taken_back="10 failed"), has_canaries=False).is_done


def test_a_member_knows_in_which_change_it_was_given_up() -> None:
    clock = Clock(described(2)).up()
    assert clock.crew.begin_change() == 1
    clock.want(described(2, queues=["bad"]))
    cannot_live(clock, "worker-default-3", beside=True)
    assert clock.crew.begin_change() == 2
    assert clock.crew.members["worker-default-3"].given_up_in == 1


def test_going_back_to_the_version_that_still_runs_needs_no_canary() -> None:
    clock = Clock(described(2)).up()
    clock.want(described(2, queues=["bad"]))
    cannot_live(clock, "worker-default-3", beside=True)
    assert clock.crew.find_restarting_groups(build_members(described(2))) == set()
    assert clock.crew.find_restarting_groups(build_members(described(2, queues=["new"]))) == {"default"}
    clock.want(described(2))
    assert clock.tick() == []
    assert clock.crew.is_complete


def test_a_reason_of_several_members_is_said_once() -> None:
    clock = Clock(described(2))
    for _ in range(3):
        clock.tick(100)
        clock.say(*[Ended(f"worker-default-{number}", "ended with 2", 2) for number in (1, 2)])
    assert clock.phase("worker-default-2") is Phase.GIVEN_UP
    assert clock.crew.problem.count("ended with 2") == 1
    assert clock.crew.problem.startswith("worker-default-1, worker-default-2: given up: ")


MEMBERS = {
    "new": "up",
    "waits": "up",
    "apart": "up",
    "dying": "stopping",
    "born": "starting",
    "dead": "given up",
    "lost": "down",
    "extra": "recycling",
    "canary": "up",
}
"""Members by name, with their phases."""


@pytest.mark.parametrize(
    ("changed", "taken_back", "versions"),
    [
        ({"new", "waits"}, False, {"new": ("new",), "old": ("waits", "extra"), "unchanged": ("apart",)}),
        (None, False, {"new": ("new", "apart"), "old": ("waits", "extra")}),
        (None, True, {"old": ("new", "waits", "apart", "extra")}),
    ],
    ids=["named", "any", "taken back"],
)
def test_each_member_is_listed_by_the_version_that_it_runs(
    changed: set[str] | None, taken_back: bool, versions: dict[str, tuple[str, ...]]
) -> None:
    members = [{"name": name, "phase": phase, "wanted": name != "extra"} for name, phase in MEMBERS.items()]
    told = {"members": members, "pending": ["waits", "born", "canary"]}
    found = list_versions(told, changed=changed, canaries={"canary"}, taken_back=taken_back)
    others = {"in_transition": ("dying", "born"), "not_running": ("dead", "lost")}
    assert found == MemberVersions(**versions, **others)
