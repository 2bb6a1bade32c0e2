"""Publish a run: its plan and the items of its maps first, in portions that may be sent again, then its start.

Nothing of a run is live before its start. What is published and not started is gone after two minutes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BadArguments, StagingLost
from celery5.workflows.compiler import Compiled, MapSource

ITEMS_PER_TRIP = 1000
"""Items in one portion."""
PORTIONS_PER_WRITE = 8
"""Portions that are sent in one write, so that the answers are not waited for one by one."""
BYTES_PER_TRIP = 1024 * 1024
"""Bytes of items in one portion, unless one item alone has more."""
NODES_PER_TRIP = 200
"""Nodes of a plan in one portion."""
MOST_PLANS = 1000
"""Plans that a process knows to be published."""
MOST_ARGUMENTS, MOST_ARGUMENT_BYTES = 40, 1024
"""What a run has of arguments among its fields. More or longer ones have their own hash: so a run that is idle can
be packed, and the record that starts a run stays short."""


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is started with."""

    run_id: str
    # The name of the workflow, for people.
    name: str
    # Seconds until it expires.
    life: float
    # The trace context; '' for none.
    trace: str = ""
    # The headers of all its messages, as middleware has added them.
    headers: Mapping[str, str] | None = None
    # The arguments of the run, as JSON, by parameter.
    inputs: Mapping[str, bytes] | None = None
    # The token of the call, when its caller has chosen the id: that is claimed for as long as the run is kept. Else ''.
    caller: str = ""


class PublishedPlans:
    """The plans that this process has published, so that each is not sent again with every run of its shape."""

    def __init__(self) -> None:
        self._digests: dict[str, None] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digest: str) -> None:
        """Note that a plan is there."""
        if len(self._digests) >= MOST_PLANS:
            self._digests.clear()
        self._digests[digest] = None

    def forget(self) -> None:
        """Forget all of them: Redis has lost one."""
        self._digests.clear()


async def stage(
    redis: AsyncDriver,
    keys: QueueKeys,
    compiled: Compiled,
    new_run: NewRun,
    published: PublishedPlans | None = None,
) -> bytes | None:
    """Publish what a run needs. Returns the record that starts it; None when a run of the id is there already.

    Args:
        published: Plans that are not published again. The start fails when one of them is gone.

    Raises:
        BadArguments: An item does not fit the task.
        StagingLost: Redis lost what was published before.
    """
    plan, counts = compiled.plan, dict[int, int]()
    if has_long_arguments(compiled) and not await _stage_arguments(redis, keys, compiled, new_run.run_id):
        return None
    # The plan after the items: a generator may take longer to make them than the plan would stay.
    for source in compiled.sources:
        count = await stage_items(redis, keys, source, new_run.run_id)
        if count is None:
            return None
        counts[source.node] = count
    digest = plan.make_digest(new_run.name)
    if published is None or digest not in published:
        await _publish_plan(redis, keys, compiled, digest, new_run.name)
    if published is not None:
        published.add(digest)
    return make_start(compiled, new_run, digest, counts)


async def _publish_plan(
    redis: AsyncDriver, keys: QueueKeys, compiled: Compiled, digest: str, name: str
) -> None:
    plan = compiled.plan
    fields = {str(number): node for number, node in enumerate(plan.nodes)}
    fields["head"] = plan.encode_head(name)
    names = list(fields)
    for first in range(0, len(names), NODES_PER_TRIP):
        portion = {name: fields[name] for name in names[first : first + NODES_PER_TRIP]}
        await redis.perform(calls.define_plan(keys, digest, portion))


def make_start(compiled: Compiled, new_run: NewRun, digest: str, counts: Mapping[int, int]) -> bytes:
    """Return the record that starts a run; `counts` are the items that were published, by the node of a map."""
    plan = compiled.plan
    fields: dict[str, Any] = {"def": digest}
    if new_run.caller:
        fields["caller"] = new_run.caller
    if has_long_arguments(compiled):
        fields["args"] = len(compiled.arguments)
    else:
        fields |= {f"arg:{number}": text.decode() for number, text in enumerate(compiled.arguments)}
    added = (("trace", new_run.trace), ("headers", new_run.headers))
    if tail := "".join(f',"{name}":{msgspec.json.encode(value).decode()}' for name, value in added if value):
        fields["tail"] = tail
    for name, raw in (new_run.inputs or {}).items():
        fields[f"value:{plan.inputs[name]}"] = raw.decode()
    life, size = int(new_run.life * 1000), len(plan.nodes)
    totals = sorted(counts.items())
    return calls.pack_record("start", new_run.run_id, life, size, fields, plan.roots, totals, plan.waits)


