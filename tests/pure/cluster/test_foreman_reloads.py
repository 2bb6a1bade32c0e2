"""Foreman: at a reload nobody who is healthy ends before those that change have come up."""

import pytest

from celery5.protocol.cluster.description import Cluster, build_members, build_spares, parse_cluster
from celery5.protocol.cluster.members import Beat, Ended, Kill, Phase, Ready, Start, Stop
from tests.pure.cluster.test_foreman import Clock, names


def described(count: int = 4, *, kind: str = "workers", **flags: object) -> Cluster:
    return parse_cluster({"restart_limit": 3, kind: {"default": {"count": count, **flags}}})


def replaced(clock: Clock, name: str) -> None:
    """It ends as it was asked to, and its successor comes up."""
    clock.say(Ended(name, "ended with 0", 0))
    assert names(clock.tick(), Start) == [name]
    assert clock.tick() == []
    clock.say(Ready(name))


def cannot_live(clock: Clock, name: str, *, beside: bool = False) -> None:
    """It ends as it was asked to, or runs `beside` others, and its successors die, until nobody tries any more."""
    if not beside:
        clock.say(Ended(name, "ended with 0", 0))
    for _ in range(3):
        assert names(clock.tick(), Start) == [name]
        clock.say(Ended(name, "ended with 1", 1))
    assert clock.wait(100, beats=clock.crew.members) == []
    assert clock.phase(name) is Phase.GIVEN_UP


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("change", ["reload", "restart", "restart of one"])
def test_a_new_version_that_cannot_live_ends_no_member_that_works(count: int, change: str) -> None:
    clock = Clock(described(count)).up()
    members = list(clock.crew.members)
    if change == "reload":
        clock.want(described(count, queues=["other"]))
    else:
        clock.crew.restart(None if change == "restart" else members[-1:])
    cannot_live(clock, f"worker-default-{count + 1}", beside=True)
    assert {clock.phase(name) for name in members} == {Phase.UP}
    assert names(clock.done, Stop) == []
    clock.want(described(count))
    clock.crew.restart()
    assert names(clock.tick(), Start) == [f"worker-default-{count + 1}"], "a mended version is tried likewise"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_at_a_reload_as_many_members_as_wanted_are_up_at_any_time(count: int) -> None:
    clock = Clock(described(count)).up()
    clock.want(described(count, queues=["other"]))
    for _ in range(20):
        clock.tick(1.0)
        assert sum(state.phase is Phase.UP for state in clock.crew.members.values()) >= count
        for name, state in list(clock.crew.members.items()):
            if state.phase is Phase.STOPPING:
                clock.say(Ended(name, "ended with 0", 0))
            elif state.phase is Phase.STARTING:
                clock.say(Ready(name))
            else:
                clock.say(Beat(name))
    assert clock.crew.is_complete
    assert len(clock.crew.members) == count


def test_repeated_command_to_scale_keeps_the_one_that_tries_a_version() -> None:
    new = described(2, queues=["other"])
    clock = Clock(described(2)).up()
    spares = build_spares(new, {}, environment={}, grace=30)
    assert len(spares) == 2, "another one could be started"
    clock.crew.set_desired(new, build_members(new), spares)
    clock.try_beside("worker-default-3")
    clock.crew.set_desired(new, build_members(new), spares)
    assert clock.tick() == [Stop("worker-default-1")]


def test_a_bad_version_ends_with_the_first_member_while_all_still_start() -> None:
    clock = Clock(described(3))
    clock.tick()
    clock.want(described(3, queues=["other"]))
    assert clock.tick() == [Stop("worker-default-1")]
    cannot_live(clock, "worker-default-1")
    clock.say(Ready("worker-default-2"), Ready("worker-default-3"))
    assert clock.wait(20, beats=["worker-default-2", "worker-default-3"]) == []


def test_a_reload_restarts_members_that_hang_at_their_start_one_by_one() -> None:
    clock = Clock(described(3))
    clock.tick()
    clock.want(described(3, queues=["other"]))
    for name in ("worker-default-1", "worker-default-2", "worker-default-3"):
        assert clock.tick() == [Stop(name)]
        replaced(clock, name)
    assert clock.tick() == []
    assert clock.crew.is_complete


