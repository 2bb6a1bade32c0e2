"""Run the workflows of one contestant: its producers and its workers."""

import json
from contextlib import AbstractContextManager
from typing import Any

import children
from measures import PEERS, Failed, Stand


class WorkflowStand(Stand):
    """One contestant at the server that runs workflows."""

    def ask(self, verb: str, *numbers: int) -> list[str]:
        """Return the command line of a verb for this contestant."""
        module = self.contestant.module.replace("_app", "_workflows")
        return [str(self.python), str(PEERS / "ask_workflows.py"), module, verb, *map(str, numbers)]

    def command(
        self, processes: int, concurrency: int, number: int, environment: dict[str, str]
    ) -> list[str]:
        """Return the command line of a worker."""
        return self.ask("worker", processes, concurrency)

    def run_workflows(self, verb: str, first: int, second: int) -> dict[str, Any]:
        """Run a producer of workflows to its end and return its output. Raises Failed."""
        environment = self.environment(True, self.contestant.drain_at, {})
        log = self.folder / "producer.log"
        try:
            out = children.run(self.ask(verb, first, second), environment, log, self.limit)
            output: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        except (RuntimeError, ValueError, IndexError) as error:
            raise Failed(f"{verb}: {error}") from None
        return output

    def with_worker(self) -> AbstractContextManager[list[children.Child]]:
        """Return a context in which one worker process runs at an empty server."""
        self.server.flush()
        return self.workers(1, self.contestant.drain_at, results=True)
