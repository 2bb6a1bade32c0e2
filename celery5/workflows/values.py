"""Read the values of a run: results of nodes, of the members of maps, and what is made of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import ResultLost
from celery5.protocol.bounded_decoding import decode_msgpack
from celery5.protocol.counts import format_count
from celery5.protocol.workflows.plan import (
    Expression,
    Fields,
    First,
    Gated,
    Items,
    Known,
    Ref,
    decode_expression,
    find_refs,
    get_field,
)
from celery5.workflows.nesting import walk_deeply

BUCKET = 128
"""Results of a map in one hash, as `advance.lua` keeps them."""
BUCKETS_PER_TRIP = 64
"""Hashes that are read in one trip."""
_MAP, _RUN, _OUTCOME = b"@map ", b"@run ", b"@outcome "
"""How a value begins that says where it is, in place of JSON: in a map of the same run; in another run; one of these
as the value of an `Outcome`."""

_RAW_LIST = msgspec.json.Decoder(list[Raw])
_RAW_FIELDS = msgspec.json.Decoder(dict[str, Raw])


class MapLocation(NamedTuple):
    """Where the results of a map are."""

    # The queue where the run lives.
    queue: str
    run: str
    node: int


class MapPages:
    """Reads the results of the members of a map page by page, in order, without those that were left out.

    Args:
        buckets: Hashes of BUCKET results that make a page.
    """

    def __init__(
        self, redis: AsyncDriver, keys: QueueKeys, run_id: str, node: int, *, buckets: int = BUCKETS_PER_TRIP
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._run = run_id
        self._node = node
        self._buckets = buckets
        self._next = 0
        self._found = 0
        # Known from the first page on.
        self._total = self._expected = -1
        self._is_chunked = False

    async def read_next(self) -> list[bytes] | None:
        """Return the next results, as JSON; None when there are no more. Raises ResultLost."""
        if self._total < 0:
            await self._read_totals()
        part = range(self._next, min(self._next + self._buckets, -(-self._total // BUCKET)))
        if not part:
            if self._found < self._expected:
                lost = f"{self._expected - self._found} of the {format_count(self._expected, 'result')}"
                raise ResultLost(f"run {self._run}: {lost} of its map are lost")
            return None
        self._next = part.stop
        read = [calls.read_bucket(self._keys, self._run, self._node, bucket) for bucket in part]
        page: list[bytes] = []
        for results in await self._redis.perform_all(read):
            self._found += len(results)
            for position in sorted(results):
                raw = results[position]
                if self._is_chunked and raw.startswith(b"["):
                    page += map(bytes, _RAW_LIST.decode(raw))
                else:
                    page.append(raw)
        return page

    async def _read_totals(self) -> None:
        names = (f"total:{self._node}", f"done:{self._node}")
        run = await self._redis.perform(calls.read_run(self._keys, self._run, names))
        self._total, self._expected = (int(run.get(name, b"0")) for name in names)
        values = RunValues(self._redis, self._keys)
        self._is_chunked = bool((await values.read_node(self._run, self._node)).get("chunk"))


class RunValues:
    """Reads values of runs that live at one queue."""

    def __init__(self, redis: AsyncDriver, keys: QueueKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def read_node(self, run_id: str, node: int) -> dict[str, Any]:
        """Return a node of the plan of a run. Raises ResultLost when Redis does not have it any more."""
        run = await self._redis.perform(calls.read_run(self._keys, run_id, ["def"]))
        if "def" not in run:
            raise ResultLost(f"run {run_id}: it is not known any more")
        found = await self._redis.perform(calls.read_plan(self._keys, run["def"].decode(), [str(node)]))
        if str(node) not in found:
            raise ResultLost(f"run {run_id}: its plan is not known any more")
        return decode_msgpack(found[str(node)], dict[str, Any])

    async def make_all(self, run_id: str, expressions: Sequence[Expression]) -> list[bytes]:
        """Return the values of expressions as JSON. Raises ResultLost.

        What jobs have returned in place of a value are runs of their own, inside each other. They are read one after
        the other, outermost first, and put together in the reverse order: no call is inside another one.
        """
        wanted: dict[str, Sequence[Expression]] = {run_id: expressions}
        pending, values = [run_id], dict[str, dict[int, bytes]]()
        while pending:
            run = pending.pop()
            values[run] = await self._read_values(run, wanted[run])
            for raw in values[run].values():
                child = _find_run(raw)
                if child and child not in wanted:
                    wanted[child] = [await self._read_result(child)]
                    pending.append(child)
        made: dict[str, list[bytes]] = {}
        for run in reversed(values):
            known = {node: _resolve(raw, made) for node, raw in values[run].items()}
            made[run] = _assemble_all(wanted[run], known)
        return made[run_id]

    async def make_result(self, run_id: str) -> bytes:
        """Return the result of a run that has succeeded, as JSON. Raises ResultLost."""
        return (await self.make_all(run_id, [await self._read_result(run_id)]))[0]

    async def locate_map(self, run_id: str, node: int) -> MapLocation | None:
        """Return where the results of a node are when its value is that of a map; None for any other value."""
        while True:
            name = f"value:{node}"
            value = (await self._redis.perform(calls.read_run(self._keys, run_id, [name]))).get(name, b"")
            if value.startswith(_MAP):
                return MapLocation(self._keys.queue, run_id, int(value.removeprefix(_MAP)))
            if not value.startswith(_RUN):
                return None
            run_id = value.removeprefix(_RUN).decode()
            expression = await self._read_result(run_id)
            if not isinstance(expression, Ref) or expression.path:
                return None
            node = expression.node

    async def locate_result(self, run_id: str) -> MapLocation | None:
        """Return where the results of a run are when its result is that of a map; None for any other result."""
        expression = await self._read_result(run_id)
        if isinstance(expression, Ref) and not expression.path:
            return await self.locate_map(run_id, expression.node)
        return None

    async def _read_result(self, run_id: str) -> Expression:
        """Return what the result of a run is made of."""
        return read_expression((await self._read_end(run_id))["a"]["value"])

    async def _read_end(self, run_id: str) -> dict[str, Any]:
        run = await self._redis.perform(calls.read_run(self._keys, run_id, ["end"]))
        if "end" not in run:
            raise ResultLost(f"run {run_id}: it is not known any more")
        return await self.read_node(run_id, int(run["end"]))

    async def _read_values(self, run_id: str, expressions: Sequence[Expression]) -> dict[int, bytes]:
        """Return the values that expressions are made of: JSON, or where they are in other runs."""
        nodes = sorted({ref.node for expression in expressions for ref in find_refs(expression)})
        values: dict[int, bytes] = {}
        for first in range(0, len(nodes), 500):
            names = {get_field(node): node for node in nodes[first : first + 500]}
            found = await self._redis.perform(calls.read_run(self._keys, run_id, list(names)))
            values.update({names[name]: value for name, value in found.items()})
        if lost := [node for node in nodes if node < 0 and node not in values]:
            raise ResultLost(f"run {run_id}: {len(lost)} of its arguments are lost")
        for node, value in values.items():
            if node >= 0 and value.startswith(_MAP):
                values[node] = await self._read_map(run_id, int(value.removeprefix(_MAP)))
        return values

    async def _read_map(self, run_id: str, node: int) -> bytes:
        pages, items = MapPages(self._redis, self._keys, run_id, node), list[bytes]()
        while (page := await pages.read_next()) is not None:
            items += page
        return b"[" + b",".join(items) + b"]"


def _find_run(value: bytes) -> str:
    """Return the id of the run whose result a value is; "" for JSON."""
    while value.startswith(_OUTCOME):
        value = value.removeprefix(_OUTCOME)
    return value.removeprefix(_RUN).decode() if value.startswith(_RUN) else ""


def _resolve(value: bytes, made: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return the JSON that a value stands for, from the results of other runs."""
    outcomes = 0
    while value.startswith(_OUTCOME):
        value, outcomes = value.removeprefix(_OUTCOME), outcomes + 1
    if value.startswith(_RUN):
        value = made[value.removeprefix(_RUN).decode()][0]
    return b'{"state":"SUCCESS","value":' * outcomes + value + b"}" * outcomes


