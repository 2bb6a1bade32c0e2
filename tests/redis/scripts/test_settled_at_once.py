"""Settled at once: the outcome of the only job that a worker has is sent before the Result Publisher's turn comes, and
nothing that comes meanwhile is taken for settled with it.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from celery5 import App
from celery5.broker.calls import jobs, leases
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log, NullLog
from celery5.protocol.job.delivery import Delivery, make_settlement
from celery5.protocol.job.messages import read_command
from celery5.protocol.job.verdict import Complete, Release
from celery5.protocol.limits import AdmissionRule
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RecentJobs, RunningJobs
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.job.reading_state import ReadingState
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.lease import Lease
from celery5.services.worker.result_publisher import (
    ResultPublisher,
    UnpublishableRetries,
)
from celery5.services.workflows.run_progress import RunProgress
from tests.redis.worker.workers import until

WORKER = "me"


@dataclass
class Desk:
    """A Result Publisher on its own link, and the jobs that were read for it."""

    app: App
    keys: QueueKeys
    publisher: ResultPublisher
    results: InternalResultsQueue
    ledger: InFlightJobs
    read: list[Delivery]

    @property
    def has_begun(self) -> bool:
        """Whether a trip is under way that its task does not know of yet."""
        return self.publisher._begun is not None

    def takes(self, count: int) -> list[Delivery]:
        """The worker has so many of the jobs in hand."""
        for entry in self.read[:count]:
            self.ledger.add(entry)
        return self.read[:count]

    def ends(self, delivery: Delivery) -> None:
        """A job has ended well."""
        self.results.put((delivery, make_settlement(Complete(b"1"), delivery, worker=WORKER, ttl=60)))

    async def finished(self, deliveries: list[Delivery]) -> dict[str, bytes]:
        """What waits under their keys once the ledger has none of them."""
        await until(lambda: self.ledger.settled_count == len(deliveries))
        await trio.testing.wait_all_tasks_blocked()
        ids = [delivery.command.id for delivery in deliveries if delivery.command]
        return {
            job_id: (await self.app.aperform(jobs.locate_job(self.keys, job_id))).document for job_id in ids
        }


def make_admission(in_flight: InFlightJobs, isolated_jobs: IsolatedJobs, log: Log) -> AdmissionState:
    """Return that of a worker whose jobs are not run, and whose tasks have no rule."""
    nothing = cast("Any", None)
    return AdmissionState(
        tasks={},
        queues={},
        duration_estimates={},
        budget=nothing,
        in_flight=in_flight,
        isolated_jobs=isolated_jobs,
        running_jobs=RunningJobs(),
        reading=ReadingState(),
        log=log,
        kind_rates={},
        waiting_tasks=nothing,
        kind_starts=nothing,
        canary_limit=nothing,
    )


@pytest.fixture
async def desk(url: str, app_name: str, nursery: trio.Nursery) -> AsyncIterator[Desk]:
    """Three jobs were read, and the publisher waits."""
    app, log = App(app_name, broker=url), NullLog()
    keys, ledger, results = app.queue("default"), InFlightJobs(), InternalResultsQueue()
    link = TrioRedis(endpoint=Endpoint.from_url(url))
    await nursery.start(link.run)
    unpublishable = UnpublishableRetries(
        when_unpublishable="backlog", queues={}, results=results, log=log, worker=WORKER, results_ttl=60
    )
    isolated = IsolatedJobs(queues={}, in_flight=ledger, max_deliveries=3)
    job_middleware = JobMiddleware(app=app, worker=WORKER, log=log)
    publisher = ResultPublisher(
        worker=WORKER,
        lease=Lease(seconds=60),
        consumed=[keys],
        redis=link,
        results=results,
        in_flight=ledger,
        recent=RecentJobs(recent_jobs=10),
        isolated_jobs=isolated,
        unpublishable_retries=unpublishable,
        admission=make_admission(ledger, isolated, log),
        admission_control=cast("Any", SimpleNamespace(on_capacity=lambda: None)),  # no task has a rule
        run_progress=RunProgress(results_ttl=60.0),
        job_middleware=job_middleware,
        log=log,
    )

    @app.task
    async def one(number: int) -> int:
        return number

    await app.aperform(leases.join_queue(keys, WORKER, lease=60))
    await app.asend_many([one.s(number) for number in range(3)])
    entries = await app.aperform(jobs.read_jobs([keys], WORKER, count=3, block_seconds=0))
    read = [
        Delivery(entry.queue, entry.id, entry.message, command=read_command(entry.message))
        for entry in entries
    ]
    await nursery.start(publisher.run)
    await trio.testing.wait_all_tasks_blocked()
    yield Desk(app, keys, publisher, results, ledger, read)
    nursery.cancel_scope.cancel()
    app.close()


async def test_the_outcome_of_the_only_job_is_sent_before_the_publishers_turn(desk: Desk) -> None:
    (lone,) = taken = desk.takes(1)
    desk.ends(lone)
    assert desk.has_begun
    assert all((await desk.finished(taken)).values())
    assert not desk.has_begun


async def test_what_was_sent_ahead_and_never_arrived_is_kept_until_it_does(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_begun: object) -> int:
        raise BrokerUnavailable("gone", maybe_done=True)

    link = desk.publisher._redis
    monkeypatch.setattr(link, "begin", lambda _call: PendingRequest(b"", 0.0, repeatable=True))
    monkeypatch.setattr(link, "finish", lost)
    (lone,) = taken = desk.takes(1)
    desk.ends(lone)
    assert desk.has_begun
    assert all((await desk.finished(taken)).values())


async def test_what_ends_before_the_publishers_turn_is_settled_by_itself(desk: Desk) -> None:
    (lone,) = desk.takes(1)
    desk.ends(lone)
    assert desk.has_begun
    everybody = desk.takes(3)
    for delivery in everybody[1:]:
        desk.ends(delivery)
    assert all((await desk.finished(everybody)).values())


async def test_with_several_jobs_in_hand_their_outcomes_go_together(desk: Desk) -> None:
    everybody = desk.takes(3)
    for delivery in everybody:
        desk.ends(delivery)
    assert not desk.has_begun
    assert all((await desk.finished(everybody)).values())


@pytest.mark.parametrize("what", ["takers", "rule", "lane", "release"])
async def test_what_is_more_than_a_result_waits_for_the_publishers_turn(desk: Desk, what: str) -> None:
    (lone,) = desk.takes(1)
    if what == "takers":
        lone.recipients = {"SUCCESS": "sink"}
    elif what == "rule":
        lone.rule = AdmissionRule("one", max_running=1)
    elif what == "lane":
        lone.lane = "g"
    verdict = Release() if what == "release" else Complete(b"1")
    desk.publisher._begin(lone, make_settlement(verdict, lone, worker=WORKER, ttl=60))
    assert not desk.has_begun


async def test_while_another_call_is_under_way_nothing_is_sent_ahead(desk: Desk) -> None:
    (lone,) = taken = desk.takes(1)
    desk.ends(lone)
    (_, other, _) = desk.read
    desk.ledger.remove(taken)
    desk.ledger.add(other)
    begun = desk.publisher._begun
    desk.publisher._begin(other, make_settlement(Complete(b"1"), other, worker=WORKER, ttl=60))
    assert desk.publisher._begun is begun
    await desk.publisher._redis.perform(jobs.PING)  # whose answer comes after the one to what was begun
    await trio.testing.wait_all_tasks_blocked()
    assert not desk.has_begun
