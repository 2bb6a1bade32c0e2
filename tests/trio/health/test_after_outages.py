"""After an outage each process reports, and alerts are evaluated, within seconds and not at the next interval."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.observability import RollupTurn
from celery5.broker.keys import Keys
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log, NullLog
from celery5.protocol.process import wake_ups
from celery5.services.health.vitals import ProcessStatus
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from tests.redis.worker.workers import Lines

INTERVAL = 600.0
REPLIES = {"send_report": True, "claim_rollup": RollupTurn(is_own=False, cursor="", now=0.0)}
OUTAGES = [
    BrokerUnavailable("away"),
    BrokerReplied("OOM command not allowed", code="OOM"),
    BrokerDenied("WRONGPASS"),
]


@pytest.fixture(autouse=True)
def no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers fire at whole intervals, whatever the number of this process."""
    monkeypatch.setattr(wake_ups, "_MAX_SHIFT", 1)


class Redis:
    """A Redis that fails while `error` is set. It notes when calls come, since the beginning of the test."""

    def __init__(self) -> None:
        self.error: BrokerError | None = None
        self.failed: dict[str, list[float]] = defaultdict(list)
        self.served: dict[str, list[float]] = defaultdict(list)
        self._began = trio.current_time()

    async def perform(self, call: Call[Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        assert call.script is not None
        name = call.script.name.rpartition("/")[2]
        found = self.served if self.error is None else self.failed
        found[name].append(trio.current_time() - self._began)
        if self.error is not None:
            raise self.error
        return REPLIES[name]

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]


class HangingRedis(Redis):
    """A Redis that never answers."""

    async def perform(self, call: Call[Any], /) -> Any:
        await trio.sleep_forever()


def make_reporter(
    redis: Redis, status: ProcessStatus | None = None, log: Log | None = None
) -> MetricsReporter:
    return MetricsReporter(
        default_redis=redis,
        keys=Keys("shop"),
        process_status=status or ProcessStatus(app="shop"),
        kind="worker",
        metrics_interval=INTERVAL,
        guarded_outlets=(),
        history_limit=0,
        log=log or NullLog(),
    )


def make_rollup(redis: Redis) -> HistoryRollup:
    return HistoryRollup(
        default_redis=redis,
        all_brokers={},
        keys=Keys("shop"),
        worker="w",
        metrics_interval=INTERVAL,
        log=NullLog(),
    )


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("make", "name"),
    [(make_reporter, "send_report"), (make_rollup, "claim_rollup")],
    ids=["reports", "rollup"],
)
async def test_what_an_outage_has_interrupted_goes_on_soon_after_it(
    autojump_clock: MockClock, nursery: trio.Nursery, make: Any, name: str, error: BrokerError
) -> None:
    redis = Redis()
    redis.error = error
    await nursery.start(make(redis).run)
    await trio.sleep(INTERVAL + 30)
    tries = redis.failed[name]
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) > 5
    assert min(pauses) >= 1, "it asks no more often, however long Redis is away"
    assert len({round(pause, 3) for pause in pauses}) > 1, "processes do not try together"
    redis.error = None
    await trio.sleep(3.1)
    assert redis.served[name], f"no try within 3 s after the outage: {tries}"
    count = len(redis.served[name])
    await trio.sleep(30)
    assert len(redis.served[name]) == count, "then it keeps its interval"


async def test_alerts_are_evaluated_after_processes_could_renew_their_leases(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPLIES, "claim_rollup", RollupTurn(is_own=True, cursor="", now=0.0))
    rolled_up = list[float]()

    async def roll_up(_self: object, _turn: RollupTurn) -> None:
        rolled_up.append(trio.current_time())

    monkeypatch.setattr(HistoryRollup, "_roll_up", roll_up)
    redis = Redis()
    redis.error = BrokerUnavailable("away")
    began = trio.current_time()
    await nursery.start(make_rollup(redis).run)
    await trio.sleep(INTERVAL + 30)
    redis.error = None
    back_at = trio.current_time()
    await trio.sleep(7)
    (at,) = rolled_up
    first = next(time for time in redis.served["claim_rollup"] if time >= back_at - began)
    assert at - began == first + 3
    await trio.sleep(INTERVAL)
    assert len(rolled_up) == 2, "without an outage it does not wait"


class Lamp:
    """A part of a process that says whether it is ready."""

    def __init__(self) -> None:
        self.problem = ""

    def conditions(self) -> dict[str, str]:
        return {"broker": self.problem}

    def metric_families(self) -> list[Any]:
        return []


async def test_process_reports_at_once_that_it_is_ready_or_is_no_more(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    redis, lamp, status = Redis(), Lamp(), ProcessStatus(app="shop")
    status.mark_up(cast("Any", [lamp]))
    await nursery.start(make_reporter(redis, status).run)
    await trio.sleep(INTERVAL + 10)
    assert len(redis.served["send_report"]) == 1, "before the first report nobody has been told anything"
    for problem in ("away", ""):
        count = len(redis.served["send_report"])
        lamp.problem = problem
        await trio.sleep(2.1)
        assert len(redis.served["send_report"]) == count + 1
        await trio.sleep(30)
        assert len(redis.served["send_report"]) == count + 1


async def test_report_that_redis_refuses_for_good_waits_for_the_next_interval(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    redis = Redis()
    redis.error = BrokerReplied("ERR no such thing", code="ERR")
    await nursery.start(make_reporter(redis).run)
    await trio.sleep(2 * INTERVAL + 30)
    assert len(redis.failed["send_report"]) == 2


async def test_report_that_has_no_answer_is_logged_in_words(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    with Lines() as lines:
        await nursery.start(make_reporter(HangingRedis(), log=Log(worker="one", app="shop")).run)
        await trio.sleep(INTERVAL + 30)
    assert [line["why"] for line in lines.of("metrics:report-failed")] == ["no answer within 5 s"]
