"""Wanted workers: how many the jobs of some queues need."""

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker, TaskLoad
from celery5.protocol.scaling.wanted_workers import QueueDemand, count_wanted_workers, measure_demands


def load(queue: str, waiting: int = 0, running: int = 0, kind: str = "trio") -> TaskLoad:
    return TaskLoad(queue=queue, task="t", kind=kind, waiting=waiting, running=running)


def wanted(queues: list[str], *loads: TaskLoad, workers: int = 0) -> int:
    members = tuple(
        ClusterWorker(name=f"w{number}", queues=("mail", "bulk"), max_slots={"trio": 10, "thread": 2})
        for number in range(workers)
    )
    return count_wanted_workers(measure_demands(ClusterSnapshot(task_loads=loads, workers=members)), queues)


def test_the_first_job_of_a_queue_wants_a_worker() -> None:
    assert wanted(["mail"]) == 0
    assert wanted(["mail"], load("mail", 1)) == 1
    assert wanted(["mail"], load("mail", 1000)) == 1, "nobody knows how many a worker can take"
    assert wanted(["bulk"], load("mail", 1000)) == 0


def test_jobs_that_run_want_their_workers() -> None:
    assert wanted(["mail"], load("mail", 0, running=31), workers=4) == 4


def test_queues_share_slots_and_kinds_do_not() -> None:
    loads = (load("mail", 5), load("bulk", 5), load("bulk", 4, kind="thread"))
    assert wanted(["mail"], *loads, workers=1) == 1
    assert wanted(["mail", "bulk"], load("mail", 5), load("bulk", 6), workers=1) == 2
    assert wanted(["mail", "bulk"], *loads, workers=1) == 2, "for the threads"


def test_a_sum_of_thirds_wants_no_worker_more_than_it_has_whole() -> None:
    rows = {"a": 1, "b": 7, "c": 1}
    demands = [QueueDemand(queue=queue, kind="trio", jobs=jobs, slots=3) for queue, jobs in rows.items()]
    assert count_wanted_workers(demands, rows) == 3, "1/3 + 7/3 + 1/3 is above 3 in floats"


def test_a_worker_counts_with_the_slots_that_it_has_beyond_its_most() -> None:
    worker = ClusterWorker(name="w", queues=("mail",), max_slots={"trio": 2}, slots={"trio": 10})
    (demand,) = measure_demands(ClusterSnapshot(task_loads=(load("mail", 1),), workers=(worker,)))
    assert demand.slots == 10


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.integers(0, 9))),
    st.sets(st.sampled_from("abc")),
)
def test_more_queues_never_want_fewer_workers(rows: list[tuple[str, int, int]], queues: set[str]) -> None:
    demands = [QueueDemand(queue=queue, kind="trio", jobs=jobs, slots=slots) for queue, jobs, slots in rows]
    some, every = count_wanted_workers(demands, queues), count_wanted_workers(demands, "abc")
    assert 0 <= some <= every
    assert (some == 0) is not any(demand.queue in queues for demand in demands)
