"""Perform bulk actions, a few at a time, whether those who asked for them still wait or not."""

import msgspec
import trio

from celery5.application import Application
from celery5.audit.actor import get_actor, get_actor_name
from celery5.audit.recording import AuditedAction
from celery5.broker.calls import bulk as calls
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.retrying import RetryingConnections, RetryingDriver
from celery5.broker.transient_errors import is_outage
from celery5.bulk.actions import BulkCount, count_selected, read_statuses, record_outcome
from celery5.bulk.operations import make_operation
from celery5.dead_letters.queues import Pace
from celery5.errors import BulkActionRefused, CeleryError
from celery5.logs.log import Log
from celery5.protocol.bulk import (
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    UNKNOWN_ACTION,
    BulkProgress,
    BulkRequest,
    BulkStatus,
    check_bulk_action,
    check_rate,
    encode_action,
    encode_progress,
)
from celery5.protocol.job.job import new_id
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.services.process.broker_outages import OutageLog, last_try

LEASE = 10.0
"""Seconds after which an action whose process is silent is interrupted."""
RENEWAL = 2.0
"""Seconds between two renewals of the leases; and the longest time until a stop is noticed."""
MAX_WAITING = 100
"""Actions that wait until one of those that run has ended."""
MAX_RUNNING = 4
"""Actions that run at once."""
MAX_OUTAGE = 600.0
"""Seconds that an action waits for a broker that is unreachable or full. Then it is interrupted, and can be resumed."""


class _Performance:
    """One action of this process: what of it was asked to end."""

    def __init__(self, action_id: str) -> None:
        self.id = action_id
        self.is_claimed = False
        self.is_stopped = False
        self.is_lost = False
        self._pause = trio.CancelScope()

    @property
    def must_end(self) -> bool:
        return self.is_stopped or self.is_lost

    def note(self, reply: int) -> None:
        """Note what Redis replied to a renewal; end a pause when it must end."""
        self.is_stopped = self.is_stopped or reply == calls.STOP_ASKED
        self.is_lost = self.is_lost or reply == calls.LOST
        if self.must_end:
            self._pause.cancel()

    async def wait(self, pace: Pace, things: int) -> None:
        """Wait until this many more may be done, or until it must end."""
        if not self.must_end:
            with trio.CancelScope() as self._pause:
                await pace.wait(things)


