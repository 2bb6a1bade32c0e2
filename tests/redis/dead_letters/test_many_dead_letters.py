"""Dead letters, crowded: replayed by several at once, while workers work, by one who is killed, and in masses."""

import signal
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from typing import Any

import redis
import trio

from celery5 import App, current_job
from celery5.broker.calls import queues
from celery5.dead_letters.queues import DeadLetterTally
from tests.redis.dead_letters.many_dead_letters import QUEUE, add_dead_letters, numbered, sent
from tests.redis.worker.workers import until_async, working


def test_two_who_replay_at_once_replay_each_job_once(app: App, redis_client: "redis.Redis") -> None:
    ids = numbered(600)
    add_dead_letters(app, redis_client, *ids)
    tallies: list[DeadLetterTally] = []
    replaying = [threading.Thread(target=lambda: tallies.append(app.dlq.replay())) for _ in range(3)]
    for thread in replaying:
        thread.start()
    for thread in replaying:
        thread.join(30)
    assert sum(tally.done for tally in tallies) == 600
    assert sorted(sent(redis_client, app)) == sorted(ids)
    assert list(app.dlq.read()) == []


async def test_jobs_are_replayed_while_workers_run_them(app: App, redis_client: "redis.Redis") -> None:
    runs: dict[str, int] = {}

    @app.task(name="shop.t", max_retries=0)
    async def noted() -> None:
        job = current_job()
        assert job is not None
        runs[job.id] = runs.get(job.id, 0) + 1
        if job.id.endswith("7"):
            raise ValueError("never")

    ids = numbered(300)
    await trio.to_thread.run_sync(lambda: add_dead_letters(app, redis_client, *ids))
    async with working(app):
        tally = await app.dlq.areplay()
        assert tally.done == 300  # those that die meanwhile are not replayed in the same go
        await until_async(lambda: dead_again(app, 30))
    assert runs == dict.fromkeys(ids, 1)


async def dead_again(app: App, count: int) -> bool:
    """Whether so many jobs are dead, and no other is left."""
    depth = await app.aperform(queues.get_queue_depth(app.queue(QUEUE)))
    return (depth.dead, depth.unfinished) == (count, 0)


REPLAYING = """
import signal
from celery5 import App
app = App({name!r}, broker={url!r})
def progress(tally):
    print(tally.done, flush=True)
    if tally.done > 4000:
        signal.pause()  # whoever is to kill it is slow
app.dlq.replay(rate=4000, progress=progress)
"""


def test_one_who_is_killed_while_replaying_has_replayed_some_and_lost_none(
    app: App, redis_client: "redis.Redis"
) -> None:
    ids = numbered(5000)
    add_dead_letters(app, redis_client, *ids)
    script = textwrap.dedent(REPLAYING).format(name=app.name, url=app.settings.broker)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) > 500:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    alive, dead = sent(redis_client, app), [job.id for job in app.dlq.read()]
    assert len(alive) > 500
    assert dead
    assert sorted(alive + dead) == sorted(ids)  # each is dead or sent; none is both, none is lost
    places: Any = redis_client.hgetall(app.queue(QUEUE).jobs)
    assert {key.decode() for key, place in places.items() if place[:1] == b"X"} == set(dead)
    assert app.dlq.replay().done == len(dead)
    assert sorted(sent(redis_client, app)) == sorted(ids)


def test_no_trip_is_long_however_many_are_dead(app: App, redis_client: "redis.Redis") -> None:
    """Batches are of at most 100 jobs, and smaller when the jobs are large."""
    add_dead_letters(app, redis_client, *numbered(2500))
    sizes: list[int] = []
    app.dlq.replay(progress=lambda tally: sizes.append(tally.matched))
    assert max(after - before for before, after in pairwise([0, *sizes])) == 100
    assert len(sizes) == 26
    add_dead_letters(app, redis_client, *[f"large{number}" for number in range(30)], trace="x" * 1_000_000)
    sizes.clear()
    app.dlq.purge(progress=lambda tally: sizes.append(tally.matched))
    assert sizes[-1] == 30
    assert max(after - before for before, after in pairwise(sizes)) <= 4
