"""Waits: an outage is one line when it begins and one when it is over, however often Redis was asked meanwhile."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.jobs import PromotedJobs
from celery5.broker.connection.link import BreakerOpened, LinkConnected, LinkConnectFailed, LinkLost
from celery5.broker.keys import Keys
from celery5.errors import BrokerDenied, BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.processes.process_parts import ConnectionLog
from celery5.services.process.broker_outages import OutageLog
from celery5.services.process.lease import Lease
from celery5.services.process.wake_ups import WakeUps
from celery5.services.worker.due_jobs import Mover
from celery5.services.workflows.run_progress import RunProgress
from tests.redis.worker.workers import Lines


def told(lines: Lines, name: str) -> list[str]:
    """What was told of it, in order."""
    return [event for event in (f"{name}:interrupted", f"{name}:resumed") for _ in lines.of(event)]


async def test_each_outage_is_told_once_with_how_long_it_was(autojump_clock: MockClock) -> None:
    waits = OutageLog(
        Log(worker="one", app="shop"), "admission:interrupted", "admission:resumed", sink="files"
    )
    with Lines() as lines:
        waits.record_recovery()  # nothing was wrong
        for _ in range(2):
            for _ in range(50):
                waits.record_error(BrokerUnavailable("it is away"))
                await trio.sleep(0.1)
            waits.record_recovery()
            waits.record_recovery()
    began, ended = lines.of("admission:interrupted"), lines.of("admission:resumed")
    assert [(line["why"], line["sink"]) for line in began] == [("it is away", "files")] * 2
    assert [(line["after"], line["sink"]) for line in ended] == [(5.0, "files")] * 2


async def test_first_outage_error_is_a_warning_and_repeats_are_debug() -> None:
    waits = OutageLog(Log(worker="one", app="shop"), "heartbeat:missed", logs_repeats=True)
    with Lines() as lines:
        for why in ("a", "b"):
            waits.record_error(BrokerUnavailable(why))
        waits.record_recovery()
        waits.record_error(BrokerUnavailable("c"))
    told = [(line["level"], line["why"]) for line in lines.of("heartbeat:missed")]
    assert told == [("warning", "a"), ("debug", "b"), ("warning", "c")]


class Away:
    """A Redis that does not serve for as many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.back = trio.Event()

    async def perform(self, call: Call[Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        self.left -= 1
        if self.left >= 0:
            raise BrokerUnavailable("it is away")
        self.back.set()
        return PromotedJobs(0, None, 0)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]


@pytest.mark.parametrize("queues", [("a",), ("a", "b", "c")])
async def test_who_looks_for_due_jobs_of_many_queues_says_so_once(
    autojump_clock: MockClock, queues: tuple[str, ...]
) -> None:
    redis = Away(30)
    with Lines() as lines:
        mover = Mover(
            redis=redis,
            consumed=[Keys("shop").for_queue(queue) for queue in queues],
            run_progress=RunProgress(results_ttl=60.0),
            lease=Lease(seconds=10),
            wake_ups=WakeUps(),
            log=Log(worker="one", app="shop"),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(mover.run)
            await redis.back.wait()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert told(lines, "due-jobs") == ["due-jobs:interrupted", "due-jobs:resumed"]


async def test_service_errors_are_at_debug_only_during_a_logged_outage() -> None:
    log = Log(worker="one", app="shop")
    waits = OutageLog(log, "admission:interrupted", "admission:resumed")
    lost = log.lost_connections
    with Lines() as lines:
        lost.record_loss("redis://a", "it was cut off", failed=1, resent=2)
        waits.record_error(BrokerUnavailable("broker redis://a cannot be reached"))
        waits.record_recovery()
        waits.record_error(BrokerUnavailable("broker redis://a cannot be reached"))
        waits.record_error(BrokerUnavailable("broker redis://b cannot be reached"))
        waits.record_error(BrokerUnavailable("broker redis://b cannot be reached"))
        waits.record_recovery()
        lost.record_connection("redis://a", is_return=True)
        waits.record_error(BrokerUnavailable("broker redis://a cannot be reached"))
    levels = [line["level"] for line in lines.of("admission:interrupted")]
    assert levels == ["debug", "debug", "warning", "warning"]
    assert [line["level"] for line in lines.of("admission:resumed")] == ["debug", "info"]


async def test_server_that_is_full_explains_only_the_writes_that_it_refuses() -> None:
    lost = Log(worker="one", app="shop").lost_connections
    refused = BrokerReplied("broker redis://a takes no writes", code="OOM")
    assert not lost.explains(refused)
    lost.record_refusal("redis://a", "Redis is full", "OOM")
    assert lost.explains(refused)
    assert not lost.explains(BrokerReplied("broker redis://b takes no writes", code="OOM"))
    assert not lost.explains(BrokerReplied("broker redis://a: no such key", code="WRONGTYPE"))
    assert not lost.explains(BrokerUnavailable("broker redis://a cannot be reached"))
    lost.record_acceptance("redis://a", "OOM")
    assert not lost.explains(refused)


@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize(("code", "level"), [("MISCONF", "error"), ("LOADING", "warning")])
async def test_refusal_is_one_line_and_another_one_when_it_is_over(
    *, code: str, level: str, is_end: bool
) -> None:
    """A connection that ends would not see the end of the refusal, so what follows is logged again."""
    lost = Log(worker="one", app="shop").lost_connections
    with Lines() as lines:
        for _ in range(2):
            lost.record_refusal("redis://a", "why", code)
            lost.record_refusal("redis://a", "why", code)
            lost.record_acceptance("redis://a", code, is_end=is_end)
            lost.record_acceptance("redis://a", code, is_end=is_end)
    assert [line["level"] for line in lines.of("broker:refused")] == [level] * 2
    assert [line["level"] for line in lines.of("broker:accepted")] == ["debug" if is_end else "info"] * 2
    assert lost.get_refusals() == {}


@pytest.mark.parametrize("is_lost_first", [True, False])
@pytest.mark.parametrize(
    ("is_refused", "is_error", "expected"),
    [
        (False, False, []),
        (False, True, [("redis:breaker-opened", "error")]),
        (True, False, [("broker:refused", "error")]),
        (True, True, [("broker:refused", "error")]),
    ],
)
async def test_outage_has_one_error_for_all_connections_that_fail(
    *, is_lost_first: bool, is_refused: bool, is_error: bool, expected: list[tuple[str, str]]
) -> None:
    """Before the first connection the process ends with the error of that, and logs its breaker alone."""
    log = ConnectionLog(log=Log(worker="one", app="shop"))
    where, links = "redis://a", ("control", "reads", "push")
    if not is_lost_first:
        expected = [("redis:breaker-opened", "error" if is_error else "warning")]
    with Lines() as lines:
        for _ in range(2):
            for link in links if is_lost_first else ():
                log(LinkLost(link, where, "it was cut off", 0, 0))
            for link in links * 2:
                log(LinkConnectFailed(link, where, "why", 0.1, is_refused))
                log(BreakerOpened(link, where, "why", 0.1, is_error))
            for link in links:
                log(LinkConnected(link, where, "redis", "8", 1, where, is_return=is_lost_first))
    shown = [
        (name, line["level"])
        for name in ("broker:disconnected", "broker:refused", "redis:breaker-opened", "broker:reconnected")
        for line in lines.of(name)
        if line["level"] != "debug"
    ]
    around = is_lost_first * 2
    assert shown == [
        *[("broker:disconnected", "warning")] * around,
        *expected * 2,
        *[("broker:reconnected", "info")] * around,
    ]


async def test_refused_login_explains_the_errors_of_services_from_then_on() -> None:
    lost = Log(worker="one", app="shop").lost_connections
    denied = BrokerDenied("broker redis://a refuses this user or password")
    lost.record_refused_connection("redis://a", "why")
    assert not lost.explains(denied), "no connection is lost"
    lost.record_loss("redis://a", "it was cut off", failed=0, resent=0)
    assert not lost.explains(denied)
    with Lines() as lines:
        lost.record_refused_connection("redis://a", "why")
        lost.record_refused_connection("redis://a", "why")
    assert [line["why"] for line in lines.of("broker:refused")] == ["why"]
    assert lost.explains(denied)
    assert not lost.explains(BrokerDenied("broker redis://b refuses this user or password"))
    lost.record_connection("redis://a", is_return=True)
    assert not lost.explains(denied)


async def test_outage_ends_when_each_lost_connection_is_back_or_closed() -> None:
    log = Log(worker="one", app="shop")
    lost = log.lost_connections
    with Lines() as lines:
        for failed in (1, 2, 3):
            lost.record_loss("redis://a", "it was cut off", failed=failed, resent=1)
        lost.record_connection("redis://a", is_return=True)
        lost.record_connection("redis://b", is_return=True)
        lost.record_end("redis://a")
        log.event("worker:stopped")  # until here it goes on
        lost.record_connection("redis://a", is_return=True)
        lost.record_loss("redis://a", "it was cut off", failed=0, resent=0)
        lost.record_end("redis://a")
        lost.record_connection("redis://a", is_return=False)  # of what follows on what has ended
    stopped, (first, second) = lines.of("worker:stopped")[0], lines.of("broker:reconnected")
    assert stopped["timestamp"] <= first["timestamp"] <= second["timestamp"]
    assert (first["connections"], first["failed"], first["resent"]) == (3, 6, 3)
    assert (second["connections"], second["failed"]) == (1, 0)
    assert len(lines.of("broker:disconnected")) == 2


async def test_outage_begins_with_the_first_call_that_had_no_answer() -> None:
    log = ConnectionLog(log=Log(worker="one", app="shop"))
    with Lines() as lines:
        log(LinkLost("reads", "redis://a", "no answer", 0, 0, 2.0))
        log(LinkLost("control", "redis://a", "no answer", 1, 0, 12.0))
        for link in ("reads", "control"):
            log(LinkConnected(link, "redis://a", "redis", "8", 1, "redis://a", is_return=True))
    (line,) = lines.of("broker:reconnected")
    assert line["after"] == 12.0


async def test_hint_of_an_interruption_is_not_on_the_line_of_its_end() -> None:
    outages = OutageLog(
        Log(worker="one", app="shop"), "leadership:interrupted", "leadership:resumed", hint="h"
    )
    with Lines() as lines:
        outages.record_error(BrokerUnavailable("no answer within 5 s"))
        outages.record_recovery()
    assert [line["hint"] for line in lines.of("leadership:interrupted")] == ["h"]
    assert [("after" in line, "hint" in line) for line in lines.of("leadership:resumed")] == [(True, False)]