class BulkPerformer:
    """Performs the bulk actions that `submit` and `resume` give it.

    Its progress is in Redis, where all processes see it. A lease tells whether its process is alive. Each step is safe
    to repeat, so an action that was interrupted can be resumed by any process.

    Args:
        app: The application.
        worker: The name of this process.
        log: Where it logs.
        bulk_lease: Seconds after which an action is interrupted when this process is silent.
    """

    def __init__(self, *, app: Application, worker: str, log: Log, bulk_lease: float = LEASE) -> None:
        self._app = app
        self._worker = worker
        self._log = log
        self._lease = bulk_lease
        self._outages = OutageLog(log, "bulk:interrupted", "bulk:resumed")
        self._send_action, self._receive_action = trio.open_memory_channel[_Performance](MAX_WAITING)
        self._performances: dict[str, _Performance] = {}
        # Actions that are being performed, until what became of them is recorded.
        self._busy = 0
        # Set when the next one has ended.
        self._ended = trio.Event()

    async def submit(self, action: BulkRequest, counted: BulkCount | None = None) -> str:
        """Have an action performed in the name of who acts now; return its id.

        Args:
            action: What to do.
            counted: How many jobs or runs that are, where that was counted already.

        Raises:
            Misconfigured: The action makes no sense.
            BulkActionRefused: Too many actions wait.
        """
        progress = BulkProgress() if counted is None else BulkProgress(**counted._asdict())
        fields = encode_action(check_bulk_action(action), get_actor_name(), get_actor().source, progress)
        action_id = new_id()
        await self._claim(action_id, fields)
        return action_id

    async def resume(self, action_id: str) -> None:
        """Go on with an action that was interrupted, in the name of who asked for it; the trail names who resumed it.

        Raises:
            BulkActionRefused: It is not known, has ended, another process performs it, or too many actions wait.
        """
        redis = await self._app.connections.get_async_driver()
        statuses = await read_statuses(self._app, redis, [action_id])
        how = {"action": statuses[0].action.verb, **statuses[0].action.filter} if statuses else {}
        async with AuditedAction(self._app, redis, "bulk:resume", action_id, how):
            await self._claim(action_id, {})

    async def _claim(self, action_id: str, fields: dict[str, str]) -> None:
        if len(self._performances) >= MAX_WAITING:
            raise BulkActionRefused(f"{MAX_WAITING} bulk actions run or wait: try again later")
        if action_id in self._performances:
            raise BulkActionRefused(f"bulk action {action_id} runs already")
        performance = self._performances[action_id] = _Performance(action_id)
        try:
            redis = await self._app.connections.get_async_driver()
            claim = calls.claim_action(self._app.keys, action_id, self._worker, fields, lease=self._lease)
            reply = await redis.perform(claim)
            if reply != calls.CLAIMED:
                raise BulkActionRefused(_REFUSALS[reply].format(action_id))
            performance.is_claimed = True
            self._send_action.send_nowait(performance)
        except BaseException:
            self._forget(performance)
            raise

    def _forget(self, performance: _Performance) -> None:
        """Forget a performance, but not another one of the same action: somebody may have asked to resume it."""
        if self._performances.get(performance.id) is performance:
            del self._performances[performance.id]

    async def wait_until_idle(self) -> None:
        """Return when no action runs or waits, and what became of each is in the audit trail."""
        while self._performances or self._busy:
            await self._ended.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Perform actions until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_RUNNING):
                nursery.start_soon(self._perform_all)
            nursery.start_soon(self._renew)
            task_status.started()

    async def _renew(self) -> None:
        """Renew the leases of all actions, those that wait included; give them up at the end."""
        try:
            while True:
                await trio.sleep(min(RENEWAL, self._lease / 3))
                with self._outages.suppressing():
                    for performance in self._list_claimed():
                        await self._save(performance, {})
        finally:
            with last_try(self._log, "bulk:interrupted"):
                for performance in self._list_claimed():
                    await self._save(performance, {}, lease=0.0)
            self._performances.clear()

    def _list_claimed(self) -> list[_Performance]:
        """Return the actions that Redis knows as those of this process: of another one it would say that it is lost."""
        return [performance for performance in self._performances.values() if performance.is_claimed]

    async def _save(
        self,
        performance: _Performance,
        fields: dict[str, str],
        *,
        redis: AsyncDriver | None = None,
        lease: float | None = None,
        has_ended: bool = False,
    ) -> None:
        redis = redis or await self._app.connections.get_async_driver()
        seconds = self._lease if lease is None else lease
        save = calls.save_action(
            self._app.keys, performance.id, self._worker, fields, lease=seconds, has_ended=has_ended
        )
        performance.note(await redis.perform(save))

    async def _perform_all(self) -> None:
        while True:
            performance = await self._receive_action.receive()
            if self._performances.get(performance.id) is not performance:
                continue  # it was given up when the service stopped
            self._busy += 1
            try:
                await self._perform(performance)
            except Exception as error:  # one action is not worth the others
                why = describe_error(error, MAX_ERROR_LENGTH)
                self._log.event("bulk:failed", "error", bulk=performance.id, why=why)
            finally:
                self._busy -= 1
            self._forget(performance)
            self._ended.set()
            self._ended = trio.Event()

    async def _perform(self, performance: _Performance) -> None:
        redis = RetryingDriver(
            await self._app.connections.get_async_driver(),
            limit=MAX_OUTAGE,
            record_error=self._outages.record_error,
            record_recovery=self._outages.record_recovery,
        )
        statuses = await read_statuses(self._app, redis, [performance.id])
        if not statuses:
            return
        status = msgspec.structs.replace(statuses[0], state=RUNNING)
        try:
            await self._go_through(performance, redis, status)
        except (CeleryError, OSError) as error:
            if is_outage(error):
                raise  # its lease ends, so it is interrupted: whoever resumes it goes on where it was
            status.progress.error = describe_error(error, MAX_ERROR_LENGTH)
            await self._end(performance, redis, status, FAILED)
        except Exception as error:
            status.progress.error = describe_error(error, MAX_ERROR_LENGTH)
            await self._end(performance, redis, status, FAILED)
            raise
        else:
            await self._end(performance, redis, status, STOPPED if performance.is_stopped else DONE)

    async def _go_through(self, performance: _Performance, redis: RetryingDriver, status: BulkStatus) -> None:
        """Count what is selected, then do it, batch by batch."""
        app, action, progress = self._app, status.action, status.progress
        connections = RetryingConnections(app.connections, redis)
        elapsed = max(0.0, await redis.perform(SERVER_TIME) - status.created)
        if not progress.total:
            counted = await count_selected(app, connections, action, elapsed=elapsed)
            progress.total, progress.is_exact = counted
        await self._save_progress(performance, redis, status)
        if action.dry_run:
            return
        operation, pace = (
            make_operation(app, connections, redis, action, elapsed=elapsed),
            Pace(check_rate(action.rate)),
        )
        while not performance.must_end:
            page = await operation.read_page()
            if page is None:
                return
            for start in range(0, len(page), pace.portion):
                batch = page[start : start + pace.portion]
                await performance.wait(pace, len(batch))
                if performance.must_end:
                    return
                outcome = await operation.perform(batch)
                progress.add(**msgspec.structs.asdict(outcome))
                await self._save_progress(performance, redis, status)

    async def _save_progress(self, performance: _Performance, redis: AsyncDriver, status: BulkStatus) -> None:
        fields = {"state": RUNNING, "progress": encode_progress(status.progress)}
        await self._save(performance, fields, redis=redis)

    async def _end(
        self, performance: _Performance, redis: AsyncDriver, status: BulkStatus, state: str
    ) -> None:
        if performance.is_lost:
            self._log.event("bulk:lost", "warning", bulk=performance.id)
            return
        fields = {"state": state, "progress": encode_progress(status.progress)}
        await self._save(performance, fields, redis=redis, lease=0.0, has_ended=True)
        self._forget(performance)
        for ended in await read_statuses(self._app, redis, [status.id]):
            await record_outcome(self._app, redis, ended)
        progress = status.progress
        self._log.event(
            "bulk:ended",
            "info",
            bulk=status.id,
            action=status.action.verb,
            state=state,
            done=progress.done,
            failed=progress.failed,
            skipped=progress.skipped,
        )


_REFUSALS = {
    calls.TAKEN: "bulk action {} is performed by another process",
    calls.UNKNOWN: UNKNOWN_ACTION,
    calls.ENDED: "bulk action {} has ended",
}
"""Why an action is not claimed."""
