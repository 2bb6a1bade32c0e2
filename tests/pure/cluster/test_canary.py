"""Canary: one worker of a new version shows whether the others may follow, and a bad one ends nobody else."""

import pytest

from celery5.errors import Misconfigured
from celery5.protocol.cluster.canary import CanaryVerdict, CanaryWatch
from celery5.protocol.cluster.description import Cluster, build_canaries, build_members, parse_cluster
from celery5.protocol.cluster.members import Beat, Ended, Phase, Ready, Start, Stop, Stopping
from celery5.protocol.health.worker_status import (
    Attempts,
    WorkerStatus,
    format_worker_status,
    parse_worker_status,
)
from tests.pure.cluster.test_foreman import Clock, names

CANARY = "worker-default-canary"
WORKERS = ["worker-default-1", "worker-default-2"]


def described(others: dict[str, object] | None = None, **flags: object) -> Cluster:
    return parse_cluster(
        {
            "canary": 60,
            "canary_attempts": 10,
            "canary_failures": 0.2,
            "hung_after": 0,
            "workers": {"default": {"count": 2, **flags}, **(others or {})},
        }
    )


class Trial:
    """A cluster that is up, and a canary beside it."""

    def __init__(self, others: dict[str, object] | None = None) -> None:
        self.clock = Clock(described(others)).up()
        self.report(*WORKERS, successes=500, failures=100)  # before anybody watches
        self.new = described(others, queues=["other"])
        self.canaries = build_canaries(self.new, {"default"}, {}, environment={}, grace=30)
        self.watch = CanaryWatch(self.canaries, self.new, self.clock.now)
        self.clock.crew.start_canaries(self.canaries)
        assert names(self.clock.tick(), Start) == [CANARY]

    def up(self) -> "Trial":
        self.clock.say(Ready(CANARY))
        assert self.clock.tick() == []
        assert self.judge() is None
        return self

    def report(self, *workers: str, successes: int = 0, failures: int = 0, problem: str = "") -> None:
        attempts = Attempts(successes, failures)
        self.clock.say(
            *(Beat(name, format_worker_status(problem, attempts.total, attempts, 0)) for name in workers)
        )

    def judge(self, seconds: float = 0.0) -> CanaryVerdict | None:
        self.clock.now += seconds
        return self.watch.judge(self.clock.crew.members, self.clock.now)


@pytest.mark.parametrize("problem", ["", "redis: away; attempts: 3, succeeded: 1, failed: 2, dead: 1"])
def test_a_status_of_a_worker_is_read_as_it_was_written(problem: str) -> None:
    status = format_worker_status(problem, 9, Attempts(5, 3), 1)
    assert parse_worker_status(status) == WorkerStatus(problem, Attempts(5, 3))
    status = format_worker_status(problem, 9, Attempts(5, 3), 1, recycling="it has done 9 jobs")
    assert parse_worker_status(status) == WorkerStatus(problem, Attempts(5, 3), "it has done 9 jobs")


@pytest.mark.parametrize(
    "status", ["", "ready", "ready; attempts: 9, dead: 1", "ready; succeeded: x, failed: 1", "failed: no"]
)
def test_attempts_are_unknown_in_a_status_of_another_form(status: str) -> None:
    assert parse_worker_status(status) is None


def test_a_canary_that_does_as_well_as_the_others_passes_when_its_time_is_over() -> None:
    trial = Trial().up()
    trial.report(CANARY, successes=90, failures=10)
    trial.report(*WORKERS, successes=590, failures=110)
    assert trial.judge(59.9) is None
    verdict = trial.judge(0.1)
    assert verdict is not None
    assert verdict.passed
    assert verdict.why == (f"{CANARY}: 10 of its 100 attempts failed, 20 of 200 of the other workers"), (
        "what the others did before does not count"
    )


