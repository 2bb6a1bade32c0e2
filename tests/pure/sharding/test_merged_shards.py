"""Shards of a queue count as one wherever queues are counted."""

from celery5.broker.calls.queues import QueueState, WorkerState, merge_queue_states
from celery5.protocol.observability.job_tally import JobTally
from celery5.protocol.observability.queue_depth import QueueDepth, merge_depths
from celery5.protocol.observability.queue_flow import QueueFlow
from celery5.protocol.observability.storage import QueueStorage, merge_shards
from celery5.protocol.process.standing import LostJob, LostRecord
from celery5.protocol.scaling.snapshot import QueueLoad, TaskConstraints, WorkerReport, make_snapshot
from celery5.protocol.shards import take_queues

FIRST = QueueDepth(
    waiting=2, oldest=5.0, dead=1, backlog=3, held=1, held_tasks={"push": 1}, workers=2, running=1,
    flow=QueueFlow(1.0, 2.0, -1.0, 60.0), idle=4.0, lost_workers={"w1": 10.0}, lost=1, deaths={"push": 1},
)  # fmt: skip
SECOND = QueueDepth(
    waiting=3, oldest=None, dead=0, backlog=3, held_tasks={"push": 2}, workers=2, running=2,
    flow=QueueFlow(2.0, 1.0, 1.0, 30.0), idle=None, lost_workers={"w1": 11.0, "w2": 12.0}, lost=2, deaths={"push": 2},
)  # fmt: skip


def test_depths_of_shards_are_those_of_their_queue() -> None:
    merged = merge_depths({"mails": FIRST, "mails#1": SECOND, "other": FIRST})
    assert merged["other"] is FIRST
    assert merged["mails"] == QueueDepth(
        waiting=5, oldest=5.0, dead=1, backlog=6, held=1, held_tasks={"push": 3}, workers=2, running=3,
        flow=QueueFlow(3.0, 3.0, 0.0, 30.0), idle=4.0, lost_workers={"w1": 11.0, "w2": 12.0}, lost=2,
        deaths={"push": 3},
    )  # fmt: skip


def test_a_worker_of_several_shards_is_one_worker() -> None:
    states = [
        QueueState(shard, 1, 2, 3, due, 0, None, 1, (WorkerState("w1", lease, 2), WorkerState("w2", 5.0, 0)))
        for shard, lease, due in (("mails", 4.0, None), ("mails#1", 3.0, 7.0), ("mails#2", 5.0, 6.0))
    ]
    (merged,) = merge_queue_states(states)
    assert (merged.queue, merged.waiting, merged.running, merged.next_due) == ("mails", 3, 6, 6.0)
    assert merged.workers == (WorkerState("w1", 3.0, 6), WorkerState("w2", 5.0, 0))


def test_the_most_urgent_shard_says_how_a_queue_is() -> None:
    workers = (
        WorkerState("w1", 4.0, 0, lapsed=1.0, is_blocked=True, silent_for=9.0),
        WorkerState("w1", 4.0, 0, lapsed=2.0, is_blocked=False, silent_for=8.0),
    )
    parts = [
        QueueState(
            name, 0, 0, 0, None, 1, dead, 1, (worker,), oldest_waiting=waiting, idle=idle
        )
        for name, dead, worker, waiting, idle in (
            ("mails", 5.0, workers[0], 7.0, 3.0), ("mails#1", 6.0, workers[1], 4.0, 2.0),
        )
    ]  # fmt: skip
    (merged,) = merge_queue_states(parts)
    assert (merged.oldest_dead, merged.oldest_waiting, merged.idle) == (6.0, 7.0, 2.0)
    assert merged.workers == (WorkerState("w1", 4.0, 0, lapsed=2.0, is_blocked=True, silent_for=9.0),)


def test_a_worker_that_is_lost_on_several_shards_is_lost_once() -> None:
    parts = [
        QueueState(
            shard, 0, 0, 0, None, 0, None, 0, (), lost=tuple(lost), lost_count=len(lost),
        )
        for shard, lost in (
            ("mails", [LostRecord(worker="w1", at=8.0, put_back=2, dead=1)]),
            ("mails#1", [LostRecord(worker="w1", at=7.0, why="killed"), LostRecord(worker="w2", at=9.0)]),
            ("mails#2", [LostRecord(worker="w1", at=9.0, put_back=3, jobs=(LostJob("a", "push", "", "mails#2"),))]),
        )
    ]  # fmt: skip
    (merged,) = merge_queue_states(parts)
    assert merged.lost_count == 2
    assert merged.lost == (
        LostRecord(
            worker="w1", at=7.0, why="killed", put_back=5, dead=1, jobs=(LostJob("a", "push", "", "mails#2"),)
        ),
        LostRecord(worker="w2", at=9.0),
    )


def test_a_shard_that_alone_is_known_counts_for_its_queue() -> None:
    (merged,) = merge_queue_states([QueueState("mails#1", 1, 0, 0, None, 0, None, 1, ())])
    assert (merged.queue, merged.waiting) == ("mails", 1)


def test_the_autoscaler_sees_one_queue() -> None:
    loads = [
        QueueLoad("mails", 10, 2, {"push": 4}, ("w1",)),
        QueueLoad("mails#1", 20, 4, {"push": 2}, ("w1",)),
    ]
    reports = {"w1": WorkerReport(queues=("mails",), held={"mails": {"push": 6}})}
    (load,) = make_snapshot(loads, reports, TaskConstraints(kinds={"push": "trio"}, paused=())).task_loads
    assert (load.queue, load.waiting, load.running) == ("mails", 30, 6)
    paused = make_snapshot(loads, reports, TaskConstraints(kinds={"push": "trio"}, paused=("mails",)))
    assert [load.waiting for load in paused.task_loads] == [0]


def test_metrics_of_jobs_are_labelled_with_the_queue() -> None:
    tally = JobTally()
    for shard in ("mails#3", "mails", "mails#1"):
        tally.count_unstarted(shard, "push", "EXPIRED")
    assert [(queue, task, counted.counts["EXPIRED"]) for queue, task, counted in tally.items()] == [
        ("mails", "push", 3)
    ]


def test_storage_of_shards_is_that_of_their_queue() -> None:
    rows = [
        QueueStorage(queue=queue, broker="default", jobs=1, scheduled=2, held=3, dead=4, total_bytes=size)
        for queue, size in (("mails", 10), ("mails#1", 20), ("other", None))
    ]
    merged, other = merge_shards(rows)
    assert (merged.queue, merged.jobs, merged.dead, merged.total_bytes) == ("mails", 2, 8, 30)
    assert (other.queue, other.total_bytes) == ("other", None)


def test_a_bound_on_queues_counts_no_shards() -> None:
    assert take_queues(["a", "a#1", "b", "c", "a#2"], 2) == ["a", "a#1", "a#2", "b"]
