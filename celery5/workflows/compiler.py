"""Compile a workflow to a plan: a flat table of nodes, each with the template of its message. Pure."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from celery5.errors import Misconfigured
from celery5.limits.declaration import LimitDeclaration
from celery5.protocol.counts import format_count
from celery5.protocol.job.arguments import Parameters
from celery5.protocol.job.job import Options, SharedFields, check_not_by_key, to_seconds
from celery5.protocol.job.messages import VERSION, Command, encode, format_lock
from celery5.protocol.shards import name_shard
from celery5.protocol.workflows.plan import (
    MAX_FEEDS,
    MAX_INLINE,
    Elsewhere,
    Expression,
    Fields,
    First,
    Gated,
    Items,
    Known,
    Node,
    NodeKind,
    OnError,
    Plan,
    Ref,
    Template,
    decode_expression,
    encode_expression,
    find_refs,
)
from celery5.workflows.nesting import walk_deeply
from celery5.workflows.on_failure import check_takes_failures, read_on_failure, refuse_dynamic
from celery5.workflows.tree import Chain, Map, StepGroup, TaskCall, Tree

_ITEM = b"\x01item\x01"
"""Stands for the item of a map in a message that is made to a template."""
_VALUE = b"\x01%d\x01"
_ID = "\x02"
_ARGUMENT = b"\x06%b\x07"
_MARKS = re.compile(rb"(\x01[^\x01]*\x01|\x06[^\x07]*\x07|[\x03\x04\x05])")
RESOLVE, EXPAND, CHUNK = "arguments", "map", "chunk"
"""What `flow` in a message says: the worker reads the arguments; maps over them; has many items in one job."""
_MOST_BETWEEN = 40
"""Arguments with at most this many characters between them are kept as one text: so most calls have one."""


class NodeTask(Protocol):
    """A task, as far as a plan needs it."""

    name: str
    parameters: Parameters
    send_options: Options
    limits: LimitDeclaration | None

    @property
    def queue(self) -> str:
        """The queue of its jobs."""
        ...

    def get_shared_fields(self) -> SharedFields:
        """Return the fields that all its messages share."""
        ...


class Placeholder(msgspec.Struct, frozen=True):
    """An argument that is known when the run is under way."""

    expression: Expression
    # The nodes that it is made of are among those that come before anyway.
    is_before: bool = False


class MapSource(msgspec.Struct, frozen=True):
    """The items of a map, and how they become texts."""

    node: int
    map: Map
    # Whether each text has the fields of the keys of a limit beside the arguments.
    is_keyed: bool

    @property
    def is_repeatable(self) -> bool:
        """Whether the items can be read again. A generator makes them once."""
        return not isinstance(self.map.items, Iterator)


class Compiled(msgspec.Struct, frozen=True):
    """A plan, and what its runs begin with: the items of maps, and the arguments that are not in the plan."""

    plan: Plan
    sources: tuple[MapSource, ...]
    arguments: tuple[bytes, ...] = ()


class _Context(msgspec.Struct, frozen=True):
    """What holds for all nodes of a part of a tree."""

    on_error: str | None = None
    # It is in a group that counts its failures.
    is_counted: bool = False
    is_apart: bool = False

    def policy_of(self, own: OnError | None) -> str:
        if own is not None:
            return own
        if self.is_counted:
            return "count"
        if self.on_error is not None:
            return self.on_error
        return "apart" if self.is_apart else "fail"


class _Part(msgspec.Struct, frozen=True):
    """A compiled part of a tree: its value, and the nodes with which it ends."""

    value: Expression
    ends: tuple[int, ...]


class Compiler:
    """Builds one plan.

    Args:
        has_constants: What its steps get is in the code of a declared workflow, so the same in all runs, and stands
            in the plan. Else it is kept with the run.
    """

    def __init__(
        self,
        *,
        on_error: OnError | None = None,
        home: str | None = None,
        check_event: Callable[[Any, Mapping[str, Any]], str] | None = None,
        has_constants: bool = False,
        on_failure: Any = None,
        shard: int = 0,
    ) -> None:
        self._check_event = check_event
        self._shard = shard
        self._on_failure = on_failure
        self.nodes: list[Node] = []
        self._sources: list[MapSource] = []
        self._has_constants = has_constants
        self._arguments: list[bytes] = []
        self._inputs: dict[str, int] = {}
        self._context = _Context(on_error)
        self._home = home

    @property
    def default_policy(self) -> str:
        """What becomes of the run when a node fails that does not say it."""
        return self._context.policy_of(None)

    def use_home(self, home: str) -> None:
        """Set the queue where runs live."""
        self._home = home

    def check_event(self, event: Any, where: Mapping[str, Any]) -> str:
        """Return the name of an event that a step waits for. Raises Misconfigured."""
        if self._check_event is None:
            raise Misconfigured("only a declared workflow waits for events")
        return self._check_event(event, where)

    def add_input(self, name: str) -> Ref:
        """Add an argument of the run."""
        self._inputs[name] = len(self.nodes)
        self.nodes.append(Node(kind="input", task=name, hidden=True))
        return Ref(self._inputs[name])

    def add_tree(
        self,
        tree: Tree,
        value: Expression | None = None,
        after: Sequence[int] = (),
        *,
        context: _Context | None = None,
    ) -> _Part:
        """Add a tree. `value` is what the step before it passes, `after` the nodes that must have ended."""
        context = context or self._context
        match tree:
            case TaskCall():
                return self._add_call(tree, value, after, context)
            case Chain():
                return self._add_chain(tree, value, after, context)
            case StepGroup():
                return self._add_group(tree, value, after, context)
            case Map():
                return self._add_map(tree, value, after, context)

    def add_node(self, node: Node, after: Iterable[int]) -> int:
        """Add a node that begins when those of `after` have ended."""
        number = len(self.nodes)
        before = [other for other in dict.fromkeys(after) if self.nodes[other].kind != "input"]
        node.needs = len(before)
        self.nodes.append(node)
        for other in before:
            self.nodes[other].feeds.append(number)
        return number

    def finish(self, value: Expression) -> Compiled:
        """Return the plan; `value` is its result."""
        size = sum(not node.hidden for node in self.nodes)
        sinks = [
            n
            for n, node in enumerate(self.nodes)
            if not node.feeds and node.kind != "input" and not self._is_undo(n)
        ]
        end = Node(kind="end", hidden=True)
        if self._is_inline([value]) and (isinstance(value, Ref) or not self._may_skip()):
            end.template = _render(value)
        end.arguments = {"value": encode_expression(value)}
        number = self.add_node(end, sinks)
        self._limit_feeds()
        roots = [
            n
            for n, node in enumerate(self.nodes)
            if not node.needs and node.kind != "input" and not self._is_undo(n)
        ]
        roots = self._make_relays(roots)
        waits = tuple(
            n for n, node in enumerate(self.nodes) if node.where is not None and self._is_known(node)
        )
        if len(waits) > 100:
            raise Misconfigured(
                f"this workflow waits for {format_count(len(waits), 'event')} from its start: 100 at most"
            )
        on_failure = self._add_on_failure(self._on_failure)
        home = self._home or self._choose_home()
        for node in self.nodes:
            self._place(node, home)
            self._move_arguments(node)
        maps = tuple(n for n, node in enumerate(self.nodes) if node.kind == "map")
        if len(maps) > 500:
            raise Misconfigured(f"this workflow has {len(maps)} maps: 500 at most; make one map of them")
        plan = Plan(
            nodes=tuple(node.encode() for node in self.nodes),
            home=home,
            roots=tuple(roots),
            maps=maps,
            size=size - len(self._sources),
            end=number,
            inputs=self._inputs,
            waits=waits,
            has_undo=any(node.undo is not None for node in self.nodes),
            on_failure=on_failure,
        )
        return Compiled(plan, tuple(self._sources), tuple(self._arguments))

    def _may_skip(self) -> bool:
        """Return whether a node may have no value at the end of a run that succeeds."""
        return any(node.on_error in ("skip", "count", "apart") for node in self.nodes)

    def _is_known(self, node: Node) -> bool:
        """Return whether what a wait compares is known when a run begins; then an early event is kept."""
        fields = (node.where or {}).get("fields", {})
        refs = [ref for plain in fields.values() for ref in find_refs(decode_expression(plain))]
        return all(self.nodes[ref.node].kind == "input" for ref in refs)

    def _is_undo(self, number: int) -> bool:
        return self.nodes[number].kind == "job" and self.nodes[number].hidden

    # the parts of a tree

    def _add_call(
        self, call: TaskCall, value: Expression | None, after: Sequence[int], context: _Context
    ) -> _Part:
        args = call.args
        if call.is_partial:
            if value is None:
                raise Misconfigured(f"{call.task.name}(...) lacks its first argument: nothing is before it")
            args = (Placeholder(value, is_before=True), *args)
        number = self.add_call(call.task, args, call.kwargs, after, context=context)
        return _Part(Ref(number), (number,))

    def add_call(
        self,
        task: NodeTask,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        after: Sequence[int] = (),
        *,
        context: _Context | None = None,
    ) -> int:
        """Add a job, whose arguments may be placeholders. Returns its number."""
        node = self._make_node("job", task, context or self._context)
        node.dynamic = bool(task.send_options.dynamic)
        raw_args, raw_kwargs = task.parameters.encode_values(args, kwargs, _is_placeholder)
        arguments = [_expression(value, raw) for value, raw in zip(args, raw_args, strict=True)]
        named = {name: _expression(value, raw_kwargs[name]) for name, value in kwargs.items()}
        later = [value for value in (*args, *kwargs.values()) if isinstance(value, Placeholder)]
        needed = [ref.node for value in later if not value.is_before for ref in find_refs(value.expression)]
        keys = ("", "")
        if task.limits is not None and not later:
            keys = task.limits.make_keys(tuple(args), dict(kwargs))
        self._set_message(node, task, arguments, named, keys)
        number = self.add_node(node, (*after, *needed))
        self._add_undo(number, task)
        self._add_step_on_failure(number, task)
        return number

    def _add_undo(self, number: int, task: NodeTask) -> None:
        undo: Any = task.send_options.undo
        if undo is None:
            return
        node = self._make_hidden_job("undo", undo, number)
        # With "continue" what depends on the node gets an Outcome: its undo gets the result all the same.
        path = ("value",) if self.nodes[number].on_error == "continue" else ()
        self._set_message(node, undo, [Ref(number, path)], {}, ("", ""))
        self.nodes[number].undo = len(self.nodes)
        self.nodes.append(node)
        self._add_step_on_failure(len(self.nodes) - 1, undo)

    def _make_hidden_job(self, name: str, task: NodeTask, of: int | None) -> Node:
        """Return a job that is no step of the run: `undo`, or `on_failure`. Its run does not stop it."""
        refuse_dynamic(name, task)
        node = self._make_node("job", task, _Context("fail"))
        node.name, node.hidden, node.of = name, True, of
        return node

    def _add_step_on_failure(self, number: int, task: NodeTask) -> None:
        """Add the `on_failure` job of a step, if it has one."""
        step = self.nodes[number]
        step.on_failure = self._add_on_failure(task.send_options.on_failure, of=number)

    def _add_on_failure(self, target: Any, *, of: int | None = None) -> int | None:
        """Add an `on_failure` job: of the step `of`, or of the run. Returns its number; None for no job."""
        if target is None:
            return None
        call = read_on_failure(target)
        task: NodeTask = call.task
        node = self._make_hidden_job("on_failure", task, of)
        number = len(self.nodes)
        self.nodes.append(node)
        args = (Placeholder(Ref(number), is_before=True), *call.args) if call.is_partial else call.args
        raw_args, raw_kwargs = task.parameters.encode_values(args, call.kwargs, _is_placeholder)
        arguments = [_expression(value, raw) for value, raw in zip(args, raw_args, strict=True)]
        named = {name: _expression(value, raw_kwargs[name]) for name, value in call.kwargs.items()}
        check_takes_failures(
            task,
            [value.raw if isinstance(value, Known) else None for value in arguments],
            {name: value.raw for name, value in named.items() if isinstance(value, Known)},
        )
        self._set_message(node, task, arguments, named, ("", ""))
        return number

    def _add_chain(
        self, chain: Chain, value: Expression | None, after: Sequence[int], context: _Context
    ) -> _Part:
        part = self.add_tree(chain.steps[0], value, after, context=context)
        for how, step in zip(chain.links, chain.steps[1:], strict=True):
            ends = part.ends or tuple(after)
            part = self.add_tree(step, part.value if how == "pass" else None, ends, context=context)
            part = part if part.ends else _Part(part.value, ends)
        return part

    def _add_group(
        self, group: StepGroup, value: Expression | None, after: Sequence[int], context: _Context
    ) -> _Part:
        options = group.options
        is_counted = options.need is not None or options.first
        inner = _Context(
            options.on_error if not is_counted else None,
            is_counted,
            options.independent or context.is_apart,
        )
        if options.on_error is None and not is_counted:
            inner = msgspec.structs.replace(context, is_apart=inner.is_apart)
        entry: int | None = None
        if after and group.members:
            entry = self.add_node(Node(kind="relay", task="group", hidden=True), after)
            after = (entry,)
        start = len(self.nodes)
        parts = [self.add_tree(member, value, after, context=inner) for member in group.members]
        ends = tuple(end for part in parts for end in part.ends)
        skips = any(node.on_error == "skip" for node in self.nodes[start:])
        if not parts or not (is_counted or skips):
            return _Part(Items(tuple(part.value for part in parts)), ends)
        # One end for each member: a member that is a group itself ends at its own gate.
        parts = [self._join(part) for part in parts]
        values = tuple(part.value for part in parts)
        gate = Node(kind="gate", task="first" if options.first else "group", hidden=True, entry=entry)
        gate.on_error = context.policy_of(options.on_error)
        if options.first:
            gate.first, gate.scope, gate.need = True, (start, len(self.nodes)), 1
        else:
            gate.need = 0 if options.need is None else math.ceil(options.need * len(parts) - 1e-9)
        number = self.add_node(gate, [part.ends[0] for part in parts])
        return _Part(
            Gated(number, First(values) if options.first else Items(values, is_partial=True)), (number,)
        )

    def _join(self, part: _Part) -> _Part:
        """Return a part that ends with one node."""
        if len(part.ends) == 1:
            return part
        gate = Node(kind="gate", task="group", hidden=True, on_error="count", need=len(part.ends))
        number = self.add_node(gate, part.ends)
        return _Part(Gated(number, part.value), (number,))

    def _add_map(
        self, mapped: Map, value: Expression | None, after: Sequence[int], context: _Context
    ) -> _Part:
        node = self._make_map_node(mapped, context.policy_of(_get_own_policy(mapped)))
        if mapped.items is not None:
            self._sources.append(MapSource(len(self.nodes), mapped, node.is_keyed))
        elif value is None:
            raise Misconfigured(f"{mapped.task.name}.map() lacks its items: nothing is before it")
        else:
            node.arguments = {"args": [encode_expression(value)], "kwargs": {}}
            fields = self._make_fields(mapped.task)
            node.expansion = _split(_encode_message(mapped.task, fields, b"", b"{}", EXPAND, ("", "")))
        number = self.add_node(node, after)
        self._add_step_on_failure(number, mapped.task)
        return _Part(Ref(number), (number,))

    def _make_map_node(self, mapped: Map, on_error: str) -> Node:
        task: NodeTask = mapped.task
        if task.send_options.undo is not None:
            raise Misconfigured(
                f"task {task.name}: the members of a map are not undone: map {task.name}.options(undo=None), "
                "and undo what they did in its own step"
            )
        if task.send_options.dynamic:
            raise Misconfigured(
                f"task {task.name} is dynamic, and cannot be mapped: a member of a map has one value, and no workflow "
                "takes its place; let one dynamic task return a group of what the members would return"
            )
        node = self._make_node("map", task, _Context(on_error))
        node.on_error = on_error
        if mapped.options.need is not None:
            node.need = mapped.options.need
        node.window, node.chunk = mapped.at_once, mapped.chunk
        limits = task.limits
        is_keyed = limits is not None and limits.is_keyed
        fields = self._make_fields(task)
        flow = CHUNK if mapped.chunk else ""
        template = _split(_encode_message(task, fields, _ITEM, b"{}", flow, ("", "")))
        if is_keyed:
            template = _widen_item(template)
        node.template, node.is_keyed, node.star = template, is_keyed, mapped.star
        return node

    # the messages of nodes

    def _make_node(self, kind: NodeKind, task: NodeTask, context: _Context) -> Node:
        options = task.send_options
        fields = task.get_shared_fields()
        check_not_by_key(task.name, fields, "a step of a workflow")
        if options.key is not None and fields.shards > 1:
            raise Misconfigured(
                f"task {task.name}: a step of a workflow on the shards of queue {fields.queue!r} has no key: leave it "
                "out, or give the task a queue without shards"
            )
        queue = name_shard(fields.queue, self._shard % fields.shards)
        node = Node(kind=kind, task=task.name, queue=queue, lane=fields.lane)
        node.on_error = context.policy_of(options.on_error)
        node.ignore = frozenset(options.ignore or ())
        if not isinstance(options.expires, datetime):
            node.expires = _to_ms(options.expires)
        if options.unique_for is not None and options.key is None:
            raise Misconfigured(
                f"task {task.name}: in a workflow unique_for needs a key, since arguments may come later"
            )
        if options.eta is not None:
            raise Misconfigured(f"task {task.name}: a node has no eta: use countdown, or flow.sleep")
        lock = format_lock(task.name, options.key) if options.key else ""
        if lock or options.countdown is not None:
            node.elsewhere = Elsewhere(
                queue=queue,
                lane=fields.lane,
                lock=lock,
                unique_for=fields.unique_for,
                delay=_to_ms(options.countdown),
            )
        return node

    def _make_fields(self, task: NodeTask) -> dict[str, Any]:
        # The `on_failure` of a step is that of its run: `_add_on_failure`.
        return {
            name: value for name, value in task.get_shared_fields().fields.items() if name != "on_failure"
        }

    def _set_message(
        self,
        node: Node,
        task: NodeTask,
        args: Sequence[Expression],
        kwargs: Mapping[str, Expression],
        keys: tuple[str, str],
    ) -> None:
        """Set the template of a node's message, or from where the worker reads its arguments."""
        fields = self._make_fields(task)
        if self._is_inline([*args, *kwargs.values()]):
            raw_args = b"[" + b",".join(map(_to_argument, args)) + b"]"
            pairs = [msgspec.json.encode(name) + b":" + _to_argument(value) for name, value in kwargs.items()]
            raw_kwargs = b"{" + b",".join(pairs) + b"}"
            node.template = _split(_encode_message(task, fields, raw_args, raw_kwargs, "", keys))
            return
        node.arguments = {
            "args": [self._encode_argument(value) for value in args],
            "kwargs": {name: self._encode_argument(value) for name, value in kwargs.items()},
        }
        node.template = _split(_encode_message(task, fields, b"[]", b"{}", RESOLVE, keys))

    def _is_inline(self, expressions: Sequence[Expression]) -> bool:
        """Return whether values are put into a message: whole ones, of few nodes, each with one job."""
        refs = [ref for expression in expressions for ref in find_refs(expression)]
        if len(refs) > MAX_INLINE:
            return False
        if any(_is_complex(expression) for expression in expressions):
            return False
        return all(
            not ref.path and self.nodes[ref.node].kind != "map" and not self.nodes[ref.node].dynamic
            for ref in refs
        )

    # what is kept with the run

    def _encode_argument(self, expression: Expression) -> Any:
        """Return an argument that a worker reads, as plain values."""
        if isinstance(expression, Known) and not self._has_constants:
            expression = Ref(self._add_argument(expression.raw))
        return encode_expression(expression)

    def _add_argument(self, text: bytes) -> int:
        """Keep a text with the run. Returns the number that stands for it in the plan."""
        self._arguments.append(text)
        return -len(self._arguments)

    def _move_arguments(self, node: Node) -> None:
        """Put what a run may have of its own in the place of what the node says, and that into the run."""
        node.template = self._move_from_template(node.template)
        node.expansion = self._move_from_template(node.expansion)
        if self._has_constants:
            return
        if node.expires:
            node.expires = self._add_argument(b"%d" % node.expires)
        if node.elsewhere and isinstance(node.elsewhere.lock, str) and node.elsewhere.lock:
            node.elsewhere.lock = self._add_argument(node.elsewhere.lock.encode())
        if node.elsewhere and node.elsewhere.delay:
            node.elsewhere.delay = self._add_argument(b"%d" % node.elsewhere.delay)

    def _move_from_template(self, template: Template | None) -> Template | None:
        if template is None:
            return None
        if self._has_constants:
            return _join_texts(template)
        return [
            self._add_argument(part) if isinstance(part, bytes) else part
            for part in _join_arguments(template)
        ]

    # the shape of the whole plan

    def _limit_feeds(self) -> None:
        """Put gates between a node and those that it feeds when they are too many."""
        for number in range(len(self.nodes)):
            if len(self.nodes[number].feeds) > MAX_FEEDS:
                self.nodes[number].feeds = self._make_relays(self.nodes[number].feeds)
                for relay in self.nodes[number].feeds:
                    self.nodes[relay].needs = 1

    def _make_relays(self, targets: list[int]) -> list[int]:
        """Return at most MAX_FEEDS nodes that feed all of `targets`: gates, as deep as it takes."""
        is_start = all(not self.nodes[target].needs for target in targets)
        while len(targets) > MAX_FEEDS:
            relays: list[int] = []
            for first in range(0, len(targets), MAX_FEEDS):
                part = targets[first : first + MAX_FEEDS]
                relay = Node(kind="relay", task="relay", hidden=True, feeds=list(part))
                relay.needs = 0 if is_start else 1
                relays.append(len(self.nodes))
                self.nodes.append(relay)
                for target in part:
                    self.nodes[target].needs = self.nodes[target].needs or 1
            targets = relays
        return targets

    def _choose_home(self) -> str:
        """Return the queue where runs live: that of a map, for its members are counted there, or of the most nodes."""
        queues = Counter(node.queue for node in self.nodes if node.kind == "map") or Counter(
            node.queue for node in self.nodes if node.queue and node.name != "on_failure"
        )
        return queues.most_common(1)[0][0] if queues else ""

    def _place(self, node: Node, home: str) -> None:
        """Have jobs of other queues published by the outbox."""
        if node.queue and node.queue != home and node.elsewhere is None:
            node.elsewhere = Elsewhere(queue=node.queue, lane=node.lane)