@pytest.mark.parametrize(
    ("own", "others", "fails"),
    [
        ((0, 10), (100, 0), True),
        ((0, 9), (100, 0), False),  # too few
        ((8, 2), (0, 0), False),  # not above the bound
        ((7, 3), (0, 0), True),
        ((5, 5), (60, 40), False),  # all fail so often
        ((3, 7), (60, 40), True),
    ],
)
def test_a_canary_fails_at_once_when_its_failures_exceed_those_of_the_others(
    own: tuple[int, int], others: tuple[int, int], fails: bool
) -> None:
    trial = Trial().up()
    trial.report(CANARY, successes=own[0], failures=own[1])
    trial.report(WORKERS[0], successes=500 + others[0], failures=100 + others[1])
    verdict = trial.judge(1)
    assert (verdict is not None and not verdict.passed) == fails


def test_a_canary_is_compared_with_the_workers_of_its_own_group_only() -> None:
    trial = Trial({"mail": {}}).up()
    trial.report("worker-mail-1")
    assert trial.judge() is None
    trial.report("worker-mail-1", failures=100, problem="health: no database")
    trial.report(CANARY, failures=10)
    verdict = trial.judge()
    assert verdict == CanaryVerdict(
        passed=False,
        why=f"{CANARY}: 10 of its 10 attempts failed, 0 of 0 of the other workers",
    )


def test_a_canary_is_compared_with_workers_that_are_up() -> None:
    trial = Trial().up()
    trial.clock.say(Stopping(WORKERS[0]))
    trial.report(CANARY, WORKERS[1], successes=500, failures=100, problem="health: no database")
    verdict = trial.judge(60)
    assert verdict is not None
    assert verdict.passed, "the one that has no such problem stops"


def test_attempts_of_a_process_that_was_started_again_are_added() -> None:
    trial = Trial().up()
    for successes in (6, 2):  # the second process has ended 2
        trial.report(CANARY, successes=successes)
        assert trial.judge() is None
    verdict = trial.judge(60)
    assert verdict is not None
    assert verdict.why.startswith(f"{CANARY}: 0 of its 8 attempts failed")


def test_a_canary_that_dies_fails_with_what_it_died_of() -> None:
    trial = Trial()
    trial.clock.say(Ended(CANARY, "ended with 1: no module shop", 1))
    assert trial.judge() == CanaryVerdict(passed=False, why=f"{CANARY}: ended with 1: no module shop")


def test_a_canary_that_ends_while_redis_is_unreachable_is_started_again() -> None:
    trial = Trial().up()
    trial.clock.crew.handle_event(Ended(CANARY, "ended with 1", 1), trial.clock.now, is_excused=True)
    assert trial.judge() is None
    assert names(trial.clock.tick(1), Start) == [CANARY]


def test_a_canary_that_is_not_ready_fails_unless_no_worker_is_ready() -> None:
    trial = Trial().up()
    trial.report(CANARY, problem="health: no database")
    assert trial.judge(59) is None, "it may get ready"
    verdict = trial.judge(1)
    assert verdict == CanaryVerdict(passed=False, why=f"{CANARY}: it is not ready: health: no database")
    trial.report(*WORKERS, successes=500, failures=100, problem="health: no database")
    verdict = trial.judge()
    assert verdict is not None
    assert verdict.passed


def test_a_canary_that_is_not_ready_fails_where_nobody_else_is_up() -> None:
    trial = Trial().up()
    trial.clock.say(*(Ended(name, "ended by SIGKILL", -9) for name in WORKERS))
    trial.report(CANARY, problem="health: no database")
    verdict = trial.judge(60)
    assert verdict == CanaryVerdict(passed=False, why=f"{CANARY}: it is not ready: health: no database")


def test_before_the_verdict_no_other_member_changes_and_scaling_keeps_the_canary() -> None:
    trial = Trial().up()
    clock = trial.clock
    assert clock.crew.pending_names == (CANARY,)
    clock.want(described(), {"worker-default": 3})
    assert names(clock.tick(1), Start) == ["worker-default-3"]
    clock.say(Ready("worker-default-3"))
    assert clock.tick(1) == []
    assert clock.phase(CANARY) is Phase.UP


