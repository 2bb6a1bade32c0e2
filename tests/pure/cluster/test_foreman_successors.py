"""Successors: a worker that is recycled under a Controller ends only when another one has taken its place."""

from celery5.protocol.cluster.description import (
    Cluster,
    build_canaries,
    build_members,
    build_spares,
    parse_cluster,
)
from celery5.protocol.cluster.foreman import DISMISSAL_LIMIT, PERMIT_INTERVAL, SUCCESSOR_WAIT, ClusterState
from celery5.protocol.cluster.members import Action, Beat, Ended, Permit, Phase, Ready, Start, Stop
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from celery5.protocol.process.recycling import RESTART_EXIT_CODE

TWO = parse_cluster({"start_limit": 20, "hung_after": 0, "workers": {"default": {"count": 2}}})
FIRST, SECOND, THIRD, FOURTH = (f"worker-default-{number}" for number in range(1, 5))
WHY = "it takes 480.0 MiB, and its limit is 450.0 MiB (max_memory)"


class Group:
    """The workers of one group, a clock, and what was decided at last."""

    def __init__(self, cluster: Cluster = TWO) -> None:
        self.now = 100.0
        self.state = ClusterState(cluster, random=lambda: 0.0)
        self.want(cluster)
        self.tick()
        self.up(*self.state.members)

    def want(self, cluster: Cluster = TWO, scale: dict[str, int] | None = None) -> None:
        spares = build_spares(cluster, scale or {}, environment={}, grace=30)
        self.state.set_desired(cluster, build_members(cluster, scale), spares)

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Let time pass, and decide until there is nothing more to decide."""
        self.now += seconds
        found: list[Action] = []
        while actions := self.state.decide(self.now):
            found += actions
        return found

    def up(self, *names: str) -> list[Action]:
        for name in names:
            self.state.handle_event(Ready(name), self.now)
        return self.tick()

    def ask(self, name: str) -> list[Action]:
        """A worker asks for a successor."""
        self.state.handle_event(Beat(name, format_status(successor=WHY)), self.now)
        return self.tick()

    def begin_to_end(self, name: str) -> list[Action]:
        """A worker reads no more jobs."""
        self.state.handle_event(Beat(name, format_status(recycling=WHY)), self.now)
        return self.tick()

    def end(self, name: str, code: int = RESTART_EXIT_CODE) -> list[Action]:
        self.state.handle_event(Ended(name, f"ended with {code}", code), self.now)
        return self.tick()

    @property
    def names(self) -> list[str]:
        return sorted(name for name, state in self.state.members.items() if state.phase.is_running)


def format_status(*, recycling: str = "", successor: str = "") -> str:
    return format_worker_status("", 9, Attempts(9, 0), 0, recycling=recycling, successor=successor)


def list_started(actions: list[Action]) -> list[str]:
    return [action.member.name for action in actions if isinstance(action, Start)]


def test_worker_is_recycled_when_its_successor_is_up_which_ends_then() -> None:
    group = Group()
    actions = group.ask(FIRST)
    assert list_started(actions) == [THIRD]
    assert Permit(FIRST, False) in actions
    assert group.tick(1.0) == [], "it goes on while its successor starts"
    assert group.up(THIRD) == [Permit(FIRST, True)]
    assert group.begin_to_end(FIRST) == []
    assert list_started(group.end(FIRST)) == [FIRST]
    assert group.names == [FIRST, SECOND, THIRD], "the successor stays until the next process is up"
    assert group.up(FIRST) == [Permit(THIRD, True)]
    assert group.begin_to_end(THIRD) == []
    assert group.tick(3000.0) == [], "its jobs may take as long as they like"
    assert group.end(THIRD) == []
    assert group.names == [FIRST, SECOND]
    assert sum(state.death_count for state in group.state.members.values()) == 0


def test_permit_is_repeated_since_a_message_may_be_lost() -> None:
    group = Group()
    group.ask(FIRST)
    assert group.tick(PERMIT_INTERVAL) == [Permit(FIRST, False)]
    group.up(THIRD)
    assert group.tick(PERMIT_INTERVAL) == [Permit(FIRST, True)]
    assert group.tick(1.0) == []


def test_cluster_counts_as_complete_while_a_successor_starts() -> None:
    group = Group()
    group.ask(FIRST)
    assert (group.state.is_complete, group.state.pending_names) == (True, ())
    assert group.state.status_line == "2 of 2 members up"
    group.up(THIRD)
    group.begin_to_end(FIRST)
    assert group.state.is_complete
    assert group.state.status_line == "1 of 2 members up, 1 recycling"
    group.end(FIRST)
    group.up(FIRST)
    assert (group.state.is_complete, group.state.pending_names) == (True, ())
    assert group.state.status_line == "2 of 2 members up"


def test_worker_goes_on_when_its_successor_cannot_start_and_tries_again() -> None:
    group = Group()
    group.ask(FIRST)
    starts = 1
    for _ in range(300):
        if THIRD in group.names:
            starts += bool(list_started(group.end(THIRD, 1)))
        actions = group.tick(1.0)
        starts += THIRD in list_started(actions)
        assert Permit(FIRST, True) not in actions
        assert not any(isinstance(action, Stop) for action in actions)
        assert (group.state.is_complete, group.state.problem) == (True, "")
    assert 6 <= starts <= 12, "at growing intervals"
    assert group.state.members[FIRST].successor_failures == starts - (THIRD in group.names)
    while THIRD not in group.names:
        group.tick(1.0)
    assert group.up(THIRD) == [Permit(FIRST, True)]
    assert group.state.members[FIRST].successor_failures == 0


def test_successor_that_dies_after_the_permit_is_started_again() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.begin_to_end(FIRST)
    group.end(THIRD, -9)
    assert list_started(group.tick(11.0)) == [THIRD] or THIRD in group.names
    group.end(FIRST)
    group.up(FIRST)
    group.end(THIRD, 1)
    assert group.names == [FIRST, SECOND]


def test_killed_worker_comes_back_and_its_successor_ends() -> None:
    for begins_to_end in (False, True):
        group = Group()
        group.ask(FIRST)
        group.up(THIRD)
        if begins_to_end:
            group.begin_to_end(FIRST)
        group.end(FIRST, -9)
        group.tick(11.0)
        assert group.names == [FIRST, SECOND, THIRD]
        assert Permit(THIRD, True) in group.up(FIRST)


def test_group_has_one_successor_at_work_and_the_others_wait_their_time() -> None:
    group = Group()
    group.ask(FIRST)
    actions = group.ask(SECOND)
    assert list_started(actions) == []
    group.up(THIRD)
    group.begin_to_end(FIRST)
    assert Permit(SECOND, True) not in group.tick(SUCCESSOR_WAIT - 1)
    assert Permit(SECOND, True) in group.tick(1.0), "its memory may keep growing"
    assert group.names == [FIRST, SECOND, THIRD]


def test_worker_does_not_end_while_the_only_successor_of_its_group_starts() -> None:
    group = Group()
    group.state.handle_event(Ready(SECOND), group.now)
    group.ask(FIRST)
    group.ask(SECOND)
    for _ in range(15):
        assert Permit(SECOND, True) not in group.tick(1.0)
    group.end(THIRD, 1)
    for _ in range(5 * int(SUCCESSOR_WAIT)):
        group.tick(1.0)
        if THIRD in group.names:
            group.end(THIRD, 1)
    assert not any(state.is_permitted for state in group.state.members.values())


def test_next_successor_has_another_name_while_the_last_one_finishes_its_jobs() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.begin_to_end(FIRST)
    group.end(FIRST)
    group.up(FIRST)
    group.begin_to_end(THIRD)
    assert list_started(group.ask(SECOND)) == [FOURTH]
    assert group.up(FOURTH) == [Permit(SECOND, True)]


def test_successor_in_place_of_a_broken_worker_is_recycled_by_one_of_its_own() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.begin_to_end(FIRST)
    group.end(FIRST)
    for _ in range(200):
        group.tick(1.0)
        if FIRST in group.names:
            group.end(FIRST, 1)
    assert group.state.members[FIRST].phase is Phase.GIVEN_UP
    assert group.names == [SECOND, THIRD], "it stays, as long as the worker does not come back"
    assert list_started(group.ask(THIRD)) == [FOURTH]
    group.end(FOURTH, 1)
    assert group.names == [SECOND, THIRD]
    group.state.restart([FIRST])
    group.tick()
    group.up(FIRST)
    assert group.begin_to_end(THIRD) == []
    group.end(THIRD)
    assert group.state.members[FOURTH].phase is Phase.STOPPING, "what it was for does not run any more"
    group.end(FOURTH, 0)
    assert group.names == [FIRST, SECOND]


def test_successor_that_does_not_begin_to_end_is_asked_to_stop() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.end(FIRST)
    group.up(FIRST)
    assert Stop(THIRD) not in group.tick(DISMISSAL_LIMIT - 1)
    assert Stop(THIRD) in group.tick(1.0)


def test_next_controller_ends_a_successor_that_it_finds() -> None:
    group = Group()
    group.state = ClusterState(TWO, random=lambda: 0.0)
    group.want()
    group.state.adopt({FIRST: "up", SECOND: "up", THIRD: "up"}, group.now)
    assert group.tick() == [Permit(THIRD, True)]
    group.begin_to_end(THIRD)
    group.end(THIRD)
    assert group.names == [FIRST, SECOND]


def test_next_controller_starts_what_is_missing_before_it_ends_a_successor() -> None:
    group = Group()
    group.state = ClusterState(TWO, random=lambda: 0.0)
    group.want()
    group.state.adopt({SECOND: "up", THIRD: "up"}, group.now)
    assert list_started(group.tick()) == [FIRST]
    assert group.up(FIRST) == [Permit(THIRD, True)]


def test_reload_restarts_the_others_and_a_successor_ends_when_it_is_not_needed() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    changed = parse_cluster(
        {"start_limit": 20, "hung_after": 0, "workers": {"default": {"count": 2, "concurrency": 7}}}
    )
    group.want(changed)
    for _ in range(40):
        group.tick(1.0)
        for name in group.names:
            phase = group.state.members[name].phase
            if phase is Phase.STOPPING:
                group.end(name, 0)
            elif phase is Phase.STARTING:
                group.up(name)
            elif group.state.members[name].dismissed_at > 0:
                group.end(name)
        working = [state for state in group.state.members.values() if state.phase is Phase.UP]
        assert len(working) >= 2 or THIRD not in group.state.members
    assert group.names == [FIRST, SECOND]
    assert group.state.is_complete
    assert all(
        "7" in state.started_as.arguments for state in group.state.members.values() if state.started_as
    )


def test_successor_whose_name_is_wanted_by_a_larger_group_becomes_a_member() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.want(scale={"worker-default": 3})
    group.tick()
    assert group.names == [FIRST, SECOND, THIRD]
    assert not group.state.members[THIRD].is_successor
    group.begin_to_end(FIRST)
    group.end(FIRST)
    assert group.up(FIRST) == []
    assert group.names == [FIRST, SECOND, THIRD]


def test_successor_ends_with_the_worker_that_a_smaller_group_does_not_want() -> None:
    group = Group()
    group.ask(SECOND)
    group.up(THIRD)
    group.want(scale={"worker-default": 1})
    actions = group.tick()
    assert Stop(SECOND) in actions
    assert Permit(THIRD, True) in actions


def test_repeated_command_to_scale_keeps_a_successor() -> None:
    group = Group()
    group.ask(FIRST)
    group.want(scale={"worker-default": 2})
    assert group.tick() == []
    assert group.up(THIRD) == [Permit(FIRST, True)]


def test_canary_is_recycled_without_a_successor() -> None:
    group = Group()
    group.state.start_canaries(build_canaries(TWO, {"default"}, {}, environment={}, grace=30))
    group.tick()
    group.up("worker-default-canary")
    assert group.ask("worker-default-canary") == [Permit("worker-default-canary", True)]


def test_successor_runs_on_the_host_of_the_worker() -> None:
    cluster = parse_cluster(
        {"hung_after": 0, "hosts": {"a": {}, "b": {}}, "workers": {"default": {"hosts": ["a", "b"]}}}
    )
    group = Group(cluster)
    assert list_started(group.ask("worker-default-1@b")) == ["worker-default-2@b"]


def test_shutdown_stops_a_successor_like_all_others() -> None:
    group = Group()
    group.ask(FIRST)
    group.up(THIRD)
    group.state.drain()
    assert sorted(action.name for action in group.tick() if isinstance(action, Stop)) == [
        FIRST,
        SECOND,
        THIRD,
    ]
