"""A run whose only node that counts is tried: what it is asked to do goes to the script as a worker would send it."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import virtual_time
from celery5.broker.calls import workflows as calls
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import QueueKeys
from celery5.protocol.workflows.plan import Node, NodeKind
from celery5.protocol.workflows.transitions import COUNTS, Kind, NodeMove, NodeWord, Policy

BEFORE, TRIED, RIVAL, GATE, OPEN, UNDO, END = range(7)
"""The nodes of the plan: the one before the node that is tried, that one, another one of a `first`, the gate of the
`first`, one that keeps the run live, an undo task, and the end. Nobody counts them but the one that is tried."""
HOUR = 3_600_000
BEFORE_FAILS, TRIED_IS_DUE, LIFE = HOUR, 5 * HOUR, 1000 * HOUR
"""ms until the node before gives up, until the node that is tried is due, and that the run has."""
TTL = 100_000.0
ENDS = {
    NodeMove.SUCCEED: "SUCCESS",
    NodeMove.DIE: "DEAD",
    NodeMove.EXPIRE: "EXPIRED",
    NodeMove.REVOKE: "REVOKED",
    NodeMove.REJECT: "REJECTED",
    NodeMove.LOSE: "LOST",
    NodeMove.PURGE: "PURGED",
}
UNSUCCESSFUL = frozenset({"DEAD", "EXPIRED", "REVOKED", "REJECTED", "LOST"})


KINDS_OF_NODES: dict[Kind, NodeKind] = {
    "job": "job",
    "child": "job",
    "later": "map",
    "member": "map",
    "sleep": "sleep",
    "wait": "wait",
    "undo": "job",
}


class Look(NamedTuple):
    """What is there of a run."""

    word: NodeWord
    counts: dict[str, int]
    run: str
    # All fields of the run, to see that nothing has changed.
    fields: dict[str, bytes]
    # How many jobs were sent in all.
    sent: int


class RunTrial:
    """One run. What it is told, a worker would tell it."""

    def __init__(self, redis: BlockingRedis, keys: QueueKeys) -> None:
        self._redis, self._keys = redis, keys
        self.id = uuid4().hex[:12]
        self._now = 1_800_000_000_000
        self._set_time(0)

    def start(
        self, nodes: Sequence[Node], roots: Sequence[int], totals: Sequence[Any] = (), **head: Any
    ) -> None:
        """Start it, of a plan with these nodes, whose last one is its end."""
        plan = self.define(nodes, head | {"maps": [n for n, _ in totals]})
        assert self.tell("start", self.id, LIFE, len(nodes), {"def": plan}, roots, totals, []) == 1

    def define(self, nodes: Sequence[Node], head: dict[str, Any]) -> str:
        """Keep a plan. Return its name."""
        head = {"name": "trial", "end": len(nodes) - 1, "all": 1, "maps": []} | head
        fields = {str(n): node.encode() for n, node in enumerate(nodes)}
        plan = sha256(msgspec.msgpack.encode([head, fields], order="deterministic")).hexdigest()[:16]
        self._perform(calls.define_plan(self._keys, plan, fields | {"head": msgspec.msgpack.encode(head)}))
        return plan

    def _perform(self, call: Any) -> Any:
        return self._redis.perform(call)

    def _set_time(self, passed: int) -> None:
        self._now += passed
        self._perform(virtual_time.set_virtual_time(self._now))

    def tell(self, handler: str, *arguments: object) -> Any:
        """Apply a record, and all that follow from it. Return the reply."""
        return self.apply(calls.pack_record(handler, *arguments))

    def apply(self, record: bytes) -> Any:
        """Apply a packed record, and all that follow from it. Return the reply."""
        records: Sequence[bytes] = [record]
        reply: Any = None
        while True:
            advance = self._perform(calls.advance(self._keys, records, ttl=TTL, is_worker=True))
            assert advance.problem == ""
            reply, records = (advance.replies[0] if records else reply), []
            if not advance.left:
                return reply

    def stop(self) -> None:
        """Let the deadline of the run come."""
        self.pass_time(LIFE)

    def signal(self, name: str) -> None:
        """Give a signal to the run."""
        self.tell("signal", self.id, name, '"value"', uuid4().hex)

    def pass_time(self, passed: int) -> None:
        """Let so many ms pass, and have the run look at what is due."""
        self._set_time(passed)
        self.tell("due", self.id)

    def read_fields(self) -> dict[str, bytes]:
        """Return all that the run has."""
        cursor, fields = "0", dict[str, bytes]()
        while True:
            cursor, found = self._perform(calls.scan_run(self._keys, self.id, cursor))
            fields |= found
            if cursor == "0":
                return fields


class NodeTrial(RunTrial):
    """A run in which one node is tried."""

    def __init__(self, redis: BlockingRedis, keys: QueueKeys, kind: Kind, policy: Policy) -> None:
        super().__init__(redis, keys)
        self._kind, self._child = kind, ""
        totals: list[list[int]] = []
        if kind == "member":
            self._perform(calls.stage_items(keys, self.id, TRIED, 0, [b"1"]))
            totals = [[TRIED, 1]]
        self._node = UNDO if kind == "undo" else TRIED
        self.start(_make_nodes(kind, policy), [BEFORE, RIVAL, OPEN], totals)
        if kind == "undo":
            self.signal("before")
            self.tell("one", f"{self.id}~{TRIED}", "1")

    def make(self, move: NodeMove) -> None:
        """Let something happen to the node."""
        match move:
            case NodeMove.BEGIN:
                self.signal("before")
                self._start_child()
            case NodeMove.STOP:
                self.stop()
            case NodeMove.RETURN:
                self._return(calls.pack_record("items", 0))
            case NodeMove.SIGNAL:
                self.signal("tried")
            case NodeMove.DECIDE:
                self.signal("rival")
            case NodeMove.SKIP:
                self.pass_time(BEFORE_FAILS)
            case NodeMove.FALL_DUE:
                self.pass_time(TRIED_IS_DUE)
            case NodeMove.RETRY:
                position = self.tell("retry", self.id, 0)
                assert position <= 0  # six nodes are one step
            case _:
                self._end_job(ENDS[move])

    @property
    def generation(self) -> int:
        """How often a retry has started the node again."""
        return int(self._field(f"node:{self._node}").partition(" ")[2] or 0)

    def end_earlier(self, move: NodeMove) -> None:
        """Let the job of the generation before the node's own end, again."""
        frame = f"{self.id}~{self._node}" + (f".{self.generation - 1}" if self.generation > 1 else "")
        self._tell_end(frame, ENDS[move])

    def _frame(self) -> str:
        generation = self.generation
        return f"{self.id}~{self._node}" + (f".{generation}" if generation else "")

    def _return(self, packed: bytes) -> None:
        """Let the job of the node return something. A script packs what it has read from a settlement as text."""
        parts = [msgspec.msgpack.encode(text) for text in ("returned", self._frame())]
        self.apply(b"".join([b"\x93", *parts, b"\xdb", len(packed).to_bytes(4, "big"), packed]))

    def _start_child(self) -> None:
        """Let the job return a workflow that waits, if the node is one of a child and its job runs."""
        if (
            self._kind != "child"
            or not self._field(f"node:{self._node}").startswith("active")
            or self._field(f"run:{self._node}")
        ):
            return
        self._child = uuid4().hex[:12]
        nodes = [
            Node(kind="wait", name="child", feeds=[1], hidden=True, seconds=TRIED_IS_DUE / 1000),
            Node(kind="end", needs=1, hidden=True),
        ]
        plan = self.define(nodes, {"all": 0})
        start = calls.pack_record("start", self._child, LIFE, len(nodes), {"def": plan}, [0], [], [])
        self._return(start)

    def _end_child(self, state: str) -> None:
        if state == "SUCCESS":
            self.tell("signal", self._child, "child", '"value"', uuid4().hex)
        elif state == "DEAD":
            self._set_time(TRIED_IS_DUE)
            self.tell("due", self._child)
        else:
            self.tell("cancel", self._child)

    def _end_job(self, state: str) -> None:
        if self._kind == "child":
            return self._end_child(state)
        return self._tell_end(self._frame(), state)

    def _tell_end(self, frame: str, state: str) -> None:
        document = '{"v":1}'
        if state != "SUCCESS":
            self.tell("end", f"{frame}~0" if self._kind == "member" else frame, state, document)
        elif self._kind == "member":
            self.tell("members", frame, [0], ["1"])
        else:
            self.tell("one", frame, "1")

    def _field(self, name: str) -> str:
        found: dict[str, bytes] = self._perform(calls.read_run(self._keys, self.id, [name]))
        return found.get(name, b"").decode()

    def look(self) -> Look:
        """Return what is there now."""
        fields = self.read_fields()
        counts = {name: int(fields.get(name, b"0")) for name in COUNTS}
        sent = self._perform(Call(("XLEN", self._keys.normal), int))
        return Look(self._read_word(fields), counts, fields["state"].decode(), fields, sent)

    def _read_word(self, fields: dict[str, bytes]) -> NodeWord:
        word = NodeWord(fields.get(f"node:{self._node}", b"none").decode().partition(" ")[0])
        if self._kind != "member":
            return word
        bits = {
            name
            for name in ("done", "bad", "held")
            if self._perform(calls.read_bit(self._keys, self.id, TRIED, name, 0))
        }
        assert len(bits) <= 1, f"a member is in several bitmaps: {bits}"
        if "bad" in bits:
            if word in (NodeWord.ENDING, NodeWord.CUT):
                return NodeWord.CUT
            return NodeWord.COUNTED if word in (NodeWord.DONE, NodeWord.COUNTED) else NodeWord.FAILED
        if bits:
            return NodeWord.DONE if "done" in bits else NodeWord.HELD
        return word