def has_long_arguments(compiled: Compiled) -> bool:
    """Return whether the arguments of the calls of a run are published before it, as the items of its maps are."""
    arguments = compiled.arguments
    return len(arguments) > MOST_ARGUMENTS or sum(map(len, arguments)) > MOST_ARGUMENT_BYTES


async def _stage_arguments(redis: AsyncDriver, keys: QueueKeys, compiled: Compiled, run_id: str) -> bool:
    """Publish the arguments of a run. Returns whether the run is not live yet."""
    before = 0
    pending: list[Any] = []
    for portion in split_items(compiled.arguments):
        pending.append(calls.stage_arguments(keys, run_id, before, portion))
        before += len(portion)
    for first in range(0, len(pending), PORTIONS_PER_WRITE):
        if -1 in await redis.perform_all(pending[first : first + PORTIONS_PER_WRITE]):
            return False
    return True


async def stage_items(
    redis: AsyncDriver, keys: QueueKeys, source: MapSource, run_id: str, *, generation: int | None = None
) -> int | None:
    """Publish the items of one map.

    Returns how many there are; None when the run does not take them: it is live already.

    Args:
        generation: For a map of a run that is live, and waits for them: how often its node was started again.

    Raises:
        BadArguments: An item does not fit the task.
        StagingLost: Redis lost what was published before.
    """
    before = 0
    pending: list[Any] = []
    for portion in split_items(encode_items(source)):
        pending.append(calls.stage_items(keys, run_id, source.node, before, portion, generation=generation))
        before += len(portion)
        if len(pending) == PORTIONS_PER_WRITE:
            if not _check_staged(await redis.perform_all(pending)):
                return None
            pending.clear()
    if pending and not _check_staged(await redis.perform_all(pending)):
        return None
    return before


def _check_staged(replies: Iterable[int]) -> bool:
    for reply in replies:
        if reply == -1:
            return False
        if reply == -2:
            raise StagingLost("the items of a map were lost before the run was started: start it again")
    return True


def split_items(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield items in portions of ITEMS_PER_TRIP, or of fewer when they are large."""
    portion: list[bytes] = []
    size = 0
    for item in items:
        if portion and (len(portion) == ITEMS_PER_TRIP or size + len(item) > BYTES_PER_TRIP):
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += len(item)
    if portion:
        yield portion


def encode_items(source: MapSource) -> Iterator[bytes]:
    """Yield the texts that stand for the item of a map in its messages. Raises BadArguments."""
    if source.map.chunk is None:
        for item in _check_items(source):
            yield _encode_item(source, item)
        return
    chunk: list[bytes] = []
    for item in _check_items(source):
        chunk.append(b"[" + _encode_item(source, item) + b"]")
        if len(chunk) == source.map.chunk:
            yield b",".join(chunk)
            chunk = []
    if chunk:
        yield b",".join(chunk)


def _check_items(source: MapSource) -> Iterable[Any]:
    assert source.map.items is not None, "a source has items"
    return source.map.items


def _encode_item(source: MapSource, item: Any) -> bytes:
    task: Any = source.map.task
    if isinstance(item, Raw):  # the result of a job: its worker has encoded it, the members decode it
        raw = bytes(item)
        if source.map.star:
            if not raw.startswith(b"["):
                raise BadArguments(f"{task.name}.starmap takes lists of arguments, got {raw[:80].decode()}")
            raw = raw[1:-1]
        args: tuple[Any, ...] | None = None
    else:
        if source.map.star and isinstance(item, str | bytes):
            raise BadArguments(f"{task.name}.starmap takes tuples of arguments, got {item!r}")
        args = tuple(item) if source.map.star else (item,)
        raw = bytes(task.parameters.encode(args, {})[0])[1:-1]
    if not source.is_keyed:
        return raw
    keys = ("", "")
    if args is not None:
        keys = task.limits.make_keys(args, {})
    pairs = zip(("concurrency_key", "fair_key"), keys, strict=True)
    words = "".join(f',"{name}":{msgspec.json.encode(key).decode()}' for name, key in pairs if key)
    return b'"args":[' + raw + b"]" + words.encode()
