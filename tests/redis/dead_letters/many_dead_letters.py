"""Graves: dead jobs as a worker leaves them, many at once, and where jobs are."""

from typing import Any

from celery5 import App, JobState
from celery5.broker.calls import queues
from celery5.protocol.job.messages import Command, Document, Failure, encode, read_command
from tests.redis.worker.workers import entries

QUEUE = "default"


def add_dead_letters(
    app: App,
    client: Any,
    *ids: str,
    queue: str = QUEUE,
    task: str = "shop.t",
    error: str = "ValueError",
    reason: str = "exhausted",
    at: str = "*",
    message_of_error: str = "",
    **more: Any,
) -> list[str]:
    """Dead jobs as the worker's script leaves them, many at once; gives their entries."""
    keys = app.queue(queue)
    app.perform(queues.register_queue(app.keys, queue))
    pipe = client.pipeline(transaction=False)
    failure = Failure(type=error, message=message_of_error or f"{error} of {task}", attempt=4)
    for job_id in ids:
        message = encode(Command(v=1, id=job_id, task=task, attempt=4, failures=(failure,), **more))
        document = encode(
            Document(v=1, id=job_id, task=task, state="DEAD", reason=reason, attempt=4, failure=failure)
        )
        pipe.xadd(keys.dead, {"job": message, "document": document}, id=at)
    entries = [reply.decode() for reply in pipe.execute()]
    for job_id, entry in zip(ids, entries, strict=True):
        pipe.hset(keys.jobs, job_id, f"X{entry}")
        pipe.set(keys.result(job_id), encode(Document(v=1, id=job_id, task=task, state="DEAD")), px=60_000)
    pipe.execute()
    return entries


def sent(client: Any, app: App, queue: str = QUEUE) -> list[str]:
    """The ids of the jobs on the stream, in order."""
    return [read_command(fields[b"job"]).id for fields in entries(client, app.queue(queue).stream)]


def state(app: App, job_id: str, queue: str = QUEUE) -> JobState:
    """Where a job is."""
    return app.result(job_id, queue=queue).status()


def numbered(count: int) -> list[str]:
    """Ids of jobs."""
    return [f"j{number}" for number in range(count)]
