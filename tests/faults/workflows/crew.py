"""Crew: the workers of an episode, and what strikes them and their Redis."""

import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis
import trio

from celery5.broker.servers.embedded import EmbeddedServer
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.nemesis.verdict import Life, Record, Struck
from tests.forking import Process, start_process
from tests.redis.worker.workers import LEASE
from tests.story.cli.commands import environment

WORKERS = 2
MOMENTS = ("before", "within", "after")
REFUSALS = ({"maxmemory": 1}, {"min-replicas-to-write": 1})
"""Why Redis takes no writes."""
STOP_LIMIT = 60.0
"""Seconds that a worker may take to stop."""


@dataclass(frozen=True)
class Strikes:
    """What strikes in an episode."""

    # At which of its calls to Redis a worker kills itself, and whether before, within or after it; one worker each.
    deaths: Sequence[tuple[int, str]] = ()
    # How often Redis refuses to write, for a moment.
    refusals: int = 0
    # How often a worker is cut off, for longer than its lease.
    partitions: int = 0

    @classmethod
    def draw(cls, rnd: random.Random, deaths: int, refusals: int, partitions: int) -> "Strikes":
        """Return random ones."""
        moments = [(rnd.randrange(1, 150), rnd.choice(MOMENTS)) for _ in range(deaths)]
        return cls(moments, refusals, partitions)


class Crew:
    """Keeps workers up until it is told to stop them."""

    def __init__(
        self, name: str, server: EmbeddedServer, folder: Path, record: Record, strikes: Strikes, *, ttl: float
    ) -> None:
        self.wrong: list[str] = []
        self._name = name
        self._server = server
        self._folder = folder
        self._record = record
        self._strikes = strikes
        self._deaths = list(strikes.deaths)
        self._ttl = ttl
        self._is_over = False

    async def run(self, rnd: random.Random, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the workers up; started when all consume."""
        async with trio.open_nursery() as nursery:
            proxies = [FaultyProxy(str(self._server.socket)) for _ in range(WORKERS)]
            async with trio.open_nursery() as workers:
                for proxy in proxies:
                    if self._strikes.partitions:
                        await nursery.start(proxy.run)
                    await workers.start(self._keep_worker, proxy)
                task_status.started()
                nursery.start_soon(self._refuse_now_and_then, random.Random(rnd.random()))
                nursery.start_soon(self._cut_off_now_and_then, random.Random(rnd.random()), proxies)
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Stop all workers in order."""
        self._is_over = True

    async def _keep_worker(self, proxy: FaultyProxy, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep a worker up: each one dies where it is to, and the last one stays."""
        is_first = True
        while not self._is_over:
            at, moment = self._deaths.pop(0) if self._deaths else (0, "")
            output = self._folder / f"worker-{len(self._record.lives)}"
            process = self._start_worker(output, at, moment, proxy.url if proxy.port else self._server.url)
            place = len(self._record.lives)
            life = Life(f"W{proxy.port}", process.pid, time.monotonic())
            self._record.lives.append(life)
            try:
                while not is_up(output) and process.poll() is None and not self._is_over:
                    await trio.sleep(0.02)
                if is_first:
                    task_status.started()
                is_first = False
                while process.poll() is None and not self._is_over:
                    await trio.sleep(0.02)
                if process.poll() is None:
                    process.terminate()
                await trio.to_thread.run_sync(process.wait, STOP_LIMIT)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            killed = bool(at) and process.returncode == -signal.SIGKILL
            life = replace(life, ended=time.monotonic(), code=process.returncode, killed=killed)
            self._record.lives[place] = life
            # Where Redis is full, or cut off, a worker does not start.
            if life.code and not killed and is_up(output):
                self.wrong.append(f"{output.name} ended with {life.code}: {output.read_text()[-500:]}")

    def _start_worker(self, output: Path, at: int, moment: str, url: str) -> Process:
        version = 1 + len(self._record.lives) % 2
        words = (self._name, url, str(self._folder), str(at), moment, str(version), str(self._ttl))
        command = [sys.executable, "-m", "tests.faults.workflows.application", *words]
        with output.open("wb") as log:
            return start_process(command, cwd=Path.cwd(), env=environment(), stdout=log, stderr=log)

    async def _refuse_now_and_then(self, rnd: random.Random) -> None:
        """Let Redis refuse to write, for a moment, again and again."""
        with redis.Redis.from_url(self._server.url) as client:
            for _ in range(self._strikes.refusals):
                await trio.sleep(rnd.uniform(0.05, 0.6))
                refusal = rnd.choice(REFUSALS)
                began = time.monotonic()
                try:
                    for name, value in refusal.items():
                        client.config_set(name, value)
                    await trio.sleep(rnd.uniform(0.005, 0.05))
                finally:
                    for name in refusal:
                        client.config_set(name, 0)
                self._record.struck.append(Struck("fill memory", "redis", 0, began, time.monotonic()))

    async def _cut_off_now_and_then(self, rnd: random.Random, proxies: Sequence[FaultyProxy]) -> None:
        """Cut workers off for longer than their lease, one after another."""
        for _ in range(self._strikes.partitions):
            await trio.sleep(rnd.uniform(0.1, 0.5))
            proxy, began = rnd.choice(proxies), time.monotonic()
            proxy.stall()
            try:
                await trio.sleep(rnd.uniform(1.5, 2.0) * LEASE)
            finally:
                proxy.resume()
            ended = time.monotonic()
            for life in self._record.lives:
                if life.name == f"W{proxy.port}" and (life.ended is None or life.ended >= began):
                    self._record.struck.append(Struck("partition", life.name, life.pid, began, ended))


def is_up(output: Path) -> bool:
    """Return whether a worker has come up, by its log."""
    return b"worker:started" in output.read_bytes()
