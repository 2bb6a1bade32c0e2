"""Roll the reports of all processes up into the history of the application, one process at a time."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from celery5.broker.calls import observability as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.observability import Change, RollupTurn
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.broker.routing.broker_router import run_all_async
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.observability.alert_rules import TaskCount, count_tasks
from celery5.protocol.observability.report import Measurements, Series, compress, unpack_report
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
    sum_points,
    unpack_point,
)
from celery5.services.process.broker_outages import OutageLog

TURN_FACTOR = 3.0
"""Intervals after which another process takes the turn of one that is silent."""
MAX_DEPTHS = 500
"""Queues of one broker whose depth is measured."""
QUEUES_AT_ONCE = 50
"""Queues that are measured in one trip."""
MAX_PAGES = 200
"""Pages of reports that are rolled up before the rest waits for the next interval."""
RECENT = 120.0
"""Seconds for which reports stay readable that were rolled up."""


@dataclass(frozen=True, slots=True)
class CountedCluster:
    """What the reports of all processes say, when they have been rolled up."""

    # By the clock of Redis, in seconds since 1970.
    now: float
    # Attempts by task, since metrics are kept.
    tasks: dict[str, TaskCount]
    # The largest lag of an event loop in seconds; None when no process has reported one.
    loop_lag: float | None


class HistoryRollup:
    """Rolls reports up while it is this process' turn.

    Every report counts once: what it is rolled up to is saved together with its place on the stream, unless another
    process has saved meanwhile.

    Args:
        metrics_redis: The default broker, where the history of the application is.
        all_brokers: The drivers of all brokers, by name.
        worker: The name of this process.
        metrics_interval: Seconds between two rollups; 0: there are none.

    Attributes:
        counted: What was counted, after each rollup of this process.
    """

    def __init__(
        self,
        *,
        metrics_redis: AsyncDriver,
        all_brokers: Mapping[str, AsyncDriver],
        keys: Keys,
        worker: str,
        metrics_interval: float,
        log: Log,
    ) -> None:
        self._redis = metrics_redis
        self._brokers = all_brokers
        self._keys = keys
        self._worker = worker
        self._interval = metrics_interval
        self._log = log
        self._outages = OutageLog(log, "metrics:rollup-interrupted")
        self._has_failed = False
        self._send, self.counted = trio.open_memory_channel[CountedCluster](1)
        self._forget()

    def _forget(self) -> None:
        """Forget what is saved in Redis: another process may have changed it."""
        self._cursor: str | None = None
        self._rollup = Rollup()
        # When the points of each group began that are not packed yet, by tier.
        self._waiting: dict[str, dict[str, list[int]]] = {}
        self._measured_at = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Roll up until cancelled."""
        task_status.started()
        if not self._interval:
            await trio.sleep_forever()
        try:
            while True:
                await trio.sleep(self._interval)
                await self._try_to_roll_up()
        finally:
            with trio.move_on_after(1, shield=True):
                await self._give_up()

    async def _try_to_roll_up(self) -> None:
        try:
            turn = await self._redis.perform(
                calls.claim_rollup(self._keys, self._worker, seconds=TURN_FACTOR * self._interval)
            )
            if turn.is_own:
                await self._roll_up(turn)
            else:
                self._forget()
        except BrokerError as error:
            self._forget()
            self._outages.record_error(error)
        except Exception as error:  # history is never worth a worker
            self._forget()
            if not self._has_failed:
                self._has_failed = True
                why = describe_error(error, MAX_ERROR_LENGTH)
                self._log.event("metrics:rollup-failed", "error", why=why)
        else:
            self._outages.record_recovery()
            self._has_failed = False

    async def _give_up(self) -> None:
        if self._cursor is not None:
            try:
                await self._redis.perform(calls.claim_rollup(self._keys, self._worker, seconds=0))
            except BrokerError as error:
                self._log.event("metrics:rollup-interrupted", "debug", why=str(error))

    async def _roll_up(self, turn: RollupTurn) -> None:
        """Add all reports that wait, close the minutes that are over, and save."""
        if turn.cursor != self._cursor:
            self._forget()
            self._cursor = turn.cursor
            await self._load_index()
        before = cursor = turn.cursor
        # What is read must be saved while the turn lasts: where reports come faster than they are added, reading would
        # not end, and another process would begin with the same ones.
        deadline = trio.current_time() + self._interval
        for _ in range(MAX_PAGES):
            page = await self._redis.perform(calls.read_reports(self._keys, cursor))
            if page:
                await self._add(page)
                cursor = page[-1].id
            if len(page) < calls.REPORTS_READ or trio.current_time() >= deadline:
                break
        await self._measure_queues(turn.now)
        changes = await self._close(turn.now)
        saved = await self._redis.perform(
            calls.save_rollup(
                self._keys,
                before=before,
                cursor=cursor,
                needed_from=turn.now - RECENT,
                changes=changes,
            )
        )
        if saved:
            self._cursor = cursor
            self._pass_on(turn.now)
        else:
            self._forget()

    def _pass_on(self, now: float) -> None:
        """Pass on what was counted to whoever reads `counted`, unless it has not read what came before."""
        gauges = self._rollup.merge_gauges(now)
        lags = [value for series, value in gauges.items() if series[0] == "celery5_loop_lag_seconds"]
        with suppress(trio.WouldBlock):
            self._send.send_nowait(
                CountedCluster(now, count_tasks(self._rollup.groups.values()), max(lags, default=None))
            )

    async def _add(self, page: Sequence[calls.StoredReport]) -> None:
        reports = [(one.at, report) for one in page if (report := unpack_report(one.packed)) is not None]
        await self._load_groups({name for _, report in reports for name in self._rollup.split(report)})
        for at, report in reports:
            self._rollup.add_report(at, report)
            await trio.lowlevel.checkpoint()

    async def _load_index(self) -> None:
        """Read which groups there are, which points of each wait, and what is under way of each."""
        found = await self._redis.perform(calls.read_state(self._keys, ["index"]))
        self._waiting = read_index(found.get("index", b""))
        await self._load_groups(set(self._waiting))

    async def _load_groups(self, names: set[str]) -> None:
        """Read groups that are not known here; of too many, further ones count for the cluster."""
        missing = sorted((names | {CLUSTER}) - set(self._rollup.groups))
        missing = missing[: max(MAX_GROUPS - len(self._rollup.groups), 0)]
        for start in range(0, len(missing), QUEUES_AT_ONCE):
            part = missing[start : start + QUEUES_AT_ONCE]
            found = await self._redis.perform(
                calls.read_state(self._keys, [f"group:{name}" for name in part])
            )
            for name in part:
                self._rollup.groups[name] = MetricsGroup.unpack(found.get(f"group:{name}"))

    async def _measure_queues(self, now: float) -> None:
        """Measure once a minute how far behind all queues are."""
        minute = int(now // MINUTE)
        if minute == self._measured_at:
            return
        self._measured_at = minute
        measured = await run_all_async(
            [partial(self._measure_broker, name, redis) for name, redis in self._brokers.items()]
        )
        for found in measured:
            if not isinstance(found, dict):
                continue  # a broker that is unreachable has no depths
            await self._load_groups(set(found))
            for queue, gauges in found.items():
                self._rollup.add_gauges(now, queue if queue in self._rollup.groups else CLUSTER, gauges)

    async def _measure_broker(self, name: str, redis: AsyncDriver) -> dict[str, dict[Series, float]]:
        queues = sorted(await redis.perform(queue_calls.list_queues(self._keys)))[:MAX_DEPTHS]
        measured: dict[str, dict[Series, float]] = {}
        for start in range(0, len(queues), QUEUES_AT_ONCE):
            part = queues[start : start + QUEUES_AT_ONCE]
            depths = await redis.perform_all(
                [queue_calls.get_queue_depth(self._keys.for_queue(queue)) for queue in part]
            )
            for queue, depth in zip(part, depths, strict=True):
                measured[queue] = {
                    ("celery5_queue_depth",): float(depth.waiting),
                    ("celery5_queue_oldest_seconds",): depth.oldest or 0.0,
                    ("celery5_queue_dead",): float(depth.dead),
                    ("celery5_queue_held",): float(depth.held),
                    ("celery5_queue_scheduled",): float(depth.scheduled),
                    ("celery5_queue_runs",): float(depth.runs),
                }
        return measured

    async def _close(self, now: float) -> list[Change]:
        """Return the changes that save everything, and those that pack what is over."""
        rollup = self._rollup
        rollup.add_gauges(now, CLUSTER, rollup.merge_gauges(now))
        new = {
            name_point(MINUTES, closed.at, closed.group): closed.measurements
            for closed in rollup.close_minutes(now)
        }
        for name in new:
            _, at, group = name.split(":", 2)
            self._get_waiting(group)[MINUTES.name].append(int(at))
        changes: list[Change] = []
        for group in list(self._waiting):
            for tier in (MINUTES, HOURS):
                changes += await self._pack_chunks(tier, group, now, new)
        changes += [("set", name, pack_point(point), "") for name, point in new.items()]
        changes += [
            ("set", f"group:{name}", group.pack(), "") for name, group in rollup.take_changed().items()
        ]
        changes.append(
            ("set", "index", compress({name: self._get_waiting(name) for name in rollup.groups}), "")
        )
        return changes

    def _get_waiting(self, group: str) -> dict[str, list[int]]:
        return self._waiting.setdefault(group, {MINUTES.name: [], HOURS.name: []})

    async def _pack_chunks(
        self, tier: Tier, group: str, now: float, new: dict[str, Measurements]
    ) -> list[Change]:
        """Return the changes that pack the chunks that are over, and enter the sum of an hour in `new`."""
        waiting = self._get_waiting(group)
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
            if tier is MINUTES:
                new[name_point(HOURS, begin, group)] = sum_points([point for _, point in chunk])
                waiting[HOURS.name].append(begin)
        return changes
