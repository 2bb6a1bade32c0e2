"""The calls that an idle worker of many repeats: Redis gets them together, and wakes up once for all of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.leases import CodeAnnouncement, HeartbeatReply
from celery5.broker.calls.limits import StoredOverrides
from celery5.broker.calls.observability import RollupTurn
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.protocol.job.foreign import CodeVersion
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vitals import ProcessStatus
from celery5.services.job.reading_state import ReadingState
from celery5.services.limits.overrides import LimitOverrides
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.lease import Heartbeat, Lease
from celery5.services.worker.foreign_jobs import ForeignJobs

LEASE = 10.0
KEYS = Keys("shop")
REPLIES = {
    "renew_lease": HeartbeatReply(alive=True, lapsed=0, due_in=None, workers=1000),
    "list_overrides": StoredOverrides({}, {}),
    "announce_code": CodeAnnouncement(is_known=True, foreign_tasks=0),
    "send_report": True,
    "claim_rollup": RollupTurn(is_own=False, cursor="", now=0.0),
}


class Redis:
    """A Redis that notes when calls come, by the name of their script."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    async def perform(self, call: Call[Any], /) -> Any:
        (reply,) = await self.perform_all([call])
        return reply

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        began = trio.current_time()
        await trio.sleep(0.003)
        names = [call.script.name.rpartition("/")[2] for call in calls if call.script]
        for name in names:
            self.times[name].append(began)
        return [REPLIES[name] for name in names]


class NoJobs:
    """The jobs of a worker that has none."""

    settled_count = 0

    def __len__(self) -> int:
        return 0


def make_parts(redis: Redis) -> list[Any]:
    """Return the parts of a worker that repeat calls."""
    lease, log, consumed = Lease(seconds=LEASE), NullLog(), [KEYS.for_queue("mail")]
    overrides = LimitOverrides(
        worker="w",
        consumed=consumed,
        redis=redis,
        keys=KEYS,
        tasks={},
        admission=cast("Any", None),  # nothing changes
        circuit_breakers=CircuitBreakers(tasks={}, log=log),
        log=log,
        breaker_suspends=False,
        lease=lease,
    )
    foreign_jobs = ForeignJobs(
        lease=lease,
        consumed=consumed,
        redis=redis,
        reading=ReadingState(),
        unstarted=cast("Any", None),  # there are no jobs
        code_version=CodeVersion("v1", {}),
        unknown_task_grace=1.0,
        log=log,
    )
    heartbeat = Heartbeat(
        redis=redis,
        sidecar=None,
        consumed=consumed,
        lease=lease,
        log=log,
        worker="w",
        heartbeat_listeners=[overrides.on_heartbeat],
        counted_jobs=NoJobs(),
    )
    return [heartbeat, overrides, foreign_jobs]


async def test_what_an_idle_worker_repeats_comes_at_the_times_of_its_reports(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.process.lease.now", trio.current_time)
    redis = Redis()
    reporter = MetricsReporter(
        default_redis=redis,
        keys=KEYS,
        process_status=ProcessStatus(app="shop"),
        kind="worker",
        metrics_interval=15.0,
        guarded_outlets=(),
        history_limit=0,
        log=NullLog(),
    )
    rollup = HistoryRollup(
        default_redis=redis, all_brokers={}, keys=KEYS, worker="w", metrics_interval=15.0, log=NullLog()
    )
    for part in [*make_parts(redis), reporter, rollup]:
        await nursery.start(part.run)
    await trio.sleep(200)
    redis.times.clear()
    await trio.sleep(720)
    nursery.cancel_scope.cancel()
    counts = {name: len(times) for name, times in redis.times.items()}
    assert counts.pop("send_report") == 48
    assert counts.pop("claim_rollup") == 16
    assert counts == {"renew_lease": 12, "list_overrides": 12, "announce_code": 12}
    moments = {round(time, 2) for times in redis.times.values() for time in times}
    assert len(moments) == 48, "the server wakes up once for all that are due"
