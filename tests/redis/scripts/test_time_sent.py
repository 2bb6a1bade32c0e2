"""Time sent: scripts that move a message from its first entry write into it when it was sent, and older ones stay."""

import json
import time

import pytest

from celery5 import App, TaskFailed
from celery5.broker.calls import jobs, limits
from celery5.broker.calls.jobs import Entry
from celery5.broker.calls.limits import AdmissionRequest
from celery5.protocol.job.messages import read_command, read_document
from celery5.protocol.limits import AdmissionRule, get_waiting_list
from tests.redis.observability.test_job_search import FAST, until_found
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import working

RULE = AdmissionRule("t", max_running=1)


def put(queue: Queue, text: str) -> Entry:
    """Put a job with more fields in its message on its queue, and have a worker read it."""
    queue(jobs.publish(queue.keys, [("a", b'{"v":1,"id":"a","task":"t"%s}\n' % text.encode())]))
    queue.join("w")
    (entry,) = queue.read("w")
    return entry


def read_time(entry: Entry) -> float:
    return int(entry.id[:13]) / 1000


MESSAGES = {
    "": None,
    ',"kwargs":{"sent":1}': None,
    ',"sent":1763713000.123': 1763713000.123,
    ',"attempt":2': 0.0,  # a worker of an older version has moved it
    ',"replays":1': 0.0,
}
"""More fields of a message, and when its job was sent: None for the time of its entry."""


@pytest.mark.parametrize("text", MESSAGES)
def test_a_recovered_message_says_when_it_was_sent(queue: Queue, text: str) -> None:
    first = put(queue, text)
    assert queue.recover("w").requeued == 1
    queue.join("w2")
    (entry,) = queue.read("w2")
    sent = MESSAGES[text]
    assert entry.id != first.id
    assert read_command(entry.message).sent == (read_time(first) if sent is None else sent)
    assert json.loads(entry.message).items() >= json.loads(first.message).items()
    queue.recover("w2", deliveries=1)
    ((_, message, _),) = queue(jobs.list_dead_jobs(queue.keys, count=9))
    assert message == entry.message


@pytest.mark.parametrize("text", [t for t in MESSAGES if "attempt" not in t and "replays" not in t])
def test_a_message_that_moves_to_a_waiting_list_says_when_it_was_sent(queue: Queue, text: str) -> None:
    first = put(queue, text)
    request = AdmissionRequest(first.id, "a", get_waiting_list(RULE, "", ""), 0, "", "wait")
    assert queue(limits.admit(queue.keys, "w", [request], [(RULE, 0)])).outcomes == [limits.WAITING]
    message = queue.client.hget(queue.keys.waiting, "a")
    sent = MESSAGES[text]
    assert read_command(message).sent == (read_time(first) if sent is None else sent)
    assert json.loads(message).items() >= json.loads(first.message).items()


@pytest.mark.parametrize(
    "bad", [b"", b"{}", b'{"v":1,"id":"a"}', b'{"v":1,"id":"a","task":"t"', b"nonsense}"]
)
def test_what_is_no_command_is_recovered_byte_for_byte(queue: Queue, bad: bytes) -> None:
    queue.join("w")
    queue.client.xadd(queue.keys.stream, {"job": bad})
    queue.read("w")
    assert queue.recover("w").requeued == 1
    queue.join("w2")
    assert [entry.message for entry in queue.read("w2")] == [bad]


def test_the_document_of_a_job_that_was_revoked_on_its_queue_says_when_it_was_sent(queue: Queue) -> None:
    queue.publish("a")
    entry = queue.client.xrange(queue.keys.stream)[0][0]
    assert queue(jobs.revoke(queue.keys, ["a"], ttl=60)) == ["REVOKED"]
    document = queue(jobs.locate_job(queue.keys, "a")).document
    assert read_document(document).sent == int(entry[:13]) / 1000


async def test_all_who_are_shown_a_job_know_when_it_was_sent(app: App) -> None:
    app.configure(**FAST)
    before = time.time() - 1

    @app.task(name="t", max_retries=1, backoff=0.01, jitter=False)
    async def fail() -> None:
        raise ValueError("no")

    result = await fail.adelay()
    waiting = await app.afind(result.id)
    assert waiting is not None
    [found] = (await app.jobs.asearch(id=result.id)).jobs
    assert before < waiting.sent == found.sent < time.time() + 1
    async with working(app, name="w"):
        with pytest.raises(TaskFailed):
            await result.aget()
        await until_found(app, 2, id=result.id)
        story = await app.jobs.astory(result.id)
    assert story is not None
    assert [attempt.attempt for attempt in story.attempts] == [1, 2]
    assert {story.sent, *(attempt.sent for attempt in story.attempts)} == {waiting.sent}
