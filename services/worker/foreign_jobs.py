"""Keep the jobs that this worker's code cannot run for workers whose code can, and take those that others have kept.

Such a job is *foreign*: its task is not declared here, or its arguments do not fit the function. So it is for a while
whenever a new version is rolled out. Each worker announces what its code knows, and is told of foreign jobs on its
queues. They are given to it directly, so that no worker with the same old code reads them again and again.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import trio

from celery5.broker.calls import jobs, leases
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.foreign import CodeVersion, HandOverPlan, add_signature, plan_hand_over
from celery5.protocol.job.verdict import (
    FOREIGN_REASONS,
    INTERRUPTED,
    ForeignJob,
    HandOver,
    Outcome,
    PermanentFailure,
    Reason,
    Release,
)
from celery5.protocol.limits import unescape_word
from celery5.protocol.process.wake_ups import get_next_tick
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.unstarted_jobs import UnstartedJobs
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.process.lease import Lease

ANNOUNCED_LEASES = 3
"""Leases for which an announcement holds; it is repeated in each. A worker that has died is missed that much later."""
TAKE_BATCH = 100
"""The most foreign jobs that are taken in one call: a script blocks the server while it runs."""
NEW_FOREIGN = b"foreign "
"""How a message begins on the channel that wakes workers when foreign jobs are kept: their list follows."""


class _UnknownJob(msgspec.Struct, frozen=True):
    """A job of a task that this worker does not know."""

    delivery: Delivery
    text: str


class ForeignJobs:
    """The foreign jobs of one worker's queues."""

    def __init__(
        self,
        *,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        redis: AsyncDriver,
        reading: ReadingState,
        unstarted: UnstartedJobs,
        code_version: CodeVersion,
        unknown_task_grace: float,
        log: Log,
    ) -> None:
        self._queues: Mapping[str, QueueKeys] = {keys.queue: keys for keys in consumed}
        self._by_channel = {keys.wake.encode(): keys.queue for keys in consumed}
        self._lease = lease
        self._redis = redis
        self._reading = reading
        self._unstarted = unstarted
        self._code = code_version
        self._grace = unknown_task_grace
        self._outages = OutageLog(log, "foreign-jobs:interrupted", "foreign-jobs:resumed")
        self._unknown: deque[_UnknownJob] = deque()
        self._has_unknown = trio.Event()
        self._wanted: dict[str, None] = {}  # in the order in which they take turns
        self._is_streams_turn = False
        self._next_at = 0.0

    @property
    def version(self) -> str:
        """The version of this worker's code."""
        return self._code.version

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce what this worker's code knows, and decide on jobs of unknown tasks, until cancelled."""
        await retry_until_available(self.announce, self._outages, even_refused=True)
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce_forever)
                while True:
                    await self._has_unknown.wait()
                    self._has_unknown = trio.Event()
                    while self._unknown:
                        await retry_until_available(self._decide_unknown, self._outages)
        finally:
            while self._unknown:
                self._unstarted.settle(self._unknown.popleft().delivery, Release())

    # what this worker's code cannot run

    def refuse(self, delivery: Delivery, text: str) -> None:
        """Decide soon what becomes of a job in flight whose task this worker does not know."""
        self._unknown.append(_UnknownJob(delivery, text))
        self._has_unknown.set()

    async def resolve(self, delivery: Delivery, outcome: PermanentFailure) -> Outcome:
        """Return the outcome of a job that this worker's code could not run: other code may be able to."""
        if outcome.reason not in FOREIGN_REASONS or outcome.failure.type == "ResultLost":
            return outcome
        try:
            (plan,) = await self._plan(delivery.queue, [delivery])
        except BrokerError as error:
            # In an outage: it is settled when Redis is back, and looked at again.
            return INTERRUPTED if is_outage(error) else outcome
        return outcome if plan is None else ForeignJob(outcome.failure, plan.refusal, plan.delay)

    async def _decide_unknown(self) -> None:
        by_queue = defaultdict[str, list[_UnknownJob]](list)
        for unknown in list(self._unknown)[: jobs.FIND_CODE_BATCH]:
            by_queue[unknown.delivery.queue].append(unknown)
        for queue, batch in by_queue.items():
            try:
                plans = await self._plan(queue, [unknown.delivery for unknown in batch])
            except BrokerError as error:
                if is_outage(error):
                    raise
                plans = [None] * len(batch)  # what Redis refuses to tell costs no worker
            for unknown, plan in zip(batch, plans, strict=True):
                self._unknown.remove(unknown)
                self._end_unknown(unknown, plan)

    def _end_unknown(self, unknown: _UnknownJob, plan: HandOverPlan | None) -> None:
        if plan is None:
            self._unstarted.refuse(unknown.delivery, Reason.UNKNOWN_TASK, "UnknownTask", unknown.text)
        else:
            verdict = HandOver(plan.delay, unknown.text, plan.refusal)
            self._unstarted.hand_over(unknown.delivery, verdict)

    async def _plan(self, queue: str, deliveries: Sequence[Delivery]) -> list[HandOverPlan | None]:
        """Return how each job is kept for other code; None for one that is given up."""
        commands = [delivery.command for delivery in deliveries if delivery.command is not None]
        refusals = [
            add_signature(command.refused, self._code.signatures.get(command.task, ""))
            for command in commands
        ]
        pairs = [(command.task, refusal.by) for command, refusal in zip(commands, refusals, strict=True)]
        search = await self._redis.perform(jobs.find_code(self._queues[queue], pairs))
        return [
            plan_hand_over(refusal, is_known=is_known, now=search.now, grace=self._grace)
            for refusal, is_known in zip(refusals, search.known, strict=True)
        ]

    # what others have kept

    async def announce(self) -> None:
        """Announce what this worker's code knows, and ask whether there are foreign jobs.

        It is repeated once in a lease, and by an idle worker, one of many, with its heartbeats.
        """
        now = trio.current_time()
        self._next_at = get_next_tick(now, max(self._lease.seconds, self._lease.idle_interval))
        lease = self._next_at - now + (ANNOUNCED_LEASES - 1) * self._lease.seconds
        call = partial(leases.announce_code, code=self._code, lease=lease)
        replies = dict(
            zip(
                self._queues.values(),
                await self._redis.perform_all([call(keys) for keys in self._queues.values()]),
                strict=True,
            )
        )
        new = [keys for keys, reply in replies.items() if not reply.is_known]
        if new:
            await self._redis.perform_all([call(keys, with_tasks=True) for keys in new])
        for keys, reply in replies.items():
            if reply.foreign_tasks:
                self._want(keys.queue)

    async def _announce_forever(self) -> None:
        while True:
            await trio.sleep_until(self._next_at)
            await retry_until_available(self.announce, self._outages, even_refused=True)

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """Handle a message: foreign jobs of a task are kept."""
        task, _, signatures = payload.removeprefix(NEW_FOREIGN).decode(errors="replace").partition(" ")
        own = self._code.signatures.get(unescape_word(task))
        if own is not None and own not in signatures.split(","):
            self._want(self._by_channel[channel])

    def choose_queue(self, capacity_by_queue: Mapping[str, int]) -> str | None:
        """Return the queue whose foreign jobs are to be taken now; None when it is the turn of other jobs.

        Neither waits for the other: foreign jobs are taken before every second read.
        """
        queue = next((queue for queue in self._wanted if capacity_by_queue[queue]), None)
        self._is_streams_turn = queue is not None and not self._is_streams_turn
        return queue if self._is_streams_turn else None

    def is_wanted(self, capacity_by_queue: Mapping[str, int]) -> bool:
        """Return whether there may be foreign jobs that this worker has capacity for."""
        return any(capacity_by_queue[queue] for queue in self._wanted)

    def note_taken(self, queue: str, *, has_more: bool) -> None:
        """Note that foreign jobs of a queue were taken, and whether there may be more."""
        self._wanted.pop(queue, None)
        if has_more:
            self._wanted[queue] = None

    def _want(self, queue: str) -> None:
        self._wanted[queue] = None
        self._reading.interrupt()
