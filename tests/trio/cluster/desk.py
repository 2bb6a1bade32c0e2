"""Desk: own boot steps and services, run on virtual time, and what can be seen of them."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.boot_step import check_boot_steps
from celery5.bootsteps.boot import BootGraph, Step
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import RETRY_BOOT_STEP
from celery5.services.commands.dispatcher import CommandRegistry, ImmediateCommands, SelfCommandSender, handle
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.step_status import StepStatus
from tests.redis.worker.workers import Lines

QUICK = RetryPolicy(max_retries=3, backoff=1.0, jitter=False)
Body = Callable[[], Awaitable[object]]


class Stays:
    """A part of celery5's own that notes when it comes and goes."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.notes.append(f"{self.name} up")
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.notes.append(f"{self.name} down")


class Desk:
    """What boots an application's steps beside celery5's own, and what can be seen of it."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.board = StepStatus()
        self.commands = CommandRegistry(handlers=handle(RETRY_BOOT_STEP, self.board.handle_command))
        self.posts: SelfCommandSender = ImmediateCommands(commands=self.commands)
        self.app = App("desk")

    def boot(self, *added: Any, services: tuple[Any, ...] = ()) -> BootGraph:
        """A process that has, of celery5's own, what publishes, what runs jobs and what consumes."""
        own = [
            Step("publishing", Stays("publishing", self.notes)),
            Step("execution", Stays("execution", self.notes), ("publishing",)),
            Step("consumer", Stays("consumer", self.notes), ("execution",)),
        ]
        offered = {"app": self.app, "settings": self.app.settings, "worker": "w1", "inbox": self.posts}
        log = Log(worker="w1", app="desk")
        self.circuits = CircuitBreakers(tasks={}, log=log)
        return BootGraph(
            steps=own,
            added=check_boot_steps(added, services),
            offered=offered,
            step_status=self.board,
            self_commands=self.posts,
            log=log,
            circuit_breakers=self.circuits,
        )

    async def retry(self, step: str) -> object:
        """Perform the command."""
        return await self.commands.perform(RETRY_BOOT_STEP.name, {"step": step})


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def desk(notes: list[str]) -> Desk:
    return Desk(notes)


@pytest.fixture
def lines() -> Iterator[Lines]:
    with Lines() as lines:
        yield lines


def told(lines: Lines, name: str) -> list[dict[str, Any]]:
    """All messages `celery5:<name>` so far."""
    lines._journal._flush()
    return lines.of(name)


def failing(notes: list[str], times: int) -> Callable[[], Awaitable[None]]:
    """A preparation that fails so often, and then does not."""
    tried: list[int] = []

    async def prepare() -> None:
        tried.append(len(tried))
        notes.append(f"try {len(tried)} at {trio.current_time():g}")
        if len(tried) <= times:
            raise ValueError(f"no {len(tried)}")

    return prepare