def compile_workflow(
    tree: Tree,
    *,
    on_error: OnError | None = None,
    home: str | None = None,
    on_failure: Any = None,
    shard: int = 0,
) -> Compiled:
    """Return the plan of a tree.

    Args:
        on_error: What becomes of the run when a node fails that does not say it.
        home: The queue where its runs live; None for the best one.
        on_failure: The task, or the call of one, that is called when a run fails.
        shard: The number of the shards on which its steps are, for queues that have more than one.

    Raises:
        Misconfigured: It cannot be a workflow.
        BadArguments: An argument does not fit its task.
    """

    def compile_tree() -> Compiled:
        compiler = Compiler(on_error=on_error, home=home, on_failure=on_failure, shard=shard)
        return compiler.finish(compiler.add_tree(tree).value)

    return walk_deeply(compile_tree)


def _get_own_policy(mapped: Map) -> OnError | None:
    own: OnError | None = mapped.options.on_error or mapped.task.send_options.on_error
    return own


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Placeholder)


def _expression(value: Any, raw: Raw | None) -> Expression:
    return value.expression if isinstance(value, Placeholder) else Known(bytes(raw or b"null"))


def _is_complex(expression: Expression) -> bool:
    """Return whether no template can stand for it: a choice, or a list with an object, which is more than one part."""
    if isinstance(expression, Items):
        return True in [isinstance(item, Fields) or _is_complex(item) for item in expression.items]
    if isinstance(expression, Fields):
        return True in [_is_complex(value) for value in expression.fields.values()]
    return isinstance(expression, First | Gated)


