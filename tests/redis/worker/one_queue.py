"""One queue: every trip to it as a method, for tests of the scripts."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from celery5.broker.call import Call
from celery5.broker.calls import jobs, leases, queues
from celery5.broker.calls.jobs import Entry
from celery5.broker.driver import BlockingDriver
from celery5.broker.keys import QueueKeys
from celery5.protocol.job.delivery import Settlement, pack_terms
from celery5.protocol.job.messages import Command, encode
from celery5.protocol.observability.queue_depth import QueueDepth


def command(job_id: str) -> bytes:
    """The message of a job."""
    return encode(Command(v=1, id=job_id, task="shop.t"))


class QueueSize(NamedTuple):
    """How many jobs are on the streams of a queue, in workers, wait for their time, are dead, and wait at limits."""

    stream: int
    in_workers: int
    due: int
    dead: int
    limited: int = 0

    @property
    def unfinished(self) -> int:
        """How many jobs have not ended."""
        return self.stream + self.due + self.limited


class Queue:
    """One queue, and the trips to it."""

    def __init__(self, driver: BlockingDriver, keys: QueueKeys, client: Any) -> None:
        self.driver = driver
        self.keys = keys
        self.client = client

    def __call__(self, call: Call[Any]) -> Any:
        return self.driver.perform(call)

    def publish(self, *ids: str) -> int:
        return int(self(jobs.publish(self.keys, [(job_id, command(job_id)) for job_id in ids])))

    def schedule(self, job_id: str, when: str) -> int:
        return int(self(jobs.schedule(self.keys, [(job_id, command(job_id), when)])))

    def join(self, worker: str, lease: float = 30.0) -> None:
        assert self(leases.join_queue(self.keys, worker, lease=lease)) == 1

    def read(self, worker: str, count: int = 100) -> list[Entry]:
        return list(self(jobs.read_jobs([self.keys], worker, count=count, block_seconds=0.001)))

    def mine(self, worker: str) -> list[Entry]:
        return list(self(jobs.read_pending(self.keys, worker, after=b"0", count=100)))

    def settle(self, worker: str, *words: Settlement) -> int:
        return int(self(jobs.settle(self.keys, worker, words)))

    def recover(
        self,
        worker: str = "",
        *,
        limit: int = 100,
        deliveries: int = 3,
        begun: list[bytes] | None = None,
        judge: leases.HeartbeatEvidence | None = None,
        message_limit: int = 1_000_000,
        with_strays: bool = True,
    ) -> leases.RecoveryResult:
        call = leases.recover(
            self.keys,
            worker=worker,
            max_deliveries=deliveries,
            limit=limit,
            ttl=60,
            message_limit=message_limit,
            begun_entries=begun,
            evidence=judge,
            with_strays=with_strays,
        )
        found = self(call)
        assert isinstance(found, leases.RecoveryResult)
        return found

    def lapse(self, worker: str) -> None:
        """End a worker's lease, as time would."""
        self.client.zadd(self.keys.leases, {worker: time.time() * 1000 - 1000})

    def judge(self, worker: str, *, lease: float = 30.0, ago: float = 0.0) -> leases.HeartbeatEvidence:
        """Let a worker's heartbeat be answered so many seconds `ago`; gives what it may judge others by."""
        pulse = self(leases.renew_lease(self.keys, worker, lease=lease))
        self.client.zincrby(self.keys.leases, -ago * 1000, worker)
        return leases.HeartbeatEvidence(worker, pulse.at - int(ago * 1000), lease)

    def fall_due(self, *ids: str) -> None:
        """Let the times of jobs come, as waiting for them would."""
        self.client.zadd(self.keys.due, dict.fromkeys(ids, 1))

    def where(self, job_id: str) -> str:
        return str(self(jobs.locate_job(self.keys, job_id)).state)

    def size(self) -> QueueSize:
        depth = self(queues.get_queue_depth(self.keys))
        assert isinstance(depth, QueueDepth)
        return QueueSize(
            depth.waiting + depth.running, depth.running, depth.scheduled, depth.dead, depth.held
        )

    def contents(self) -> dict[str, Any]:
        """Every key of the queue with its value; times to live rounded away."""
        found: dict[str, Any] = {}
        prefix = self.keys.stream.removesuffix("stream")
        for key in sorted(self.client.scan_iter(match=prefix.replace("{", "[{]") + "*")):
            found[key.decode()] = self.client.dump(key)
        return found


def done(entry: Entry, job_id: str, ttl: int = 60_000) -> Settlement:
    """The job succeeded."""
    return Settlement(
        "complete", entry.id, job_id, b'{"v":1,"id":"a","task":"t","state":"SUCCESS"}', ttl, b""
    )


def failed(entry: Entry, job_id: str, delay: int = 60_000) -> Settlement:
    """The job is tried again."""
    return Settlement("retry", entry.id, job_id, command(job_id), 60_000, delay)


def failed_for_good(entry: Entry, job_id: str, ttl: int = 60_000) -> Settlement:
    """The job is dead."""
    terms = pack_terms(cause="", document='{"v":1,"id":"a","task":"t","state":"DEAD"}')
    return Settlement("bury", entry.id, job_id, b"message", ttl, terms)


def released(entry: Entry, job_id: str) -> Settlement:
    """The job goes back."""
    return Settlement("release", entry.id, job_id, command(job_id), 60_000, entry.deliveries)


def held(entry: Entry, job_id: str, delay: int = 0) -> Settlement:
    """The job waits as it is."""
    return Settlement("hold", entry.id, job_id, command(job_id), 60_000, delay)


VERBS: dict[str, tuple[Callable[[Entry, str], Settlement], str]] = {
    "complete": (done, "ENDED"),
    "retry": (failed, "RETRY"),
    "bury": (failed_for_good, "DEAD"),
    "release": (released, "SENT"),
}
