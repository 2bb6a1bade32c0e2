"""Stories: a random workflow, what happens to its run, and how it may end. A pure function of a seed."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from celery5 import chain, first, fork, group
from celery5.workflows.compose import Workflow
from celery5.workflows.tree import Chain, Map, StepGroup, TaskCall, Tree
from tests.faults.workflows.application import INNER, QUEUES, TELL, NotedTasks, make_result
from tests.redis.workflows.reference import Reference, RunFails, plain

FAILED, CANCELLED, EXPIRED = "FAILED", "CANCELLED", "EXPIRED"
MODES = (
    "plain",
    "plain",
    "plain",
    "doomed",
    "doomed",
    "cancel",
    "cancel",
    "retry",
    "hold",
    "again",
    "deadline",
    "wait",
    "resume",
    "purge",
)
"""What happens to a run. `again` is retried, fails again, and is undone; `resume` is cancelled, then retried."""
HEALING_MODES = ("retry", "hold", "resume", "purge")
"""Those whose runs fail by what is flaky only, and have nothing to undo."""
LATER = 0.1
"""Part of the calls that have a countdown, and of those that have a key."""
TOLD = 0.4
"""Part of the runs that have an `on_failure` task."""
APPROVAL = 7
"""The value of the signal."""
LONGEST_PAUSE = 0.4
"""Seconds until a run is cancelled, or expires."""
UNDONE = {"book": 0, "charge": 0, "build": 0, "wrap": INNER, "nest": 2 * INNER}
"""The tasks with an undo, or with a step within them that has one: what is added to their label for that."""
STEPS = ("step", "risk", "grow", "book", "charge", "build", "book", "wrap", "nest", "unfold")
HEALING_STEPS = ("step", "firm", "grow", "flaky", "twig", "unfold")
"""The steps of runs that are not undone, and come to their end once they are healed."""


@dataclass
class Story:
    """A run: how it is started under an id, what is done to it, and what is known of it in the end."""

    number: int
    mode: str
    start: Callable[[str], Awaitable[Any]]
    # Each is what the run may come to: at first, and after its retry.
    ends: list[list[Any]]
    # The labels of steps that are undone, of which the first has ended before the second begins.
    order: list[tuple[int, int]]
    pause: float = 0.0
    # Whether it has an `on_failure` task.
    tells: bool = False
    # What it has come to.
    found: list[Any] = field(default_factory=list)


class Storyteller:
    """Makes stories of the tasks of an application."""

    def __init__(self, tasks: NotedTasks) -> None:
        self._tasks = tasks

    def make(self, seed: str, number: int) -> Story:
        """Return the story of the run of that number."""
        rnd = random.Random(f"{seed}/{number}")
        mode = rnd.choice(MODES)
        if mode == "wait":
            return self._make_wait(rnd, number)
        graph = _Graph(self._tasks, rnd, number, mode)
        workflow = graph.make()
        pause = rnd.random() ** 2 * LONGEST_PAUSE
        broken = self._expect(workflow.tree, is_healed=False)
        healed = self._expect(workflow.tree, is_healed=True)
        ends = {
            "cancel": [[healed, CANCELLED]],
            "deadline": [[healed, EXPIRED]],
            "hold": [[healed]],
            "resume": [[healed, CANCELLED], [healed]],
        }.get(mode, [[broken]])
        if mode in ("retry", "again") and broken == FAILED:
            ends.append([healed])
        options: dict[str, Any] = {"on_error": "hold"} if mode in ("hold", "purge") else {}
        if mode == "deadline":
            options["deadline"] = max(0.05, pause)
        tells = mode not in HEALING_MODES and rnd.random() < TOLD
        if tells:
            options["on_failure"] = self._tasks.tasks["tell"].partial(number * 1000 + TELL)

        def start(run_id: str) -> Awaitable[Any]:
            return workflow.astart(id=run_id, **options)

        return Story(number, mode, start, ends, pairs_in_order(workflow.tree), pause, tells)

    def _make_wait(self, rnd: random.Random, number: int) -> Story:
        """Return the story of a declared workflow that waits for a signal."""
        name = rnd.choice(("patient", "patient", "hasty"))
        labels = [number * 1000 + n for n in (1, 2, 3)]

        def start(run_id: str) -> Awaitable[Any]:
            run: Awaitable[Any] = self._tasks.waits[name].options(id=run_id).astart(*labels)
            return run

        # The one that waits for a short time gets no signal.
        end = FAILED if name == "hasty" else make_result(APPROVAL, labels[2])
        mode = "signal" if name == "patient" else "plain"
        return Story(number, mode, start, [[end]], [(labels[0], labels[1])], rnd.random() * LONGEST_PAUSE)

    def _expect(self, tree: Tree, *, is_healed: bool) -> Any:
        try:
            return plain(Reference(self._tasks.make_functions(is_healed=is_healed)).run(tree))
        except RunFails:
            return FAILED


class _Graph:
    """Makes one random workflow."""

    def __init__(self, tasks: NotedTasks, rnd: random.Random, number: int, mode: str) -> None:
        self._tasks = tasks.tasks
        self._rnd = rnd
        self._label = number * 1000
        self._heals = mode in HEALING_MODES
        self._mode = mode

    def make(self) -> Workflow[Any]:
        workflow: Any = self._step(3, is_partial=False)
        if self._mode in ("doomed", "again"):
            doom = self._call("doom", is_partial=False)
            others = self._step(2, is_partial=False)
            workflow = self._rnd.choice(
                (workflow >> doom, workflow >> group(others, doom), group(workflow, others >> doom))
            )
        if self._mode == "again":  # before all that is undone
            workflow = self._call("flaky", is_partial=False) >> workflow
        return workflow  # type: ignore[no-any-return]

    def _next_label(self) -> int:
        self._label += 1
        return self._label

    def _call(self, name: str, *, is_partial: bool) -> Any:
        options: dict[str, Any] = {"queue": self._rnd.choice(QUEUES)}
        if not self._heals and self._mode != "again" and self._rnd.random() < 0.2:
            options["on_error"] = self._rnd.choice(("skip", "continue"))
        if name == "risk" and self._rnd.random() < 0.2:
            options["ignore"] = {"DEAD"}
        label = self._next_label()
        if self._rnd.random() < LATER:
            options["countdown"] = 0.02
        if self._rnd.random() < LATER:
            options["key"] = f"call-{label}"
        task = self._tasks[name].options(**options)
        return task.partial(label) if is_partial else task.s(self._rnd.randrange(100), label)

    def _single(self, *, is_partial: bool) -> Any:
        names = HEALING_STEPS if self._heals else STEPS
        return self._call(self._rnd.choice(names), is_partial=is_partial)

    def _step(self, depth: int, *, is_partial: bool) -> Any:
        rnd = self._rnd
        if depth == 0 or rnd.random() < 0.25:
            return self._single(is_partial=is_partial)
        kind = rnd.choice(("chain", "chain", "chain", "group", "fork", "first", "map", "order"))
        if kind == "chain":
            steps = [self._step(depth - 1, is_partial=is_partial)]
            steps += [self._step(depth - 1, is_partial=True) for _ in range(rnd.randrange(1, 4))]
            return chain(*steps)
        if kind == "order":
            before = self._step(depth - 1, is_partial=is_partial)
            return before >> self._step(depth - 1, is_partial=False)
        if kind == "map":
            return self._map(is_partial=is_partial)
        if kind == "fork" and is_partial:
            return fork(*(self._step(depth - 1, is_partial=True) for _ in range(rnd.randrange(1, 4))))
        if kind == "first" and not is_partial:
            return self._first()
        members = [self._step(depth - 1, is_partial=is_partial) for _ in range(rnd.randrange(1, 4))]
        if self._heals or self._mode == "again":
            return group(*members)
        on_error: Any = rnd.choice((None, None, None, "skip", "continue"))
        return group(*members, on_error=on_error, need=rnd.choice((None, None, 0.5, 1.0)))

    def _first(self) -> Any:
        """Return calls that run against each other: whichever is first, the value is the same."""
        value = self._rnd.randrange(100)
        calls = []
        for _ in range(self._rnd.randrange(1, 4)):
            task = self._tasks["race"].options(queue=self._rnd.choice(QUEUES))
            label = self._next_label()
            calls.append(task.s(value, label + (label % 3 == 0 and self._heals) * 400))
        return first(*calls)

    def _map(self, *, is_partial: bool) -> Any:
        rnd = self._rnd
        name = rnd.choice(("member", "shaky") if self._heals else ("member", "chance"))
        task = self._tasks[name].options(queue=rnd.choice(QUEUES))
        options: dict[str, Any] = {"at_once": rnd.choice((None, 1, 2))}
        if not self._heals and self._mode != "again":
            options |= {
                "need": rnd.choice((None, None, 0.5)),
                "on_error": rnd.choice((None, None, "skip", "continue")),
            }
        if is_partial:
            return chain(self._call("spread", is_partial=True), task.map(**options))
        label = self._next_label()
        return task.map([label * 1000 + n for n in range(rnd.randrange(6))], **options)


def labels_in(tree: Tree) -> set[int]:
    """Return the labels of the calls of a tree that are undone."""
    if isinstance(tree, TaskCall):
        return {tree.args[-1] + UNDONE[tree.task.name]} if tree.task.name in UNDONE else set()
    if isinstance(tree, Map):
        return set()
    parts = tree.steps if isinstance(tree, Chain) else tree.members
    return set().union(*map(labels_in, parts))


def pairs_in_order(tree: Tree) -> list[tuple[int, int]]:
    """Return the labels of calls that are undone, of which the first has ended before the second begins."""
    if isinstance(tree, StepGroup):
        return [pair for member in tree.members for pair in pairs_in_order(member)]
    if not isinstance(tree, Chain):
        return []
    found = [pair for step in tree.steps for pair in pairs_in_order(step)]
    before: set[int] = set()
    for step in tree.steps:
        after = labels_in(step)
        found += [(earlier, other) for earlier in before for other in after]
        before |= after
    return found
