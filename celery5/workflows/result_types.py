"""The types of the results of workflows, as far as the annotations of their tasks say them."""

from typing import Any

import msgspec
from msgspec import Raw

from celery5.errors import BadResult
from celery5.workflows.nesting import walk_deeply
from celery5.workflows.tree import Chain, Map, StepGroup, TaskCall, Tree

_LIST = msgspec.json.Decoder(list[Raw])


class RunResultType:
    """Decodes the result of a run; without a tree as plain JSON."""

    def __init__(self, tree: Tree | None = None, task: Any = None) -> None:
        self._tree = tree
        # The task whose annotation says the type, in place of a tree.
        self._task = task

    def decode(self, raw: bytes) -> Any:
        """Return a result. Raises BadResult when it does not fit the annotations."""
        return walk_deeply(lambda: self._decode(raw))

    def decode_item(self, raw: bytes) -> Any:
        """Return one result of a map with which the workflow ends. Raises BadResult."""
        tree = self._tree
        while isinstance(tree, Chain):
            tree = tree.steps[-1]
        if not isinstance(tree, Map) or _gives_outcomes(tree):
            return msgspec.json.decode(raw)
        return tree.task.result_type.decode(raw)

    def _decode(self, raw: bytes) -> Any:
        if bytes(raw) == b"null":
            return None  # its last step was skipped, say, whatever the annotation
        if self._task is not None:
            return self._task.result_type.decode(raw)
        if self._tree is None:
            return msgspec.json.decode(raw)
        return _decode(self._tree, raw)


def _decode(tree: Tree, raw: bytes | Raw) -> Any:
    while isinstance(tree, Chain):
        tree = tree.steps[-1]
    if isinstance(tree, TaskCall):
        return _decode_call(tree, raw)
    if bytes(raw) == b"null":
        return None  # it was skipped
    if isinstance(tree, StepGroup) and tree.options.first:
        return msgspec.json.decode(raw)  # nobody knows whose value it is
    if isinstance(tree, Map) and _gives_outcomes(tree):
        return msgspec.json.decode(raw)  # a list of Outcomes, or one for the whole map
    try:
        items = _LIST.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadResult(f"its result is no list: {error}") from None
    if isinstance(tree, Map):
        return [tree.task.result_type.decode(item) for item in items]
    group: StepGroup = tree
    if len(items) != len(group.members) or group.options.on_error == "continue":
        return msgspec.json.decode(raw)
    values = [_decode(member, item) for member, item in zip(group.members, items, strict=True)]
    return tuple(values) if group.options.independent else values


def _gives_outcomes(tree: Map) -> bool:
    return tree.options.on_error == "continue" or tree.task.send_options.on_error == "continue"


def _decode_call(call: TaskCall, raw: bytes | Raw) -> Any:
    options = call.task.send_options
    if options.dynamic or options.on_error == "continue":
        return msgspec.json.decode(raw)
    if bytes(raw) == b"null" and (options.ignore or options.on_error == "skip"):
        return None
    return call.task.result_type.decode(raw)
