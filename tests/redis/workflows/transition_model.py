"""A run whose only node that counts is tried: what it is asked to do goes to the script as a worker would send it."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import virtual_time
from celery5.broker.calls import workflows as calls
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import QueueKeys
from celery5.protocol.workflows.plan import Node
from celery5.protocol.workflows.transitions import COUNTS, Kind, NodeMove, NodeWord, Policy

BEFORE, TRIED, RIVAL, GATE, OPEN, END = range(6)
"""The nodes of the plan: the one before the node that is tried, that one, another one of a `first`, the gate of the
`first`, one that keeps the run live, and the end. All but the one that is tried are hidden: nobody counts them."""
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
        head |= {"name": "trial", "end": len(nodes) - 1, "all": 1, "maps": [n for n, _ in totals]}
        fields = {str(n): node.encode() for n, node in enumerate(nodes)}
        plan = f"plan-{self.id}"
        self._perform(calls.define_plan(self._keys, plan, fields | {"head": msgspec.msgpack.encode(head)}))
        assert self.tell("start", self.id, LIFE, len(nodes), {"def": plan}, roots, totals, []) == 1

    def _perform(self, call: Any) -> Any:
        return self._redis.perform(call)

    def _set_time(self, passed: int) -> None:
        self._now += passed
        self._perform(virtual_time.set_virtual_time(self._now))

    def tell(self, handler: str, *arguments: object) -> Any:
        """Apply a record, and all that follow from it. Return the reply."""
        records: Sequence[bytes] = [calls.pack_record(handler, *arguments)]
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
        self._kind = kind
        totals: list[list[int]] = []
        if kind == "member":
            self._perform(calls.stage_items(keys, self.id, TRIED, 0, [b"1"]))
            totals = [[TRIED, 1]]
        self.start(_make_nodes(kind, policy), [BEFORE, RIVAL, OPEN], totals)

    def make(self, move: NodeMove) -> None:
        """Let something happen to the node."""
        match move:
            case NodeMove.BEGIN:
                self.signal("before")
            case NodeMove.SIGNAL:
                self.signal("tried")
            case NodeMove.DECIDE:
                self.signal("rival")
            case NodeMove.SKIP:
                self.pass_time(BEFORE_FAILS)
            case NodeMove.FALL_DUE:
                self.pass_time(TRIED_IS_DUE)
            case NodeMove.RETRY:
                position = self.tell("again", self.id, 0)
                assert position <= 0  # six nodes are one step
            case _:
                self._end_job(ENDS[move])

    def _end_job(self, state: str) -> None:
        generation = self._generation()
        frame = f"{self.id}~{TRIED}" + (f".{generation}" if generation else "")
        document = '{"v":1}'
        if state != "SUCCESS":
            self.tell("end", f"{frame}~0" if self._kind == "member" else frame, state, document)
        elif self._kind == "member":
            self.tell("members", frame, [0], ["1"])
        else:
            self.tell("one", frame, "1")

    def _generation(self) -> int:
        return int(self._field(f"node:{TRIED}").partition(" ")[2] or 0)

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
        word = NodeWord(fields.get(f"node:{TRIED}", b"none").decode().partition(" ")[0])
        if self._kind != "member":
            return word
        bits = {
            name
            for name in ("done", "bad", "held")
            if self._perform(calls.read_bit(self._keys, self.id, TRIED, name, 0))
        }
        assert len(bits) <= 1, f"a member is in several bitmaps: {bits}"
        if "bad" in bits:
            return NodeWord.COUNTED if word in (NodeWord.DONE, NodeWord.COUNTED) else NodeWord.FAILED
        if bits:
            return NodeWord.DONE if "done" in bits else NodeWord.HELD
        return word


def _make_nodes(kind: Kind, policy: Policy) -> list[Node]:
    template = [',"task":"tried","args":[', True if kind == "member" else "", '],"kwargs":{}']
    tried = Node(
        kind="map" if kind == "member" else kind,
        task="tried",
        name="tried",
        needs=1,
        feeds=[GATE],
        on_error="fail" if policy == "ignore" else policy,
        ignore=UNSUCCESSFUL if policy == "ignore" else frozenset(),
        template=template if kind in ("job", "member") else None,
        seconds=TRIED_IS_DUE / 1000 if kind in ("sleep", "wait") else None,
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
        Node(kind="end", needs=2, hidden=True),
    ]
