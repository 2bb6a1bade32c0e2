"""A job that takes its worker down is counted by its task, where that is found, and shown in the metrics."""

import pytest

from celery5.broker.calls import dead_letters, jobs, leases
from celery5.broker.calls import queues as queue_calls
from celery5.protocol.job.dead_letters import make_dead_job
from celery5.protocol.job.messages import Command, encode
from celery5.protocol.observability.exposition import format_exposition
from celery5.services.health.vitals import ProcessStatus
from tests.redis.worker.one_queue import Queue, command


def kill(queue: Queue, worker: str) -> None:
    """Have a worker take what waits, and die with it."""
    queue.join(worker)
    queue.read(worker)
    call = leases.recover(
        queue.keys, worker=worker, max_deliveries=3, limit=100, ttl=60, message_limit=1_000_000
    )
    while queue(call).has_more:
        pass


@pytest.mark.parametrize(("deaths", "poisoned"), [(1, 0), (3, 0), (4, 1)])
def test_deaths_and_poisoned_jobs_are_counted_by_task_from_the_first_on(
    queue: Queue, deaths: int, poisoned: int
) -> None:
    queue.publish("a")
    for number in range(deaths):
        kill(queue, f"w{number}")
    depth = queue(queue_calls.get_queue_depth(queue.keys))
    (task,) = depth.deaths
    assert depth.deaths == {task: deaths}
    assert depth.poisoned == ({task: poisoned} if poisoned else {})
    assert depth.dead == poisoned
    status = ProcessStatus()
    status.replace_depths((), {"mail": depth})
    shown = format_exposition(status.metric_families()).decode()
    assert f'celery5_worker_deaths{{queue="mail",task="{task}"}} {deaths}' in shown
    assert (f'celery5_jobs_poisoned{{queue="mail",task="{task}"}} 1' in shown) == bool(poisoned)
    assert 0 < queue.client.ttl(queue.keys.worker_deaths) <= 90 * 86_400


@pytest.mark.parametrize(
    "why",
    [
        "",
        "the time limit of the job passed 5 s ago",
        "it was told to stop at once",
        "/usr/lib/x.py:12 in été",
        "x" * 2000,
    ],
)
@pytest.mark.parametrize("task", ["shop.t", "été.tâche"])
def test_a_poisoned_job_is_counted_under_the_group_that_readers_give_it(
    queue: Queue, task: str, why: str
) -> None:
    message = encode(Command(v=1, id="a", task=task))
    queue(jobs.publish(queue.keys, [("a", message)]))
    queue.join("w")
    queue.read("w")
    call = leases.recover(
        queue.keys, worker="w", max_deliveries=0, limit=100, ttl=60, message_limit=1_000_000, cause=why
    )
    assert queue(call).dead_lettered == 1
    (entry,) = queue(dead_letters.list_entries(queue.keys, first="-", last="+", count=2))
    dead = make_dead_job("mail", entry.entry, entry.message, entry.document)
    assert {group: cause.dead for group, cause in queue(dead_letters.read_causes(queue.keys)).items()} == {
        dead.group: 1
    }
    assert queue(dead_letters.purge_jobs(queue.keys, [(entry.entry, "a")])) == [1]
    assert queue(dead_letters.read_causes(queue.keys)) == {}


def test_a_job_is_told_of_the_last_twenty_workers_that_it_took_down(queue: Queue) -> None:
    queue.publish("a")
    for number in range(23):
        queue.join(f"w{number}")
        queue.read(f"w{number}")
        queue.recover(f"w{number}", deliveries=100)
    found = queue(jobs.inspect_job(queue.keys, "a"))
    assert found.deliveries == 23
    assert [death.worker for death in found.deaths] == [f"w{number}" for number in range(3, 23)]
    assert 0 < queue.client.ttl(queue.keys.job_deaths("a")) <= 86_400


@pytest.mark.parametrize("begun", ["all", "none", "the other"])
def test_only_what_had_begun_is_told_to_have_taken_the_worker_down(queue: Queue, begun: str) -> None:
    queue.publish("a", "b")
    queue.join("w")
    entries = {entry.message: entry.id for entry in queue.read("w")}
    blamed = {"all": None, "none": [], "the other": [entries[command("b")]]}[begun]
    queue.recover("w", begun=blamed)
    told = {job: len(queue(jobs.inspect_job(queue.keys, job)).deaths) for job in "ab"}
    assert (
        told
        == {
            "all": {"a": 1, "b": 1},
            "none": {"a": 0, "b": 0},
            "the other": {"a": 0, "b": 1},
        }[begun]
    )


def test_a_worker_that_left_in_order_has_not_been_taken_down(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    call = leases.recover(
        queue.keys, worker="w", max_deliveries=3, limit=100, ttl=60, message_limit=1_000_000, begun_entries=()
    )
    queue(call)
    assert queue(queue_calls.get_queue_depth(queue.keys)).deaths == {}


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_worker_counts_once_for_a_task_however_many_of_its_jobs_it_ran(queue: Queue, limit: int) -> None:
    for worker in range(2):
        queue.publish(*(f"{worker}-{number}" for number in range(5)))
        queue.join(f"w{worker}")
        held = len(queue.read(f"w{worker}"))
        assert held == 5 * (worker + 1)
        call = leases.recover(
            queue.keys, worker=f"w{worker}", max_deliveries=3, limit=limit, ttl=60, message_limit=1_000_000
        )
        while queue(call).has_more:
            pass
        assert list(queue(queue_calls.get_queue_depth(queue.keys)).deaths.values()) == [worker + 1]
