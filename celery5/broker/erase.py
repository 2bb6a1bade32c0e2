"""Erase: takes everything that an application has in Redis away again.

Floor: broker. Reads: nothing. Writes: deletes all keys of an application.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from celery5.broker.call import Call
from celery5.broker.keys import Keys, QueueKeys

PORTION = 500


def erase(keys: Keys, queues: Sequence[QueueKeys], job_ids: Collection[str] = ()) -> Iterator[Call[int]]:
    """The calls that delete `queues`, the results of the jobs `job_ids` on each of them, and the set of queues.

    For applications that were made for a moment, such as a demonstration or a test. Its workers must have stopped.
    """
    for queue in queues:
        named = (*queue.streams, queue.jobs, queue.due, queue.waiting, queue.dead, queue.leases)
        yield Call(("DEL", *named), int, repeatable=True)
        ids = iter(job_ids)
        while portion := list(islice(ids, PORTION)):
            yield Call(("DEL", *[queue.result(each) for each in portion]), int, repeatable=True)
    yield Call(("DEL", keys.queues), int, repeatable=True)
