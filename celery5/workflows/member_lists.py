"""List jobs of a run: those that have not ended, those that Redis has lost, and those that a retry has replaced."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from celery5.application import Application
from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError
from celery5.protocol.workflows.member_ids import MemberId
from celery5.workflows.graph import goes_by_outbox, is_on_failure, is_one_job, read_node, scan_all

LOOKED_FOR = 1000
"""Jobs of a run that are looked for at once."""


class NodeJobs(NamedTuple):
    """The jobs of a node that have not ended."""

    queue: str
    ids: tuple[str, ...]
    # Those whose dead letter was held when the run stopped. It may have been replayed by then.
    held: tuple[str, ...] = ()


async def list_members(
    redis: AsyncDriver,
    keys: QueueKeys,
    run_id: str,
    number: int,
    run: Mapping[str, bytes],
    node: Mapping[str, Any],
) -> NodeJobs:
    """Return the jobs of a node that have not ended.

    Args:
        keys: The keys of the home of the run.
        run: All fields of the run.
        node: The node, as its plan has it.
    """
    state = run[f"node:{number}"]
    generation = read_generation(state)
    by_outbox = keys.queue if goes_by_outbox(node, keys.queue) else ""
    queue = str(node.get("p", {}).get("queue", keys.queue))
    if is_one_job(node, run, number):
        own = (str(MemberId(run_id, number, generation, None, by_outbox)),)
        return NodeJobs(queue, (), own) if state.partition(b" ")[0] == b"held" else NodeJobs(queue, own)
    by_outbox = keys.queue if node.get("p") else ""
    *ended, held = await redis.perform_all(
        [calls.read_bits(keys, run_id, number, name) for name in ("done", "bad", "again", "held")]
    )
    is_live = run.get("state") == b"live"
    ids, held_ids = list[str](), list[str]()
    for member in range(int(run.get(f"sent:{number}", b"0"))):
        if any(_has_bit(bits, member) for bits in ended):
            continue
        if not _has_bit(held, member):
            ids.append(str(MemberId(run_id, number, generation, member, by_outbox)))
        elif not is_live:
            held_ids.append(str(MemberId(run_id, number, generation, member, by_outbox)))
    return NodeJobs(queue, tuple(ids), tuple(held_ids))


def list_replaced(
    keys: QueueKeys, run_id: str, number: int, run: Mapping[str, bytes], node: Mapping[str, Any]
) -> NodeJobs:
    """Return the jobs of a node that are replaced: a retry has started the node again since.

    Args:
        keys: The keys of the home of the run.
        run: All fields of the run.
        node: The node, as its plan has it.
    """
    generations = range(read_generation(run.get(f"node:{number}", b"")))
    by_outbox = keys.queue if goes_by_outbox(node, keys.queue) else ""
    jobs = [MemberId(run_id, number, generation, None, by_outbox) for generation in generations]
    if node["k"] == "map":
        by_outbox, sent = keys.queue if node.get("p") else "", int(run.get(f"sent:{number}", b"0"))
        jobs += [
            MemberId(run_id, number, generation, member, by_outbox)
            for generation in generations
            for member in range(sent)
        ]
    return NodeJobs(str(node.get("p", {}).get("queue", keys.queue)), tuple(str(job) for job in jobs))


def read_generation(state: bytes) -> int:
    """Return how often a node was started again, of what its run has as its state."""
    return int(state.partition(b" ")[2] or b"0")


def _has_bit(bitmap: bytes, position: int) -> bool:
    at = position >> 3
    return at < len(bitmap) and bool(bitmap[at] & (128 >> (position & 7)))


async def find_missing_jobs(
    app: Application, redis: AsyncDriver, home: str, run_id: str
) -> dict[str, list[str]]:
    """Return jobs for which a run that stops, or one inside it, waits and which are nowhere: by the run.

    One that ends is missing, too, until its run has heard of it. A queue that cannot be reached is left out,
    and one that has ends of jobs to tell.
    """
    keys, found, runs = app.queue(home), dict[str, list[str]](), [run_id]
    for run in runs:  # those inside are added on the way
        found[run] = await _find_missing_of_run(app, redis, keys, run)
        if len(runs) < LOOKED_FOR:
            runs += await redis.perform(calls.list_children(keys, run, count=LOOKED_FOR - len(runs)))
    return found


async def _find_missing_of_run(
    app: Application, redis: AsyncDriver, keys: QueueKeys, run_id: str
) -> list[str]:
    run = await scan_all(redis, partial(calls.scan_run, keys, run_id))
    missing: list[str] = []
    for name, state in run.items():
        is_begun = name.startswith("node:") and state.split(b" ")[0] in (b"active", b"ending")
        if not is_begun or f"run:{name[5:]}" in run:
            continue
        node = await read_node(redis, keys, run, int(name[5:]))
        if node is None or is_on_failure(node):
            continue
        jobs = await list_members(redis, keys, run_id, int(name[5:]), run, node)
        wanted, at = jobs.ids[: LOOKED_FOR - len(missing)], app.queue(jobs.queue)
        try:
            missing += await _find_missing(redis, at, wanted, is_home=jobs.queue == keys.queue)
        except BrokerError:
            continue
    return missing


async def _find_missing(
    redis: AsyncDriver, keys: QueueKeys, ids: Sequence[str], *, is_home: bool
) -> list[str]:
    if not ids or not (is_home or await redis.perform(calls.count_outbox(keys)) == 0):
        return []
    places = await redis.perform(calls.read_places(keys, ids))
    return [job_id for job_id, is_there in zip(ids, places, strict=True) if not is_there]
