"""Send the metrics that have changed to Redis and to outlets, every 15 seconds, and the records of ended jobs.

A report that Redis has not taken is sent again every two seconds, so it comes soon after an outage.

Records are sent in one call each second, if there are any, so that people find a job that has just run. Records that do
not fit into this call wait for the next report.
"""

import random
import time
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import trio

from celery5.broker.calls import job_history
from celery5.broker.calls import observability as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.broker.transient_errors import is_transient
from celery5.errors import BrokerError
from celery5.health.circuit_breaker import CircuitBreaker
from celery5.logs.log import Log
from celery5.observability.outlets import MetricsOutlet
from celery5.protocol.health.breaker import OUTLET_PREFIX, BreakerPolicy
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.observability.report import MetricsReport
from celery5.protocol.process.wake_ups import get_next_tick
from celery5.runners.user_errors import call_user_code, reraise_cancellation
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vitals import ProcessStatus

SEND_TIMEOUT = 5.0
"""Seconds that one report may take, to Redis or to an outlet."""
LAST_TIMEOUT = 2.0
"""Seconds that the last report may take, while the process stops."""
RETRY_INTERVAL = 2.0
"""Seconds, on average, between two tries to store a report while Redis is unreachable or full. Each is drawn at random,
so that many processes do not report together when it is back."""
EARLY_INTERVAL = 1.0
"""Seconds between two calls with records of ended jobs."""
MAX_BATCHES = 60
"""Batches of ended jobs in one interval: the rest waits for the next one."""
OUTLET_BREAKER = BreakerPolicy(threshold=3, reset=30.0, growth="exponential", longest=300.0)
"""When an outlet that fails gets no reports for a while."""


class GuardedOutlet(NamedTuple):
    """An outlet, and its circuit breaker."""

    outlet: MetricsOutlet
    circuit: CircuitBreaker


def guard_outlets(
    outlets: Sequence[MetricsOutlet], circuit_breakers: CircuitBreakers
) -> tuple[GuardedOutlet, ...]:
    """Return outlets, each with its own circuit breaker among those of the process."""
    return tuple(
        GuardedOutlet(
            outlet,
            circuit_breakers.add(
                f"{OUTLET_PREFIX}{type(outlet).__name__}", OUTLET_BREAKER, effect="it gets no metrics"
            ),
        )
        for outlet in outlets
    )


