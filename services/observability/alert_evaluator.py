"""Evaluate the rules of alerts whenever this process has rolled metrics up, so in one process at a time."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import trio

from celery5.broker.call import Call
from celery5.broker.calls import alerts as calls
from celery5.broker.calls import cluster as cluster_calls
from celery5.broker.calls import commands as command_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import streams as stream_calls
from celery5.broker.calls import workflows as workflow_calls
from celery5.broker.calls.alerts import AlertsRead
from celery5.broker.calls.queues import QueueState, merge_queue_states
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import EVENTS, Keys, QueueKeys
from celery5.broker.routing.broker_router import run_all_async
from celery5.errors import BrokerError
from celery5.limits.holds import LimitHolds
from celery5.logs.log import Log
from celery5.observability.lost_processes import list_lost
from celery5.observability.storage import read_broker_memory
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.observability.alert_rules import (
    MAX_SUBJECTS,
    MeasuredCluster,
    MeasuredQueue,
    StoppingRun,
    StoredAlerts,
    add_sample,
    read_conditions,
)
from celery5.protocol.observability.alerting import AlertRule, Measure, decide_alerts
from celery5.protocol.observability.overview import LostWorker
from celery5.protocol.observability.queue_depth import QueueDepth, merge_depths
from celery5.protocol.process.missing import MembersReport, MissingMember, list_missing, make_start_advice
from celery5.protocol.shards import get_queue_of_shard, take_queues
from celery5.protocol.workflows.status import make_status
from celery5.results.job_details import LEASED_PROCESS_KINDS, count_active_schedules
from celery5.services.observability.history_rollup import CountedCluster, HistoryRollup
from celery5.services.process.broker_outages import OutageLog
from celery5.streams import lags as stream_lags
from celery5.workflows import run as workflow_runs

STOPPING_RUNS = 50
"""Runs of workflows of one queue of which it is measured whether they are undone."""
QUEUES_AT_ONCE = 50
"""Queues that are measured in one trip."""
MAX_GROUPS_MEASURED = 64
"""Groups of streams of one broker that are measured."""
OF_QUEUES = frozenset[Measure](
    {"oldest", "no-workers", "dead-letters", "worker-deaths", "worker-lost", "loop-lag", "not-undone"}
)
"""What is measured of queues."""


class _MeasuredBroker(NamedTuple):
    """What was measured of one broker."""

    queues: dict[str, MeasuredQueue]
    lags: dict[tuple[str, str], float]
    memory: list[ServerMemory]
    # The queues, or their shards, that have lost workers.
    with_lost: list[QueueState]


class AlertEvaluator:
    """Decides which alerts fire, and saves that together with the notifications.

    It is saved only while it is still the turn of this process, and nobody has saved since it was read: whatever is
    killed or frozen, each alert fires once.

    Args:
        default_redis: The default broker, where the alerts are.
        all_brokers: The drivers of all brokers, by name.
        history_rollup: What counts the jobs of the cluster.
        alert_rules: The rules.
        limit_holds: Says what holds jobs that wait at limits.
        worker: The name of this process.

    Attributes:
        evaluated: Says after each evaluation that notifications may be sent by this process.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        default_redis: AsyncDriver,
        all_brokers: Mapping[str, AsyncDriver],
        keys: Keys,
        history_rollup: HistoryRollup,
        alert_rules: Sequence[AlertRule],
        limit_holds: LimitHolds,
        worker: str,
        log: Log,
    ) -> None:
        self._redis = default_redis
        self._brokers = all_brokers
        self._keys = keys
        self._counted = history_rollup.counted
        self._rules = {rule.name: rule for rule in alert_rules}
        self._measures = {rule.condition.measure for rule in alert_rules}
        self._limit_holds = limit_holds
        self._worker = worker
        self._log = log
        self._outages = OutageLog(log, "alerts:interrupted", "alerts:resumed")
        self._has_failed = False
        self._before: AlertsRead | None = None
        self._send, self.evaluated = trio.open_memory_channel[None](1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Evaluate until cancelled."""
        task_status.started()
        async for counted in self._counted:
            try:
                await self._evaluate(counted)
            except BrokerError as error:
                self._before = None
                self._outages.record_error(error)
            except Exception as error:  # alerts are never worth a worker
                self._before = None
                if not self._has_failed:
                    self._has_failed = True
                    why = describe_error(error, MAX_ERROR_LENGTH)
                    self._log.event("alerts:evaluation-failed", "error", why=why)
            else:
                self._outages.record_recovery()
                self._has_failed = False

    async def _evaluate(self, counted: CountedCluster) -> None:
        measured = await self._measure(counted)
        before = self._before
        if before is None:
            before = await self._redis.perform(calls.read_alerts(self._keys))
        silences = await self._redis.perform(calls.read_silences(self._keys))
        rules = list(self._rules.values())
        samples = add_sample(before.stored.samples, measured, rules)
        decision = decide_alerts(
            self._rules,
            before.stored.instances,
            read_conditions(rules, measured, samples),
            {name: silence.until for name, silence in silences.items()},
            measured.at,
        )
        after = StoredAlerts(decision.instances, samples)
        # Also when nothing has changed: so everybody knows how old the last evaluation is.
        revision = await self._redis.perform(
            calls.save_alerts(self._keys, self._worker, before.revision, after, decision.transitions)
        )
        self._before = AlertsRead(revision, after) if revision else None
        if not revision:
            return
        if not self._send.statistics().current_buffer_used:
            self._send.send_nowait(None)

    async def _measure(self, counted: CountedCluster) -> MeasuredCluster:
        """Measure all queues, and all groups of streams."""
        queues: dict[str, MeasuredQueue] = {}
        lags: dict[tuple[str, str], float] = {}
        memory: list[ServerMemory] = []
        with_lost: list[QueueState] = []
        cluster, missing = None, tuple[MissingMember, ...]()
        if "member-missing" in self._measures:
            cluster, missing = await self._measure_missing()
        measured = await run_all_async(
            [partial(self._measure_broker, name, redis) for name, redis in self._brokers.items()]
        )
        for found in measured:
            if isinstance(found, _MeasuredBroker):  # a broker that is unreachable has no queues
                queues.update(found.queues)
                lags.update(found.lags)
                memory += found.memory
                with_lost += found.with_lost
        needs_lost = self._measures & {"worker-lost", "worker-deaths"}
        return MeasuredCluster(
            at=counted.now,
            queues=queues,
            tasks=counted.tasks,
            lags=lags,
            loop_lag=counted.loop_lag,
            memory=tuple(memory),
            lost=await self._measure_lost(with_lost, counted.now) if needs_lost else (),
            cluster=cluster,
            missing=missing,
        )

    async def _measure_broker(self, name: str, redis: AsyncDriver) -> "_MeasuredBroker":
        queues: dict[str, MeasuredQueue] = {}
        with_lost: list[QueueState] = []
        if self._measures & OF_QUEUES:
            names = await redis.perform(queue_calls.list_queues(self._keys))
            names = take_queues(sorted(names), MAX_SUBJECTS)
            paused = await redis.perform(command_calls.list_paused_queues(self._keys))
            queues, with_lost = await self._measure_queues(redis, names, paused)
        lags: dict[tuple[str, str], float] = {}
        if "stream-lag" in self._measures:
            lags = await self._measure_groups(redis)
        memory = await read_broker_memory(name, redis) if "memory" in self._measures else None
        return _MeasuredBroker(queues, lags, [memory] if memory else [], with_lost)

    async def _measure_lost(self, queues: Sequence[QueueState], now: float) -> tuple[LostWorker, ...]:
        """Return the processes that were lost in the last hour, as all surfaces show them.

        Args:
            queues: The queues, or their shards, that have lost workers.
            now: In seconds since 1970.
        """
        over: list[Call[Any]] = [
            cluster_calls.list_lost_processes(self._keys, kind) for kind in LEASED_PROCESS_KINDS
        ]
        live: list[Call[Any]] = [
            cluster_calls.list_live_processes(self._keys, kind) for kind in LEASED_PROCESS_KINDS
        ]
        events: Call[Any] = queue_calls.get_queue_state(self._keys.for_queue(EVENTS))
        events_state, *replies = await self._redis.perform_all([events, *over, *live])
        kinds = len(LEASED_PROCESS_KINDS)
        return tuple(
            list_lost(
                merge_queue_states(queues),
                events_state,
                dict(zip(LEASED_PROCESS_KINDS, replies[:kinds], strict=True)),
                dict(zip(LEASED_PROCESS_KINDS, replies[kinds:], strict=True)),
                brokers=self._brokers,
                now=now,
            )
        )

    async def _measure_missing(self) -> tuple[MembersReport | None, tuple[MissingMember, ...]]:
        """Return what the Controller says of its members, and all processes that should work and do not."""
        reads: list[Call[Any]] = [
            cluster_calls.read_members_report(self._keys),
            cluster_calls.list_live_processes(self._keys, "scheduler"),
            cluster_calls.list_live_processes(self._keys, "controller"),
        ]
        report, schedulers, controllers = await self._redis.perform_all(reads)
        idle = 0 if schedulers else await count_active_schedules(self._keys, self._redis)
        advice = make_start_advice(controllers, report)
        return advice.report, list_missing(advice, idle_schedules=idle)

    async def _measure_queues(
        self, redis: AsyncDriver, names: Sequence[str], paused: Collection[str]
    ) -> tuple[dict[str, MeasuredQueue], list[QueueState]]:
        """Return what is measured of queues, and the states of those, or of their shards, that have lost workers."""
        of_shards: dict[str, QueueDepth] = {}
        stopping: dict[str, tuple[StoppingRun, ...]] = {}
        for start in range(0, len(names), QUEUES_AT_ONCE):
            part = names[start : start + QUEUES_AT_ONCE]
            keys = [self._keys.for_queue(name) for name in part]
            depth_calls: list[Call[QueueDepth]] = [queue_calls.get_queue_depth(key) for key in keys]
            of_shards |= zip(part, await redis.perform_all(depth_calls), strict=True)
            if "not-undone" in self._measures:
                for name, runs in (await self._measure_stopping(redis, keys)).items():
                    queue = get_queue_of_shard(name)
                    stopping[queue] = stopping.get(queue, ()) + runs
        depths = merge_depths(of_shards)
        held = {name: depth.held_tasks for name, depth in depths.items()}
        held_by = await self._limit_holds.describe(redis, held)
        reads: list[Call[QueueState]] = [
            queue_calls.get_queue_state(self._keys.for_queue(name))
            for name, depth in of_shards.items()
            if depth.lost
        ]
        with_lost = await redis.perform_all(reads) if reads else []
        queues = {
            name: MeasuredQueue(
                depth=depth,
                held_by=held_by.get(name, ""),
                is_paused=name in paused,
                stopping_runs=stopping.get(name, ()),
            )
            for name, depth in depths.items()
        }
        return queues, with_lost

    async def _measure_stopping(
        self, redis: AsyncDriver, queues: Sequence[QueueKeys]
    ) -> dict[str, tuple[StoppingRun, ...]]:
        """Return the runs of each queue that are not completely undone, as far as they are still known."""
        listed: list[Call[Any]] = [
            workflow_calls.list_undoing_runs(queue, count=STOPPING_RUNS) for queue in queues
        ]
        replies = await redis.perform_all(listed)
        found: dict[str, tuple[StoppingRun, ...]] = {}
        for keys, since in zip(queues, replies, strict=True):
            reads = [workflow_calls.read_run(keys, run_id, workflow_runs.STATUS_FIELDS) for run_id in since]
            runs = await redis.perform_all(reads) if reads else []
            statuses = [
                make_status(run_id, keys.queue, fields)
                for run_id, fields in zip(since, runs, strict=True)
                if "state" in fields
            ]
            found[keys.queue] = tuple(
                StoppingRun(
                    id=status.id,
                    since=since[status.id],
                    failed=status.undo_failed,
                    description=(
                        f"run {status.id} ({status.name}) is {status.state.value}, "
                        f"{status.undo or 'its jobs stop'}"
                    ),
                )
                for status in statuses
            )
        return found

    async def _measure_groups(self, redis: AsyncDriver) -> dict[tuple[str, str], float]:
        lags: dict[tuple[str, str], float] = {}
        for stream in await redis.perform(stream_calls.list_streams(self._keys)):
            keys = self._keys.for_stream(stream)
            for group in await redis.perform(stream_calls.list_groups(keys)):
                if len(lags) >= MAX_GROUPS_MEASURED:
                    return lags
                lags[stream, group] = (await stream_lags.measure_group(keys, redis, group)).age
        return lags
