"""Admission whose reply is lost or late: a slot that was taken for a job is freed when the job goes, and what was
admitted is one job, however often it is reported.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import jobs, leases, limits
from celery5.broker.calls.jobs import READ_PENDING
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.logs.log import Log
from celery5.processes.process_parts import Incarnation
from celery5.processes.worker import WorkerOptions, make_incarnation_values
from celery5.processes.worker_parts import WorkerParts
from celery5.services.job.in_flight import InFlightJobs, RecentJobs
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.reloader import NextIncarnation
from celery5.services.worker.admission_control import AdmissionControl
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.job_intake import JobIntake
from celery5.services.worker.reading import QueueLanes
from celery5.services.worker.result_publisher import ResultPublisher
from celery5.wiring import build
from tests.redis.worker.workers import until


def entries_of(client: "redis.Redis", stream: str) -> list[bytes]:
    """The entries on a stream."""
    found: Any = client.xrange(stream)
    return [entry for entry, _ in found]


class Deaf:
    """A connection on which the answers of the gates are not heard, while it is `deaf`. `meanwhile` is what happens
    while each answer is on its way that says what is this worker's."""

    def __init__(self, inner: TrioRedis) -> None:
        self._inner = inner
        self.deaf = False
        self.meanwhile: list[Callable[[], object]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def perform(self, call: Any) -> Any:
        reply = await self._inner.perform(call)
        if self.deaf and limits.ADMIT.sha in call.words:
            await trio.sleep_forever()
        if READ_PENDING.sha in call.words and reply and self.meanwhile:
            self.meanwhile.pop(0)()
        return reply


class Desk:
    """What of a worker has to do with gates."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        intake: JobIntake,
        admission_control: AdmissionControl,
        admission: AdmissionState,
        result_publisher: ResultPublisher,
        results: InternalResultsQueue,
        recent: RecentJobs,
        in_flight: InFlightJobs,
        lanes: QueueLanes,
    ) -> None:
        self.lanes = lanes
        self.results = results
        self.recent = recent
        self.in_flight = in_flight
        self.consumer = consumer
        self.intake = intake
        self.gates = admission_control
        self.admission = admission
        self.publisher = result_publisher


@asynccontextmanager
async def desk(app: App) -> AsyncGenerator[tuple[Desk, Deaf]]:
    """A worker without executors, that has read one job and has sent it to its gate."""
    log, keys = Log(worker="w", app=app.name), app.queue("default")
    incarnation = Incarnation("w", log, trio.Event(), NextIncarnation())
    values = make_incarnation_values(app, WorkerOptions(), incarnation)
    async with trio.open_nursery() as nursery:
        link = TrioRedis(endpoint=app.connections.endpoint)
        await nursery.start(link.run)
        deaf = Deaf(link)
        one = build(Desk, WorkerParts, *values, redis=deaf)
        values[1].lease.mark_renewed(1e12)
        await nursery.start(one.publisher.run)
        await app.tasks["one"].adelay()
        await link.perform(leases.join_queue(keys, "w", lease=30))
        one.intake.accept(await link.perform(jobs.read_jobs([keys], "w", count=9, block_seconds=0)))
        yield one, deaf
        nursery.cancel_scope.cancel()


@pytest.fixture
def app(url: str, app_name: str) -> App:
    """An application with a limited task."""
    made = App(app_name, broker=url)

    @made.task(name="one", limit=1)
    async def one() -> None: ...

    return made


async def asked_in_vain(one: Desk, deaf: Deaf, app: App, client: "redis.Redis") -> None:
    """It asks, the job has its slot, and nobody hears of it."""
    deaf.deaf = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.gates.request_admission)
        await until(lambda: client.hlen(app.queue("default").slots) == 1)
        nursery.cancel_scope.cancel()
    deaf.deaf = False


async def test_a_worker_that_stops_while_it_asks(app: App, redis_client: "redis.Redis") -> None:
    keys = app.queue("default")
    async with desk(app) as (one, deaf):
        (before,) = entries_of(redis_client, keys.stream)
        await asked_in_vain(one, deaf, app, redis_client)
        one.gates.release_unadmitted()
        await until(lambda: entries_of(redis_client, keys.stream) not in ([], [before]))
        assert redis_client.hgetall(keys.slots) == redis_client.hgetall(keys.slot_counts) == {}


async def test_a_job_that_is_revoked_before_it_is_asked_for_again(
    app: App, redis_client: "redis.Redis"
) -> None:
    keys = app.queue("default")
    async with desk(app) as (one, deaf):
        await asked_in_vain(one, deaf, app, redis_client)
        (job,) = one.admission.awaiting_admission
        assert job.command is not None
        await app.aperform(jobs.revoke(keys, [job.command.id], ttl=60))
        await one.gates.request_admission()
        await until(lambda: redis_client.xlen(keys.stream) == 0)
        assert redis_client.hgetall(keys.slots) == redis_client.hgetall(keys.slot_counts) == {}


async def test_a_job_that_expires_before_it_is_asked_for_again(app: App, redis_client: "redis.Redis") -> None:
    keys = app.queue("default")
    async with desk(app) as (one, deaf):
        await asked_in_vain(one, deaf, app, redis_client)
        (job,) = one.admission.awaiting_admission
        assert job.command is not None
        job.command = msgspec.structs.replace(job.command, expires=1.0)
        await one.gates.request_admission()
        await until(lambda: redis_client.xlen(keys.stream) == 0)
        assert redis_client.hgetall(keys.slots) == redis_client.hgetall(keys.slot_counts) == {}


async def test_a_job_that_was_handed_over_but_had_come_before(app: App, redis_client: "redis.Redis") -> None:
    keys, handed = app.queue("default"), app.queue("default").on_lane("g")
    async with desk(app) as (one, _):
        (job,) = one.admission.awaiting_admission
        assert job.command is not None
        words = limits.AdmissionRequest(job.entry, job.command.id, "one  ", 0, "", "wait")
        await app.aperform(limits.admit(keys, "w", [words], [(one.admission.get_rule("one"), 0)]))
        one.admission.awaiting_admission.clear()
        pulled = await app.aperform(limits.admit_waiting(keys, "w", [(one.admission.get_rule("one"), 1)]))
        assert redis_client.hlen(keys.slots) == 1
        one.intake.accept(pulled.entries)  # the worker remembers that it had this very message
        await until(lambda: redis_client.xlen(handed.stream) == 0)
        assert redis_client.hgetall(keys.slots) == redis_client.hgetall(keys.slot_counts) == {}


async def handed_over(one: Desk, app: App) -> list[jobs.Entry]:
    """The job waited in Redis, and was handed to this worker, which has not heard of it."""
    keys = app.queue("default")
    (job,) = one.admission.awaiting_admission
    assert job.command is not None
    words = limits.AdmissionRequest(job.entry, job.command.id, "one  ", 0, "", "wait")
    await app.aperform(limits.admit(keys, "w", [words], [(one.admission.get_rule("one"), 0)]))
    one.admission.awaiting_admission.clear()
    one.recent.forget(job)
    one.in_flight.remove([job])
    pulled = await app.aperform(limits.admit_waiting(keys, "w", [(one.admission.get_rule("one"), 1)]))
    one.lanes.on_heartbeat(keys, await app.aperform(leases.renew_lease(keys, "w", lease=30)))
    return list(pulled.entries)


@pytest.mark.parametrize("late", ["the answer", "the look"])
async def test_what_is_found_as_lost_while_its_answer_is_on_the_way_is_one_job(app: App, late: str) -> None:
    async with desk(app) as (one, deaf):
        handed = await handed_over(one, app)
        if late == "the look":
            deaf.meanwhile = [lambda: None, lambda: one.intake.accept_new(handed)]
        one.consumer.recheck()
        with trio.move_on_after(0.5):  # it reads on
            await one.consumer.fetch()
        if late == "the answer":
            one.intake.accept_new(handed)
        assert not deaf.meanwhile
        assert [delivery.entry for delivery in one.in_flight] == [entry.id for entry in handed]
        assert one.admission.admitted.total() == 1
        assert len(one.results) == 0  # nothing of it is dropped or given back
