"""A job that takes its worker down is counted by its task, where that is found, and shown in the metrics."""

import pytest

from celery5.broker.calls import leases
from celery5.broker.calls import queues as queue_calls
from celery5.protocol.observability.exposition import format_exposition
from celery5.services.health.vitals import ProcessStatus
from tests.redis.worker.one_queue import Queue


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


def test_a_worker_that_left_in_order_has_not_been_taken_down(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    call = leases.recover(
        queue.keys, worker="w", max_deliveries=3, limit=100, ttl=60, message_limit=1_000_000, begun_entries=()
    )
    queue(call)
    assert queue(queue_calls.get_queue_depth(queue.keys)).deaths == {}
