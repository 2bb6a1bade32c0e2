"""A reference interpreter of workflows, in plain Python: what a run must come to.

It follows the guide, not the code of the runtime: it walks the tree of calls and computes values directly.
"""

import json
import math
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from celery5.workflows.compose import Composed
from celery5.workflows.tree import Chain, Map, StepGroup, TaskCall, Tree


class RunFails(Exception):
    """The whole run fails."""


def plain(value: Any) -> Any:
    """Return a value without what differs from run to run: errors."""
    if isinstance(value, dict):
        kept = {"state": value["state"]}
        return kept | {"value": plain(value["value"])} if value.get("state") == "SUCCESS" else kept
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def digest(*args: Any) -> int:
    """Return a number that depends on all arguments, and on their order."""
    return crc32(json.dumps(plain(list(args)), sort_keys=True).encode()) % 997


@dataclass(frozen=True)
class Left:
    """What has no value: it failed or was skipped, and the run goes on."""


LEFT = Left()


@dataclass(frozen=True)
class Context:
    """What holds for a part of a tree."""

    on_error: str = "fail"
    is_counted: bool = False
    is_apart: bool = False


class Reference:
    """Interprets one tree."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self.has_failed_branch = False

    def run(self, tree: Tree, on_error: str = "fail") -> Any:
        """Return the value of a run. Raises RunFails."""
        value = self._walk(tree, None, False, Context(on_error))
        if self.has_failed_branch:
            raise RunFails
        return None if value is LEFT else value

    def _walk(self, tree: Tree, value: Any, is_left: bool, context: Context) -> Any:
        """Return the value of a part; `is_left` when what it depends on has none, and so it is skipped."""
        if isinstance(tree, Chain):
            current = self._walk(tree.steps[0], value, is_left, context)
            left = is_left or current is LEFT
            for how, step in zip(tree.links, tree.steps[1:], strict=True):
                current = self._walk(step, current if how == "pass" else None, left, context)
                left = left or current is LEFT
            return current
        if is_left:
            return LEFT
        if isinstance(tree, TaskCall):
            args = (value, *tree.args) if tree.is_partial else tree.args
            return self._call(tree.task, args, None, context)
        if isinstance(tree, Map):
            return self._map(tree, value, context)
        return self._group(tree, value, context)

    def _policy(self, own: str | None, context: Context) -> str:
        if own is not None:
            return own
        if context.is_counted:
            return "count"
        if context.on_error != "fail":
            return context.on_error
        return "apart" if context.is_apart else "fail"

    def _call(self, task: Any, args: tuple[Any, ...], own: str | None, context: Context) -> Any:
        policy = self._policy(own or task.send_options.on_error, context)
        try:
            result = self._functions[task.name](*args)
            if isinstance(result, Composed):
                result = Reference(self._functions).run(result.tree)
        except (ValueError, RunFails):
            if "DEAD" not in (task.send_options.ignore or ()):
                return self._fail(policy)
            result = None
        return {"state": "SUCCESS", "value": result} if policy == "continue" else result

    def _fail(self, policy: str) -> Any:
        if policy == "continue":
            return {"state": "DEAD"}
        if policy == "fail":
            raise RunFails
        if policy == "apart":
            self.has_failed_branch = True
        return LEFT

    def _map(self, tree: Map, value: Any, context: Context) -> Any:
        policy = self._policy(tree.options.on_error or tree.task.send_options.on_error, context)
        source: Any = tree.items if tree.items is not None else value
        if tree.items is None and not isinstance(source, list):  # the job that reads its items fails
            return self._fail(policy)
        items = list(source)
        results: list[Any] = []
        bad = 0
        size = tree.chunk or 1
        jobs = [items[n : n + size] for n in range(0, len(items), size)]
        function = self._functions[tree.task.name]
        for job in jobs:
            try:
                made = [function(*item) if tree.star else function(item) for item in job]
                if policy == "continue":
                    results.append({"state": "SUCCESS", "value": made if tree.chunk else made[0]})
                else:
                    results += made
            except ValueError:
                if policy == "continue":
                    results.append({"state": "DEAD"})
                else:
                    bad += 1
        need = len(jobs) if tree.options.need is None else math.ceil(tree.options.need * len(jobs) - 1e-9)
        if len(jobs) - bad >= need or (bad and policy == "skip" and tree.options.need is None):
            return results
        return self._fail(policy)

    def _group(self, tree: StepGroup, value: Any, context: Context) -> Any:
        options = tree.options
        is_counted = options.need is not None or options.first
        if is_counted:
            inner = Context("fail", True, options.independent or context.is_apart)
        else:
            inner = Context(
                options.on_error or context.on_error,
                context.is_counted if options.on_error is None else False,
                options.independent or context.is_apart,
            )
        values = [self._walk(member, value, False, inner) for member in tree.members]
        present = [item for item in values if item is not LEFT]
        policy = self._policy(options.on_error, context)
        if options.first:
            if not present and self._fail(policy) is LEFT:
                return LEFT
            return present[0] if present else None
        if is_counted:
            need = math.ceil((options.need or 0) * len(values) - 1e-9)
            if len(present) < need and self._fail(policy) is LEFT:
                return LEFT
            return present
        if any(self._may_skip(member, inner) for member in tree.members):
            return present
        return present if len(present) == len(values) else LEFT

    def _may_skip(self, tree: Tree, context: Context) -> bool:
        """Return whether a part of the tree skips what fails: then a group goes on without it."""
        if isinstance(tree, TaskCall):
            return self._policy(tree.task.send_options.on_error, context) == "skip"
        if isinstance(tree, Map):
            own = tree.options.on_error or tree.task.send_options.on_error
            return self._policy(own, context) == "skip"
        if isinstance(tree, Chain):
            return any(self._may_skip(step, context) for step in tree.steps)
        options = tree.options
        is_counted = options.need is not None or options.first
        inner = Context(
            "fail" if is_counted else options.on_error or context.on_error,
            is_counted or (context.is_counted and options.on_error is None),
        )
        own_gate = is_counted and self._policy(options.on_error, context) == "skip"
        return own_gate or any(self._may_skip(member, inner) for member in tree.members)