def test_fewer_and_changed_members_come_up_one_by_one_before_the_surplus_goes() -> None:
    clock = Clock(described()).up()
    clock.want(described(2, queues=["other"]))
    assert clock.tick() == [Stop("worker-default-1")], "those that go stand in"
    replaced(clock, "worker-default-1")
    assert clock.tick() == [Stop("worker-default-2")]
    replaced(clock, "worker-default-2")
    assert clock.tick() == [Stop("worker-default-3"), Stop("worker-default-4")]


def test_what_is_still_to_be_done_is_known_until_it_is() -> None:
    workers = [f"worker-default-{number}" for number in range(1, 5)]
    clock = Clock(described())
    assert list(clock.crew.pending_names) == workers
    clock.up()
    assert clock.crew.pending_names == ()
    clock.want(described(2, queues=["other"]))
    assert list(clock.crew.pending_names) == workers, "two change, two go"
    clock.tick()
    replaced(clock, workers[0])
    assert list(clock.crew.pending_names) == workers[1:]
    clock.tick()
    replaced(clock, workers[1])
    clock.tick()
    assert list(clock.crew.pending_names) == workers[2:]
    for name in workers[2:]:
        clock.say(Ended(name, "ended with 0", 0))
    clock.tick()
    assert clock.crew.pending_names == ()
    clock.crew.restart(workers[:1])
    assert list(clock.crew.pending_names) == workers[:1]
    clock.try_beside(workers[2]).tick()
    cannot_live(clock, workers[0])
    assert clock.crew.pending_names == (), "nothing more is done for it"


def test_healthy_members_stay_when_changed_ones_fail() -> None:
    clock = Clock(described()).up()
    clock.want(described(2, queues=["other"]))
    assert clock.tick() == [Stop("worker-default-1")]
    cannot_live(clock, "worker-default-1")
    assert [clock.phase(f"worker-default-{n}") for n in (2, 3, 4)] == [Phase.UP] * 3
    assert [running.member.name for running in clock.crew.retained] == [
        "worker-default-3",
        "worker-default-4",
    ]
    assert "worker-default-1: given up" in clock.crew.problem
    assert "worker-default-3, worker-default-4: not wanted any more, and kept" in clock.crew.problem
    clock.want(described(2))
    assert names(clock.tick(), Start) == ["worker-default-1"], "fewer, with the old settings"
    clock.say(Ready("worker-default-1"))
    assert clock.tick() == [Stop("worker-default-3"), Stop("worker-default-4")]


def test_who_stays_does_so_when_the_same_description_is_read_again() -> None:
    clock = Clock(described(2, kind="schedulers")).up()
    clock.want(described(1, kind="schedulers", log_level="debug"))
    assert clock.tick() == [Stop("scheduler-default-1")]
    for _ in range(4):
        clock.say(Ended("scheduler-default-1", "ended with 1", 1))
        clock.tick()
    assert clock.phase("scheduler-default-1") is Phase.GIVEN_UP
    clock.want(described(1, kind="schedulers", log_level="debug"))
    assert clock.wait(10, beats=clock.crew.members) == []
    assert clock.phase("scheduler-default-2") is Phase.UP


def test_member_is_wanted_again_when_the_old_description_is_back() -> None:
    clock = Clock(described()).up()
    clock.want(described(2, queues=["other"]))
    clock.tick()
    clock.want(described())
    clock.say(Ended("worker-default-1", "ended with 0", 0))
    assert names(clock.tick(), Start) == ["worker-default-1"]
    clock.say(Ready("worker-default-1"))
    assert clock.wait(20, beats=clock.crew.members) == []
    assert clock.crew.status_line == "4 of 4 members up"


def test_for_the_only_one_that_is_to_be_left_one_of_the_surplus_stands_in() -> None:
    clock = Clock(described(2)).up()
    clock.want(described(1, queues=["other"]))
    assert clock.tick() == [Stop("worker-default-1")]
    replaced(clock, "worker-default-1")
    assert clock.tick() == [Stop("worker-default-2")]


