"""Plans: what a workflow is compiled to. A flat, frozen table of nodes, which Redis keeps under its hash.

A plan has the graph and the options of its steps, so that runs of the same shape share it. The arguments of calls, and
what else may differ from run to run (keys, expiries, countdowns), are kept with the run. A plan names them by number.

`advance.lua` reads the short names of `Node.encode`, which stand in one table there.
"""

from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal, TypeAlias, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.similar_names import did_you_mean

OnError = Literal["fail", "continue", "skip", "hold"]
"""What becomes of a run when a node fails.

fail: the run fails. continue: what depends on the node gets an `Outcome`. skip: what depends on it is skipped, and a
join goes on without it. hold: the run waits until the dead letter is replayed.
"""
NodeKind = Literal["job", "map", "relay", "gate", "sleep", "wait", "input", "end"]
"""job: one job. map: a job for each item. relay, gate: no job; they end when those before them have. A relay is skipped
with them, a gate counts which of them succeeded. sleep, wait: no job either.
input: an argument of the run. end: the run ends with it."""
MAX_FEEDS = 100
"""The most nodes that one node feeds, and roots of a plan: a script that ends it looks at all of them."""
MAX_INLINE = 16
"""The most values that are put into a message. A job with more of them reads them when it runs."""
DEFAULT_LIFE = 30 * 86400.0
"""Seconds that a run has, without its own deadline."""


class Known(msgspec.Struct, frozen=True):
    """A value that is known, as JSON."""

    raw: bytes


class Ref(msgspec.Struct, frozen=True):
    """The value of a node, or what is at a path in it."""

    # A negative number: an argument of the run, -1 for the first.
    node: int
    path: tuple[str | int, ...] = ()


class Items(msgspec.Struct, frozen=True):
    """A list of values."""

    items: tuple["Expression", ...]
    # Leave out what has no value; else the list has none either when one of its items has none.
    is_partial: bool = False


class Fields(msgspec.Struct, frozen=True):
    """An object of values by name."""

    fields: Mapping[str, "Expression"]


class First(msgspec.Struct, frozen=True):
    """The value of the first of several that has one."""

    choices: tuple["Expression", ...]


class Gated(msgspec.Struct, frozen=True):
    """A value that there is only when a gate has let it through."""

    gate: int
    value: "Expression"


Expression: TypeAlias = Known | Ref | Items | Fields | First | Gated
"""How a value is made of the values of nodes."""


def find_refs(expression: Expression) -> Iterator[Ref]:
    """Yield the references in an expression."""
    stack: list[Expression] = [expression]
    while stack:
        current = stack.pop()
        if isinstance(current, Ref):
            yield current
        elif isinstance(current, Items):
            stack += reversed(current.items)
        elif isinstance(current, First):
            stack += reversed(current.choices)
        elif isinstance(current, Gated):
            stack += (current.value, Ref(current.gate))
        elif isinstance(current, Fields):
            stack += current.fields.values()


def get_field(number: int) -> str:
    """Return the field of a run that has the value of a node, or for a negative number an argument."""
    return f"value:{number}" if number >= 0 else f"arg:{-1 - number}"


def encode_expression(expression: Expression) -> Any:
    """Return an expression as plain values.

    What is nested in practice is one list a level: encoders allow about 1,500 levels on Python 3.12.
    """
    match expression:
        case Known(raw):
            return raw.decode()
        case Ref(node, path):
            return [node, *path]
        case Gated(gate, value):
            return {"gate": gate, "value": encode_expression(value)}
        case First(choices):
            return ["first", *[encode_expression(choice) for choice in choices]]
        case Items(items, is_partial):
            return ["some" if is_partial else "items", *[encode_expression(item) for item in items]]
        case Fields(fields):
            return {"fields": {name: encode_expression(value) for name, value in fields.items()}}


