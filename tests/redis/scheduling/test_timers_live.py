"""Timers live: what each process of a worker runs by the clock, beside its jobs."""

import signal
import sys
from pathlib import Path

import redis
import trio
from trio.testing import wait_all_tasks_blocked

from celery5 import App, BootStep
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.health.test_probes import numbers
from tests.redis.worker.workers import LEASE, Lines, until, working
from tests.trio.health.test_status_port import free_port

CLOCKS = """
import os
import time

import trio

from celery5 import App, BootStep

app = App({name!r})
noted = open({noted!r}, "a", buffering=1)


def note(what: str) -> None:
    print(what, os.getpid(), file=noted)


def warm_up() -> None:
    time.sleep(0.3)
    note("warm")


app.bootsteps = (BootStep("warm", warm_up),)


@app.task
async def work() -> str:
    return "done"


@app.timer(interval=0.1)
async def quick() -> None:
    note("quick")


@app.timer(0.1)
def broken() -> None:
    raise SystemExit("no rates")


@app.timer(0.2)
async def finishes() -> None:
    note("begun")
    await trio.sleep(1)
    note("finished")


@app.timer(0.2, overlap="queue")
async def stuck() -> None:
    await trio.sleep_forever()
"""


def test_each_process_runs_the_timers_and_no_failure_or_stuck_run_ends_it(
    staff: Staff, tmp_path: Path
) -> None:
    noted, port = tmp_path / "noted", free_port()
    (tmp_path / "clocks.py").write_text(CLOCKS.format(name=staff.app.name, noted=str(noted)))

    def pids(what: str) -> list[str]:
        lines = [line.split() for line in noted.read_text().splitlines()] if noted.exists() else []
        return [pid for word, pid in lines if word == what]

    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from celery5.cli.main import cli; cli()"
    command = [sys.executable, "-c", start, "-A", "clocks:app", "worker", "start", "--processes", "2"]
    worker = staff.launch(command, forked=False, status_port=port, grace_period=3, log_format="json")
    wait_until(lambda: len(set(pids("quick"))) == 2)
    wait_until(lambda: len(worker.lines("timer:failed")) > 3)
    wait_until(lambda: numbers(port).get('celery5_timer_skipped_total{timer="stuck"}', 0) > 1)
    failed = worker.lines("timer:failed")[0]
    assert (failed["timer"], failed["level"], failed["why"]) == ("broken", "error", "SystemExit: no rates")
    assert 'raise SystemExit("no rates")' in failed["traceback"]
    found = numbers(port)
    assert found['celery5_timer_runs_total{timer="quick"}'] >= 1
    assert found['celery5_timer_failures_total{timer="broken"}'] >= 1
    assert found['celery5_timer_failures_total{timer="quick"}'] == 0
    assert found['celery5_timer_running{timer="stuck"}'] == 1
    lines = noted.read_text().splitlines()
    assert all(lines.index(f"warm {pid}") < lines.index(f"quick {pid}") for pid in set(pids("quick")))
    begun = len(pids("begun"))
    wait_until(lambda: len(pids("begun")) > begun)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert len(pids("begun")) == len(pids("finished"))  # within the grace period
    assert {line["timer"] for line in worker.lines("timer:cancelled")} == {"stuck"}


async def test_a_timer_sends_jobs_is_shown_in_stats_and_leaves_nothing_in_redis(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    got: list[int] = []
    incarnations: list[str] = []

    async def prepare(worker: str) -> None:
        incarnations.append(worker)

    app = App(app_name, broker=url, lease=LEASE, bootsteps=[BootStep("rates", prepare)])

    @app.task
    async def double(n: int) -> None:
        got.append(2 * n)

    @app.timer(interval=0.05, name="ask-rates")
    async def ask() -> None:
        assert incarnations
        await double.adelay(7)

    with Lines() as lines:
        async with working(app, name="w1"):
            await until(lambda: len(got) > 2)
            (reply,) = await app.control.asend("stats", to="w1")
            before = reply.answer["timers"]["ask-rates"]
            assert before["runs"] > 2
            assert before["failures"] == 0
            # Another incarnation goes on with them, and goes on counting.
            redis_client.zrem(app.queue("default").leases, incarnations[0])
            await until(lambda: len(incarnations) == 2)
            count = len(got)
            await until(lambda: len(got) > count)
            (reply,) = await app.control.asend("stats", to="w1")
            assert reply.answer["timers"]["ask-rates"]["runs"] > before["runs"]
        assert lines.of("timer:failed") == []
    assert set(got) == {14}
    stored = list(redis_client.scan_iter(f"*{app_name}*ask-rates*"))
    assert stored == []
    count = len(got)
    await wait_all_tasks_blocked(0.1)
    assert len(got) == count
    app.close()


async def test_a_worker_on_several_brokers_runs_a_timer_once(
    url: str, own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=url, brokers={"second": own_server.url}, routes={"mail": "second"})
    count = 0
    running: list[int] = []  # how many runs there are, at the start of each

    @app.task(queue="mail")
    async def mail() -> str:
        return "sent"

    @app.timer(0.02)
    async def note() -> None:
        nonlocal count
        count += 1
        running.append(count)
        await trio.sleep(0.05)
        count -= 1

    async with working(app):
        assert await (await mail.adelay()).aget() == "sent"
        await until(lambda: len(running) > 4)
    assert set(running) == {1}
    app.close()
