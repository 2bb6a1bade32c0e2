"""Spread a queue over several hash tags, so that one node of a Redis Cluster need not hold all of it.

A shard is a queue of its own. The first one has the name of the sharded queue, the others are `mails#1`, `mails#2` and
so on: so a queue without shards is its own first shard, and nothing moves when it gets more.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar
from zlib import crc32

from celery5.errors import Misconfigured
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.limits import DeclaredLimits, LimitOverride
from celery5.protocol.names import SHARD_MARK, is_queue_name
from celery5.protocol.text_values import parse_assignments

T = TypeVar("T")

MAX_SHARDS = 256
"""The most shards of one queue."""
_HINT = "write mails=8 reports=4: a queue, and a number of shards from 1 to 256"

Placement = Literal["spread", "keyed", "first"]
"""Which shards the jobs of a task go to.

spread: all of them, by the unique key of a job, else by its id. keyed: all of them, by the concurrency key, since the
limit holds for each key. first: the first one alone, where the task's limit or rate is counted.
"""


def parse_shards(setting: str | Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of shards in the setting `shards`, by queue. Raises Misconfigured.

    A number of 1 is kept: such a queue may have had more, and jobs on them.
    """
    if isinstance(setting, str):
        setting = {queue: _to_number(text) for queue, text in parse_assignments(setting, _HINT).items()}
    for queue, number in setting.items():
        if not is_queue_name(queue):
            raise Misconfigured(f"{queue!r} is not the name of a queue: {_HINT}")
        if type(number) is not int or not 1 <= number <= MAX_SHARDS:
            raise Misconfigured(f"{queue}={number} is not a number of shards: {_HINT}")
    return dict(setting)


def _to_number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 10 else text


def get_queue_of_shard(name: str) -> str:
    """Return the queue that a shard belongs to; for any other queue its own name."""
    return name.partition(SHARD_MARK)[0]


def name_shard(queue: str, number: int) -> str:
    """Return the name of a shard of a queue, by its number from 0."""
    return f"{queue}{SHARD_MARK}{number}" if number else queue


def get_shard_number(name: str) -> int:
    """Return the number of a shard, from 0; 0 for any other queue."""
    number = name.partition(SHARD_MARK)[2]
    return read_whole(number)


def list_shards(queue: str, count: int) -> list[str]:
    """Return the names of the shards of a queue."""
    return [name_shard(queue, number) for number in range(count)]


def find_shards(queue: str, count: int, names: Iterable[str]) -> list[str]:
    """Return the names of the `count` shards of a queue, and after them all others of it among `names`.

    The others are those of an earlier number of shards.
    """
    shards = list_shards(queue, count)
    return [
        *shards,
        *sorted({name for name in names if get_queue_of_shard(name) == queue}.difference(shards)),
    ]


def group_shards(named: Mapping[str, T]) -> dict[str, list[T]]:
    """Group values of queues and shards by the queues that these belong to."""
    groups: dict[str, list[T]] = {}
    for name, value in named.items():
        groups.setdefault(get_queue_of_shard(name), []).append(value)
    return groups


def take_queues(names: Iterable[str], most: int) -> list[str]:
    """Return the names of the first `most` queues, in their order, each with all of its shards."""
    groups = group_shards({name: name for name in names})
    return [shard for queue in list(groups)[:most] for shard in groups[queue]]


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of numbers by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def get_largest(values: Iterable[float | None]) -> float | None:
    """Return the largest of some numbers that may be unknown; None where all are."""
    return max((value for value in values if value is not None), default=None)


def get_smallest(values: Iterable[float | None]) -> float | None:
    """Return the smallest of some numbers that may be unknown; None where all are."""
    return min((value for value in values if value is not None), default=None)


def choose_shard(queue: str, count: int, word: str) -> str:
    """Return the shard of a queue for a word: an id, a unique key or a concurrency key."""
    return name_shard(queue, crc32(word.encode(errors="replace")) % count) if count > 1 else queue


def choose_number(shards: Mapping[str, int], run_id: str) -> int:
    """Return the shard number of a run's steps, from 0. A queue with fewer shards takes it modulo their number."""
    most = max(shards.values(), default=1)
    return crc32(run_id.encode(errors="replace")) % most if most > 1 else 0


def get_placement(limits: DeclaredLimits | None) -> Placement:
    """Return which shards the jobs of a task with these limits go to, so that its limits hold over all workers."""
    if limits is None:
        return "spread"
    if limits.rate is not None:  # then its own limit does not count
        return "first" if limits.rate.per == "all" else "spread"
    if limits.limit is None or limits.limit.per == "worker":
        return "spread"
    return "keyed" if limits.keyed else "first"


def check_override(task: str, placement: Placement | None, override: LimitOverride) -> None:
    """Raise Misconfigured for a limit set at run time that would be counted on each shard of a queue.

    Args:
        task: The name of the task.
        placement: Which shards its jobs go to; None if its queue has no shards.
        override: The limit. For a keyed task it is counted by key; a rate is not. 0 rejects all jobs on any shard.
    """
    holds = placement in (None, "first") or (placement == "keyed" and not override.rate)
    if not holds and (override.rate or override.limit):
        raise Misconfigured(
            f"task {task}: its jobs are spread over the shards of its queue, where this would be counted on each: "
            "declare a limit or a rate for the task, then it can be changed at run time; or suspend the task"
        )
