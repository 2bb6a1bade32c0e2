"""Scripts: each of them against the real server, one state change at a time.

Floor: tests. Reads and writes: the keys of one queue of one application that only the test has.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery5.broker import calls
from celery5.broker.blocking import BlockingRedis
from celery5.broker.call import Call
from celery5.broker.calls import Entry
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.errors import BrokerReplied
from celery5.protocol.envelope import Envelope, encode

Words = tuple[str, bytes, str, bytes, int, bytes | int]


def envelope(job_id: str) -> bytes:
    """The message of a job."""
    return encode(Envelope(v=1, id=job_id, task="shop.t"))


class Queue:
    """One queue, and the trips to it."""

    def __init__(self, driver: BlockingRedis, keys: QueueKeys, client: Any) -> None:
        self.driver = driver
        self.keys = keys
        self.client = client

    def __call__(self, call: Call[Any]) -> Any:
        return self.driver.perform(call)

    def publish(self, *ids: str) -> int:
        return int(self(calls.publish(self.keys, [(each, envelope(each)) for each in ids])))

    def schedule(self, job_id: str, when: str) -> int:
        return int(self(calls.schedule(self.keys, [(job_id, envelope(job_id), when)])))

    def join(self, worker: str, lease: float = 30.0) -> None:
        assert self(calls.join(self.keys, worker, lease=lease)) == 1

    def read(self, worker: str, count: int = 100) -> list[Entry]:
        return list(self(calls.read([self.keys], worker, count=count, block=0.001)))

    def mine(self, worker: str) -> list[Entry]:
        return list(self(calls.mine(self.keys, worker, after=b"0", count=100)))

    def settle(self, worker: str, *words: Words) -> int:
        return int(self(calls.settle(self.keys, worker, words)))

    def recover(self, worker: str = "", *, limit: int = 100, deliveries: int = 3) -> calls.Recovered:
        call = calls.recover(self.keys, worker=worker, max_deliveries=deliveries, limit=limit, ttl=60)
        found = self(call)
        assert isinstance(found, calls.Recovered)
        return found

    def lapse(self, worker: str) -> None:
        """End a worker's lease, as time would."""
        self.client.zadd(self.keys.leases, {worker: 1})

    def where(self, job_id: str) -> str:
        return str(self(calls.locate(self.keys, job_id)).state)

    def size(self) -> calls.Size:
        found = self(calls.measure(self.keys))
        assert isinstance(found, calls.Size)
        return found

    def contents(self) -> dict[str, Any]:
        """Every key of the queue with its value; times to live rounded away."""
        found: dict[str, Any] = {}
        prefix = self.keys.stream.removesuffix("stream")
        for key in sorted(self.client.scan_iter(match=prefix.replace("{", "[{]") + "*")):
            found[key.decode()] = self.client.dump(key)
        return found


@pytest.fixture
def driver(url: str) -> Iterator[BlockingRedis]:
    driver = BlockingRedis(Endpoint.from_url(url))
    yield driver
    driver.close()


@pytest.fixture
def queue(driver: BlockingRedis, app_name: str, redis_client: "redis.Redis") -> Queue:
    return Queue(driver, Keys(app_name).of("mail"), redis_client)


def done(entry: Entry, job_id: str, ttl: int = 60_000) -> Words:
    """The job succeeded."""
    return ("complete", entry.id, job_id, b'{"v":1,"id":"a","task":"t","state":"SUCCESS"}', ttl, 0)


def failed(entry: Entry, job_id: str, delay: int = 60_000) -> Words:
    """The job is tried again."""
    return ("retry", entry.id, job_id, envelope(job_id), delay, 0)


def buried(entry: Entry, job_id: str, ttl: int = 60_000) -> Words:
    """The job is dead."""
    return ("bury", entry.id, job_id, b"message", ttl, b'{"v":1,"id":"a","task":"t","state":"DEAD"}')


def released(entry: Entry, job_id: str) -> Words:
    """The job goes back."""
    return ("release", entry.id, job_id, envelope(job_id), entry.deliveries, 0)


VERBS: dict[str, tuple[Callable[[Entry, str], Words], str]] = {
    "complete": (done, "ENDED"),
    "retry": (failed, "RETRY"),
    "bury": (buried, "DEAD"),
    "release": (released, "SENT"),
}


# Publishing