def _assemble_all(expressions: Sequence[Expression], values: Mapping[int, bytes]) -> list[bytes]:
    return walk_deeply(lambda: [_assemble(expression, values) or b"null" for expression in expressions])


def read_expression(plain: Any) -> Expression:
    """Return the expression that a node of a plan has, however deeply it is nested."""
    return walk_deeply(lambda: decode_expression(plain))


def _assemble(expression: Expression, values: Mapping[int, bytes]) -> bytes | None:
    """Return the JSON of an expression; None for a node that was skipped."""
    match expression:
        case Known(raw):
            return raw
        case Ref(node, path):
            value = values.get(node)
            return value if value is None or not path else pick(value, path)
        case Gated(gate, gated):
            return (_assemble(gated, values) or b"null") if gate in values else None
        case First(choices):
            for choice in choices:
                if (value := _assemble(choice, values)) is not None:
                    return value
            return None
        case Items(items, is_partial):
            made = [_assemble(item, values) for item in items]
            if not is_partial and None in made:
                return None
            return b"[" + b",".join(item for item in made if item is not None) + b"]"
        case Fields(fields):
            pairs = [
                msgspec.json.encode(name) + b":" + (_assemble(value, values) or b"null")
                for name, value in fields.items()
            ]
            return b"{" + b",".join(pairs) + b"}"


def pick(value: bytes, path: Sequence[str | int]) -> bytes:
    """Return what is at a path in JSON. Raises ResultLost when there is nothing."""
    raw = Raw(value)
    for step in path:
        try:
            raw = _RAW_LIST.decode(raw)[step] if isinstance(step, int) else _RAW_FIELDS.decode(raw)[step]
        except (msgspec.DecodeError, KeyError, IndexError, RecursionError):
            shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
            raise ResultLost(f"the result has nothing at {shown}") from None
    return bytes(raw)
