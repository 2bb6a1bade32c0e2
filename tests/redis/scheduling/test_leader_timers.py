"""Timers of the leader: one process of the cluster runs them, and the next one when that is dead."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import cluster
from celery5.broker.keys import Keys
from celery5.services.process import exclusive_lease
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import Lines, until, working

COMMAND = [
    sys.executable,
    "-m",
    "celery5",
    "-A",
    "tests.redis.scheduling.leader_clocks:app",
    "worker",
    "start",
]


def _list_pids(staff: Staff, what: str) -> list[int]:
    """Return which processes have noted that, in order."""
    lines = [line.split() for line in staff.history.read_text().splitlines()]
    return [int(pid) for word, pid in lines if word == what]


def _assert_never_two_at_once(staff: Staff, killed: int) -> None:
    """The run that the killed process was in has ended with it."""
    running: list[int] = []
    for line in staff.history.read_text().splitlines():
        what, pid = line.split()
        if what == "begun":
            running = [other for other in running if other != killed or int(pid) == killed]
            assert running == [], line
            running.append(int(pid))
        elif what == "ended":
            running.remove(int(pid))


def _launch(staff: Staff) -> Employee:
    return staff.launch(COMMAND, log_format="json")


def test_leader_timers_move_to_another_process_and_start_once(
    staff: Staff,
) -> None:
    workers = [_launch(staff) for _ in range(2)]
    wait_until(lambda: len(set(_list_pids(staff, "warm"))) == 2 and len(_list_pids(staff, "ended")) > 3)
    (leader,) = set(_list_pids(staff, "begun"))
    assert _list_pids(staff, "migrated") == [leader]
    (killed,) = [worker for worker in workers if worker.process.pid == leader]
    (heir,) = [worker for worker in workers if worker.process.pid != leader]
    killed.signal(signal.SIGKILL)
    killed.wait()
    before = time.monotonic()
    wait_until(lambda: heir.process.pid in _list_pids(staff, "ended"))
    assert time.monotonic() - before < 15  # a second is the lease
    assert [line["cluster_started"] for line in heir.lines("timer:lead-acquired")] == [False]
    # One that joins a cluster that runs is no start of it.
    joined = _launch(staff)
    wait_until(lambda: joined.process.pid in _list_pids(staff, "warm"))
    heir.signal(signal.SIGTERM)
    assert heir.wait() == 0
    wait_until(lambda: joined.process.pid in _list_pids(staff, "begun"))
    assert _list_pids(staff, "migrated") == [leader]
    # When all have stopped, the next one is.
    joined.signal(signal.SIGTERM)
    assert joined.wait() == 0
    last = _launch(staff)
    wait_until(lambda: last.process.pid in _list_pids(staff, "begun"))
    assert _list_pids(staff, "migrated") == [leader, last.process.pid]
    _assert_never_two_at_once(staff, killed=leader)


@pytest.mark.parametrize("loop", ["trio", "asyncio", "thread"])
async def test_whoever_loses_the_lead_cancels_its_runs(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr(exclusive_lease, "LEASE", 0.3)
    app = App(app_name, broker=url, grace_period=0.1)
    running: list[str] = []
    begun, may_end = list[str](), threading.Event()
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep if loop == "asyncio" else trio.sleep
    options: dict[str, Any] = {"loop": loop} if loop != "thread" else {}

    @app.task
    async def work() -> None: ...

    async def sync() -> None:
        begun.append(loop)
        running.append(loop)
        try:
            await sleep(3600)
        finally:
            running.remove(loop)

    def sync_in_thread() -> None:
        begun.append(loop)
        may_end.wait(30)

    app.timer(0.02, on_leader=True, **options)(sync_in_thread if loop == "thread" else sync)
    with Lines() as lines:
        async with working(app):
            await until(lambda: len(begun) == 1)
            key = app.keys.timer_leader
            redis_client.set(key, "somebody else", px=700)  # as when it was frozen for longer than the lease
            await until(lambda: bool(lines.of("timer:cancelled")) and not running)
            assert lines.of("timer:lead-lost")
            await until(lambda: len(lines.of("timer:lead-acquired")) == 2)
            if loop == "thread":  # it cannot be cancelled, so no other one begins here before it ends
                await trio.sleep(0.2)
                assert len(begun) == 1
                may_end.set()
            await until(lambda: len(begun) >= 2)
            may_end.set()
            app_lines = lines.of("timer:lead-acquired")
    assert [line["cluster_started"] for line in app_lines] == [True, False]
    assert redis_client.get(key) is None  # released in order
    app.close()


async def test_without_redis_no_leader_runs_anything(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of another kind stands for whatever Redis refuses: the jobs go on."""
    monkeypatch.setattr(exclusive_lease, "LEASE", 0.3)
    app = App(app_name, broker=url)
    runs: list[str] = []

    @app.task
    async def work() -> str:
        return "done"

    @app.timer(0.02, on_leader=True)
    async def sync() -> None:
        runs.append("leader")

    @app.timer(0.02)
    async def everywhere() -> None:
        runs.append("each")

    redis_client.hset(app.keys.timer_leader, "odd", "1")
    with Lines() as lines:
        async with working(app):
            await until(lambda: bool(lines.of("timer:acquire-failed")))
            assert await (await work.adelay()).aget(timeout=30) == "done"
            await until(lambda: len(runs) > 3)
            assert set(runs) == {"each"}
            redis_client.delete(app.keys.timer_leader)
            await until(lambda: "leader" in runs)
    app.close()


def test_the_lease_says_how_many_others_ask_for_it(queue: Queue, app_name: str) -> None:
    keys = Keys(app_name)
    key, candidates = keys.timer_leader, keys.timer_candidates

    def ask(who: str) -> tuple[bool, int]:
        reply = queue(cluster.acquire_lease(key, who, lease=60, candidates=candidates))
        return reply.wait == 0, reply.others

    assert ask("one") == (True, 0)
    assert ask("one") == (True, 0)  # a request whose answer was lost
    assert ask("two") == (False, 1)
    assert ask("one") == (True, 1)
    queue(cluster.release_lease(key, "one", candidates=candidates))
    assert ask("three") == (True, 1)  # the second one still asks
    queue(cluster.release_lease(key, "two", candidates=candidates))
    queue(cluster.release_lease(key, "three", candidates=candidates))
    assert queue.client.exists(key, candidates) == 0
    assert ask("four") == (True, 0)
    assert 0 < queue.client.pttl(candidates) <= 60_000
