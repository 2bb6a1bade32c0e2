"""Erase: takes everything that an application has in Redis away again.

Floor: broker. Reads: nothing. Writes: deletes all keys of an application.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from celery5.broker.call import Call, Script, script_call
from celery5.broker.keys import EVENTS, Keys, QueueKeys

ERASE = Script.load("diagnosis/erase")
BATCH_SIZE = 500


def erase_app(
    keys: Keys, queues: Sequence[QueueKeys], job_ids: Collection[str] = (), sinks: Collection[str] = ()
) -> Iterator[Call[int]]:
    """The calls that delete `queues`, what waits there for Data Sinks of these names (`sinks`), the results of the jobs
    `job_ids` on each of them, the events, and what the application has beside its queues. Settings that all workers
    share stay, for they are whose who set them; what has a short time to live goes by itself.

    For applications that were made for a moment, such as a demonstration or a test. Its workers must have stopped.
    """
    for queue in (*queues, keys.for_queue(EVENTS)):
        yield script_call(
            ERASE,
            (queue.jobs, queue.waiting_list_prefix, *_all_of(keys, queue, sinks)),
            (),
            int,
            repeatable=True,
        )
        ids = iter(job_ids)
        while portion := list(islice(ids, BATCH_SIZE)):
            yield Call(("DEL", *[queue.result(each) for each in portion]), int, repeatable=True)
    yield Call(("DEL", *_beside(keys)), int, repeatable=True)


def _beside(keys: Keys) -> Iterator[str]:
    yield from (keys.queues, keys.paused, keys.limits, keys.suspended, keys.schedule_queues)
    yield from (
        keys.scaling,
        keys.scaling_turn,
        keys.leader,
        keys.live_processes("scheduler"),
        keys.live_processes("controller"),
    )
    yield keys.recycling
    yield from (keys.subscriptions, keys.subscription_deadlines, keys.unclaimed_events)


def _all_of(keys: Keys, queue: QueueKeys, sinks: Collection[str]) -> Iterator[str]:
    yield from (
        *queue.streams,
        queue.due,
        queue.waiting,
        queue.dead,
        queue.leases,
        queue.unique,
        queue.replication_mark,
    )
    yield from (queue.slots, queue.slot_counts, queue.limited_counts, queue.documents)
    if queue.queue != EVENTS:  # events have no schedules
        yield from (keys.schedules(queue.queue), keys.schedule_times(queue.queue))
    for sink in sinks:
        yield from (queue.documents_for(sink), queue.claimed_documents(sink), queue.document_progress(sink))