def decode_expression(plain: Any) -> Expression:
    """Return the expression that `encode_expression` encoded."""
    if isinstance(plain, bytes | str):
        return Known(plain if isinstance(plain, bytes) else plain.encode())
    if isinstance(plain, list):
        kind, *parts = cast("list[Any]", plain)
        if kind == "first":
            return First(tuple([decode_expression(choice) for choice in parts]))
        if kind in ("items", "some"):
            return Items(tuple([decode_expression(item) for item in parts]), is_partial=kind == "some")
        return Ref(int(kind), tuple(parts))
    if "gate" in plain:
        return Gated(int(plain["gate"]), decode_expression(plain["value"]))
    return Fields({name: decode_expression(value) for name, value in plain["fields"].items()})


Template: TypeAlias = Sequence[Any]
"""The parts of a message: a text; the number of a node, for its value; a negative number, for an argument of the run;
True, for the item; a list of templates."""


class Elsewhere(msgspec.Struct, kw_only=True):
    """How a job is published that cannot go straight to the stream of the run's own queue."""

    queue: str
    lane: str = ""
    # A text, or the number of an argument of the run.
    lock: str | int = ""
    unique_for: float | None = None
    # Milliseconds from when it may run, or the number of an argument of the run.
    delay: int = 0

    def encode(self) -> dict[str, Any]:
        """Return the fields as the script takes them."""
        fields: dict[str, Any] = {"queue": self.queue}
        for name in ("lane", "lock", "unique_for", "delay"):
            if value := getattr(self, name):
                fields[name] = value
        return fields


class Node(msgspec.Struct, kw_only=True):
    """One node of a plan. The compiler builds it; nothing changes it afterwards."""

    kind: NodeKind
    # The task's name, or what the node is, for people.
    task: str = ""
    # How many nodes must have ended before it.
    needs: int = 0
    # The nodes that depend on it.
    feeds: list[int] = msgspec.field(default_factory=list[int])
    # What becomes of the run when it fails: `fail`, `continue`, `skip`, `hold`; `count` at a gate that counts failures;
    # `apart` in an independent branch.
    on_error: str = "fail"
    # End states that count as success.
    ignore: frozenset[str] = frozenset()
    template: Template | None = None
    # Where its arguments come from, when they are read by the worker: `args` and `kwargs`, or `value` of an end.
    arguments: Mapping[str, Any] | None = None
    queue: str = ""
    lane: str = ""
    elsewhere: Elsewhere | None = None
    # Milliseconds until a job expires, or the number of an argument of the run.
    expires: int = 0
    # How many members of a map are on the queue at once.
    window: int | None = None
    # The number (gate) or fraction (map) of those before it, or of its members, that must succeed.
    need: float | None = None
    # A gate that ends with the first success; then the nodes `scope` are ended.
    first: bool = False
    scope: tuple[int, int] = (0, 0)
    # The relay before the members of a gate: when that is skipped, the gate is, too.
    entry: int | None = None
    undo: int | None = None
    # Its `on_failure` job.
    on_failure: int | None = None
    # Of an `undo` or `on_failure` job: its step.
    of: int | None = None
    # Seconds of a sleep, or until a wait gives up.
    seconds: float | None = None
    # What a wait waits for.
    name: str = ""
    # The event and the fields that a wait for an event compares.
    where: Mapping[str, Any] | None = None
    # It stands for no work of the user's, so nobody counts it.
    hidden: bool = False
    # A job that may return a workflow, which takes its place.
    dynamic: bool = False
    # Items of a map in one job.
    chunk: int | None = None
    # Of a map whose items are a value of the run: the message of the job that reads them, `arguments` says where.
    expansion: Template | None = None
    # Of such a map: each item has all arguments of a job; the items bring the keys of a limit.
    star: bool = False
    is_keyed: bool = False

    def encode(self) -> bytes:
        """Return the node as the script reads it."""
        return msgspec.msgpack.encode(self.to_plain())

    def to_plain(self) -> dict[str, Any]:
        """Return the node as plain values, by short names, without those that have their default."""
        values: dict[str, Any] = {
            "k": self.kind,
            "task": self.task,
            "n": self.needs,
            "f": self.feeds,
            "o": self.on_error if self.on_error != "fail" else None,
            "i": dict.fromkeys(sorted(self.ignore), True),
            "t": self.template,
            "a": self.arguments,
            "queue": self.queue,
            "l": self.lane,
            "p": self.elsewhere and self.elsewhere.encode(),
            "x": self.expires or None,
            "w": self.window,
            "q": self.need,
            "first": self.first,
            "entry": self.entry,
            "u": self.undo,
            "e": self.on_failure,
            "of": self.of,
            "d": None if self.seconds is None else int(self.seconds * 1000),
            "name": self.name,
            "where": self.where,
            "h": self.hidden,
            "dynamic": self.dynamic,
            "chunk": self.chunk,
            "m": self.expansion,
            "star": self.star,
            "keyed": self.is_keyed,
        }
        if self.first:
            values["from"], values["to"] = self.scope
        return {name: value for name, value in values.items() if _is_set(value)}


