"""Application: tasks that note in a file when they begin and end, and a worker of them that kills itself.

    python -m tests.faults.workflows.application APP URL FOLDER AT MOMENT VERSION

AT and MOMENT are those of `tests.redis.workflows.mortal`. VERSION 2 is a newer release of the code: its dynamic tasks
return other graphs, of the same values.

A label is the number of a run, then that of a call in it, with three digits; a result is a label, then three digits
that depend on the arguments. So each line of the file says which run and which call it is of.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import trio

from celery5 import App, RetryPolicy, current_job, group
from celery5.processes.foreground import ServeOptions, serve
from celery5.services.workflows import run_progress
from celery5.workflows import Flow
from tests.redis.worker.workers import LEASE
from tests.redis.workflows.mortal import die_at
from tests.redis.workflows.reference import digest

QUEUES = ("one", "two", "three")
PAUSES = (0, 0, 0, 0, 0, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Seconds that a job takes; which one, its arguments say."""
RACE = 999
"""The number of each call that runs against others: whichever is first, the value is the same."""
INNER = 300
"""What is added to the label of a dynamic step for the first step of its workflow: no run has so many calls."""
TELL = 998
"""What the label of the `on_failure` call of a run ends with."""
WAITS = {"patient": 600.0, "hasty": 0.2}
"""The declared workflows, and how many seconds each waits for a signal."""
STALE_AFTER = 0.3
"""Seconds, less than a lease: an entry of an outbox is often performed twice."""


def make_result(value: Any, label: int) -> int:
    """Return what a step comes to."""
    return label * 1000 + digest(value, label)


def take_risk(value: Any, label: int) -> int:
    """Return what a step comes to; fail for some arguments."""
    if digest(label, value) % 4 == 0:
        raise ValueError("unlucky")
    return make_result(value, label)


