"""Recoverer: it judges others only when its own heartbeat was just answered, and again for each worker."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls.leases import HeartbeatEvidence, HeartbeatReply, RecoveryResult
from celery5.broker.keys import Keys, QueueKeys
from celery5.logs.log import Log, NullLog
from celery5.protocol.process.liveness import LONGEST_WAIT
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.process.lease import Lease
from celery5.services.worker.recovery import Recoverer

MAIL = Keys("shop").for_queue("mail")
NEWS = Keys("shop").for_queue("news")


class Judged:
    """A server that may be frozen; it notes when it was asked, and has so many dead workers that hold jobs."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.calls: list[Call[RecoveryResult]] = []
        self.dead = 0
        self.thawed = trio.Event()
        self.thawed.set()

    async def perform(self, call: Call[Any], /) -> Any:
        """Somebody is to be recovered."""
        self.at.append(trio.current_time())
        self.calls.append(call)
        await self.thawed.wait()
        self.dead -= 1
        return RecoveryResult(
            worker="dead" if self.dead >= 0 else "", requeued=1, dead_lettered=0, has_more=False
        )

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]


def hear(recoverer: Recoverer, *, lapsed: int = 1, keys: QueueKeys = MAIL) -> float | None:
    """A heartbeat is answered now, and tells of lapsed leases; gives in how many seconds another one is wanted."""
    at = int(trio.current_time() * 1000)
    return recoverer.on_heartbeat(keys, HeartbeatReply(alive=True, lapsed=lapsed, due_in=None, at=at))


async def beats(recoverer: Recoverer, *, every: float, until: float) -> None:
    """A steady heart that sees a lapsed lease at each beat."""
    while trio.current_time() < until:
        hear(recoverer)
        await trio.sleep(every)


async def judging(nursery: trio.Nursery, *, lease: float) -> tuple[Recoverer, Judged]:
    """A recoverer that runs, and its server."""
    server = Judged()
    recoverer = Recoverer(
        redis=server,
        worker="w",
        lease=Lease(seconds=lease),
        consumed=[MAIL, NEWS],
        job_middleware=JobMiddleware(app=App("shop"), worker="w", log=NullLog()),
        log=Log(worker="w", app="shop"),
        max_deliveries=3,
        results_ttl=60.0,
        message_limit=1_000_000,
    )
    await nursery.start(recoverer.run)
    return recoverer, server


async def test_nobody_is_judged_until_the_judges_own_heart_has_beaten_steadily(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, server = await judging(nursery, lease=9.0)
    for _ in range(2):  # at its start, and after an outage
        began = trio.current_time()
        await beats(recoverer, every=3.0, until=began + 12.0)
        assert began + LONGEST_WAIT <= server.at[0] <= began + LONGEST_WAIT + 3.0
        await trio.sleep(60.0)
        server.at.clear()
    nursery.cancel_scope.cancel()


async def test_a_heart_that_stumbles_has_to_beat_steadily_anew(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, server = await judging(nursery, lease=3.0)
    for _ in range(5):  # a silence that is longer than two beats, and shorter than the wait
        hear(recoverer)
        await trio.sleep(2.5)
    assert server.at == []
    last = trio.current_time() - 2.5
    await beats(recoverer, every=1.0, until=last + 8.0)
    assert server.at[0] == pytest.approx(last + 2.5 + 3.0)
    assert len(server.at) > 1, "and from then on who lapses is judged at once"
    nursery.cancel_scope.cancel()


async def test_nothing_is_decided_while_redis_is_silent(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """Frozen for 4 s, up for 2.6 s, three times: what would be sent then would run when all leases have lapsed."""
    recoverer, server = await judging(nursery, lease=3.0)
    for _ in range(3):
        await beats(recoverer, every=1.0, until=trio.current_time() + 2.6)
        await trio.sleep(4.0)
    assert server.at == []
    nursery.cancel_scope.cancel()


async def test_it_wants_a_heartbeat_when_it_may_judge_however_long_the_lease(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """The usual one may be far away, and nothing is decided without one."""
    recoverer, server = await judging(nursery, lease=180.0)
    assert hear(recoverer, lapsed=0) is None
    await trio.sleep(3.0)
    wanted = hear(recoverer)
    assert wanted is not None
    assert wanted == pytest.approx(LONGEST_WAIT - 3.0)
    await trio.sleep(wanted)
    assert hear(recoverer) is None
    await trio.sleep(0.1)
    assert len(server.at) == 1
    nursery.cancel_scope.cancel()


async def test_each_call_says_by_which_heartbeat_it_was_decided(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, server = await judging(nursery, lease=3.0)
    server.dead = 1
    await beats(recoverer, every=1.0, until=3.5)
    assert [call.words for call in server.calls] == [server.calls[0].words] * 2
    judge = HeartbeatEvidence("w", 3000, 3.0)
    words = server.calls[0].words
    at = words.index(judge.name)
    assert words[at : at + 3] == (judge.name, judge.at, 3000)
    nursery.cancel_scope.cancel()


async def test_it_is_decided_anew_for_each_worker(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    recoverer, server = await judging(nursery, lease=3.0)
    server.dead = 5
    await beats(recoverer, every=1.0, until=2.5)
    server.thawed = trio.Event()  # it freezes with the first call on its way
    await trio.sleep(0.4)
    hear(recoverer)
    await trio.sleep(0.1)
    assert len(server.at) == 1
    await trio.sleep(4.0)
    server.thawed.set()
    await trio.sleep(1.0)
    assert len(server.at) == 1, "no further worker is judged by what was heard before the freeze"
    await beats(recoverer, every=1.0, until=trio.current_time() + 4.0)
    assert len(server.at) > 4, "those that are dead are recovered after it"
    nursery.cancel_scope.cancel()


async def test_each_queue_is_judged_by_the_answers_on_that_queue(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """In a cluster each queue may be on its own server, which alone was frozen."""
    recoverer, server = await judging(nursery, lease=3.0)
    await beats(recoverer, every=1.0, until=3.5)
    server.calls.clear()
    hear(recoverer, lapsed=0)
    hear(recoverer, keys=NEWS)
    await trio.sleep(0.1)
    assert server.calls == []
    for _ in range(4):
        hear(recoverer, lapsed=0)
        hear(recoverer, keys=NEWS)
        await trio.sleep(1.0)
    assert {call.words[3] for call in server.calls} == {NEWS.normal}
    nursery.cancel_scope.cancel()


async def test_an_idle_worker_judges_by_the_heartbeats_of_others(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    recoverer, server = await judging(nursery, lease=9.0)

    def hear_of_others(steady_for: float) -> float | None:
        at = int(trio.current_time() * 1000)
        reply = HeartbeatReply(alive=True, lapsed=1, due_in=None, at=at, steady_for=steady_for)
        return recoverer.on_heartbeat(MAIL, reply)

    hear(recoverer, lapsed=0)
    for interval, judges in ((0.0, False), (30.0, True)):
        recoverer._lease.idle_interval = interval
        await trio.sleep(30.0)
        assert hear_of_others(1.0) == LONGEST_WAIT, "there was an outage, for all that Redis knows"
        await trio.sleep(30.0)
        assert (hear_of_others(LONGEST_WAIT) is None) is judges
        await trio.testing.wait_all_tasks_blocked()
        assert bool(server.at) is judges
    nursery.cancel_scope.cancel()
