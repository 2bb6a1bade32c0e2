"""Roll the reports of all processes up into the history of the application, one process at a time."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

import msgspec
import trio

from celery5.broker.calls import observability as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.observability import Change, RollupTurn, StateChange
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.routing.broker_router import run_all_async
from celery5.broker.transient_errors import is_transient
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.observability.storage import read_broker_memory
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.observability.alert_rules import TaskCount, count_tasks
from celery5.protocol.observability.queue_depth import QueueDepth, list_gauges, merge_depths
from celery5.protocol.observability.queue_flow import LOOK_INTERVAL, SHORTEST_WINDOW, FlowReading, add_look
from celery5.protocol.observability.report import Measurements, Series, compress, make_series, unpack_report
from celery5.protocol.observability.rollup import (
    CLUSTER,
    HOURS,
    MAX_GROUPS,
    MINUTE,
    MINUTES,
    MetricsGroup,
    Rollup,
    Tier,
    name_point,
    pack_chunk,
    pack_point,
    read_index,
    read_report_id,
    sum_points,
    unpack_point,
)
from celery5.protocol.observability.storage import make_memory_metrics
from celery5.protocol.process.wake_ups import get_next_tick
from celery5.protocol.shards import take_queues
from celery5.services.process.broker_outages import OutageLog, last_try

TURN_FACTOR = 3.0
"""Intervals after which another process takes the turn of one that is silent."""
MAX_DEPTHS = 500
"""Queues of one broker whose depth is measured."""
QUEUES_AT_ONCE = 50
"""Queues that are measured in one trip."""
MAX_READ = 60_000
"""Reports that are rolled up before the rest waits for the next interval."""
PAGE_BYTES = 256 * 1024
"""Bytes of reports that are read at once, about."""
FIRST_PAGE = 20
"""Reports that are read first, before it is known how large they are."""
MAX_TRIMS = 100
"""Calls in which old reports are deleted before the rest waits for the next interval."""
RETRY_INTERVAL = 2.0
"""Seconds, on average, between two tries while Redis is unreachable or full. Each is drawn at random."""
RECOVERY_GRACE = 3.0
"""Seconds after an outage in which other processes renew their leases first: without them they would count as lost."""
RECENT = 15.0
"""Seconds for which reports stay readable that were rolled up."""
INDEX = "index"
"""The field that has the names of all groups."""
SAVED_BYTES = 64 * 1024
"""Bytes that are saved by one call, about: a group is never divided."""
SAVED_WORDS = 600
"""Words that are saved by one call, about, so that it takes Redis less than 2 ms."""
TIME_SLICE = 0.001
"""Seconds of work after which other tasks run. To let them run costs 15 us: a twentieth of what a report does."""
PACKED_AT_ONCE = 100
"""Groups whose hours are packed before the rest waits for the next interval."""


class CountedCluster(msgspec.Struct, frozen=True):
    """What the reports of all processes say, when they have been rolled up."""

    # By the clock of Redis, in seconds since 1970.
    now: float
    # Attempts by task, since metrics are kept.
    tasks: dict[str, TaskCount]
    # The largest lag of an event loop in seconds; None when no process has reported one.
    loop_lag: float | None


class HistoryRollup:
    """Rolls reports up while it is this process' turn.

    Every report counts once: each group is saved together with the id of the last report that counts in it, unless
    another process has saved it. When all groups are saved, the reports are done with.

    Args:
        default_redis: The default broker, where the history of the application is.
        all_brokers: The drivers of all brokers, by name.
        worker: The name of this process.
        metrics_interval: Seconds between two rollups; 0: there are none.

    Attributes:
        counted: What was counted, after each rollup of this process.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        default_redis: AsyncDriver,
        all_brokers: Mapping[str, AsyncDriver],
        keys: Keys,
        worker: str,
        metrics_interval: float,
        log: Log,
    ) -> None:
        self._redis = default_redis
        self._brokers = all_brokers
        self._keys = keys
        self._worker = worker
        self._interval = metrics_interval
        self._look_interval = max(SHORTEST_WINDOW, min(LOOK_INTERVAL, metrics_interval))
        self._log = log
        self._outages = OutageLog(log, "metrics:rollup-interrupted")
        self._has_failed = self._is_others_turn = self._is_interrupted = False
        self._pause_at = 0.0
        self._send, self.counted = trio.open_memory_channel[CountedCluster](1)
        self._forget()

    def _forget(self) -> None:
        """Forget what is saved in Redis: another process may have changed it."""
        self._cursor: str | None = None
        self._rollup = Rollup()
        # The names that the index has, and how often it was saved.
        self._indexed: set[str] = set()
        self._index_mark = ""
        self._page_size = FIRST_PAGE
        self._packed = set[str]()
        self._measured_at = 0
        # When the counters of queues are looked at again, on Trio's clock.
        self._look_due = 0.0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Roll up until cancelled."""
        task_status.started()
        if not self._interval:
            await trio.sleep_forever()
        try:
            await trio.sleep(self._interval)
            while True:
                if not await self._try_to_roll_up():
                    await trio.sleep(RETRY_INTERVAL * random.uniform(0.5, 1.5))
                    continue
                # A turn that is not renewed lasts for as long.
                interval = self._interval * (TURN_FACTOR if self._is_others_turn else 1)
                await trio.sleep_until(get_next_tick(trio.current_time(), interval))
        finally:
            if self._cursor is not None:
                with last_try(self._log, "metrics:rollup-interrupted"):
                    await self._redis.perform(calls.claim_rollup(self._keys, self._worker, seconds=0))

    async def _try_to_roll_up(self) -> bool:
        """Return False if an outage has interrupted it: alerts wait for it, so it is tried again soon."""
        self._is_others_turn = False
        try:
            turn = await self._claim_turn()
            if turn.is_own and self._is_interrupted:
                await trio.sleep(RECOVERY_GRACE)
                turn = await self._claim_turn()
            self._is_others_turn = not turn.is_own
            if turn.is_own:
                await self._roll_up(turn)
            else:
                self._forget()
        except BrokerError as error:
            self._forget()
            self._outages.record_error(error)
            self._is_interrupted = is_transient(error)
            return not self._is_interrupted
        except Exception as error:  # history is never worth a worker
            self._forget()
            if not self._has_failed:
                self._has_failed = True
                why = describe_error(error, MAX_ERROR_LENGTH)
                self._log.event("metrics:rollup-failed", "error", why=why)
        else:
            self._outages.record_recovery()
            self._has_failed = self._is_interrupted = False
        return True

    async def _claim_turn(self) -> RollupTurn:
        seconds = TURN_FACTOR * self._interval
        return await self._redis.perform(calls.claim_rollup(self._keys, self._worker, seconds=seconds))

    async def _roll_up(self, turn: RollupTurn) -> None:
        """Add all reports that wait, close the minutes that are over, and save."""
        if turn.cursor != self._cursor:
            self._forget()
            self._cursor = turn.cursor
            await self._load_index()
        cursor, now = await self._read_reports(turn)
        await self._measure_queues(now)
        gauges = dict[Series, float]()
        for _ in self._rollup.merge_gauges(now, gauges):
            await self._let_others_run()
        gauges |= await self._measure_memory()
        self._rollup.add_gauges(now, CLUSTER, gauges)
        if await self._save(now) and await self._redis.perform(
            calls.advance_rollup(self._keys, before=turn.cursor, cursor=cursor)
        ):
            self._cursor = cursor
            await self._pass_on(now, gauges)
            await self._trim_reports(now)
        else:
            self._forget()

    async def _let_others_run(self) -> None:
        """Let the other tasks of this process run, jobs among them, when this one has had its time slice."""
        if trio.current_time() >= self._pause_at:
            await trio.lowlevel.checkpoint()
            self._pause_at = trio.current_time() + TIME_SLICE

    async def _pass_on(self, now: float, gauges: Mapping[Series, float]) -> None:
        """Pass on what was counted to whoever reads `counted`, unless it has not read what came before."""
        lags = [value for series, value in gauges.items() if series[0] == "celery5_loop_lag_seconds"]
        tasks: dict[str, TaskCount] = {}
        for _ in count_tasks(self._rollup.groups.values(), tasks):
            await self._let_others_run()
        with suppress(trio.WouldBlock):
            self._send.send_nowait(CountedCluster(now, tasks, max(lags, default=None)))

    async def _read_reports(self, turn: RollupTurn) -> tuple[str, float]:
        """Add the reports that wait. Return the id of the last one, and up to when all have been added."""
        cursor, left = turn.cursor, MAX_READ
        # What is read must be saved while the turn lasts: where reports come faster than they are added, reading would
        # not end, and another process would begin with the same ones.
        deadline = trio.current_time() + self._interval
        while left > 0 and trio.current_time() < deadline:
            count = min(self._page_size, left)
            page = await self._redis.perform(calls.read_reports(self._keys, cursor, count))
            if page:
                await self._add(page)
                cursor = page[-1].id
                size = sum(len(stored.packed) for stored in page) // len(page) or 1
                self._page_size = min(max(PAGE_BYTES // size, 1), calls.REPORTS_READ)
            if len(page) < count:
                return cursor, turn.now
            left -= count
        # The minute of the last report may go on, whatever the time is.
        return cursor, min(read_report_id(cursor)[0] / 1000, turn.now)

    async def _trim_reports(self, now: float) -> None:
        """Delete old reports, but only what was rolled up: `now` is never later than that."""
        for _ in range(MAX_TRIMS):
            if not await self._redis.perform(calls.trim_reports(self._keys, now - RECENT)):
                return

    async def _add(self, page: Sequence[calls.StoredReport]) -> None:
        """Add the reports of a page, each before the next is unpacked.

        Two hundred unpacked reports at a time would live on into the oldest generation of Python's garbage collector,
        which then stops the process for 60 ms, once in two seconds.
        """
        for stored in page:
            if (report := unpack_report(stored.packed)) is not None:
                parts = self._rollup.split(report)
                if not parts.keys() <= self._rollup.groups.keys():
                    await self._load_groups(set(parts))
                self._rollup.add_report(stored.at, report, parts, read_report_id(stored.id))
            await self._let_others_run()

    async def _load_index(self) -> None:
        """Read which groups there are, and what is under way of each."""
        found = await self._redis.perform(calls.read_state(self._keys, [INDEX, f"mark:{INDEX}"]))
        names = read_index(found.get(INDEX, b""))
        self._indexed = set(names)
        self._index_mark = found.get(f"mark:{INDEX}", b"").decode()
        await self._load_groups(set(names))

    async def _load_groups(self, names: set[str]) -> None:
        """Read groups that are not known here; of too many, further ones count for the cluster."""
        missing = sorted((names | {CLUSTER}) - set(self._rollup.groups))
        missing = missing[: max(MAX_GROUPS - len(self._rollup.groups), 0)]
        for start in range(0, len(missing), QUEUES_AT_ONCE):
            part = missing[start : start + QUEUES_AT_ONCE]
            fields = [field for name in part for field in (f"group:{name}", f"mark:group:{name}")]
            found = await self._redis.perform(calls.read_state(self._keys, fields))
            for name in part:
                self._rollup.groups[name] = MetricsGroup.unpack(
                    found.get(f"group:{name}"), found.get(f"mark:group:{name}")
                )
                await self._let_others_run()

    async def _measure_queues(self, now: float) -> None:
        """Look at the counters of all queues, and enter once a minute how far behind they are.

        The flow of each is measured by the difference of two looks. While the last look is young nothing is read.
        """
        minute, is_entered = int(now // MINUTE), int(now // MINUTE) == self._measured_at
        if is_entered and trio.current_time() < self._look_due:
            return
        self._measured_at = minute
        self._look_due = trio.current_time() + self._look_interval
        measured = await run_all_async(
            [partial(self._measure_broker, broker) for broker in self._brokers.values()]
        )
        for found in () if is_entered else measured:
            if not isinstance(found, dict):
                continue  # a broker that is unreachable has no depths
            await self._load_groups(set(found))
            for queue, gauges in found.items():
                self._rollup.add_gauges(now, queue if queue in self._rollup.groups else CLUSTER, gauges)

    async def _measure_broker(self, redis: AsyncDriver) -> dict[str, dict[Series, float]]:
        queues = take_queues(sorted(await redis.perform(queue_calls.list_queues(self._keys))), MAX_DEPTHS)
        measured: dict[str, QueueDepth] = {}
        for start in range(0, len(queues), QUEUES_AT_ONCE):
            part = queues[start : start + QUEUES_AT_ONCE]
            keys = [self._keys.for_queue(queue) for queue in part]
            found = await redis.perform_all([queue_calls.measure_depth_and_flow(key) for key in keys])
            await self._keep_looks(redis, keys, [flow for _, flow in found])
            measured |= zip(part, (depth for depth, _ in found), strict=True)
        return {
            queue: {make_series(gauge.name, gauge.labels): float(gauge.value) for gauge in list_gauges(depth)}
            for queue, depth in merge_depths(measured).items()
        }

    async def _keep_looks(
        self, redis: AsyncDriver, keys: Sequence[QueueKeys], readings: Sequence[FlowReading]
    ) -> None:
        kept = [add_look(reading, self._look_interval) for reading in readings]
        new = [
            queue_calls.keep_looks(queue_keys, looks)
            for queue_keys, looks in zip(keys, kept, strict=True)
            if looks is not None
        ]
        if new:
            await redis.perform_all(new)

    async def _measure_memory(self) -> dict[Series, float]:
        """Return how full the servers are that can be reached and say it."""
        read = await run_all_async(
            [partial(read_broker_memory, name, redis) for name, redis in self._brokers.items()]
        )
        families = make_memory_metrics(memory for memory in read if isinstance(memory, ServerMemory))
        return {
            make_series(family.name, sample.labels): sample.value
            for family in families
            for sample in family.samples
        }

    async def _save(self, now: float) -> bool:
        """Save all groups that have changed. Return False if another process has saved one."""
        rollup = self._rollup
        new: dict[str, dict[str, Measurements]] = {}
        for closed in rollup.close_minutes(now):
            await self._let_others_run()
            new.setdefault(closed.group, {})[name_point(MINUTES, closed.at, closed.group)] = (
                closed.measurements
            )
            waiting = rollup.groups[closed.group].waiting[MINUTES.name]
            if closed.at not in waiting:
                waiting.append(closed.at)
        self._choose_packed(now)
        part = self._index_groups()
        for name, group in rollup.take_changed().items():
            part.append(await self._make_change(name, group, now, new.get(name, {})))
            if _is_full(part):
                if not await self._redis.perform(calls.save_rollup(self._keys, part)):
                    return False
                part = []
        return not part or await self._redis.perform(calls.save_rollup(self._keys, part))

    def _index_groups(self) -> list[StateChange]:
        """Return the change of the index, which is saved before any group that is new in it."""
        names = set(self._rollup.groups)
        if names == self._indexed:
            return []
        before, self._indexed = self._index_mark, names
        self._index_mark = str(int(before or 0) + 1)
        return [StateChange(INDEX, before, self._index_mark, [("set", INDEX, compress(sorted(names)), "")])]

    def _choose_packed(self, now: float) -> None:
        """Choose the groups that are packed now: not all at once, since a group takes some milliseconds."""
        self._packed.clear()
        for name, group in self._rollup.groups.items():
            if len(self._packed) < PACKED_AT_ONCE and any(
                min(group.waiting[tier.name], default=now) < now // tier.chunk * tier.chunk
                for tier in (MINUTES, HOURS)
            ):
                self._packed.add(name)
                self._rollup.change(name)

    async def _make_change(
        self, name: str, group: MetricsGroup, now: float, new: dict[str, Measurements]
    ) -> StateChange:
        """Return all changes of a group: they are saved together."""
        changes: list[Change] = []
        if name in self._packed:
            for tier in (MINUTES, HOURS):
                changes += await self._pack_chunks(tier, name, now, new)
        changes += [("set", field, pack_point(point), "") for field, point in new.items()]
        await self._let_others_run()
        changes.append(("set", f"group:{name}", group.pack(), ""))
        before = group.advance_mark()
        return StateChange(f"group:{name}", before, group.mark, changes)

    async def _pack_chunks(
        self, tier: Tier, group: str, now: float, new: dict[str, Measurements]
    ) -> list[Change]:
        """Return the changes that pack the chunks that are over, and enter the sum of an hour in `new`."""
        waiting = self._rollup.groups[group].waiting
        over = [at for at in sorted(set(waiting[tier.name])) if at < now // tier.chunk * tier.chunk]
        if not over:
            return []
        names = {at: name_point(tier, at, group) for at in over}
        stored = await self._redis.perform(calls.read_state(self._keys, list(names.values())))
        points = {at: unpack_point(stored[name]) for at, name in names.items() if name in stored}
        points |= {at: new.pop(name) for at, name in names.items() if name in new}
        waiting[tier.name] = [at for at in waiting[tier.name] if at not in names]
        changes: list[Change] = [("del", name, "", "") for name in names.values()]
        for begin in sorted({at // tier.chunk * tier.chunk for at in points}):
            chunk = [(at, point) for at, point in sorted(points.items()) if begin <= at < begin + tier.chunk]
            changes.append((tier.name, group, str(begin * 1000), pack_chunk(tier, chunk)))
            await self._let_others_run()
            if tier is MINUTES:
                new[name_point(HOURS, begin, group)] = sum_points([point for _, point in chunk])
                waiting[HOURS.name].append(begin)
        return changes


def _is_full(part: Sequence[StateChange]) -> bool:
    """Whether a call that saves these changes is as large as it may be."""
    words = [word for state_change in part for change in state_change.changes for word in change]
    return (
        len(words) >= SAVED_WORDS
        or sum(len(word) for word in words if isinstance(word, bytes)) >= SAVED_BYTES
    )