def _is_set(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number or bool(value)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled workflow."""

    nodes: tuple[bytes, ...]
    # The queue where its runs live.
    home: str
    # Nodes that nothing is before.
    roots: tuple[int, ...]
    # Nodes that are maps.
    maps: tuple[int, ...]
    # How many nodes people count.
    size: int
    # The number of the node with which a run ends.
    end: int
    # The nodes that are arguments of the run, by parameter.
    inputs: Mapping[str, int]
    # The waits for events whose values are known when a run begins.
    waits: tuple[int, ...] = ()
    # Whether a node is undone when the run fails.
    has_undo: bool = False
    # The `on_failure` job of the run.
    on_failure: int | None = None

    def encode_head(self, name: str) -> bytes:
        """Return what all runs share that have the plan under the name of a workflow, as the scripts read it."""
        head: dict[str, Any] = {"name": name, "end": self.end, "all": self.size, "maps": self.maps}
        if self.has_undo:
            head["undo"] = True
        if self.on_failure is not None:
            head["fail"] = self.on_failure
        return msgspec.msgpack.encode(head)

    def make_digest(self, name: str) -> str:
        """Return the hash under which it is kept: the same for the same graph of a workflow of that name."""
        digest = sha256(self.home.encode())
        for part in (*self.nodes, self.encode_head(name)):
            digest.update(len(part).to_bytes(8, "big") + part)
        return urlsafe_b64encode(digest.digest()[:12]).decode()


UNSUCCESSFUL = ("DEAD", "EXPIRED", "REJECTED", "REVOKED")
"""The states in which a job ends that has not succeeded: those that `ignore` takes."""


def check_ignore(value: object) -> None:
    """Raise Misconfigured when `value` is no set of end states that count as success."""
    if value is None:
        return
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise Misconfigured(f"ignore is {value!r}: give a set of end states, such as {{'REVOKED'}}")
    for state in cast("Collection[object]", value):
        if state not in UNSUCCESSFUL:
            suggestion = did_you_mean(str(state), UNSUCCESSFUL)
            raise Misconfigured(
                f"ignore has {state!r}: give some of {', '.join(UNSUCCESSFUL)}; {suggestion}".rstrip("; ")
            )


def check_on_error(value: object, what: str = "") -> None:
    """Raise Misconfigured when `value` is no way to handle an error; `what` takes it, where that is not clear."""
    known = ("fail", "continue", "skip", "hold")
    if value is not None and value not in known:
        suggestion = did_you_mean(str(value), known)
        place = f"{what}: " if what else ""
        raise Misconfigured(
            f"{place}on_error is {value!r}: give fail, continue, skip or hold; {suggestion}".rstrip("; ")
        )


def check_on_failure(value: Any, what: str = "") -> None:
    """Raise Misconfigured when `value` is neither a task nor one call of a task; `what` takes it."""
    call = getattr(value, "tree", None)
    if value is None or hasattr(call, "is_partial") or (call is None and hasattr(value, "send_options")):
        return
    place = f"{what}: " if what else ""
    raise Misconfigured(
        f"{place}on_failure is {value!r}: give a task, or one call of it: notify, or notify.partial('ops')"
    )