def run_race(value: Any, label: int) -> int:
    """Return the same as each other one of a race; fail for some labels."""
    if label % 3 == 0:
        raise ValueError("stumbled")
    return make_result(value, label // 1000 * 1000 + RACE)


def spread_out(value: Any, label: int) -> list[int]:
    """Return the items of a map, up to four."""
    return [label * 1000 + n for n in range(digest(value, label) % 5)]


def fail_always(value: Any, label: int) -> int:
    """Fail."""
    raise ValueError("doomed")


def make_member(item: int) -> int:
    """Return what a member of a map comes to."""
    return make_result(item, item // 1000)


def risk_member(item: int) -> int:
    """Return what a member of a map comes to; fail for some items."""
    return take_risk(item, item // 1000)


class NotedTasks:
    """The tasks, and their functions for a reference."""

    def __init__(self, app: App, folder: Path, version: int = 1) -> None:
        self.app = app
        self.functions: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self._folder = folder
        self._version = version
        undo = self._declare("undo", lambda result: None)
        for name in ("step", "built", "book", "charge"):
            is_undone = name in ("book", "charge")
            self._declare(name, make_result, undo=undo if is_undone else None, in_thread=name == "charge")
        self._declare("firm", make_result, in_thread=True)
        self._declare("risk", take_risk)
        self._declare("race", run_race)
        self._declare("spread", spread_out)
        self._declare("doom", fail_always)
        self._declare("member", make_member)
        self._declare("chance", risk_member)
        self._declare("flaky", self._heal_first(make_result))
        self._declare("shaky", self._heal_first(make_member))
        self._declare("grow", self._grow("step"), dynamic=True)
        self._declare("build", self._grow("built"), dynamic=True, undo=undo)
        self._declare("wrap", self._lead_to("book", "step"), dynamic=True)
        self._declare("twig", self._lead_to("flaky", "step"), dynamic=True)
        self._declare("nest", self._lead_to("wrap", "step"), dynamic=True)
        self._declare("unfold", self._unfold, dynamic=True)
        self._declare("tell", lambda failures, label: None)
        self.waits = {name: self._declare_wait(name, timeout) for name, timeout in WAITS.items()}

    def heal(self, number: int) -> None:
        """Let what is flaky in a run succeed from now on."""
        (self._folder / f"healed-{number}").touch()

    def make_functions(self, *, is_healed: bool) -> dict[str, Any]:
        """Return the functions of all tasks, for a reference."""

        def fail(*_args: Any) -> int:
            raise ValueError("flaky")

        steps = (make_result, make_member) if is_healed else (fail, fail)
        return self.functions | dict(zip(("flaky", "shaky"), steps, strict=True))

    def _heal_first(self, function: Callable[..., int]) -> Callable[..., int]:
        def run(*args: int) -> int:
            number = number_of(args)
            if not (self._folder / f"healed-{number}").exists():
                raise ValueError(f"run {number}.")
            return function(*args)

        return run

    def _grow(self, last: str) -> Callable[[Any, int], Any]:
        """Return the function of a dynamic task."""

        def grow(value: Any, label: int) -> Any:
            number = digest(value, label)
            if number % 3 == 0:
                return make_result(value, label)
            step, end = self.tasks["step"].options(queue="one"), self.tasks[last].options(queue="two")
            calls = [(label * 1000 + n, label) for n in range(number % 4)]
            if self._version > 1:
                return step.starmap(calls) | end.partial(label)
            return group(step.s(*call) for call in calls) | end.partial(label)

        return grow

    def _lead_to(self, first: str, last: str) -> Callable[[Any, int], Any]:
        """Return the function of a dynamic task that comes to two steps."""

        def lead_to(value: Any, label: int) -> Any:
            before, after = (self.tasks[name].options(queue=QUEUES[label % 3]) for name in (first, last))
            return before.s(digest(value, label), label + INNER) | after.partial(label)

        return lead_to

    def _unfold(self, value: Any, label: int) -> Any:
        """Return a map over what is known only later."""
        spread, member = self.tasks["spread"], self.tasks["member"].options(queue=QUEUES[label % 3])
        return spread.s(digest(value, label), label) | member.map(at_once=2)

    def _declare_wait(self, name: str, timeout: float) -> Any:
        """Declare a workflow that sleeps, and waits for a signal. A newer release has other steps."""
        book, charge, step = (self.tasks[task].options(queue="two") for task in ("book", "charge", "step"))

        @self.app.workflow(name=name)
        def wait(flow: Flow, first: int, second: int, last: int) -> int:
            flow.call(book, 1, first)
            with flow.parallel():
                flow.call(charge, 2, second)
                flow.sleep(0.05)
            answer = flow.wait_for("approval", timeout=timeout)
            result: int = flow.call(step, answer, last)
            return result if self._version == 1 else flow.call(step, result, last)

        return wait

    def _declare(
        self, name: str, function: Callable[..., Any], *, in_thread: bool = False, **options: Any
    ) -> Any:
        """Declare a task that notes what it does."""

        async def wait(value: Any, label: int = 0) -> Any:
            args = (value, label) if label else (value,)
            title = self._begin(name, args)
            try:
                await trio.sleep(pause_of(args))
                result = function(*args)
            except BaseException as error:
                self._note(title, "fail" if isinstance(error, ValueError) else "stop")
                raise
            self._note(title, "end")
            return result

        def block(value: Any, label: int = 0) -> Any:
            title = self._begin(name, (value, label))
            time.sleep(pause_of((value, label)))
            self._note(title, "end")
            return function(value, label)

        self.functions[name] = function
        options.setdefault("queue", "two" if name == "undo" else "one")
        self.tasks[name] = self.app.task(name=name, **options)(block if in_thread else wait)
        return self.tasks[name]

    def _begin(self, name: str, args: tuple[Any, ...]) -> str:
        last = args[-1]
        title = f"{name}/{last // 1000 if len(args) == 1 else last}/{crc32(repr(args).encode())}"
        self._note(title, "begin")
        return title

    def _note(self, title: str, what: str) -> None:
        """Write a line in one piece, as `tests.faults.nemesis.verdict.runs_of` reads it."""
        job = current_job()
        assert job is not None
        line = f"{title} {what} {os.getpid()} {job.attempt} {job.id} {time.monotonic():.6f}\n"
        file = os.open(self._folder / "history", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def number_of(args: tuple[Any, ...]) -> int:
    """Return the number of the run that the arguments of a call are of."""
    label: int = args[-1] if len(args) > 1 else args[0] // 1000
    return label // 1000


def pause_of(args: tuple[Any, ...]) -> float:
    """Return how many seconds a job takes."""
    return PAUSES[crc32(repr(args[-1]).encode()) % len(PAUSES)]


def make_app(name: str, url: str, **settings: Any) -> App:
    """Return an application whose jobs are tried once."""
    return App(
        name,
        broker=url,
        lease=LEASE,
        concurrency=30,
        cpu_slots=8,
        log_level="info",
        max_deliveries=1000,
        unknown_task_grace=0.0,
        retry_policy=RetryPolicy(max_retries=0),
        **settings,
    )


def main(name: str, url: str, folder: str, at: str, moment: str, version: str, ttl: str) -> int:
    """Run a worker. Returns its exit code."""
    run_progress.STALE_AFTER = STALE_AFTER
    if int(at):
        die_at(int(at), moment)
    app = make_app(name, url, results_ttl=float(ttl))
    NotedTasks(app, Path(folder), int(version))
    return serve(app, ServeOptions(queues=QUEUES))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
