"""Episode: many random runs at once, on workers that are killed, and a Redis that refuses to write now and then."""

import random
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
from tests.faults.nemesis.verdict import Record, runs_of
from tests.faults.workflows.application import QUEUES, NotedTasks, make_app
from tests.faults.workflows.crew import Crew, Strikes
from tests.faults.workflows.stories import APPROVAL, CANCELLED, EXPIRED, FAILED, Story, Storyteller
from tests.faults.workflows.verdict import Quiet, RunHistory, sort_jobs, violations
from tests.leaks import leaks
from tests.redis.worker.workers import LEASE
from tests.redis.workflows.reference import plain

AT_ONCE = 40
"""Runs at the same time."""
LIMIT = 600.0
"""Seconds that anything may take: more than a starved machine makes of the few that an episode takes."""
POLL = 0.05
"""Seconds between two looks at a run."""
LONG, SHORT = 900.0, 1.0
"""Seconds that results are kept: more than a run takes, and less."""


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
                *(f"WRONG: {fault}" for fault in self.wrong[:20]),
                *([again] * bool(self.wrong)),
            ]
        )


class Episode:
    """One episode, from its seed to its verdict."""

    def __init__(
        self,
        seed: int,
        runs: int,
        folder: Path,
        server: EmbeddedServer,
        *,
        strikes: Callable[[random.Random], Strikes],
        make_story: Callable[[NotedTasks, int], Story] | None = None,
    ) -> None:
        self.outcome = Outcome(seed, runs)
        self._rnd = random.Random(seed)
        self._folder = folder
        self._server = server
        ttl = self._rnd.choice((LONG, LONG, SHORT))
        self._is_short = ttl == SHORT
        self._app: App = make_app(f"w{seed}-{uuid4().hex[:8]}", server.url, results_ttl=ttl)
        self._tasks = NotedTasks(self._app, folder)
        self._make_story = make_story or (lambda tasks, number: Storyteller(tasks).make(str(seed), number))
        self._record = Record(LEASE)
        self._histories: list[RunHistory] = []
        self._crew = Crew(self._app.name, server, folder, self._record, strikes(self._rnd), ttl=ttl)

    async def play(self) -> Outcome:
        """Play it. Returns what has come of it."""
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._crew.run, self._rnd)
            await self._follow_all()
            self.outcome.wrong += [f"left: {left}" for left in [await self._wait_until_idle()] if left]
            self._crew.stop()
        took = time.monotonic() - began
        self._judge()
        self._app.close()
        self.outcome.numbers |= {
            "seconds": f"{took:.1f}",
            "killed": sum(life.killed for life in self._record.lives),
        }
        return self.outcome

    # ---- runs

    async def _follow_all(self) -> None:
        limiter = trio.CapacityLimiter(AT_ONCE)

        async def follow(number: int) -> None:
            async with limiter:
                history = RunHistory(self._make_story(self._tasks, number))
                self._histories.append(history)
                await self._follow(history)

        async with trio.open_nursery() as nursery:
            for number in range(1, self.outcome.runs + 1):
                nursery.start_soon(follow, number)

    async def _follow(self, history: RunHistory) -> None:
        """Start a run, do to it what its story says, and wait for its end."""
        story = history.story
        run_id = f"{self._app.name}-{story.number}"
        if story.mode == "resume":
            self._tasks.heal(story.number)
        run = await insist(lambda: story.start(run_id))
        async with trio.open_nursery() as nursery:
            if story.mode in ("cancel", "resume"):
                nursery.start_soon(self._cancel, run, story)
            if story.mode == "signal":
                nursery.start_soon(self._signal, run, story)
            if story.mode in ("hold", "purge"):
                nursery.start_soon(self._clear, story)
            story.found.append(await come_to(run))
            nursery.cancel_scope.cancel()
        quiet = await self._wait_for_quiet(history, run)
        if quiet.status.state is RunState.UNKNOWN:  # what is known of it has expired
            del story.ends[1:]
        if story.found[0] not in (FAILED, CANCELLED):
            del story.ends[1:]
        if len(story.ends) == 1:
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

    async def _signal(self, run: WorkflowRun[Any], story: Story) -> None:
        await trio.sleep(story.pause)
        await insist(lambda: run.asignal("approval", APPROVAL, id="once"))

    async def _clear(self, story: Story) -> None:
        """Heal a run after a while, and replay or purge its dead letters until it has ended."""
        await trio.sleep(story.pause + (2 * SHORT if self._is_short else 0))
        if story.mode == "hold":
            self._tasks.heal(story.number)
        clear = self._app.dlq.areplay if story.mode == "hold" else self._app.dlq.apurge
        while True:
            await insist(lambda: clear(message=f"run {story.number}."))
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
                counts = await driver.perform_all([Call(word, int, repeatable=True) for word in words])
                left |= {key: count for (_, key), count in zip(words, counts, strict=True) if count}
            if not left or trio.current_time() > deadline:
                return left
            await trio.sleep(POLL)

    # ---- the verdict

    def _judge(self) -> None:
        history = self._folder / "history"
        self._record.runs = runs_of(history.read_text() if history.exists() else "")
        jobs = sort_jobs(self._record.runs)
        for job_history in self._histories:
            job_history.jobs = jobs[job_history.story.number]
        self.outcome.wrong += self._crew.wrong + violations(self._record, self._histories)
        with redis.Redis.from_url(self._server.url) as client:
            self.outcome.wrong += [f"leak: {leak}" for leak in leaks(client) if self._app.name in leak]
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
            episode = Episode(seed, runs, folders(seed), server, strikes=draw_strikes)
            yield trio.run(episode.play)


def draw_strikes(rnd: random.Random) -> Strikes:
    """Return what strikes in an episode that is played by hand."""
    return Strikes.draw(rnd, deaths=6, refusals=8, partitions=rnd.choice((0, 0, 0, 2)))
