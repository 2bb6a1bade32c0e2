"""Episode: many random runs at once, on workers that are killed, and a Redis that refuses to write now and then."""

import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerError, RunNotRetried, WorkflowCancelled, WorkflowExpired, WorkflowFailed
from celery5.workflows import RunState, WorkflowRun
from tests.faults.nemesis.verdict import Life, Record, Struck, runs_of
from tests.faults.workflows.application import QUEUES, NotedTasks, make_app
from tests.faults.workflows.stories import CANCELLED, EXPIRED, FAILED, IS_ONE_RUN, Story, Storyteller
from tests.faults.workflows.verdict import Quiet, RunHistory, sort_jobs, violations
from tests.forking import Process, start_process
from tests.leaks import leaks
from tests.redis.worker.workers import LEASE
from tests.redis.workflows.reference import plain
from tests.story.cli.commands import environment

AT_ONCE = 40
"""Runs at the same time."""
LIMIT = 60.0
"""Seconds that anything may take."""
POLL = 0.05
"""Seconds between two looks at a run."""
WORKERS = 2
LONG, SHORT = 60.0, 1.0
"""Seconds that results are kept: more than a run takes, and less."""
MOMENTS = ("before", "within", "after")
REFUSALS = ({"maxmemory": 1}, {"min-replicas-to-write": 1})
"""Why Redis takes no writes."""


@dataclass
class Outcome:
    """What has come of an episode."""

    seed: int
    runs: int
    wrong: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        again = f"python -m tests.faults.workflows --seed {self.seed} --runs {self.runs} --episodes 1"
        numbers = ", ".join(f"{name} {number}" for name, number in self.numbers.items())
        return "\n".join(
            [
                f"seed {self.seed}: {numbers}",
                *(f"WRONG: {one}" for one in self.wrong[:20]),
                *([again] * bool(self.wrong)),
            ]
        )


