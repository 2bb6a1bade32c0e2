"""Foreman: whatever happens, no member is there twice, and what should be there comes back."""

from collections.abc import Iterable

import pytest

from celery5.errors import EXIT_ALREADY_IN_USE
from celery5.protocol.cluster.description import Cluster, Group, build_members, parse_cluster
from celery5.protocol.cluster.foreman import STALL_LIMIT, ClusterState
from celery5.protocol.cluster.members import (
    TRANSITIONS,
    Action,
    Beat,
    Ended,
    Kill,
    MemberEvent,
    Phase,
    Ready,
    Start,
    Stop,
    Stopping,
    Unknown,
)
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from celery5.protocol.process.recycling import RESTART_EXIT_CODE

CLUSTER = parse_cluster(
    {
        "restart_limit": 3,
        "restart_period": 60,
        "hung_after": 10,
        "start_limit": 20,
        "workers": {"default": {"count": 2}},
        "routers": {"default": {}},
        "schedulers": {"default": {}},
        "publishers": {"default": {}},
    }
)


class Clock:
    """A crew, a clock, and what was done so far."""

    def __init__(self, cluster: Cluster = CLUSTER, *, chance: float = 0.0) -> None:
        self.now = 100.0
        self.crew = ClusterState(cluster, random=lambda: chance)
        self.want(cluster)
        self.done: list[Action] = []

    def want(self, cluster: Cluster, scale: dict[str, int] | None = None) -> None:
        wanted = build_members(cluster, scale)
        more = {group.key: (scale or {}).get(group.key, group.total) + 1 for group in cluster.groups}
        spares = [
            member
            for member in build_members(cluster, more)
            if member.name not in {wanted_member.name for wanted_member in wanted}
        ]
        self.crew.set_desired(cluster, wanted, spares)

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Let time pass, and decide."""
        self.now += seconds
        found = self.crew.decide(self.now)
        self.done += found
        return found

    def wait(self, seconds: float, *, beats: Iterable[str] = ()) -> list[Action]:
        """Let time pass second by second, while these say that they live."""
        found = []
        for _ in range(int(seconds)):
            self.say(*map(Beat, beats))
            found += self.tick(1.0)
        return found

    def say(self, *words: MemberEvent) -> None:
        for word in words:
            self.crew.handle_event(word, self.now)

    def up(self) -> "Clock":
        """Have everybody up."""
        self.tick()
        self.say(*map(Ready, self.crew.members))
        assert self.tick() == []
        assert self.crew.is_complete
        return self

    def try_beside(self, name: str) -> "Clock":
        """Have the additional member up that tries a new version before the others."""
        assert names(self.tick(), Start) == [name]
        assert self.tick() == [], "the others wait for it"
        self.say(Ready(name))
        return self

    def phase(self, name: str) -> Phase:
        return self.crew.members[name].phase


def names(actions: Iterable[Action], kind: type[Action]) -> list[str]:
    return [
        action.member.name if isinstance(action, Start) else action.name
        for action in actions
        if isinstance(action, kind)
    ]


def test_all_members_are_started_once() -> None:
    clock = Clock()
    assert sorted(names(clock.tick(), Start)) == [
        *("publisher-default-1", "router-default-1", "scheduler-default-1"),
        *("worker-default-1", "worker-default-2"),
    ]
    assert clock.tick() == []
    assert not clock.crew.is_complete
    clock.say(*map(Ready, clock.crew.members))
    assert clock.crew.is_complete
    assert clock.crew.status_line == "5 of 5 members up"


def test_the_table_has_all_words_for_all_that_run() -> None:
    running = {phase for phase in Phase if phase.is_running}
    assert set(TRANSITIONS) == {
        (phase, word) for phase in running for word in (Ready, Beat, Stopping, Unknown)
    }


def test_who_dies_is_started_again_with_backoff() -> None:
    clock = Clock(chance=1.0).up()
    clock.say(Ended("worker-default-1", "ended by SIGKILL", -9))
    assert clock.crew.problem == "worker-default-1: ended by SIGKILL; it is started again"
    assert clock.tick() == []
    assert names(clock.tick(0.05), Start) == ["worker-default-1"]
    clock.say(Ended("worker-default-1", "ended with 1", 1))
    assert clock.tick(0.09) == []
    assert names(clock.tick(0.02), Start) == ["worker-default-1"]
    clock.say(Ready("worker-default-1"))
    assert clock.crew.problem == ""


def test_one_that_is_recycled_is_started_at_once_and_has_not_died() -> None:
    clock = Clock(chance=1.0).up()
    for _ in range(9):
        clock.say(Ended("worker-default-1", "ended with 75", RESTART_EXIT_CODE))
        assert names(clock.tick(), Start) == ["worker-default-1"]
        clock.say(Ready("worker-default-1"))
    assert clock.crew.members["worker-default-1"].recent_deaths == []


def test_recycled_member_is_recycling_until_its_next_process_is_up() -> None:
    clock, name, why = Clock().up(), "worker-default-1", "it has done 500 jobs (max_jobs)"
    state = clock.crew.members[name]
    status = format_worker_status("", 500, Attempts(500, 0), 0, recycling=why)
    words: list[MemberEvent] = [Beat(name, status), Stopping(name), Beat(name, status, loop_alive=False)]
    for word in (*words, Ended(name, "ended with 75", RESTART_EXIT_CODE)):
        clock.say(word)
        assert (state.shown_phase, state.recycle_reason, state.problem) == ("recycling", why, "")
        assert clock.crew.is_complete
        assert clock.crew.status_line == "4 of 5 members up, 1 recycling"
    assert state.end_reason == f"recycled: {why}"
    assert names(clock.tick(), Start) == [name]
    clock.say(Beat(name, format_worker_status("boot", 0, Attempts(), 0), loop_alive=False))
    assert (state.shown_phase, state.recycle_reason) == ("recycling", why)
    clock.say(Ready(name))
    assert (state.shown_phase, state.recycle_reason) == ("up", "")
    assert (state.death_count, state.failures) == (0, 0)
    assert clock.crew.status_line == "5 of 5 members up"


def test_recycled_member_that_does_not_come_back_in_time_is_down() -> None:
    clock, name = Clock().up(), "worker-default-1"
    clock.say(Ended(name, "ended with 75", RESTART_EXIT_CODE))
    clock.now += (
        CLUSTER.start_limit - 1
    )  # nothing may be started, since this Controller is not sure that it leads
    clock.crew.end_overdue_recycling(clock.now)
    assert clock.crew.is_complete
    clock.now += 1
    clock.crew.end_overdue_recycling(clock.now)
    assert not clock.crew.is_complete
    assert clock.crew.members[name].shown_phase == "down"
    late = f"{name}: it was recycled, and was not up 20 s later; it is started again"
    assert clock.crew.status_line == f"4 of 5 members up; {late}"


def test_recycled_member_whose_next_process_dies_has_failed() -> None:
    clock, name = Clock().up(), "worker-default-1"
    clock.say(Ended(name, "ended with 75", RESTART_EXIT_CODE))
    clock.tick()
    clock.say(Ended(name, "ended with 1", 1))
    assert not clock.crew.is_complete
    assert clock.crew.status_line == f"4 of 5 members up; {name}: ended with 1; it is started again"


@pytest.mark.parametrize("code", [0, -9])
def test_recycling_member_that_is_asked_to_stop_or_dies_is_not_recycled(code: int) -> None:
    clock, name = Clock().up(), "worker-default-1"
    clock.say(Beat(name, format_worker_status("", 9, Attempts(9, 0), 0, recycling="it has done 9 jobs")))
    state = clock.crew.members[name]
    assert state.is_recycling
    if code == 0:
        clock.crew.restart([name])
        clock.try_beside("worker-default-3").tick()
        assert state.shown_phase == "stopping"
    clock.say(Ended(name, "it ended", code))
    assert (state.shown_phase, state.recycle_reason) == ("down", "")


def test_member_that_ends_in_order_is_restarted_uncounted() -> None:
    clock = Clock(chance=1.0).up()
    for _ in range(9):
        clock.say(Stopping("worker-default-1"), Ended("worker-default-1", "ended with 0", 0))
        assert names(clock.tick(), Start) == ["worker-default-1"]
        clock.say(Ready("worker-default-1"))
    assert clock.crew.members["worker-default-1"].recent_deaths == []


def test_who_says_nothing_and_ends_with_0_has_died() -> None:
    clock = Clock().up()
    clock.say(Ended("worker-default-1", "ended with 0", 0))
    assert len(clock.crew.members["worker-default-1"].recent_deaths) == 1


def test_who_dies_too_often_is_given_up_and_that_is_told() -> None:
    clock = Clock().up()
    for _ in range(3):
        clock.say(Ended("worker-default-1", "ended with 1", 1))
        clock.tick()
    assert clock.phase("worker-default-1") is Phase.GIVEN_UP
    why = "worker-default-1: given up: it has died 3 times within 60 s: ended with 1"
    assert clock.crew.problem == why
    assert clock.crew.status_line == f"4 of 5 members up; {why}"
    assert clock.wait(300, beats=clock.crew.members) == []


def test_deaths_that_are_long_ago_do_not_count() -> None:
    clock = Clock().up()
    for _ in range(9):
        clock.wait(31, beats=clock.crew.members)
        clock.say(Ended("worker-default-1", "ended with 1", 1))
        assert names(clock.tick(), Start) == ["worker-default-1"]
        clock.say(Ready("worker-default-1"))


def test_deaths_that_are_excused_do_not_count_but_are_backed_off() -> None:
    clock = Clock(chance=1.0).up()
    for _ in range(20):
        clock.crew.handle_event(Ended("worker-default-1", "ended with 1", 1), clock.now, is_excused=True)
        assert clock.tick() == []
        assert names(clock.wait(11, beats=clock.crew.members), Start) == ["worker-default-1"]


def test_who_was_given_up_is_tried_again_when_somebody_says_so() -> None:
    clock = Clock().up()
    for _ in range(3):
        clock.say(Ended("worker-default-1", "ended with 1", 1))
        clock.tick()
    assert clock.crew.restart(["worker-default-1"]) == ("worker-default-1",)
    assert names(clock.tick(), Start) == ["worker-default-1"]


def test_who_says_nothing_for_too_long_is_killed_and_replaced() -> None:
    clock = Clock().up()
    others = set(clock.crew.members) - {"worker-default-1"}
    assert names(clock.wait(10, beats=others), Kill) == [], (
        "its last word may be a second older than its silence"
    )
    (kill,) = clock.wait(1, beats=others)
    assert kill == Kill("worker-default-1", "its event loop has said nothing for 10 s")
    assert clock.wait(4, beats=others) == []
    assert names(clock.wait(2, beats=others), Kill) == ["worker-default-1"], "and killed again"
    clock.say(Ended("worker-default-1", "ended by SIGKILL", -9))
    assert "its event loop has said nothing for 10 s" in clock.crew.problem
    assert names(clock.tick(), Start) == ["worker-default-1"]


def test_a_member_whose_thread_says_that_its_loop_is_blocked_is_still_silent() -> None:
    clock = Clock().up()
    others = set(clock.crew.members) - {"worker-default-1"}
    found = []
    for _ in range(12):
        clock.say(Beat("worker-default-1", "blocked by job j", loop_alive=False))
        found += names(clock.wait(1, beats=others), Kill)
    assert found == ["worker-default-1"]
    assert clock.crew.members["worker-default-1"].status == "blocked by job j"


def test_nobody_is_blamed_for_silence_while_we_were_away() -> None:
    clock = Clock().up()
    assert clock.tick(STALL_LIMIT + 100) == []
    assert clock.wait(9) == []
    assert len(names(clock.wait(3), Kill)) == 5


def test_nobody_is_hung_where_that_is_not_asked_for() -> None:
    cluster = parse_cluster({"hung_after": 0, "workers": {"default": {}}})
    assert Clock(cluster).up().wait(500) == []


def test_who_does_not_come_up_is_killed() -> None:
    clock = Clock()
    clock.tick()
    clock.say(*[Ready(name) for name in clock.crew.members if name != "router-default-1"])
    others = set(clock.crew.members) - {"router-default-1"}
    assert names(clock.wait(21, beats=others), Kill) == ["router-default-1"]


def test_they_end_in_order() -> None:
    clock = Clock().up()
    clock.crew.drain()
    for stage in (
        ["scheduler-default-1"],
        ["router-default-1"],
        ["worker-default-1", "worker-default-2"],
        ["publisher-default-1"],
    ):
        assert names(clock.tick(), Stop) == stage
        assert clock.tick() == []
        clock.say(*[Ended(name, "ended with 0", 0) for name in stage])
    assert clock.tick() == []
    assert clock.crew.is_stopped


def test_member_that_does_not_end_in_time_is_killed_before_the_next() -> None:
    clock = Clock().up()
    clock.crew.drain()
    clock.tick()
    patience = clock.crew.members["scheduler-default-1"].member.stop_after
    assert clock.wait(patience - 1, beats=clock.crew.members) == []
    assert names(clock.wait(2, beats=clock.crew.members), Kill) == ["scheduler-default-1"]
    clock.say(Ended("scheduler-default-1", "ended by SIGKILL", -9))
    assert names(clock.tick(), Stop) == ["router-default-1"]


def test_member_that_is_ending_is_not_asked_again_to_end() -> None:
    clock = Clock().up()
    clock.say(Stopping("scheduler-default-1"))
    clock.crew.drain()
    assert clock.tick() == []
    clock.say(Ended("scheduler-default-1", "ended with 0", 0))
    assert names(clock.tick(), Stop) == ["router-default-1"]


def test_they_are_restarted_one_of_a_group_at_a_time() -> None:
    clock = Clock().up()
    clock.crew.restart(["worker-default-1", "worker-default-2"])
    clock.try_beside("worker-default-3")
    for name in ("worker-default-1", "worker-default-2"):
        assert clock.tick() == [Stop(name)]
        assert clock.tick() == []
        clock.say(Stopping(name), Ended(name, "ended with 0", 0))
        assert names(clock.tick(), Start) == [name]
        assert clock.tick() == [], "the next one waits until this one is up"
        clock.say(Ready(name))
    assert clock.tick() == [Stop("worker-default-3")]
    clock.say(Ended("worker-default-3", "ended with 0", 0))
    assert clock.tick() == []
    assert clock.crew.is_complete


def test_for_the_only_one_of_a_group_another_one_stands_in() -> None:
    clock = Clock().up()
    clock.crew.restart(["router-default-1"])
    assert names(clock.tick(), Start) == ["router-default-2"]
    assert clock.tick() == []
    clock.say(Ready("router-default-2"))
    assert clock.tick() == [Stop("router-default-1")]
    clock.say(Ended("router-default-1", "ended with 0", 0))
    assert names(clock.tick(), Start) == ["router-default-1"]
    assert clock.tick() == []
    clock.say(Ready("router-default-1"))
    assert clock.tick() == [Stop("router-default-2")]
    clock.say(Ended("router-default-2", "ended with 0", 0))
    assert clock.tick() == []
    assert "router-default-2" not in clock.crew.members


def test_a_publisher_is_never_replaced_by_two() -> None:
    clock = Clock().up()
    clock.crew.restart()
    actions = clock.tick()
    assert "publisher-default-1" in names(actions, Stop)
    assert "publisher-default-2" not in names(actions, Start)


def test_only_what_has_changed_is_restarted() -> None:
    clock = Clock(parse_cluster({"workers": {"a": {"count": 1}, "b": {"count": 2}}})).up()
    clock.want(parse_cluster({"workers": {"a": {"count": 1}, "b": {"count": 2, "queues": ["x"]}}}))
    clock.try_beside("worker-b-3")
    assert clock.tick() == [Stop("worker-b-1")]


def test_who_goes_waits_for_who_comes() -> None:
    clock = Clock(Cluster(groups=(Group(kind="worker", name="old"),))).up()
    clock.want(Cluster(groups=(Group(kind="worker", name="new"),)))
    assert names(clock.tick(), Start) == ["worker-new-1"]
    assert clock.tick() == []
    clock.say(Ready("worker-new-1"))
    assert clock.tick() == [Stop("worker-old-1")]


def test_scaling_down_ends_the_last_ones_at_once() -> None:
    clock = Clock().up()
    clock.want(CLUSTER, {"worker-default": 1})
    assert clock.tick() == [Stop("worker-default-2")]
    clock.say(Ended("worker-default-2", "ended with 0", 0))
    assert clock.tick() == []
    assert clock.crew.status_line == "4 of 4 members up"


def test_what_runs_already_is_adopted_and_what_should_not_run_ends() -> None:
    clock = Clock()
    clock.crew.adopt({"worker-default-1": "up", "worker-old-7": "up", "router-default-1": "starting"}, 100.0)
    actions = clock.tick()
    assert sorted(names(actions, Start)) == [
        "publisher-default-1",
        "scheduler-default-1",
        "worker-default-2",
    ]
    clock.say(*map(Ready, clock.crew.members))
    assert clock.tick() == [Stop("worker-old-7")]


@pytest.mark.parametrize("word", [Ready("x"), Beat("x"), Stopping("x"), Unknown("x", ""), Ended("x", "")])
def test_words_of_nobody_mean_nothing(word: MemberEvent) -> None:
    clock = Clock().up()
    clock.say(word)
    assert clock.tick() == []


def test_member_of_an_unreachable_host_is_left_alone() -> None:
    clock = Clock()
    clock.tick()
    names_ = list(clock.crew.members)
    clock.say(*map(Ready, names_[1:]))
    for _ in range(30):
        clock.say(*[Unknown(name, "host web2 is away") for name in names_])
        assert clock.tick(5) == []  # neither late nor hung
    assert clock.crew.status_line.startswith("0 of 5 members up; ")
    assert f"{', '.join(names_)}: unknown: host web2 is away" in clock.crew.problem
    clock.say(*map(Ready, names_))
    assert clock.tick() == []
    assert clock.crew.status_line == "5 of 5 members up"


def test_restarted_member_is_asked_again_to_end() -> None:
    clock, name = Clock().up(), "worker-default-1"
    clock.crew.restart([name])
    assert Stop(name) in clock.try_beside("worker-default-3").tick(1)
    clock.crew.release(list(clock.crew.members))  # another Controller leads, and has ended it
    clock.crew.adopt({member: "up" for member in clock.crew.members if member != name}, clock.now)
    assert [action.member.name for action in clock.tick(1) if isinstance(action, Start)] == [name]
    clock.say(Ready(name))
    clock.crew.restart([name])
    assert Stop(name) in clock.tick(1)


def test_forgotten_member_is_not_killed_when_it_is_adopted() -> None:
    clock, name = Clock().up(), "worker-default-1"
    others = [member for member in clock.crew.members if member != name]
    assert any(isinstance(action, Kill) for action in clock.wait(12, beats=others))
    clock.crew.release(list(clock.crew.members))
    clock.crew.adopt(dict.fromkeys(clock.crew.members, "up"), clock.now)
    assert clock.wait(6, beats=list(clock.crew.members)) == []


def test_who_says_that_it_is_recycled_before_it_was_ready_has_died() -> None:
    clock, name = Clock(), "worker-default-1"
    clock.tick()
    for _ in range(10):
        clock.say(Ended(name, "ended with 75", RESTART_EXIT_CODE))
        clock.tick()
    assert clock.phase(name) is Phase.GIVEN_UP
    assert clock.crew.problem.endswith("within 60 s: it asked to be started again before it was ready")


def test_who_waits_for_anothers_place_is_never_given_up() -> None:
    clock, name = Clock(), "publisher-default-1"
    clock.tick()
    for _ in range(20):
        clock.say(Ended(name, "ended with 73", EXIT_ALREADY_IN_USE))
        clock.tick()
    assert clock.phase(name) is Phase.STARTING
    assert "started again" in clock.crew.members[name].problem
    assert clock.crew.members[name].death_count == 0
