"""Report: the snapshot that is made of what workers tell and of what waits on queues."""

from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.limits import DeclaredLimits, Limit, LimitOverride, Range, Rate
from celery5.protocol.scaling.snapshot import (
    QueueLoad,
    TaskConstraints,
    TaskLoad,
    WorkerReport,
    make_snapshot,
    make_task_constraints,
)

TERMS = TaskConstraints(kinds={"a": "trio", "b": "thread", "nightly": "boxed"})


def test_a_sample_says_how_many_of_each_task_wait() -> None:
    found = make_snapshot([QueueLoad("q", 1000, 0, {"a": 24, "b": 8})], {}, TERMS)
    assert found.task_loads == (
        TaskLoad(queue="q", task="a", kind="trio", waiting=750),
        TaskLoad(queue="q", task="b", kind="thread", waiting=250),
    )


def test_what_workers_hold_and_how_long_it_takes_is_added_up() -> None:
    one = WorkerReport(queues=("q",), held={"q": {"a": 3}}, means={"a": 1.0})
    two = WorkerReport(queues=("q",), held={"q": {"a": 2, "b": 1}}, means={"a": 2.0, "b": 5.0}, prefetch=2.0)
    found = make_snapshot([QueueLoad("q", 0, 6, {}, ("1", "2"))], {"2": two, "1": one}, TERMS)
    assert found.task_loads == (
        TaskLoad(queue="q", task="a", kind="trio", running=5, mean=1.5),
        TaskLoad(queue="q", task="b", kind="thread", running=1, mean=5.0),
    )
    assert [(worker.name, worker.prefetch) for worker in found.workers] == [("1", 1.0), ("2", 2.0)]


def test_jobs_that_schedules_will_send_soon_are_there_before_they_are_sent() -> None:
    soon = QueueLoad("night", 0, 0, upcoming={"nightly": 7, "gone": 3})
    (line,) = make_snapshot([soon], {}, TERMS).task_loads
    assert (line.queue, line.upcoming, line.demand) == ("night", 7, 7)


def test_what_waits_on_a_paused_queue_needs_nobody() -> None:
    terms = TaskConstraints(kinds=TERMS.kinds, paused={"q"})
    held = {"w": WorkerReport(held={"q": {"a": 1}})}
    assert make_snapshot([QueueLoad("q", 9, 1, {"a": 9}, upcoming={"b": 3})], held, terms).demand() == {
        "trio": 1
    }


def test_suspended_and_limited_tasks_are_marked() -> None:
    terms = TaskConstraints(kinds=TERMS.kinds, suspended={"a"}, limits={"b": 2})
    a, b = make_snapshot([QueueLoad("q", 10, 0, {"a": 5, "b": 5})], {}, terms).task_loads
    assert (a.suspended, a.demand, b.limit, b.demand) == (True, 0, 2, 2)


def test_declared_and_imposed_limits_hold_for_all_jobs() -> None:
    gates = {
        "few": DeclaredLimits(Limit(3)),
        "imposed": DeclaredLimits(Limit(3)),
        "computed": DeclaredLimits(Range(1, 8, compute=lambda: 2)),
        "each": DeclaredLimits(Limit(3, per="worker")),
        "customer": DeclaredLimits(Limit(1), keyed=True),
        "rated": DeclaredLimits(Limit(3), rate=Rate("200/m")),
        "free": DeclaredLimits(fair=True),
    }
    limits = {
        "imposed": LimitOverride(limit=5),
        "from outside": LimitOverride(limit=7),
        "slowed": LimitOverride(rate="5/s"),
    }
    found = make_task_constraints({}, gates, limits=limits, suspended={"few"}, paused={"q"})
    assert found.limits == {"few": 3, "imposed": 5, "computed": 8, "from outside": 7}
    assert found.throttled == {"each", "customer", "rated", "slowed"}
    assert (found.suspended, found.paused) == ({"few"}, {"q"})


def test_report_counts_jobs_that_wait_for_a_slot_not_for_time() -> None:
    terms = TaskConstraints(kinds=TERMS.kinds, limits={"b": 3}, throttled={"nightly"})
    seen = QueueLoad("q", 2, 0, {"a": 2}, waiting_at_limit={"a": 50, "b": 50, "nightly": 50})
    assert make_snapshot([seen], {}, terms).demand() == {"trio": 52, "thread": 3}


def test_a_task_that_nobody_declares_needs_nobody() -> None:
    assert make_snapshot([QueueLoad("q", 10, 0, {"unknown": 10})], {}, TERMS).task_loads == ()


@given(st.integers(0, 10**9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 16), max_size=3))
def test_what_a_sample_says_is_about_as_many_as_wait(waiting: int, sample: dict[str, int]) -> None:
    terms = TaskConstraints(kinds=dict.fromkeys("abc", "trio"))
    total = sum(
        line.waiting for line in make_snapshot([QueueLoad("q", waiting, 0, sample)], {}, terms).task_loads
    )
    assert abs(total - waiting) <= 3 if sample else total == 0


def test_jobs_of_workers_are_counted_now_and_split_by_their_last_reports() -> None:
    said = {"w": WorkerReport(held={"q": {"a": 3, "b": 1}})}
    a, b = make_snapshot([QueueLoad("q", 0, 8)], said, TERMS).task_loads
    assert (a.running, b.running) == (6, 2)
    (a,) = make_snapshot(
        [QueueLoad("q", 4, 2, {"a": 4})], {"w": WorkerReport()}, TERMS
    ).task_loads  # none was held yet
    assert (a.waiting, a.running) == (4, 2)
    assert (
        make_snapshot([QueueLoad("q", 0, 2)], {}, TERMS).task_loads == ()
    )  # of which task they are nobody knows
