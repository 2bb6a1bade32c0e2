"""The graph of a run, with the states of its nodes: as data, and as a drawing."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.protocol.bounded_decoding import decode_msgpack, read_whole
from celery5.protocol.counts import format_count
from celery5.protocol.workflows.member_ids import MemberId
from celery5.protocol.workflows.status import ENDED, NODE_STATES, RUN_STATES, NodeState

MAX_DRAWN = 500
"""Nodes of a drawing: nobody can look at more."""


class GraphNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node. A map is one node, however many members it has."""

    id: int
    kind: str
    # The task, or what the node is.
    name: str
    state: NodeState
    # The nodes that depend on it.
    feeds: tuple[int, ...] = ()
    # Of a map: its members, and how many have succeeded and failed.
    total: int = 0
    done: int = 0
    failed: int = 0
    # The run in its place, that the job returned.
    run: str = ""
    # The id of its job, and the queue of that; '' while it has none, and for a map.
    job: str = ""
    queue: str = ""
    # Of a job of kind `undo` or `on_failure`: the step that it undoes, or that has failed; None where the whole run has
    # failed. Such jobs are in the graph from the failure on.
    of: int | None = None


class RunGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of a run."""

    id: str
    nodes: tuple[GraphNode, ...]

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    def to_mermaid(self) -> str:
        """Return it as a Mermaid flowchart."""
        lines = ["flowchart TD"]
        shown = self.nodes[:MAX_DRAWN]
        drawn = {node.id for node in shown}
        for node in shown:
            count = f"<br/>{node.done} of {node.total}" if node.kind == "map" else ""
            failed = f", {node.failed} failed" if node.failed else ""
            name = node.name.replace('"', "'")
            lines.append(f'    n{node.id}["{name}{count}{failed}"]:::{node.state.value.lower()}')
        hidden_jobs = {node.id: node for node in shown if node.kind in _HIDDEN_KINDS}
        for node in shown:
            for after in node.feeds:
                if after in hidden_jobs:
                    lines.append(f"    n{node.id} -.->|{hidden_jobs[after].kind}| n{after}")
                elif after in drawn:
                    lines.append(f"    n{node.id} --> n{after}")
        if len(self.nodes) > MAX_DRAWN:
            lines.append(f'    more["{format_count(len(self.nodes) - MAX_DRAWN, "more node")}"]')
        return "\n".join([*lines, *_CLASSES])


_CLASSES = (
    "    classDef success fill:#d4edda,stroke:#28a745",
    "    classDef failed fill:#f8d7da,stroke:#dc3545",
    "    classDef active fill:#cce5ff,stroke:#007bff",
    "    classDef waiting fill:#e2e3e5,stroke:#6c757d",
    "    classDef held fill:#fff3cd,stroke:#ffc107",
    "    classDef skipped fill:#f8f9fa,stroke:#adb5bd,color:#adb5bd",
    "    classDef pending fill:#ffffff,stroke:#adb5bd",
)


_HIDDEN_KINDS = ("undo", "on_failure")
"""The kinds of jobs that are no steps: the plan hides them."""
_WITHOUT_JOB = (NodeState.PENDING, NodeState.SKIPPED, NodeState.WAITING)
"""States of nodes whose job was not sent, or was stopped."""
_NOT_BEGUN = (NodeState.PENDING, NodeState.WAITING)
"""States of nodes that are skipped when their run ends."""


async def read_graph(redis: AsyncDriver, keys: QueueKeys, run_id: str) -> RunGraph:
    """Read the graph of a run; it has no nodes when the run is not known."""
    fields = await scan_all(redis, partial(calls.scan_run, keys, run_id))
    if "def" not in fields:
        return RunGraph(id=run_id, nodes=())
    digest = get_plan_digest(fields)
    stored = await scan_all(redis, partial(calls.scan_plan, keys, digest))
    plan = {
        number: node
        for name, raw in stored.items()
        if (number := read_whole(name, -1)) >= 0 and (node := try_decode_node(raw))
    }
    hidden_jobs = _find_hidden_jobs(plan, fields)
    return RunGraph(
        id=run_id,
        nodes=tuple(
            _make_node(MemberId(run_id, number, home=keys.queue), node, plan, fields, hidden_jobs)
            for number, node in sorted(plan.items())
            if number in hidden_jobs or not node.get("h")
        ),
    )


def _find_hidden_jobs(
    plan: Mapping[int, Mapping[str, Any]], fields: Mapping[str, bytes]
) -> dict[int, int | None]:
    """Return the `undo` and `on_failure` jobs that were or will be sent, with their steps; None for the run."""
    is_failing = fields.get("state", b"live") not in (b"live", b"success")
    steps = {node[how]: number for number, node in plan.items() for how in ("u", "e") if how in node}
    found: dict[int, int | None] = {}
    for number, node in plan.items():
        step = steps.get(number)
        if not is_hidden_job(node):
            continue
        will_be_undone = is_undo(node) and is_failing and step is not None
        if fields.get(f"node:{number}", b"cut") != b"cut" or (
            will_be_undone and get_node_state(fields, cast("int", step)) is NodeState.SUCCESS
        ):
            found[number] = step
    return found


async def scan_all(
    redis: AsyncDriver, make_call: Callable[[str], Call[tuple[str, dict[str, bytes]]]]
) -> dict[str, bytes]:
    """Return all fields of a hash, which is read in portions."""
    found: dict[str, bytes] = {}
    cursor = "0"
    while True:
        cursor, portion = await redis.perform(make_call(cursor))
        found |= portion
        if cursor == "0":
            return found


def decode_node(raw: bytes) -> dict[str, Any]:
    """Return a node as `Node.encode` has made it."""
    return decode_msgpack(raw, dict[str, Any])


def try_decode_node(raw: bytes) -> dict[str, Any] | None:
    """Return a node; None for what is none: the rest of the graph is shown."""
    try:
        return decode_node(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None


def get_plan_digest(fields: Mapping[str, bytes]) -> str:
    """Return the hash under which the plan of a run is kept; '' where the run is not known."""
    return fields.get("def", b"").decode(errors="replace")


async def read_node(
    redis: AsyncDriver, keys: QueueKeys, fields: Mapping[str, bytes], number: int
) -> dict[str, Any] | None:
    """Return a node of the plan that is the field `def` of a run; None where that is gone."""
    digest, name = get_plan_digest(fields), str(number)
    if not digest:
        return None
    raw = (await redis.perform(calls.read_plan(keys, digest, [name]))).get(name)
    return None if raw is None else try_decode_node(raw)


def is_hidden_job(node: Mapping[str, Any]) -> bool:
    """Return whether a node is an `undo` or `on_failure` job: such a job is not stopped with its run."""
    return node["k"] == "job" and bool(node.get("h"))


def is_one_job(node: Mapping[str, Any], fields: Mapping[str, bytes], number: int) -> bool:
    """Return whether a node has one job now: a map has, too, while a job reads its items from the values before it."""
    return node["k"] == "job" or (node["k"] == "map" and f"total:{number}" not in fields)


def goes_by_outbox(node: Mapping[str, Any], home: str) -> bool:
    """Return whether the outbox sends the one job that a node has: the job that reads items has no key and no time."""
    return bool(node.get("p")) and (node["k"] == "job" or node["queue"] != home)


def is_undo(node: Mapping[str, Any]) -> bool:
    """Return whether a node is the `undo` job of a step."""
    return is_hidden_job(node) and node.get("name") == "undo"


def is_on_failure(node: Mapping[str, Any]) -> bool:
    """Return whether a node is an `on_failure` job: its run does not wait for it."""
    return is_hidden_job(node) and node.get("name") == "on_failure"


def get_node_state(fields: Mapping[str, bytes], number: int) -> NodeState:
    """Return the state of a node from the fields of its run."""
    word = fields.get(f"node:{number}", b"").decode(errors="replace").partition(" ")[0]
    state = NODE_STATES.get(word, NodeState.PENDING)
    if RUN_STATES.get(fields.get("state", b"").decode(errors="replace")) not in ENDED:
        return state
    if state in _NOT_BEGUN:
        return NodeState.SKIPPED
    if state is NodeState.ACTIVE and _has_stopped(fields, number):
        return NodeState.FAILED if _count(fields, "failed", number) else NodeState.SKIPPED
    return state


def _has_stopped(fields: Mapping[str, bytes], number: int) -> bool:
    """Return whether no member of a map runs any more; False for what is no map."""
    ended = sum(_count(fields, name, number) for name in ("done", "failed", "held", "again"))
    return f"total:{number}" in fields and _count(fields, "sent", number) <= ended


def _count(fields: Mapping[str, bytes], name: str, number: int) -> int:
    return read_whole(fields.get(f"{name}:{number}", b""))


def _make_node(
    member: MemberId,
    node: Mapping[str, Any],
    plan: Mapping[int, Mapping[str, Any]],
    fields: Mapping[str, bytes],
    hidden_jobs: Mapping[int, int | None],
) -> GraphNode:
    number, state = member.node, get_node_state(fields, member.node)
    generation = fields.get(f"node:{number}", b"").decode(errors="replace").partition(" ")[2]
    is_single = is_one_job(node, fields, number)
    has_job = is_single and state not in _WITHOUT_JOB
    job = member._replace(
        generation=read_whole(generation),
        home=member.home if goes_by_outbox(node, member.home) else "",
    )

    own = [node[how] for how in ("u", "e") if how in node]

    def count(name: str) -> int:
        return _count(fields, name, number) if node["k"] == "map" else 0

    return GraphNode(
        id=number,
        kind=node["name"] if number in hidden_jobs else node["k"],
        name=node.get("task") or node.get("name") or node["k"],
        state=state,
        feeds=tuple(sorted({*_find_visible(node, plan), *(after for after in own if after in hidden_jobs)})),
        total=count("total"),
        done=count("done"),
        failed=count("failed"),
        run=fields.get(f"run:{number}", b"").decode(errors="replace"),
        job=str(job) if has_job else "",
        queue=(node.get("queue") or member.home) if has_job else "",
        of=hidden_jobs.get(number),
    )


def _find_visible(node: Mapping[str, Any], plan: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the visible nodes that a node feeds, through hidden ones."""
    found: list[int] = []
    stack = list(node.get("f", ()))
    seen: set[int] = set()
    while stack:
        number = stack.pop()
        if number in seen or number not in plan:
            continue
        seen.add(number)
        if plan[number].get("h"):
            stack += plan[number].get("f", ())
        else:
            found.append(number)
    return found