class Episode:
    """One episode, from its seed to its verdict."""

    def __init__(
        self, seed: int, runs: int, folder: Path, server: EmbeddedServer, *, deaths: int, refusals: int
    ) -> None:
        self.outcome = Outcome(seed, runs)
        self._rnd = random.Random(seed)
        self._folder = folder
        self._server = server
        self._deaths = [(self._rnd.randrange(1, 150), self._rnd.choice(MOMENTS)) for _ in range(deaths)]
        self._refusals = refusals
        self._ttl = self._rnd.choice((LONG, LONG, SHORT if IS_ONE_RUN else LONG))
        self._app: App = make_app(f"w{seed}-{uuid4().hex[:8]}", server.url, results_ttl=self._ttl)
        self._tasks = NotedTasks(self._app, folder)
        self._record = Record(LEASE)
        self._histories: list[RunHistory] = []
        self._is_over = False

    async def play(self) -> Outcome:
        """Play it. Returns what has come of it."""
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                await nursery.start(self._keep_worker)
            nursery.start_soon(self._refuse_now_and_then)
            await self._follow_all()
            self.outcome.wrong += [f"left: {left}" for left in [await self._wait_until_idle()] if left]
            self._is_over = True
        took = time.monotonic() - began
        self._judge()
        self._app.close()
        self.outcome.numbers |= {
            "seconds": f"{took:.1f}",
            "killed": sum(life.killed for life in self._record.lives),
        }
        return self.outcome

    # ---- workers

    async def _keep_worker(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a worker up until the episode is over: each dies where it is to, and the last one stays."""
        is_first = True
        while not self._is_over:
            at, moment = self._deaths.pop() if self._deaths else (0, "")
            output = self._folder / f"worker-{len(self._record.lives)}"
            process = self._start_worker(output, at, moment)
            life = Life(output.name, process.pid, time.monotonic())
            self._record.lives.append(life)
            try:
                while is_first and b"worker:started" not in output.read_bytes() and process.poll() is None:
                    await trio.sleep(0.02)
                if is_first:
                    task_status.started()
                is_first = False
                while process.poll() is None and not self._is_over:
                    await trio.sleep(0.02)
                if self._is_over and process.poll() is None:
                    process.terminate()
                await trio.to_thread.run_sync(process.wait, LIMIT)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            life.code, life.ended = process.returncode, time.monotonic()
            life.killed = bool(at) and life.code == -signal.SIGKILL
            is_up = b"worker:started" in output.read_bytes()  # where Redis is full, a worker does not start
            if life.code and not life.killed and is_up:
                self.outcome.wrong.append(f"{life.name} ended with {life.code}: {output.read_text()[-500:]}")

    def _start_worker(self, output: Path, at: int, moment: str) -> Process:
        words = (self._app.name, self._server.url, str(self._folder), str(at), moment)
        version = str(1 + len(self._record.lives) % 2)
        command = [
            sys.executable,
            "-m",
            "tests.faults.workflows.application",
            *words,
            version,
            str(self._ttl),
        ]
        with output.open("wb") as log:
            return start_process(command, cwd=Path.cwd(), env=environment(), stdout=log, stderr=log)

    async def _refuse_now_and_then(self) -> None:
        """Let Redis refuse to write, for a moment, again and again."""
        with redis.Redis.from_url(self._server.url) as client:
            for _ in range(self._refusals):
                await trio.sleep(self._rnd.uniform(0.05, 0.6))
                refusal = self._rnd.choice(REFUSALS)
                began = time.monotonic()
                for name, value in refusal.items():
                    client.config_set(name, value)
                await trio.sleep(self._rnd.uniform(0.005, 0.05))
                for name in refusal:
                    client.config_set(name, 0)
                self._record.struck.append(Struck("fill memory", "redis", 0, began, time.monotonic()))

    # ---- runs

    async def _follow_all(self) -> None:
        storyteller = Storyteller(self._tasks)
        limiter = trio.CapacityLimiter(AT_ONCE)

        async def follow(number: int) -> None:
            async with limiter:
                history = RunHistory(storyteller.make(str(self.outcome.seed), number))
                self._histories.append(history)
                await self._follow(history)

        async with trio.open_nursery() as nursery:
            for number in range(1, self.outcome.runs + 1):
                nursery.start_soon(follow, number)

    async def _follow(self, history: RunHistory) -> None:
        """Start a run, do to it what its story says, and wait for its end."""
        story = history.story
        run_id = f"{self._app.name}-{story.number}"
        run = await insist(lambda: story.workflow.astart(id=run_id, **story.options))
        async with trio.open_nursery() as nursery:
            if story.mode == "cancel":
                nursery.start_soon(self._cancel, run, story)
            if story.mode == "hold":
                nursery.start_soon(self._replay, run, story)
            story.found.append(await come_to(run))
            nursery.cancel_scope.cancel()
        quiet = await self._wait_for_quiet(history, run)
        if quiet.status.state is RunState.UNKNOWN:  # what is known of it has expired
            del story.ends[1:]
        if len(story.ends) == 1 or story.found != [FAILED]:
            return
        self._tasks.heal(story.number)
        quiet.ended = time.monotonic()
        try:
            await insist(run.aretry)
        except RunNotRetried as error:
            story.found.append(str(error))
            return
        story.found.append(await come_to(run))
        await self._wait_for_quiet(history, run)

    async def _cancel(self, run: WorkflowRun[Any], story: Story) -> None:
        await trio.sleep(story.pause)
        await insist(run.acancel)

    async def _replay(self, run: WorkflowRun[Any], story: Story) -> None:
        """Heal a run after a while, and replay its dead letters until it has ended."""
        await trio.sleep(story.pause + (2 * SHORT if self._ttl == SHORT else 0))
        self._tasks.heal(story.number)
        while True:
            await insist(lambda: self._app.dlq.areplay(message=f"run {story.number}."))
            await trio.sleep(POLL)

    async def _wait_for_quiet(self, history: RunHistory, run: WorkflowRun[Any]) -> Quiet:
        """Wait until a run has ended and nothing of it is active."""
        deadline = trio.current_time() + LIMIT
        while True:
            status, now = await run.astatus(), time.monotonic()
            is_quiet = status.state is RunState.UNKNOWN or (status.ended is not None and status.active == 0)
            if is_quiet or trio.current_time() > deadline:
                if not is_quiet:
                    self.outcome.wrong.append(f"{history}: not quiet after {LIMIT:g} s: {status}")
                quiet = Quiet(status, now)
                if status.state is not RunState.UNKNOWN:
                    history.quiet.append(quiet)
                return quiet
            await trio.sleep(POLL)

    async def _wait_until_idle(self) -> dict[str, int]:
        """Wait until nothing is left to be done for runs; return what is left all the same."""
        driver = await self._app.connections.get_async_driver()
        deadline = trio.current_time() + LIMIT
        while True:
            left: dict[str, int] = {}
            for queue in QUEUES:
                keys = self._app.queue(queue)
                words = (
                    ("LLEN", keys.run_records),
                    ("XLEN", keys.run_outbox),
                    ("ZCARD", keys.live_runs),
                    ("XLEN", keys.stream),
                )
                counts = await driver.perform_all([Call(one, int, repeatable=True) for one in words])
                left |= {key: count for (_, key), count in zip(words, counts, strict=True) if count}
            if not left or trio.current_time() > deadline:
                return left
            await trio.sleep(POLL)

    # ---- the verdict

    def _judge(self) -> None:
        history = self._folder / "history"
        self._record.runs = runs_of(history.read_text() if history.exists() else "")
        jobs = sort_jobs(self._record.runs)
        for one in self._histories:
            one.jobs = jobs[one.story.number]
        self.outcome.wrong += violations(self._record, self._histories)
        with redis.Redis.from_url(self._server.url) as client:
            self.outcome.wrong += [f"leak: {leak}" for leak in leaks(client)]
        found = [str(history.story.found[-1]) for history in self._histories if history.story.found]
        failed = {state: found.count(state) for state in (FAILED, CANCELLED, EXPIRED)}
        undos = sum(job.label.startswith("undo/") for job in self._record.runs)
        self.outcome.numbers |= {
            "runs": len(found),
            "jobs": len(self._record.runs),
            "undone": undos,
            **failed,
        }


async def insist(action: Callable[[], Awaitable[Any]]) -> Any:
    """Do something until Redis takes it."""
    with trio.fail_after(LIMIT):
        while True:
            with suppress(BrokerError):
                return await action()
            await trio.sleep(0.01)


async def come_to(run: WorkflowRun[Any]) -> Any:
    """Return what a run comes to."""
    try:
        return plain(await run.aget(timeout=LIMIT))
    except WorkflowCancelled:
        return CANCELLED
    except WorkflowExpired:
        return EXPIRED
    except WorkflowFailed:
        return FAILED
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def play(
    seeds: Iterator[int], runs: int, folders: Callable[[int], Path], *, binary: str | None = None
) -> Iterator[Outcome]:
    """Play one episode for each seed, on one server."""
    with EmbeddedServer.start(binary) as server:
        for seed in seeds:
            episode = Episode(seed, runs, folders(seed), server, deaths=6, refusals=8)
            yield trio.run(episode.play)