def test_schedulers_too_go_after_the_changed_one_of_their_group() -> None:
    clock = Clock(described(2, kind="schedulers")).up()
    clock.want(described(1, kind="schedulers", log_level="debug"))
    assert clock.tick() == [Stop("scheduler-default-1")]
    replaced(clock, "scheduler-default-1")
    assert clock.tick() == [Stop("scheduler-default-2")]


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
def test_the_only_member_goes_on_while_the_new_version_cannot_start(kind: str) -> None:
    clock = Clock(described(1, kind=f"{kind}s")).up()
    clock.crew.restart()
    for _ in range(3):
        assert names(clock.tick(20), Start) == [f"{kind}-default-2"], "the new version beside the old one"
        clock.say(Ended(f"{kind}-default-2", "ended with 1", 1), Beat(f"{kind}-default-1"))
    assert clock.phase(f"{kind}-default-2") is Phase.GIVEN_UP
    assert clock.wait(100, beats=clock.crew.members) == []
    assert clock.phase(f"{kind}-default-1") is Phase.UP
    assert clock.crew.problem.startswith(f"{kind}-default-2: given up: it has died 3 times")
    clock.crew.restart()
    assert names(clock.tick(), Start) == [f"{kind}-default-2"], "the code is mended"
    clock.say(Ready(f"{kind}-default-2"))
    assert clock.tick() == [Stop(f"{kind}-default-1")]


def test_publisher_gives_its_socket_to_one_of_another_group() -> None:
    clock = Clock(parse_cluster({"publishers": {"old": {}}})).up()
    clock.want(parse_cluster({"publishers": {"new": {}}}))
    assert Stop("publisher-old-1") in clock.tick()


def test_one_of_the_surplus_that_hangs_is_killed_and_not_started_again() -> None:
    clock = Clock(parse_cluster({"hung_after": 10, "workers": {"default": {"count": 2}}})).up()
    clock.want(parse_cluster({"hung_after": 10, "workers": {"default": {"count": 1, "queues": ["other"]}}}))
    clock.tick()
    found = clock.wait(12, beats=["worker-default-1"])
    assert names(found, Kill) == ["worker-default-2"]
    clock.say(Ended("worker-default-2", "ended by SIGKILL", -9))
    clock.tick()
    assert "worker-default-2" not in clock.crew.members


def test_deaths_and_restarts_in_order_are_counted_apart() -> None:
    clock = Clock(described(1)).up()
    clock.say(Ended("worker-default-1", "ended by SIGKILL", -9))
    clock.tick(1)
    clock.say(Ready("worker-default-1"))
    clock.crew.restart()
    clock.tick()
    clock.say(Ready("worker-default-2"))
    assert clock.tick() == [Stop("worker-default-1")]
    replaced(clock, "worker-default-1")
    post = clock.crew.members["worker-default-1"]
    assert (post.death_count, post.restart_count) == (1, 1)


@pytest.mark.parametrize(
    ("group", "has_capacity", "is_beside"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"capacity": "gpu=1"}, False, False),
        ({"environment": {"CELERY5_CAPACITY": "gpu=1"}}, False, False),
        ({"environment": {"CELERY5_CAPACITY": ""}}, True, True),
    ],
)
def test_workers_with_a_capacity_end_before_the_next_one_starts(
    group: dict[str, object], *, has_capacity: bool, is_beside: bool
) -> None:
    cluster = parse_cluster({"workers": {"default": group}, "routers": {"default": {}}})
    clock = Clock(cluster).up()
    spares = build_spares(cluster, {}, environment={}, grace=30, has_capacity=has_capacity)
    clock.crew.set_desired(cluster, build_members(cluster), spares)
    clock.crew.restart()
    actions = clock.tick()
    assert (names(actions, Stop) == []) is is_beside
    assert ("worker-default-2" in names(actions, Start)) is is_beside
    assert "router-default-2" in names(actions, Start)
