"""Sight: one worker with several lives is one worker, and what cannot be seen makes nothing less."""

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.scaling.autoscale import (
    Autoscale,
    AutoscaleState,
    Load,
    Scale,
    get_next_state,
    make_initial_state,
    resume_state,
)
from celery5.protocol.scaling.snapshot import (
    BrokerVisibility,
    ClusterSnapshot,
    ClusterWorker,
    QueueLoad,
    TaskConstraints,
    TaskLoad,
    WorkerReport,
    make_snapshot,
    merge_snapshots,
    update_visibility,
)

POLICY = Autoscale(minimum=1, maximum=10, cooldown=1, longest_cooldown=1, shrink_after=0)


def life(queue: str, executing: int, *, process: str = "p", prefetch: float = 1.0) -> WorkerReport:
    """A life of a process with four slots."""
    return WorkerReport(
        queues=(queue,),
        slots={"trio": 4},
        most={"trio": 4},
        executing={"trio": executing},
        process=process,
        prefetch=prefetch,
    )


def on(queue: str, waiting: int, reports: Mapping[str, WorkerReport]) -> ClusterSnapshot:
    """What one broker has."""
    census = QueueLoad(queue, waiting, 0, {"a": 1}, tuple(reports))
    return make_snapshot([census], reports, TaskConstraints(kinds={"a": "trio"}))


def test_lives_of_one_process_are_one_worker_whose_slots_count_once() -> None:
    here = on("near", 3, {"web:a": life("near", 3), "only:b": life("near", 0, process="")})
    there = on("post", 5, {"web@mails:c": life("post", 1, prefetch=2.0)})
    found = merge_snapshots([here, there])
    web, only = sorted(found.workers, key=lambda worker: worker.name, reverse=True)
    assert (web.name, web.queues, web.slots, web.max_slots) == (
        "web:a",
        ("near", "post"),
        {"trio": 4},
        {"trio": 4},
    )
    assert (web.executing, web.prefetch) == ({"trio": 4}, 2.0)
    assert [(target.name, target.queues) for target in web.command_targets] == [
        ("web:a", ("near",)),
        ("web@mails:c", ("post",)),
    ]
    assert only.command_targets == (only,)
    assert found.max_slots("trio") == 8
    assert found.demand() == {"trio": 8}
    assert found.io_utilization == 0.5


def test_processes_that_know_nothing_of_lives_are_counted_as_they_come() -> None:
    old = {"web:a": life("near", 0, process=""), "web@mails:c": life("near", 0, process="")}
    assert len(merge_snapshots([on("near", 0, old)]).workers) == 2


def test_a_broker_is_unseen_while_it_is_away_and_a_little_longer() -> None:
    sight = update_visibility(BrokerVisibility(), ["mails"], 100.0, settle_seconds=12)
    assert sight.unreachable == ("mails",)
    sight = update_visibility(sight, ["mails", "news"], 200.0, settle_seconds=12)
    assert sight.until == {"mails": math.inf, "news": math.inf}
    sight = update_visibility(sight, ["news"], 300.0, settle_seconds=12)
    assert sight.until == {"mails": 312.0, "news": math.inf}
    assert update_visibility(sight, ["news"], 311.0, settle_seconds=12).unreachable == ("mails", "news")
    assert update_visibility(sight, ["news"], 312.0, settle_seconds=12).unreachable == ("news",)
    assert (
        update_visibility(sight, ["mails"], 311.0, settle_seconds=12).until["mails"] == math.inf
    )  # it has gone again meanwhile


def seen(jobs: int, workers: int, *unseen: str) -> ClusterSnapshot:
    """Jobs, and workers with ten slots."""
    lines = (TaskLoad(queue="q", task="a", kind="trio", waiting=jobs),)
    members = tuple(
        ClusterWorker(name=f"w{n}", queues=("q",), max_slots={"trio": 10}) for n in range(workers)
    )
    return ClusterSnapshot(task_loads=lines, workers=members, unreachable=unseen)


def test_workers_do_not_shrink_while_a_broker_is_unreachable() -> None:
    policy = Autoscale(minimum=1, maximum=10, cooldown=1, longest_cooldown=1, shrink_after=30)
    course = AutoscaleState(workers=6, prefetch=4.0, crowded=("q",), events=3, at=0.0, low_since=1.0)
    for second in range(2, 100, 2):
        course = get_next_state(course, policy, seen(0, 2, "mails"), float(second))
        assert (course.workers, course.prefetch) == (6, 4.0)
    course = get_next_state(course, policy, seen(0, 6), 100.0)
    assert course.workers == 6
    assert get_next_state(course, policy, seen(0, 6), 129.0).workers == 6
    assert get_next_state(course, policy, seen(0, 6), 130.0).workers == 3


def test_while_a_broker_is_unseen_what_is_known_may_still_need_more() -> None:
    course = AutoscaleState(workers=2, prefetch=4.0, events=1, at=0.0)
    assert get_next_state(course, POLICY, seen(90, 2, "mails"), 10.0).workers == 4


def test_custom_strategy_may_scale_one_dimension_only() -> None:
    def fewer_but_further(load: Load) -> Scale:
        assert load.snapshot.unreachable == ("mails",)
        return Scale(1, 4.0)

    policy = Autoscale(minimum=1, maximum=10, shrink_after=0, strategy=fewer_but_further)
    course = get_next_state(AutoscaleState(workers=5, events=1, at=0.0), policy, seen(0, 1, "mails"), 100.0)
    assert course.scale == Scale(5, 4.0)


def test_limits_that_were_changed_hold_all_the_same() -> None:
    course = get_next_state(AutoscaleState(workers=20, events=1, at=0.0), POLICY, seen(0, 1, "mails"), 100.0)
    assert course.workers == POLICY.maximum


def test_autoscaler_begins_with_all_brokers_and_continues_without_one() -> None:
    assert resume_state(None, POLICY, seen(0, 1, "mails")) is None
    first = resume_state(None, POLICY, seen(0, 3))
    assert first == make_initial_state(POLICY, seen(0, 3)) == AutoscaleState(workers=3)
    assert resume_state(first, POLICY, seen(0, 1, "mails")) == first
    assert resume_state(first, POLICY, seen(0, 2)) == AutoscaleState(workers=2)
    stepped = AutoscaleState(workers=5, events=1, at=1.0)
    assert resume_state(stepped, POLICY, seen(0, 1)) == stepped


@given(
    looks=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12)), max_size=40),
    workers=st.integers(1, 10),
    prefetch=st.sampled_from([1.0, 2.0, 4.0]),
)
def test_nothing_shrinks_while_a_broker_is_unreachable(
    looks: list[tuple[int, int]], workers: int, prefetch: float
) -> None:
    course = AutoscaleState(workers=workers, prefetch=prefetch, events=1, at=0.0)
    for second, (jobs, members) in enumerate(looks):
        after = get_next_state(course, POLICY, seen(jobs, members, "mails"), 3.0 * second)
        assert after.workers >= course.workers
        assert after.prefetch >= course.prefetch
        course = after
