"""See and release the parked keys of a group: `app.streams.parked_keys`.

A processor with `then="park-key"` sets a record that fails aside, with all later records of its key.
"""

from typing import ClassVar

import msgspec

from celery5.application import Application
from celery5.audit.recording import AuditedAction
from celery5.broker.calls import streams as calls
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.errors import Misconfigured
from celery5.protocol.masking import mask_lines
from celery5.protocol.streams.parking import ParkedAction
from celery5.similar_names import join_names
from celery5.streams.browsing import make_unknown_group_error

KEYS_PER_CALL = 100
"""Keys whose records are counted at once."""


class ParkedKeyState(msgspec.Struct, frozen=True):
    """A parked key."""

    key: str
    # How many of its records wait.
    records: int
    # What failed.
    why: str
    # When the first record was parked, in seconds since 1970.
    since: float
    # What its owner is about to do: `release`, `discard`, or '' for nothing.
    action: ParkedAction


class ParkedKeyRegistry:
    """The parked keys of groups: `app.streams.parked_keys`.

    What is asked for is done by the owners of the partitions, in the order of the records of each key; with no worker
    running it is done when one starts.

    Raises:
        Misconfigured: There is no such stream, group, or parked key.
        BrokerError: The broker cannot be reached, or refuses.
    """

    REACHED_AS: ClassVar[str] = "app.streams.parked_keys."

    def __init__(self, app: Application) -> None:
        self._app = app

    async def aread(self, stream: str, group: str) -> list[ParkedKeyState]:
        """Return the parked keys of a group, the first one that was parked first."""
        redis = await self._app.connections.get_async_driver()
        return await _list(self._app, redis, stream, group)

    @blocking(aread)
    def read(self) -> None: ...

    async def arelease(self, stream: str, group: str, *keys: str) -> int:
        """Have parked records processed: those of these keys, or all.

        The parked records of a key are processed in their order, before later ones. If one fails again, the key stays
        parked from there on.

        Returns:
            How many keys are released.
        """
        redis = await self._app.connections.get_async_driver()
        return await _set_action(self._app, redis, stream, group, "release", keys)

    @blocking(arelease)
    def release(self) -> None: ...

    async def adiscard(self, stream: str, group: str, *keys: str) -> int:
        """Have parked records made dead records: those of these keys, or all.

        Later records of a key are processed again after that.

        Returns:
            How many keys are discarded.
        """
        redis = await self._app.connections.get_async_driver()
        return await _set_action(self._app, redis, stream, group, "discard", keys)

    @blocking(adiscard)
    def discard(self) -> None: ...


async def _list(app: Application, redis: AsyncDriver, stream: str, group: str) -> list[ParkedKeyState]:
    keys = app.keys.for_stream(stream)
    found = await redis.perform(calls.list_parked_keys(keys, group))
    if not found.keys and group not in await redis.perform(calls.list_groups(keys)):
        raise await make_unknown_group_error(app, redis, stream, group)
    names = sorted(found.keys, key=lambda name: (found.keys[name].since, name))
    counts: list[int] = []
    for first in range(0, len(names), KEYS_PER_CALL):
        portion = names[first : first + KEYS_PER_CALL]
        counts += await redis.perform_all([calls.count_parked_records(keys, group, name) for name in portion])
    return [
        ParkedKeyState(
            name.decode(errors="backslashreplace"),
            count,
            mask_lines(found.keys[name].why),
            found.keys[name].since / 1000,
            found.keys[name].action,
        )
        for name, count in zip(names, counts, strict=True)
    ]


async def _set_action(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    action: ParkedAction,
    names: tuple[str, ...],
) -> int:
    how = {"keys": join_names(names) or "all", "discard": action == "discard"}
    async with AuditedAction(app, redis, "stream:release", f"{stream} {group}", how) as audited:
        count = await _find_and_set(app, redis, stream, group, action, names)
        audited.set_count(count)
        return count


async def _find_and_set(
    app: Application,
    redis: AsyncDriver,
    stream: str,
    group: str,
    action: ParkedAction,
    names: tuple[str, ...],
) -> int:
    keys = app.keys.for_stream(stream)
    found = await redis.perform(calls.list_parked_keys(keys, group))
    if not found.keys and group not in await redis.perform(calls.list_groups(keys)):
        raise await make_unknown_group_error(app, redis, stream, group)
    by_text = {name.decode(errors="backslashreplace"): name for name in found.keys}
    unknown = [name for name in names if name not in by_text]
    if unknown:
        raise Misconfigured(
            f"group {group} of stream {stream} has not parked key {unknown[0]!r}: celery5 stream parked {stream} "
            f"{group} shows those that it has"
        )
    chosen = [by_text[name] for name in names]
    return await redis.perform(calls.set_parked(keys, group, action, chosen)) if found.keys else 0
