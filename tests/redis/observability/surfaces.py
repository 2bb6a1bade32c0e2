"""Everything that shows an application, read at one time: pages, JSON API, commands, metrics, alerts."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from celery5 import App
from tests.redis.dashboard.client import looking_at
from tests.redis.health.test_probes import numbers
from tests.story.cli.commands import celery5

TARGET = "tests.redis.observability.surfaces_app"
ROOT = Path(__file__).parents[3]


@dataclass
class Surfaces:
    """The application as all surfaces show it. What a surface did not show is missing.

    Attributes:
        port: The status port of one of its processes; 0 where there is none.
    """

    app: App
    port: int = 0
    # What was read, so that each surface is asked once, however many facts it is asked for.
    _read: dict[tuple[str, ...], Any] = field(default_factory=dict[tuple[str, ...], Any])

    async def _once(self, key: tuple[str, ...], read: Callable[[], Awaitable[Any]]) -> Any:
        if key not in self._read:
            self._read[key] = await read()
        return self._read[key]

    def look_again(self) -> "Surfaces":
        """Return the same, with nothing read."""
        return Surfaces(self.app, self.port)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands on the application."""
        return {"CELERY5_BROKER": self.app.settings.broker, "HISTORY_APP": self.app.name, "COLUMNS": "250"}

    async def run(self, *words: object) -> str:
        """What a command prints. It ends with 0."""
        run = partial(
            celery5, "-A", TARGET, *words, cwd=ROOT,
            env=self.environment,
        )  # fmt: skip

        async def end() -> str:
            ended = await trio.to_thread.run_sync(run)
            assert (ended.code, ended.err) == (0, ""), ended
            return ended.out

        return str(await self._once(("run", *map(str, words)), end))

    async def run_json(self, *words: object) -> Any:
        """What a command prints for programs."""
        return json.loads(await self.run(*words, "--json"))

    async def ask(self, operation: str, **parameters: Any) -> Any:
        """What the JSON API answers."""

        async def ask() -> Any:
            async with looking_at(self.app) as client:
                return await client.ask(operation, **parameters)

        return await self._once(("ask", operation, repr(parameters)), ask)

    async def look(self, path: str) -> str:
        """What a reader sees of a page, in one line."""

        async def look() -> str:
            async with looking_at(self.app) as client:
                return await client.look(path)

        return str(await self._once(("look", path), look))

    async def measure(self, path: str = "/metrics") -> dict[str, float]:
        """The metrics of a process; `/metrics/cluster`: those of the cluster."""
        return await trio.to_thread.run_sync(numbers, self.port, path)


def find_queue(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The one row of a queue, in whatever a surface calls its name."""
    (row,) = (row for row in rows if name in (row.get("queue"), row.get("name")))
    return row


def find_row(text: str, name: str) -> list[str]:
    """The cells of the one line of a table that begins with this name."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"\s{2,}", line.strip())


async def get(answer: Awaitable[Any], pick: Callable[[Any], Any]) -> Any:
    """What is picked of an answer."""
    return pick(await answer)