def _to_ms(span: float | timedelta | None) -> int:
    return int((to_seconds(span) or 0) * 1000)


def _encode_message(
    task: NodeTask,
    fields: dict[str, Any],
    args: bytes,
    kwargs: bytes,
    flow: str,
    keys: tuple[str, str],
) -> bytes:
    """Return a message without its end, whose id and values are marked."""
    expires = task.send_options.expires
    own = {
        "key": fields.get("key"),
        "concurrency_key": keys[0],
        "fair_key": keys[1],
        "expires": expires.timestamp() if isinstance(expires, datetime) else None,
    }
    fields |= {name: Raw(_ARGUMENT % encode(value)) for name, value in own.items() if value}
    raw_args = b"[" + args + b"]" if args is _ITEM or not args else args
    command = Command(VERSION, _ID, task.name, Raw(raw_args), Raw(kwargs), flow=flow, **fields)
    return encode(command)[:-1]


def _to_argument(expression: Expression) -> bytes:
    """Return an argument of a call for a message; what is known is marked."""
    return _ARGUMENT % expression.raw if isinstance(expression, Known) else _to_marked(expression)


def _to_marked(expression: Expression) -> bytes:
    match expression:
        case Known(raw):
            return raw
        case Ref(node):
            return _VALUE % node
        case Items(items):
            return b"\x03" + b"\x04".join([_to_marked(item) for item in items]) + b"\x05"
        case Fields(fields):
            pairs = [msgspec.json.encode(name) + b":" + _to_marked(value) for name, value in fields.items()]
            return b"{" + b",".join(pairs) + b"}"
        case First() | Gated():
            raise AssertionError("a choice is never put into a message")