def _make_nodes(kind: Kind, policy: Policy) -> list[Node]:
    template = [',"task":"tried","args":[', True if kind == "member" else "", '],"kwargs":{}']
    tried = Node(
        kind=KINDS_OF_NODES[kind],
        dynamic=kind == "child",
        task="tried",
        name="tried",
        needs=1,
        feeds=[GATE],
        on_error="fail" if policy == "ignore" else policy,
        ignore=UNSUCCESSFUL if policy == "ignore" else frozenset(),
        template=None if kind in ("sleep", "wait") else template,
        expansion=template if kind == "later" else None,
        seconds=TRIED_IS_DUE / 1000 if kind in ("sleep", "wait") else None,
        undo=UNDO if kind == "undo" else None,
    )
    before = Node(
        kind="wait", name="before", feeds=[TRIED], on_error="skip", hidden=True, seconds=BEFORE_FAILS / 1000
    )
    gate = Node(kind="gate", needs=2, feeds=[END], first=True, scope=(TRIED, GATE), hidden=True)
    return [
        before,
        tried,
        Node(kind="wait", name="rival", feeds=[GATE], hidden=True),
        gate,
        Node(kind="wait", name="open", feeds=[END], hidden=True),
        Node(kind="job", task="undo", name="undo", template=template, hidden=True),
        Node(kind="end", needs=2, hidden=True),
    ]
