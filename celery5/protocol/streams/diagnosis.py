"""Diagnose the streams of an application for `celery5 doctor`."""

import shlex
from collections.abc import Sequence

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.process.missing import BY_HAND, StartAdvice
from celery5.similar_names import join_names

MAX_GROUPS = 5
"""Groups that are named of many."""


class GroupHealth(msgspec.Struct, frozen=True):
    """What is looked at of one group of a stream."""

    stream: str
    group: str
    # Records that it has not done.
    lag: int
    # Whether a worker runs it.
    is_live: bool
    # Its quarantined partitions.
    quarantined: Sequence[int] = ()
    # Records that were dropped before it has read them.
    lost: int = 0
    # Partitions that have as many unread records as the stream keeps: more are refused.
    full: Sequence[int] = ()
    # Records that were archived before it has read them.
    archived: int = 0
    # Keys that it has parked.
    parked: int = 0

    @property
    def name(self) -> str:
        """Its stream and its name."""
        return f"{self.stream}:{self.group}"

    @property
    def words(self) -> str:
        """Both, as words of a command."""
        return shlex.join((self.stream, self.group))


class ArchiveHealth(msgspec.Struct, frozen=True):
    """What is looked at of the archive of a stream."""

    stream: str
    # The partition of which most records wait for it, how many, and how many may.
    partition: int
    waiting: int
    most: int

    @property
    def is_behind(self) -> bool:
        """Whether more than half of what may wait does."""
        return 2 * self.waiting > self.most


def diagnose_streams(
    streams: int,
    groups: Sequence[GroupHealth],
    archives: Sequence[ArchiveHealth] = (),
    advice: StartAdvice = BY_HAND,
) -> Finding:
    """Diagnose the streams: the worst that there is.

    Args:
        streams: How many there are.
        groups: Their groups.
        archives: Their archives that have not taken all records.
        advice: How processes are started.
    """
    if full := [group for group in groups if group.full]:
        return Finding(
            "streams",
            "fail",
            f"full, more records are refused: {_list([f'{group.name} {_numbers(group.full)}' for group in full])}",
            _start_workers(full[0], advice),
        )
    if lost := [group for group in groups if group.lost]:
        return Finding(
            "streams",
            "fail",
            f"records were dropped unread: {_list([f'{group.name} {group.lost}' for group in lost])}",
            "start more workers, raise Keep(records=...), or have it refuse: Keep(full='refuse')",
        )
    if quarantined := [group for group in groups if group.quarantined]:
        first = quarantined[0]
        return Finding(
            "streams",
            "fail",
            f"quarantined: {_list([f'{group.name} {_numbers(group.quarantined)}' for group in quarantined])}",
            f"celery5 stream quarantine {first.words} says why; when that is mended: "
            f"celery5 stream quarantine {first.words} --clear --all",
        )
    if parked := [group for group in groups if group.parked]:
        first = parked[0]
        return Finding(
            "streams",
            "warn",
            f"keys are parked: {_list([f'{group.name} {group.parked}' for group in parked])}",
            f"celery5 stream parked {first.words} says why; when that is mended: "
            f"celery5 stream release {first.words} --all",
        )
    if finding := _diagnose_archives(groups, archives, advice):
        return finding
    if finding := _diagnose_idle(groups, advice):
        return finding
    if not streams:
        return Finding("streams", "ok", "none")
    records = format_count(sum(group.lag for group in groups), "record")
    return Finding(
        "streams", "ok", f"{streams}, with {format_count(len(groups), 'group')}; {records} not done"
    )


def _diagnose_idle(groups: Sequence[GroupHealth], advice: StartAdvice) -> Finding | None:
    if idle := [group for group in groups if group.lag and not group.is_live]:
        return Finding(
            "streams",
            "warn",
            f"records wait, and no worker runs: {_list([f'{group.name} {group.lag}' for group in idle])}",
            _start_workers(idle[0], advice),
        )
    return None


def _diagnose_archives(
    groups: Sequence[GroupHealth], archives: Sequence[ArchiveHealth], advice: StartAdvice
) -> Finding | None:
    if behind := [archive for archive in archives if archive.is_behind]:
        named = [
            f"{archive.stream} partition {archive.partition} {archive.waiting} of {archive.most}"
            for archive in behind
        ]
        return Finding(
            "streams",
            "warn",
            f"records wait for the archive, more are refused when it is full: {_list(named)}",
            f"see archive:failed in the logs of the workers; with none running: {advice.format_start('worker')}",
        )
    if archived := [group for group in groups if group.archived]:
        return Finding(
            "streams",
            "warn",
            f"records were archived unread: {_list([f'{group.name} {group.archived}' for group in archived])}",
            "start more workers, or raise Keep(records=...)",
        )
    return None


def _start_workers(group: GroupHealth, advice: StartAdvice) -> str:
    """Return the remedy for a group that is not read. How to forget a group is for the guide: it cannot be undone."""
    return (
        f"{advice.format_start('worker')}; "
        f"celery5 stream show {shlex.quote(group.stream)} says what each group has not done; "
        "celery5 docs streams-operating, for a group that nobody needs any more"
    )


def _numbers(partitions: Sequence[int]) -> str:
    return (
        f"partition {partitions[0]}" if len(partitions) == 1 else format_count(len(partitions), "partition")
    )


def _list(names: Sequence[str]) -> str:
    return join_names(names, MAX_GROUPS)
