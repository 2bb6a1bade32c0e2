"""Lanes: jobs of other priorities than normal stand on streams of their own, which workers read when there are any."""

import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, agather, gather
from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls.queues import get_queue_state
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.job import Job
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.one_queue import Queue, QueueSize, command, done
from tests.redis.worker.workers import working


def on_lane(app: App, lane: str, *jobs: Job) -> Call[dict[str, str]]:
    """The call that puts jobs on a lane of the default queue."""
    words = [(job.id, job.message, job.at, "", None) for job in jobs]
    return jobs_calls.publish_unique(app.queue("default").on_lane(lane), words)


@pytest.mark.parametrize("lane", ["h", "l"])
async def test_waiting_worker_runs_the_first_job_on_a_lane_at_once(
    url: str, app_name: str, lane: str
) -> None:
    app = App(
        app_name, broker=url, lease=60, read_block=30
    )  # neither a beat nor the end of a read would help

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        assert await (await double.adelay(1)).aget(timeout=30) == 2
        job = double.job(21)
        await app.aperform(on_lane(app, lane, job))
        assert await app.result(job.id, task=double).aget(timeout=30) == 42
        later = [double.job(number) for number in range(300)]
        await app.aperform(on_lane(app, lane, *later))
        found = await agather([app.result(result.id, task=double) for result in later])
        assert found == [2 * number for number in range(300)]


async def test_jobs_of_all_lanes_are_run_in_their_order_and_those_of_one_in_theirs(app: App) -> None:
    ran: list[str] = []

    @app.task
    async def note(name: str) -> None:
        ran.append(name)

    for lane, name in (("l", "low"), ("", "normal"), ("h", "high")):
        await app.aperform(on_lane(app, lane, *[note.job(f"{name} {number}") for number in range(3)]))
    async with working(app, burst=True, name="w") as worker:
        await worker.done.wait()
    assert ran == [f"{name} {number}" for name in ("high", "normal", "low") for number in range(3)]


