"""Group dead jobs by what made them fail: the task, the class of the error and its normalised message."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from celery5.protocol.job.dead_letters import DeadJob, format_position
from celery5.protocol.job.error_text import make_group_id, normalise_message
from celery5.protocol.masking import collapse_whitespace
from celery5.protocol.shards import get_queue_of_shard

SAMPLES = 5
"""Ids of jobs that a group names."""
EXAMPLE_LENGTH = 80
"""The most characters of an example."""
MAX_GROUPS = 1000
"""Groups of one reply: the jobs of further groups are counted together."""


class DeadJobGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead jobs that have failed in the same way."""

    # Its id, which depends on the task, the class of the error and the pattern only.
    id: str
    task: str
    # The class of the last error.
    type: str
    # The message of the error, with placeholders for what differs: see `normalise_message`.
    pattern: str
    # How many are dead, also beyond those that were looked at: counted where jobs die, and where they leave.
    count: int
    # When the first and the last of them died, in seconds since 1970, by the clock of Redis.
    first_died: float
    last_died: float
    queues: tuple[str, ...]
    # Why they are dead, such as `exhausted`.
    reasons: tuple[str, ...]
    # Message and traceback of the newest one.
    message: str
    traceback: str
    # The newest ones.
    ids: tuple[str, ...]

    @property
    def example(self) -> str:
        """The message of the newest job, in one line that may be cut; '' if it is the same as the pattern."""
        line = collapse_whitespace(self.message)
        if line == self.pattern:
            return ""
        return line if len(line) <= EXAMPLE_LENGTH else f"{line[: EXAMPLE_LENGTH - 1]}…"


class DeadJobGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of the dead jobs that were looked at."""

    # The largest first.
    groups: tuple[DeadJobGroup, ...]
    # Dead jobs that were looked at, and those of them that were selected.
    looked_at: int
    matched: int
    # Jobs whose group is not listed, since there are too many groups.
    ungrouped: int
    # Dead jobs in the queues.
    total: int
    # Where to go on, as `after`; '' when all was looked at.
    next: str = ""


class DeathCause(NamedTuple):
    """What is counted of a cause where jobs die: how many are dead, and when the first and the last died."""

    dead: int
    # In seconds since 1970, by the clock of Redis: of the first and the last that died, also when they have left since.
    first_died: float
    last_died: float
    # The entries of the last one and the first one.
    samples: tuple[str, ...] = ()


def sum_causes(queues: Iterable[Mapping[str, DeathCause]]) -> dict[str, DeathCause]:
    """Return what is counted of each cause on these queues together, by the id of its group."""
    total: dict[str, DeathCause] = {}
    for by_group in queues:
        for group, cause in by_group.items():
            before = total.get(group)
            if before is not None:
                first = min(before.first_died, cause.first_died)
                last = max(before.last_died, cause.last_died)
                cause = DeathCause(before.dead + cause.dead, first, last)
            total[group] = cause
    return total


def apply_causes(found: DeadJobGroups, causes: Iterable[Mapping[str, DeathCause]]) -> DeadJobGroups:
    """Return groups with what was counted where their jobs died, instead of what was found among those looked at.

    Jobs that died before causes were counted are known by looking alone: so the larger count and the earlier time hold.

    Args:
        found: The groups of whole causes: no condition has selected some jobs of one.
        causes: What is counted, of each queue that was looked at.
    """
    total = sum_causes(causes)
    groups = [_apply(group, total.get(group.id)) for group in found.groups]
    groups.sort(key=lambda group: (-group.count, -group.last_died, group.id))
    return msgspec.structs.replace(found, groups=tuple(groups))


def _apply(group: DeadJobGroup, cause: DeathCause | None) -> DeadJobGroup:
    if cause is None:
        return group
    return msgspec.structs.replace(
        group,
        count=max(group.count, cause.dead),
        first_died=min(group.first_died, cause.first_died),
        last_died=max(group.last_died, cause.last_died),
    )


class _GroupedJobs:
    """What is known of one group while jobs are added to it."""

    __slots__ = ("count", "first_died", "ids", "newest", "pattern", "queues", "reasons")

    def __init__(self, job: DeadJob, pattern: str) -> None:
        self.pattern = pattern
        self.count = 0
        self.first_died = job.died
        self.newest = job
        self.queues: set[str] = set()
        self.reasons: set[str] = set()
        self.ids: list[tuple[float, str]] = []

    def add(self, job: DeadJob) -> None:
        self.count += 1
        self.first_died = min(self.first_died, job.died)
        if job.died >= self.newest.died:
            self.newest = job
        self.queues.add(get_queue_of_shard(job.queue))
        self.reasons.add(job.reason)
        self.ids.append((job.died, job.id or job.entry))
        if len(self.ids) > 2 * SAMPLES:
            self.ids = sorted(self.ids, reverse=True)[:SAMPLES]

    def finish(self, group_id: str) -> DeadJobGroup:
        return DeadJobGroup(
            id=group_id,
            task=self.newest.task,
            type=self.newest.type,
            pattern=self.pattern,
            count=self.count,
            first_died=self.first_died,
            last_died=self.newest.died,
            queues=tuple(sorted(self.queues)),
            reasons=tuple(sorted(self.reasons)),
            message=self.newest.message,
            traceback=self.newest.traceback,
            ids=tuple(job_id for _, job_id in sorted(self.ids, reverse=True)[:SAMPLES]),
        )


class DeadJobGrouping:
    """Puts dead jobs into groups. Its size depends on the number of groups, which is bounded."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupedJobs] = {}
        self._matched = 0
        self._ungrouped = 0

    def add(self, job: DeadJob) -> None:
        """Add a job to its group."""
        self._matched += 1
        pattern = normalise_message(job.message)
        group_id = make_group_id(job.task, job.type, pattern)
        group = self._groups.get(group_id)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                self._ungrouped += 1
                return
            group = self._groups[group_id] = _GroupedJobs(job, pattern)
        group.add(job)

    def finish(self, *, looked_at: int, total: int, last: DeadJob | None) -> DeadJobGroups:
        """Return the groups. `last` is the last job that was looked at, if there may be more."""
        groups = [grouped.finish(group_id) for group_id, grouped in self._groups.items()]
        return DeadJobGroups(
            groups=tuple(sorted(groups, key=lambda group: (-group.count, -group.last_died, group.id))),
            looked_at=looked_at,
            matched=self._matched,
            ungrouped=self._ungrouped,
            total=max(total, looked_at),
            next="" if last is None else format_position(last),
        )