def _render(expression: Expression) -> Template:
    return _parse(_to_marked(expression))


def _split(message: bytes) -> Template:
    """Return the template of a message, from behind its id."""
    head = b'{"v":%d,"id":"\\u0002"' % VERSION
    if not message.startswith(head):
        raise AssertionError(message[:60])
    return _parse(message[len(head) :])


def _parse(marked: bytes) -> list[Any]:
    """Return the parts of a marked text. JSON has no control characters, so they are free to be marks.

    An argument that is known is bytes, until the plan is finished.
    """
    root: list[Any] = []
    stack: list[list[Any]] = [root]
    for part in _MARKS.split(marked):
        if part == b"\x03":
            inner: list[Any] = []
            stack[-1].append(inner)
            stack.append(inner)
        elif part == b"\x05":
            stack.pop()
        elif part.startswith(b"\x01"):
            stack[-1].append(True if part == _ITEM else int(part[1:-1]))
        elif part.startswith(b"\x06"):
            stack[-1].append(part[1:-1])
        elif part and part != b"\x04":
            stack[-1].append(part.decode())
    return root


def _join_arguments(template: Template) -> list[Any]:
    """Return a template in which arguments that stand close together, and what is between them, are one text."""
    joined: list[Any] = []
    for part in template:
        if isinstance(part, bytes) and len(joined) > 1 and isinstance(joined[-2], bytes):
            between = joined[-1]
            if isinstance(between, str) and len(between) <= _MOST_BETWEEN:
                joined[-2:] = [joined[-2] + between.encode() + part]
                continue
        joined.append(part)
    return joined


def _join_texts(template: Template) -> list[Any]:
    """Return a template in which arguments are part of the texts around them."""
    joined: list[Any] = []
    for part in template:
        text = part.decode() if isinstance(part, bytes) else part
        if joined and isinstance(joined[-1], str) and isinstance(text, str):
            joined[-1] += text
        else:
            joined.append(text)
    return joined


def _widen_item(template: Template) -> list[Any]:
    """Return the template of a map whose items bring the keys of a limit: the item stands for `args` and those."""
    before, item, after = template[0], template[1], template[2]
    head = before.removesuffix('"args":[')
    return [head, item, after.removeprefix("]"), *template[3:]]
