"""Autoscaler: decide how many workers there are, how far they read ahead, how much they run and prefer.

Any number of Schedulers have one, but only one at a time has the turn. The state of the scaling is in Redis, on
the default broker, so the next one continues from there. Nothing is sent unless scaling or priorities are
configured.
"""

from collections.abc import Iterable, Mapping

import msgspec
import trio

from celery5.broker.calls import cluster
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.scaling import Scaling, ScalingTurn
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.logs.log import Log
from celery5.protocol.masking import show_error
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.protocol.scaling.autoscale import (
    Autoscale,
    AutoscaleState,
    Load,
    get_changes,
    get_cooldown_end,
    get_next_state,
    resume_state,
)
from celery5.protocol.scaling.prioritisation import Preference, PrioritisationStrategy, compute_preference
from celery5.protocol.scaling.snapshot import ClusterSnapshot
from celery5.protocol.scaling.wanted_workers import measure_demands
from celery5.runners.user_errors import guard_scopes, reraise_cancellation
from celery5.services.process.broker_outages import OutageLog, last_try, retry_until_available
from celery5.services.scaling.observer import ClusterObserver
from celery5.services.scaling.scaling_commands import ScalingCommands

LOOK = 2.0
"""Seconds between two snapshots, at least."""
A_SECOND = 3
"""The most Redis commands in a second, on average over a snapshot of many queues and the pause after it."""


class Autoscaler:
    """Scales one application while this Scheduler has the turn."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        autoscale: Autoscale | None,
        prioritise: PrioritisationStrategy | None,
        observer: ClusterObserver,
        scaling_commands: ScalingCommands,
        worker: str,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._policy = autoscale
        self._strategy = prioritise
        self._observer = observer
        self._scaling_commands = scaling_commands
        self._name = worker
        self._log = log
        self._has_turn = False
        self._pause = LOOK
        self._failed: dict[str, str] = {}
        self._outages = OutageLog(log, "autoscale:failed", of="redis")
        self._last_scaling: Scaling | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Decide at intervals until cancelled."""
        task_status.started()
        if self._policy is None and self._strategy is None:
            await trio.sleep_forever()
        try:
            while True:
                await retry_until_available(self.run_once, self._outages, LOOK)
                await trio.sleep(self._pause)
        finally:
            if self._has_turn:
                with last_try(self._log, "autoscale:lock-release-failed"):
                    await self._redis.perform(scaling_calls.release_scaling_turn(self._keys, self._name))

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: with or without the turn, the Scheduler is ready."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the desired scale as metrics, if this one has the turn."""
        found = self._last_scaling
        if found is None:
            return
        yield make_gauge("celery5_scaling_jobs", "Jobs that could use a slot.", found.jobs, merge="max")
        yield make_gauge("celery5_scaling_workers", "Live workers.", found.workers, merge="max")
        yield make_gauge(
            "celery5_scaling_brokers_unreachable",
            "Brokers that could not be read.",
            len(found.unseen),
            merge="max",
        )
        if found.course is not None:
            yield make_gauge(
                "celery5_scaling_workers_needed",
                "Workers that are needed for every job to have a slot.",
                found.needed,
                merge="max",
            )
            yield make_gauge(
                "celery5_scaling_workers_desired",
                "Workers that should run.",
                found.course.workers,
                merge="max",
            )
            yield make_gauge(
                "celery5_scaling_prefetch_factor",
                "Factor by which workers read more jobs ahead.",
                found.course.prefetch,
                merge="max",
            )
            yield make_gauge(
                "celery5_scaling_concurrency_factor",
                "Factor by which workers run more I/O-bound jobs at once.",
                found.course.concurrency,
                merge="max",
            )

    async def run_once(self) -> None:
        """Take a snapshot, decide, store the decision and send it. Nothing is sent that was not stored."""
        seconds = max(scaling_calls.TURN, 3 * self._pause)
        turn = await self._redis.perform(
            scaling_calls.claim_scaling_turn(self._keys, self._name, seconds=seconds)
        )
        self._change_turn(turn.mine)
        if not turn.mine:
            return
        snapshot = await self._observer.take_snapshot()
        self._pause = max(LOOK, (self._observer.max_queues_observed + 6) / A_SECOND)
        found = self._decide(turn, snapshot)
        preference = self._prefer(snapshot)
        found = msgspec.structs.replace(found, preferred=dict(preference.tasks))
        if not await self._redis.perform(scaling_calls.save_scaling(self._keys, self._name, found)):
            return
        self._last_scaling = found
        controllers = await self._redis.perform(cluster.list_live_processes(self._keys, "controller"))
        await self._scaling_commands.send_changes(snapshot, found.course, preference, controllers)

    def _change_turn(self, mine: bool) -> None:
        if mine != self._has_turn:
            self._has_turn, self._last_scaling = mine, None
            self._scaling_commands.reset()
            self._observer.reset()
            self._log.event(
                "autoscale:lock-acquired" if mine else "autoscale:lock-lost", "info" if mine else "debug"
            )

    def _decide(self, turn: ScalingTurn, snapshot: ClusterSnapshot) -> Scaling:
        found = Scaling(
            workers=len(snapshot.workers),
            jobs=sum(snapshot.demand().values()),
            unseen=snapshot.unreachable,
            demands=measure_demands(snapshot),
            by=self._name,
            at=turn.now,
        )
        policy = self._policy
        if policy is None:
            return found
        known = None if turn.scaling is None else turn.scaling.course
        before = resume_state(known, policy, snapshot)
        if before is None:
            return found
        try:
            with guard_scopes():
                course = get_next_state(before, policy, snapshot, turn.now)
        except BaseException as error:  # user code
            reraise_cancellation(error)
            self._log_once("autoscale", f"its strategy failed: {show_error(error)}")
            course = before
        else:
            self._failed.pop("autoscale", None)
        load = Load(snapshot=snapshot, now=course.scale, minimum=policy.minimum, maximum=policy.maximum)
        found = msgspec.structs.replace(
            found,
            course=course,
            minimum=policy.minimum,
            maximum=policy.maximum,
            needed=load.needed(),
            cool_until=max(0.0, get_cooldown_end(course, policy)),
        )
        self._log_changes(before, course, found)
        return found

    def _log_changes(self, before: AutoscaleState, after: AutoscaleState, found: Scaling) -> None:
        for name, (was, now) in get_changes(before, after).items():
            self._log.event(
                "autoscale:decided",
                "info",
                of=name,
                before=was,
                after=now,
                jobs=found.jobs,
                workers=found.workers,
                needed=found.needed,
                cooldown=round(max(0.0, found.cool_until - found.at), 3),
            )

    def _prefer(self, snapshot: ClusterSnapshot) -> Preference:
        if self._strategy is None:
            return Preference()
        try:
            with guard_scopes():
                preference = compute_preference(self._strategy, snapshot)
        except BaseException as error:  # user code
            reraise_cancellation(error)
            self._log_once("prioritise", f"its strategy failed: {show_error(error)}")
            return Preference()
        self._failed.pop("prioritise", None)
        return preference

    def _log_once(self, what: str, why: str) -> None:
        """Log a warning, once for each reason until it is over."""
        if self._failed.get(what) != why:
            self._failed[what] = why
            self._log.event("autoscale:failed", "warning", of=what, why=why)