async def test_an_announcement_that_was_lost_is_made_good_by_the_next_beat(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        job = double.job(21)
        redis_client.xadd(
            app.queue("default").low, {"job": job.message}
        )  # as raw producers may: it tells nobody
        assert await app.result(job.id, task=double).aget(timeout=30) == 42


def send_and_wait(app: App, lane: str, *jobs: Job) -> list[Any]:
    """Put jobs on a lane of the default queue and return their results, in a thread.

    In the Trio run of a worker, calls go over its own connection, which it closes when it has lost its lease.
    """
    app.perform(on_lane(app, lane, *jobs))
    results: list[AsyncResult[Any]] = [app.result(job.id, queue="default") for job in jobs]
    return gather(results, timeout=30)


async def test_a_lane_whose_stream_was_lost_is_read_again(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        for number in range(3):
            jobs = [double.job(number) for _ in range(3)]
            found = await trio.to_thread.run_sync(partial(send_and_wait, app, "h", *jobs))
            assert found == [2 * number] * 3
            redis_client.delete(app.queue("default").high)


async def test_all_lanes_are_read_again_after_redis_has_lost_everything(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, lease=1.0)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        with redis.Redis.from_url(own_server.url) as client:
            for number in range(3):
                for lane in ("h", "", "l"):
                    job = double.job(number)
                    found = await trio.to_thread.run_sync(partial(send_and_wait, app, lane, job))
                    assert found == [2 * number]
                client.flushall()
    app.close()


def test_workers_are_killed_again_and_again_and_every_job_of_every_priority_ends(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    nap = staff.app.tasks["nap"]
    sent = [
        handle
        for level in ("low", "high", "normal")
        for handle in staff.app.send_many([nap.options(priority=level).s(0.02) for _ in range(60)])
    ]
    for _ in range(3):
        victim = staff.start(lease=1.0, concurrency=3)
        enough = len(staff.notes("end")) + 10
        wait_until(partial(_ended, staff, enough))
        victim.signal(signal.SIGKILL)
        victim.wait()
    staff.start(lease=1.0, concurrency=10)
    gather(sent, timeout=30)
    keys = staff.app.queue("default")
    wait_until(lambda: not redis_client.exists(keys.jobs))
    assert [redis_client.xlen(stream) for stream in keys.streams] == [0, 0, 0, 0]
    twice = Counter(note.job for note in staff.notes("end"))
    assert set(twice) == {job.id for job in sent}


async def test_a_queue_whose_jobs_never_had_a_priority_has_one_stream(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with working(app):
        assert await (await double.adelay(1)).aget() == 2
        assert await (await double.options(countdown=0.01).adelay(1)).aget() == 2
    keys = app.queue("default")
    assert redis_client.exists(keys.stream) == 1
    assert redis_client.exists(*keys.other_streams) == 0


def test_jobs_of_a_dead_worker_return_to_their_lane(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    victim = staff.start(lease=60, concurrency=1)
    gate = staff.app.tasks["gate"]
    jobs = {lane: gate.job(str(tmp_path / "gate")) for lane in ("h", "l", "")}
    staff.app.perform(on_lane(staff.app, "h", jobs["h"]))
    wait_until(lambda: len(staff.notes()) == 1)
    for lane in ("l", ""):
        staff.app.perform(on_lane(staff.app, lane, jobs[lane]))
    victim.signal(signal.SIGKILL)
    victim.wait()
    keys = staff.app.queue("default")
    wait_until(
        lambda: (
            redis_client.hget(keys.jobs, jobs["h"].id) != b"" and _deliveries(redis_client, keys.high) == [1]
        )
    )
    assert _deliveries(redis_client, keys.low) == _deliveries(redis_client, keys.stream) == [0]
    (tmp_path / "gate").touch()
    staff.start(lease=60, concurrency=1)
    wait_until(lambda: len(staff.notes("end")) == 3)
    assert [note.job for note in staff.notes("end")] == [jobs[lane].id for lane in ("h", "", "l")]


def _ended(staff: Staff, least: int) -> bool:
    return len(staff.notes("end")) >= least


def _deliveries(client: "redis.Redis", stream: str) -> list[int]:
    """How many workers died with each job on a stream."""
    found: Any = client.xrange(stream)
    return [int(fields.get(b"deliveries", b"0")) for _, fields in found]


async def test_a_job_on_a_lane_is_revoked_while_it_runs_at_once(app: App) -> None:
    began = trio.Event()

    @app.task
    async def long() -> None:
        began.set()
        await trio.sleep_forever()

    async with working(app):
        job = long.job()
        await app.aperform(on_lane(app, "h", job))
        await began.wait()
        handle = app.result(job.id, task=long)
        await handle.arevoke()
        with trio.fail_after(30):
            while await handle.astatus() is not JobState.REVOKED:
                await trio.sleep(0.01)


def test_a_queue_is_told_by_its_lanes(queue: Queue) -> None:
    for lane, ids in (("h", "ab"), ("l", "cde")):
        jobs = [(job_id, command(job_id), "", "", None) for job_id in ids]
        queue(jobs_calls.publish_unique(queue.keys.on_lane(lane), jobs))
    queue.publish("f")
    queue.join("w")
    assert queue(lease_calls.renew_lease(queue.keys, "w", lease=5)).lanes == "hl"
    state = queue(get_queue_state(queue.keys))
    assert (state.waiting, state.high, state.low, state.running) == (6, 2, 3, 0)
    (first,) = queue(jobs_calls.read_jobs([queue.keys.on_lane("h")], "w", count=1, block_seconds=0))
    state = queue(get_queue_state(queue.keys))
    assert (state.waiting, state.high, state.low, state.running) == (5, 1, 3, 1)
    assert [(worker.name, worker.running) for worker in state.workers] == [("w", 1)]
    assert queue.size() == QueueSize(6, 1, 0, 0)
    assert queue(lease_calls.leave_queue(queue.keys, "w")) == 1  # still there, for others to recover
    queue.join("w")
    assert queue(jobs_calls.settle(queue.keys.on_lane("h"), "w", [done(first, "a")])) == 1
    assert queue(lease_calls.leave_queue(queue.keys, "w")) == 0


def test_lanes_share_what_is_read_and_leave_no_room_unused(queue: Queue) -> None:
    lanes = [queue.keys.on_lane(lane) for lane in ("h", "", "l")]
    for lane, ids in zip(lanes, ("abcd", "efg", "ijkl"), strict=True):
        queue(jobs_calls.publish_unique(lane, [(job_id, command(job_id), "", "", None) for job_id in ids]))
    queue.join("w")
    queue(lease_calls.renew_lease(queue.keys, "w", lease=5))

    def picked(count: int, *shares: int) -> str:
        entries = queue(jobs_calls.read_by_lane(lanes, "w", count=count, shares=shares))
        return "".join(entry.message.split(b'"id":"')[1][:1].decode() for entry in entries)

    assert picked(3, 1, 1, 1) == "aei"
    assert picked(3, 1, 1, 0) == "bcf"
    assert picked(3, 3, 0, 0) == "dgj"
    assert picked(9, 3, 3, 3) == "kl"
    assert picked(9, 9, 0, 0) == ""