class MetricsReporter:
    """Reports until cancelled, and once more then. Nothing that fails here stops any work.

    While Redis is unreachable what is counted stays in this process, and is in the first report after that.

    Args:
        default_redis: The default broker, where the history of the application is.
        kind: The kind of this process.
        metrics_interval: Seconds between two reports; 0: none are made.
        guarded_outlets: Who gets each report besides Redis.
        history_limit: How many failed jobs the history keeps, and as many others; 0: there is none.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        default_redis: AsyncDriver,
        keys: Keys,
        process_status: ProcessStatus,
        kind: str,
        metrics_interval: float,
        guarded_outlets: Sequence[GuardedOutlet],
        history_limit: int,
        log: Log,
    ) -> None:
        self._redis = default_redis
        self._keys = keys
        self._process_status = process_status
        self._kind = kind
        self._interval = metrics_interval
        self._outlets = guarded_outlets
        self._history_limit = history_limit
        self._log = log
        self._failing: set[str] = set()
        # Whether the last report was not stored for a reason that passes by itself.
        self._is_interrupted = False
        # Whether the process was ready when the last report was made; None before the first.
        self._was_ready: bool | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Report until cancelled."""
        task_status.started()
        if not self._interval:
            await trio.sleep_forever()
        try:
            await self._send_early(trio.current_time() + self._interval)
            while True:
                is_stored = await self._report_in_interval()
                await self._send_history()
                if is_stored:
                    await self._send_early(get_next_tick(trio.current_time(), self._interval))
        finally:
            with trio.move_on_after(LAST_TIMEOUT, shield=True):
                await self._report()
                await self._send_history()

    async def _report_in_interval(self) -> bool:
        """Report. Try again while Redis is unreachable or full, until the next report is due.

        Return whether there is nothing more to do before that.
        """
        next_at = get_next_tick(trio.current_time(), self._interval)
        while True:
            await self._report()
            if not self._is_interrupted:
                return True
            await trio.sleep(RETRY_INTERVAL * random.uniform(0.5, 1.5))
            if trio.current_time() >= next_at:
                return False

    async def _report(self) -> None:
        """Send one report; two if the one before had not arrived."""
        status = self._process_status
        maker = status.report_maker
        for _ in range(2):
            is_new = not maker.has_pending
            try:
                self._was_ready = status.get_readiness().ok
                report = maker.make(status.metric_families(), kind=self._kind, origin=status.get_origin())
            except Exception as error:  # of a part that is asked for its metrics
                self._is_interrupted = False
                self._note("measuring", error)
                return
            if is_new:
                for outlet, circuit in self._outlets:
                    if circuit.try_pass(self) is None:
                        await self._send_to(outlet, circuit, report)
            if not await self._store(report):
                return
            maker.acknowledge()
            if is_new:
                return

    async def _store(self, report: MetricsReport) -> bool:
        """Send a report to Redis. Return whether it is there."""
        call = calls.send_report(self._keys, report.process, report.number, report.pack())
        try:
            with trio.fail_after(SEND_TIMEOUT):
                await self._redis.perform(call)
        except (BrokerError, trio.TooSlowError) as error:
            self._note("redis", error)
            self._is_interrupted = isinstance(error, trio.TooSlowError) or is_transient(error)
            return False
        self._failing.discard("redis")
        self._is_interrupted = False
        return True

    async def _send_history(self) -> None:
        """Send the jobs that have ended, in as many calls as they need. Those that do not arrive wait here."""
        if not self._history_limit:
            return
        self._process_status.ended_jobs.collect(time.time(), self._interval)
        await self._send_batches(MAX_BATCHES)

    async def _send_early(self, report_at: float) -> None:
        """Wait until the next report is due, or the process has become ready or is ready no more.

        Send records of ended jobs meanwhile, unless Redis has refused some.
        """
        while (next_at := get_next_tick(trio.current_time(), EARLY_INTERVAL)) + EARLY_INTERVAL <= report_at:
            await trio.sleep_until(next_at)
            if self._was_ready not in (None, self._process_status.get_readiness().ok):
                return
            if self._history_limit and "history" not in self._failing:
                self._process_status.ended_jobs.collect_early()
                await self._send_batches(1)
        await trio.sleep_until(report_at)

    async def _send_batches(self, most: int) -> None:
        ended_jobs = self._process_status.ended_jobs
        for _ in range(most):
            batch = ended_jobs.make_batch()
            if batch is None:
                return
            call = job_history.add_history(self._keys, batch, limit=self._history_limit)
            try:
                with trio.fail_after(SEND_TIMEOUT):
                    await self._redis.perform(call)
            except (BrokerError, trio.TooSlowError) as error:
                if "history" not in self._failing:
                    self._failing.add("history")
                    self._log.event(
                        "history:write-failed",
                        "debug" if self._log.lost_connections.explains(error) else "warning",
                        why=_describe(error),
                    )
                return
            self._failing.discard("history")
            ended_jobs.acknowledge()

    async def _send_to(self, outlet: MetricsOutlet, circuit: CircuitBreaker, report: MetricsReport) -> None:
        name, succeeded, why = type(outlet).__name__, None, ""
        try:
            with trio.fail_after(SEND_TIMEOUT):
                await call_user_code(outlet.send, report)
        except BaseException as error:  # the user's code, or a network
            reraise_cancellation(error)
            self._note(name, error)
            succeeded, why = False, _describe(error)
        else:
            self._failing.discard(name)
            succeeded = True
        finally:
            circuit.record_result(self, succeeded=succeeded, why=why)

    def _note(self, name: str, error: BaseException) -> None:
        """Log the first failure of several in a row."""
        if name not in self._failing:
            self._failing.add(name)
            self._log.event(
                "metrics:report-failed",
                "debug" if self._log.lost_connections.explains(error) else "warning",
                to=name,
                why=_describe(error),
            )


def _describe(error: BaseException) -> str:
    """Return an error in words: that of a time limit has none."""
    if isinstance(error, trio.TooSlowError) and not str(error):
        return f"no answer within {SEND_TIMEOUT:g} s"
    return describe_error(error, MAX_ERROR_LENGTH)
