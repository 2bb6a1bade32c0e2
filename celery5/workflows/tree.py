"""The values that a workflow is composed of: calls, chains, groups and maps, nested in each other.

They are plain values: `compose.py` makes them, `compiler.py` makes a flat plan of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from celery5.protocol.workflows.plan import OnError
from celery5.similar_names import count_rest

Link = Literal["pass", "order"]
"""How a step follows another: it gets the value, or it only comes after it."""


class TaskCall(msgspec.Struct, frozen=True):
    """One call of a task."""

    task: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # It lacks its first argument, which is the value of the step before it.
    is_partial: bool = False


class Chain(msgspec.Struct, frozen=True):
    """Steps one after another: `links[n]` is between `steps[n]` and `steps[n + 1]`."""

    steps: tuple["Tree", ...]
    links: tuple[Link, ...]


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a group or a map ends."""

    on_error: OnError | None = None
    # The fraction of the members that must succeed; None: all, by their policy.
    need: float | None = None
    # Its value is that of the first member that succeeds.
    first: bool = False
    # Failures of one member do not stop the others.
    independent: bool = False


class StepGroup(msgspec.Struct, frozen=True):
    """Steps beside each other; the value is the list of their values."""

    members: tuple["Tree", ...]
    options: GroupOptions = msgspec.field(default_factory=GroupOptions)


class Map(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a task for each item; the value is the list of their values.

    `items` is read once, when the run is started; None: the items are the value of the step before it.
    """

    task: Any
    items: Iterable[Any] | None
    # Each item has all the arguments of a call.
    star: bool = False
    # How many items are in one job; None: each has its own job.
    chunk: int | None = None
    # How many jobs are on the queue at once; None: as many as the runtime likes.
    at_once: int | None = None
    options: GroupOptions = msgspec.field(default_factory=GroupOptions)


Tree: TypeAlias = TaskCall | Chain | StepGroup | Map


def link(before: Tree, after: Tree, how: Link) -> Chain:
    """Return a chain of two trees. Chains are flattened, so that a long one is not nested deeply."""
    first = before if isinstance(before, Chain) else Chain((before,), ())
    second = after if isinstance(after, Chain) else Chain((after,), ())
    return Chain((*first.steps, *second.steps), (*first.links, how, *second.links))


def join_chain(steps: Sequence[Tree]) -> Tree:
    """Return a chain in which each step gets the value of the one before it. One step is returned as it is."""
    flat_steps: list[Tree] = []
    links: list[Link] = []
    for step in steps:
        if flat_steps:
            links.append("pass")
        if isinstance(step, Chain):
            flat_steps += step.steps
            links += step.links
        else:
            flat_steps.append(step)
    return flat_steps[0] if len(flat_steps) == 1 else Chain(tuple(flat_steps), tuple(links))


def describe(tree: Tree) -> str:
    """Return a tree on one line, as code would write it; a long one is shortened."""
    text = _describe(tree, 0)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _describe(tree: Tree, depth: int) -> str:
    if depth > 5:
        return "..."
    match tree:
        case TaskCall(task, args, kwargs):
            named = [f"{name}={value!r}" for name, value in kwargs.items()]
            return f"{task.name}({', '.join([*map(repr, args), *named])})"
        case Chain(steps, links):
            words = [_describe(steps[0], depth + 1)]
            for how, step in zip(links[:20], steps[1:21], strict=True):
                words += ["|" if how == "pass" else ">>", _describe(step, depth + 1)]
            return " ".join(words) + count_rest(len(steps) - 21)
        case StepGroup(members, options):
            name = "first" if options.first else "fork" if options.independent else "group"
            words = [_describe(member, depth + 1) for member in members[:20]]
            return f"{name}({', '.join(words)}{count_rest(len(members) - 20)})"
        case Map():
            return f"{tree.task.name}.{'starmap' if tree.star else 'map'}(...)"


def get_first_call(tree: Tree) -> TaskCall | Map | None:
    """Return the call or map with which a tree begins; None for an empty group."""
    stack: list[Tree] = [tree]
    while stack:
        current = stack.pop()
        if isinstance(current, (TaskCall, Map)):
            return current
        inner = current.steps if isinstance(current, Chain) else current.members
        stack += reversed(inner)
    return None


def takes_input(tree: Tree) -> bool:
    """Return whether a tree lacks the value of a step before it."""
    stack: list[Tree] = [tree]
    while stack:
        current = stack.pop()
        if isinstance(current, TaskCall):
            if current.is_partial:
                return True
        elif isinstance(current, Map):
            if current.items is None:
                return True
        elif isinstance(current, Chain):
            stack.append(current.steps[0])
        else:
            stack += current.members
    return False