def test_only_the_failed_canary_stops_and_at_once() -> None:
    trial = Trial().up()
    clock = trial.clock
    clock.say(Ended(WORKERS[0], "ended by SIGKILL", -9))  # its successor is not up yet
    clock.crew.end_canaries(passed=False)
    assert names(clock.tick(), Stop) == [CANARY]
    clock.say(Ended(CANARY, "ended with 0", 0), Ready(WORKERS[0]))
    assert clock.tick() == []
    assert sorted(clock.crew.members) == WORKERS
    assert clock.crew.pending_names == ()
    started = clock.crew.members[WORKERS[0]].started_as
    assert started is not None
    assert "other" not in started.arguments


@pytest.mark.parametrize("change", ["description", "restart"])
def test_after_a_canary_has_passed_the_others_follow_one_by_one_and_it_goes_last(change: str) -> None:
    trial = Trial().up()
    clock = trial.clock
    clock.crew.end_canaries(passed=True)
    if change == "restart":
        assert clock.crew.restart() == tuple(WORKERS), "the canary is new"
    else:
        clock.want(trial.new)
    for name in WORKERS:
        assert clock.tick() == [Stop(name)]
        clock.say(Ended(name, "ended with 0", 0))
        assert names(clock.tick(), Start) == [name]
        clock.say(Ready(name))
    assert clock.tick() == [Stop(CANARY)]


def test_another_change_replaces_the_canary_and_its_old_process_is_not_watched() -> None:
    trial = Trial().up()
    clock = trial.clock
    trial.report(CANARY, failures=10)
    clock.now += 1
    watch = CanaryWatch(trial.canaries, trial.new, clock.now)
    clock.crew.end_canaries(passed=False)
    clock.crew.start_canaries(trial.canaries)
    assert watch.judge(clock.crew.members, clock.now) is None
    assert clock.tick() == [Stop(CANARY)]
    clock.say(Ended(CANARY, "ended with 0", 0))
    assert names(clock.tick(1), Start) == [CANARY]
    clock.say(Ready(CANARY))
    assert watch.judge(clock.crew.members, clock.now) is None


def test_only_groups_that_work_and_change_get_a_canary() -> None:
    clock = Clock(described())
    new = build_members(described(queues=["other"]))
    assert clock.crew.find_restarting_groups(new) == set(), "nobody runs: there is nothing to compare with"
    clock.tick()
    assert clock.crew.find_restarting_groups(new) == {"default"}, "they come up, as far as anybody knows"
    clock.say(*[Ended(worker, "ended with 1", 1) for worker in WORKERS])
    clock.tick(1)
    assert clock.crew.find_restarting_groups(new) == set(), (
        "a version that repairs a broken one is not delayed"
    )
    clock.up()
    assert clock.crew.find_restarting_groups(new) == {"default"}
    assert clock.crew.find_restarting_groups(build_members(described())) == set()
    assert clock.crew.find_restarting_groups() == {"default"}


def test_a_canary_has_a_name_and_a_port_of_its_own() -> None:
    cluster = parse_cluster(
        {
            "workers": {"default": {"count": 2, "status_port": 9000, "hosts": ["a", "b"]}, "mail": {}},
            "routers": {"default": {}},
            "hosts": {"a": {}, "b": {}},
        }
    )
    scale = {"worker-default": 5}
    (canary,) = build_canaries(cluster, {"default"}, scale, environment={"A": "1"}, grace=30)
    assert (canary.name, canary.host) == ("worker-default-canary@a", "a")
    assert canary.arguments[-2:] == ("--status-port", "9003")
    assert canary.environment["A"] == "1"
    others = build_members(cluster, scale, environment={"A": "1"})
    assert not {member.arguments for member in others if member.host == "a"} & {canary.arguments}


@pytest.mark.parametrize("wrong", [{"canary": -1}, {"canary_attempts": 0}, {"canary_failures": 1.1}])
def test_invalid_bounds_of_a_canary_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(Misconfigured, match=next(iter(wrong))):
        parse_cluster({**wrong, "workers": {"default": {}}})