def test_a_job_is_published_once_however_often_the_trip_is_made(queue: Queue) -> None:
    assert queue.publish("a", "b") == 2
    assert queue.publish("a", "b", "c") == 1
    assert queue.size() == calls.Size(stream=3, held=0, due=0, dead=0)
    queue.join("w")
    assert [(each.message, each.deliveries) for each in queue.read("w")] == [(envelope(i), 0) for i in "abc"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_that_is_known_or_has_ended_is_not_published_again(queue: Queue, verb: str) -> None:
    words, place = VERBS[verb]
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    assert (queue.publish("a"), queue.schedule("a", "+1")) == (0, 0)
    queue.settle("w", words(entry, "a"))
    before = queue.contents()
    assert (queue.publish("a"), queue.schedule("a", "+1")) == (0, 0)
    assert queue.where("a") == place
    assert queue.contents() == before


def test_jobs_twice_in_one_trip_are_one_job(queue: Queue) -> None:
    assert queue.publish("a", "a") == 1


def test_a_scheduled_job_waits_for_its_time_and_then_is_moved_once(queue: Queue) -> None:
    later = int(time.time() * 1000) + 60_000
    assert queue.schedule("late", str(later)) == 1
    assert queue.schedule("late", "+0") == queue.publish("late") == 0
    assert [queue.schedule(each, "+0") for each in "abc"] == [1, 1, 1]
    assert queue.size() == calls.Size(stream=0, held=0, due=4, dead=0)
    moved, due_in = queue(calls.promote(queue.keys, limit=2))
    assert (moved, due_in) == (2, 0)
    moved, due_in = queue(calls.promote(queue.keys, limit=2))
    assert moved == 1
    assert 50 < due_in <= 60
    assert queue(calls.promote(queue.keys, limit=2))[0] == 0
    assert [queue.where(each) for each in ("late", "a", "b", "c")] == ["SCHEDULED", "SENT", "SENT", "SENT"]
    assert queue.client.hkeys(queue.keys.waiting) == [b"late"]


def test_nothing_scheduled_is_nothing_to_wait_for(queue: Queue) -> None:
    assert queue(calls.promote(queue.keys, limit=10)) == (0, None)


def test_a_scheduled_job_whose_envelope_is_gone_is_forgotten(queue: Queue) -> None:
    queue.schedule("a", "+0")
    queue.client.hdel(queue.keys.waiting, "a")
    assert queue(calls.promote(queue.keys, limit=10))[0] == 1
    assert queue.where("a") == "UNKNOWN"
    assert queue.contents() == {}


def test_workers_are_woken_only_for_a_job_that_is_now_the_first(queue: Queue) -> None:
    with queue.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(queue.keys.wake)
        heard.get_message(timeout=5)
        queue.schedule("first", "+50000")
        queue.schedule("later", "+90000")
        queue.schedule("sooner", "+10000")
        queue.schedule("sooner", "+1")  # known
        told = [heard.get_message(timeout=0.2) for _ in range(4)]
    times = [int(each["data"]) for each in told if each]
    assert len(times) == 2
    assert 35_000 < times[0] - times[1] < 45_000


# Settling


@pytest.mark.parametrize("verb", VERBS)
def test_settling_twice_is_settling_once(queue: Queue, verb: str) -> None:
    words, place = VERBS[verb]
    queue.publish("a", "b")
    queue.join("w")
    entry, other = queue.read("w")
    assert queue.settle("w", words(entry, "a")) == 1
    assert queue.where("a") == place
    before = queue.contents()
    assert queue.settle("w", words(entry, "a")) == 0
    assert queue.contents() == before
    assert queue.where("b") == "EXECUTING"
    assert [each.id for each in queue.mine("w")] == [other.id]


def test_one_trip_settles_many_in_every_way(queue: Queue) -> None:
    queue.publish("a", "b", "c", "d", "e")
    queue.join("w")
    a, b, c, d, _ = queue.read("w")
    assert queue.settle("w", done(a, "a"), failed(b, "b"), buried(c, "c"), released(d, "d")) == 4
    assert [queue.where(each) for each in "abcde"] == ["ENDED", "RETRY", "DEAD", "SENT", "EXECUTING"]
    assert queue.size() == calls.Size(stream=2, held=1, due=1, dead=1)


def test_a_result_is_stored_announced_and_expires(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    a, b = queue.read("w")
    with queue.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(queue.keys.result("a"), queue.keys.result("b"))
        heard.get_message(timeout=5)
        queue.settle("w", done(a, "a", 60_000), buried(b, "b", 1))
        told = [each["channel"] for each in [heard.get_message(timeout=1) for _ in range(4)] if each]
    assert told == [queue.keys.result(each).encode() for each in "ab"]
    assert 50_000 < queue.client.pttl(queue.keys.result("a")) <= 60_000
    expired(queue, "b")
    assert queue.where("b") == "DEAD"  # for as long as it is in the dead-letter queue
    assert queue(calls.forget(queue.keys, ["a", "b"])) == 1
    assert queue.where("a") == "UNKNOWN"


def expired(queue: Queue, job_id: str) -> None:
    """Wait until the document of a job is gone."""
    end = time.monotonic() + 5
    while queue.client.exists(queue.keys.result(job_id)):
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lease", ["none", "being recovered"])
def test_a_worker_without_a_lease_settles_nothing(queue: Queue, verb: str, lease: str) -> None:
    words, _ = VERBS[verb]
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    if lease == "none":
        queue.client.zrem(queue.keys.leases, "w")
    else:
        queue.client.zadd(queue.keys.leases, {"w": -1})
    before = queue.contents()
    assert queue.settle("w", words(entry, "a")) == -1
    assert queue.contents() == before
    assert queue.where("a") == "EXECUTING"


@pytest.mark.parametrize("verb", VERBS)
def test_what_was_given_to_another_is_left_alone(queue: Queue, verb: str) -> None:
    words, _ = VERBS[verb]
    queue.publish("a")
    queue.join("old")
    queue.join("new")
    (entry,) = queue.read("old")
    assert queue.recover("old").back == 1
    (again,) = queue.read("new")
    queue.join("old")  # back again, under its old name
    before = queue.contents()
    assert queue.settle("old", words(entry, "a")) == 0
    assert queue.contents() == before
    assert queue.settle("new", done(again, "a")) == 1


def test_a_worker_whose_lease_has_lapsed_but_whom_nobody_recovered_may_still_settle(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    queue.lapse("w")
    assert queue.settle("w", done(entry, "a")) == 1


def test_a_retry_comes_back_with_its_new_message(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    queue.settle("w", ("retry", entry.id, "a", b"second", 0, 0))
    assert queue.where("a") == "RETRY"
    assert queue(calls.promote(queue.keys, limit=10))[0] == 1
    (again,) = queue.read("w")
    assert (again.message, again.deliveries) == (b"second", 0)


def test_a_corrupt_message_is_buried_without_an_id(queue: Queue) -> None:
    queue.client.xadd(queue.keys.stream, {"job": b"\xff"})
    queue.client.xadd(queue.keys.stream, {"nonsense": "x"})
    queue.join("w")
    first, second = queue.read("w")
    assert (first.message, second.message) == (b"\xff", b"")
    queue.settle("w", ("bury", first.id, "", b"\xff", 1000, b"why"), released(second, ""))
    assert queue(calls.dead(queue.keys, count=9))[0][1:] == (b"\xff", b"why")
    assert not queue.client.exists(queue.keys.jobs)


# Workers that come, live, leave and die


def test_joining_twice_changes_nothing_but_the_lease(queue: Queue) -> None:
    queue.join("w", lease=1)
    queue.publish("a")
    assert len(queue.read("w")) == 1
    queue.join("w", lease=1000)
    assert len(queue.mine("w")) == 1
    lease = queue.client.zscore(queue.keys.leases, "w")
    assert lease is not None
    assert lease / 1000 > time.time() + 900


def test_joining_something_that_is_no_stream_fails(queue: Queue) -> None:
    queue.client.set(queue.keys.stream, "x", px=60_000)
    with pytest.raises(BrokerReplied, match="WRONGTYPE"):
        queue(calls.join(queue.keys, "w", lease=1))


def test_jobs_published_before_the_first_worker_are_not_lost(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    assert len(queue.read("w")) == 1


def test_a_beat_renews_the_lease_and_tells_the_news(queue: Queue) -> None:
    queue.join("w", lease=1)
    assert queue(calls.beat(queue.keys, "w", lease=500)) == calls.Pulse(alive=True, lapsed=0, due_in=None)
    assert (queue.client.zscore(queue.keys.leases, "w") or 0) / 1000 > time.time() + 400
    queue.schedule("a", "+20000")
    queue.join("other")
    queue.lapse("other")
    pulse = queue(calls.beat(queue.keys, "w", lease=5))
    assert (pulse.alive, pulse.lapsed) == (True, 1)
    assert 15 < pulse.due_in <= 20


@pytest.mark.parametrize("state", ["never joined", "left", "recovered", "being recovered"])
def test_a_beat_of_a_worker_without_a_lease_says_so_and_gives_it_none(queue: Queue, state: str) -> None:
    if state != "never joined":
        queue.join("w")
    if state == "left":
        queue(calls.leave(queue.keys, "w"))
    if state == "recovered":
        queue.recover("w")
    if state == "being recovered":
        queue.client.zadd(queue.keys.leases, {"w": -1})
    before = queue.contents()
    assert queue(calls.beat(queue.keys, "w", lease=5)).alive is False
    assert queue.contents() == before


def test_a_worker_that_leaves_with_nothing_leaves_nothing(queue: Queue) -> None:
    queue.join("w")
    assert queue(calls.leave(queue.keys, "w")) == 0
    assert queue.client.xinfo_consumers(queue.keys.stream, GROUP) == []
    assert not queue.client.exists(queue.keys.leases)
    assert queue(calls.leave(queue.keys, "w")) == 0


def test_what_a_leaving_worker_holds_is_recovered_at_once(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    queue.join("other")
    queue.read("w")
    assert queue(calls.leave(queue.keys, "w")) > 0
    assert queue(calls.beat(queue.keys, "other", lease=5)).lapsed == 1
    assert queue.recover() == calls.Recovered(worker="w", back=2, buried=0, more=False)


def test_leaving_does_not_undo_the_fence(queue: Queue) -> None:
    queue.publish(*[f"j{n}" for n in range(5)])
    queue.join("w")
    *_, last = queue.read("w")
    assert queue.recover("w", limit=2).more
    queue(calls.leave(queue.keys, "w"))
    assert queue.settle("w", done(last, "j4")) == -1


def test_a_dead_workers_jobs_come_back_in_portions_with_a_count(queue: Queue) -> None:
    queue.publish(*[f"j{n}" for n in range(5)])
    queue.join("w")
    queue.join("other")
    assert queue.recover() == calls.Recovered(worker="", back=0, buried=0, more=False)
    assert len(queue.read("w")) == 5
    queue.lapse("w")
    for expected in ((2, True), (2, True), (1, False)):
        found = queue.recover(limit=2)
        assert (found.worker, found.back, found.more) == ("w", *expected)
        assert queue(calls.beat(queue.keys, "w", lease=5)).alive is False
    assert queue.recover().worker == ""
    assert [each.deliveries for each in queue.read("other")] == [1] * 5
    names = [each["name"] for each in queue.client.xinfo_consumers(queue.keys.stream, GROUP)]
    assert names == [b"other"]


def test_giving_a_job_back_neither_adds_to_its_deliveries_nor_forgets_them(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    queue.recover("w")
    queue.join("other")
    for _ in range(3):
        (entry,) = queue.read("other")
        assert entry.deliveries == 1
        queue.settle("other", released(entry, "a"))


def test_the_last_portion_may_be_full(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    queue.read("w")
    assert queue.recover("w", limit=2).more
    assert queue.recover("w", limit=2) == calls.Recovered(worker="w", back=0, buried=0, more=False)


def test_a_job_that_takes_down_too_many_workers_is_buried_as_poisoned(queue: Queue) -> None:
    queue.publish("a")
    for death in range(1, 4):
        queue.join(f"w{death}")
        (entry,) = queue.read(f"w{death}")
        assert entry.deliveries == death - 1
        found = queue.recover(f"w{death}", deliveries=2)
        assert (found.back, found.buried) == ((0, 1) if death == 3 else (1, 0))
    place = queue(calls.locate(queue.keys, "a"))
    document = json.loads(place.document)
    assert (place.state, document["state"], document["reason"]) == ("DEAD", "DEAD", "poisoned")
    assert (document["id"], document["task"], document["attempt"]) == ("a", "shop.t", 1)
    assert document["failure"]["worker"] == document["worker"] == "w3"
    assert "3 times" in document["failure"]["message"]
    assert abs(document["finished"] - time.time()) < 60
    ((_, message, grave),) = queue(calls.dead(queue.keys, count=9))
    assert (message, json.loads(grave)) == (envelope("a"), document)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"5",
        b"true",
        b"null",
        b'"text"',
        b"[1]",
        b"{}",
        b'{"id":{}}',
        b'{"id":5,"task":[]}',
        b"[" * 2000,
    ],
    ids=repr,
)
def test_a_corrupt_message_is_put_back_and_at_last_buried(queue: Queue, message: bytes) -> None:
    queue.client.xadd(queue.keys.stream, {"job": message})
    for death in range(1, 3):
        queue.join(f"w{death}")
        (entry,) = queue.read(f"w{death}")
        assert entry.message == message
        found = queue.recover(f"w{death}", deliveries=1)
        assert (found.back, found.buried) == ((1, 0) if death == 1 else (0, 1))
    ((_, kept, document),) = queue(calls.dead(queue.keys, count=9))
    assert kept == message
    assert json.loads(document)["reason"] == "poisoned"
    assert not queue.client.exists(queue.keys.jobs)


def test_an_entry_that_was_deleted_while_it_was_pending_is_only_acknowledged(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    first, _ = queue.read("w")
    queue.client.xdel(queue.keys.stream, first.id)
    assert [each.message for each in queue.mine("w")] == [b"", envelope("b")]
    assert queue.recover("w").back == 1
    assert queue.size() == calls.Size(stream=1, held=0, due=0, dead=0)


def test_recovering_a_worker_of_whom_nothing_is_known_does_nothing(queue: Queue) -> None:
    assert queue.recover("nobody") == calls.Recovered(worker="nobody", back=0, buried=0, more=False)
    assert queue.contents() == {}


def test_a_job_read_in_the_name_of_a_worker_already_recovered_is_found(queue: Queue) -> None:
    queue.join("dead")
    queue.join("other")
    queue.recover("dead")
    queue.publish("a")
    assert len(queue.read("dead")) == 1  # its blocked read was served after its recovery
    pulse = queue(calls.beat(queue.keys, "other", lease=5))
    assert (pulse.alive, pulse.lapsed) == (True, 1)
    assert queue.recover() == calls.Recovered(worker="dead", back=1, buried=0, more=False)
    assert queue.recover().worker == ""
    assert len(queue.read("other")) == 1


# Looking


def test_where_a_job_is_in_every_state(queue: Queue) -> None:
    assert queue.where("a") == "UNKNOWN"
    queue.publish("a")
    assert queue.where("a") == "SENT"
    queue.join("w")
    (entry,) = queue.read("w")
    assert queue(calls.locate(queue.keys, "a")) == calls.Place("EXECUTING", "w", b"")
    queue.settle("w", done(entry, "a"))
    place = queue(calls.locate(queue.keys, "a"))
    assert (place.state, json.loads(place.document)["state"]) == ("ENDED", "SUCCESS")
    queue.client.hset(queue.keys.jobs, "h", "H")
    assert queue.where("h") == "HELD"


def test_an_empty_queue_measures_nothing(queue: Queue) -> None:
    assert queue.size() == calls.Size(stream=0, held=0, due=0, dead=0)
    assert queue.size().unfinished == 0
    assert queue.contents() == {}


# What is left, and what it weighs


def test_when_all_is_settled_and_expired_only_the_stream_is_left(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b")
    queue.schedule("c", "+0")
    queue(calls.promote(queue.keys, limit=9))
    for number in range(4):
        for entry in queue.read("w"):
            job_id = json.loads(entry.message)["id"]
            queue.settle("w", failed(entry, job_id, 0) if number < 2 else done(entry, job_id, 1))
        queue(calls.promote(queue.keys, limit=9))
    queue(calls.leave(queue.keys, "w"))
    for job_id in "abc":
        expired(queue, job_id)
    assert list(queue.contents()) == [queue.keys.stream]
    assert queue.size() == calls.Size(stream=0, held=0, due=0, dead=0)


def test_every_key_is_a_queues_own_or_expires(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b", "c")
    queue.schedule("d", "+60000")
    a, b, _ = queue.read("w")
    queue.settle("w", done(a, "a"), buried(b, "b"))
    keys = queue.keys
    own = {keys.stream, keys.jobs, keys.due, keys.waiting, keys.dead, keys.leases}
    found = set(queue.contents())
    assert found == own | {keys.result("a"), keys.result("b")}
    assert all(queue.client.pttl(key) > 0 for key in found - own)


def test_a_queued_job_takes_at_most_300_bytes(own_server: Any, app_name: str) -> None:
    from celery5 import App

    app = App(app_name, broker=own_server.url)

    @app.task(name="shop.tasks.charge")
    async def charge(order: int, amount: float) -> None: ...

    with redis.Redis.from_url(own_server.url) as client:
        app.send_many([charge.s(0, 9.9)])
        before = client.info("memory")["used_memory_dataset"]
        app.send_many([charge.s(number, 9.9) for number in range(10_000)])
        each = (client.info("memory")["used_memory_dataset"] - before) / 10_000
    app.close()
    assert each <= 300, f"{each:.0f} bytes"
