"""What operators do with streams and their groups: move, reset and forget groups, quarantine, reshard and erase."""

from datetime import datetime

from celery5.application import Application
from celery5.audit.recording import AuditedAction, perform_audited
from celery5.broker.calls import streams as calls
from celery5.broker.calls.streams import MAX_PARTITIONS
from celery5.broker.driver import AsyncDriver
from celery5.connections.long_operations import persist
from celery5.errors import CeleryError, Misconfigured
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.streams.groups import StreamMap
from celery5.streams.browsing import make_unknown_group_error
from celery5.streams.lags import PARTITIONS_PER_CALL
from celery5.streams.processor import parse_start


class GroupIsLive(CeleryError):
    """Members of the group run: its cursors are not moved under them."""


class GroupNotEmpty(CeleryError):
    """A group has outputs that are not delivered, or dead or parked records: it is not forgotten."""


class WindowsAreOpen(CeleryError):
    """A group has open windows: the number of partitions is not changed, as keys would move away from theirs."""


async def seek(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    start: str | datetime,
    partition: int | None,
    force: bool,
) -> dict[int, str]:
    """Have a group continue elsewhere: `Streams.seek` explains it."""
    first = parse_start(start, "seek")
    how = {"to": start, "partition": partition, "force": force}
    async with AuditedAction(app, redis, "stream:seek", f"{stream} {group}", how) as action:
        reply = await redis.perform(
            calls.seek(app.keys.for_stream(stream), group, first, partition=partition, force=force)
        )
        cursors = await _check_sought(app, redis, stream, group, reply)
        if partition is not None and partition not in cursors:
            raise Misconfigured(f"stream {stream} has no partition {partition}")
        action.set_count(len(cursors))
        return cursors


async def _check_sought(
    app: Application, redis: AsyncDriver, stream: str, group: str, reply: int | dict[int, str]
) -> dict[int, str]:
    if reply == -1:
        raise await make_unknown_group_error(app, redis, stream, group)
    if isinstance(reply, int):
        raise GroupIsLive(
            f"{_name_members(reply, group)}: stop them first, or force it: they continue at the new place"
        )
    return reply


def _name_members(count: int, group: str) -> str:
    return f"{format_count(count, 'member')} of group {group} {choose_form(count, 'runs', 'run')}"


async def reset(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    start: str | datetime,
    force: bool,
    state: bool,
) -> dict[int, str]:
    """Have a group begin again: `Streams.reset` explains it."""
    first = parse_start(start, "reset")
    call = calls.seek(
        app.keys.for_stream(stream), group, first, force=force, begins_anew=True, forgets_state=state
    )
    how = {"to": start, "force": force, "state": state}
    async with AuditedAction(app, redis, "stream:reset", f"{stream} {group}", how) as action:
        cursors = await _check_sought(app, redis, stream, group, await redis.perform(call))
        action.set_count(len(cursors))
        return cursors


async def forget(app: Application, redis: AsyncDriver, stream: str, group: str, force: bool) -> None:
    """Remove a group: `Streams.forget` explains it."""
    how = {"forget": True, "force": force}
    async with AuditedAction(app, redis, "stream:reset", f"{stream} {group}", how):
        await _forget(app, redis, stream, group, force)


async def _forget(app: Application, redis: AsyncDriver, stream: str, group: str, force: bool) -> None:
    keys, first, redis = app.keys.for_stream(stream), 0, persist(redis, "stream:reset")
    while True:
        call = calls.forget_group(keys, group, first=first, count=PARTITIONS_PER_CALL, force=force)
        reply = await redis.perform(call)
        if reply.outcome == "unknown":
            raise await make_unknown_group_error(app, redis, stream, group)
        if reply.outcome == "live":
            raise GroupIsLive(f"{_name_members(reply.number, group)}: stop them first")
        if reply.outcome == "kept":
            outputs = format_count(reply.number, "output that is", "outputs that are")
            raise GroupNotEmpty(
                f"group {group} of stream {stream} has {outputs} not delivered and "
                f"{reply.dead} dead and {format_count(reply.parked, 'parked record')}: "
                "nothing was forgotten; with force they go, too"
            )
        first = reply.number
        if not first:
            return


async def set_quarantine(
    app: Application, redis: AsyncDriver, stream: str, group: str, partition: int, why: str
) -> bool:
    """Quarantine a partition of a group, or end that: `Streams.set_quarantine` explains it."""
    condition = "quarantined" if why else ""
    call = calls.set_condition(app.keys.for_stream(stream), group, partition, condition, why=why)
    how = {"partition": partition, "why": why, "end": not why}
    return await perform_audited(app, redis, call, "stream:quarantine", f"{stream} {group}", how)


async def reshard(
    app: Application, redis: AsyncDriver, stream: str, partitions: int, force: bool
) -> StreamMap:
    """Change the number of partitions: `Streams.reshard` explains it."""
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise Misconfigured(f"reshard to {partitions!r}: give 1 to {MAX_PARTITIONS} partitions")
    how = {"partitions": partitions, "force": force}
    async with AuditedAction(app, redis, "stream:reshard", stream, how):
        return await _reshard(app, redis, stream, partitions, force)


async def _reshard(
    app: Application, redis: AsyncDriver, stream: str, partitions: int, force: bool
) -> StreamMap:
    reply = await redis.perform(calls.reshard(app.keys.for_stream(stream), partitions, force=force))
    if isinstance(reply, StreamMap):
        return reply
    if reply.outcome == "windows":
        raise WindowsAreOpen(
            f"group {reply.group} of stream {stream} has open windows in partition {reply.partition}, and keys would "
            "move away from theirs: send nothing until they are closed, or force it: such keys get two windows of "
            "the same time"
        )
    raise Misconfigured(
        f"stream {stream} is not there: nothing was ever sent to it"
        if reply.outcome == "unknown"
        else f"stream {stream} was resharded 16 times, and the records from before are still there"
    )


async def erase_streams(app: Application, redis: AsyncDriver) -> None:
    """Delete everything that the streams of an application have. Its workers must have stopped.

    Raises:
        BrokerUnavailable: Redis cannot be reached.
    """
    for stream in await redis.perform(calls.list_streams(app.keys)):
        keys = app.keys.for_stream(stream)
        groups = await redis.perform(calls.list_groups(keys))
        for group in groups:
            parked = await redis.perform(calls.list_parked_keys(keys, group))
            await redis.perform(calls.erase_parked(keys, group, list(parked.keys)))
        partitions = await redis.perform(calls.count_partitions(keys))
        await redis.perform(calls.erase_stream(keys, groups, partitions))
