"""Read the overview of an application: its queues, tasks and workers as one value, in a few trips."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from celery5.application import Application
from celery5.broker.calls import cluster as cluster_calls
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import job_history as history_calls
from celery5.broker.calls import observability as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.dead_letters import DeadLetterEntry
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.calls.queues import QueueState, WorkerState
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import UNREACHABLE, skip_unreachable
from celery5.errors import Misconfigured
from celery5.observability.failure_onsets import FailureOnsetReader
from celery5.observability.lost_processes import get_process_name, list_lost
from celery5.observability.queue_pauses import QueuePauseReader
from celery5.observability.recent_history import RecentHistoryReader
from celery5.observability.shown_values import mask_text
from celery5.observability.storage import GetDriver, read_broker_memory, read_memory, read_storage
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.cluster.members import MemberEnd
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.job.dead_letters import DeadJob, make_dead_job
from celery5.protocol.job.failure_groups import sum_causes
from celery5.protocol.job.history import JobRecord, unpack_record
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.overview import (
    DueSchedule,
    LastError,
    LeftOut,
    LostWorker,
    Overview,
    OverviewTotals,
    QueueOverview,
    QueuePause,
    ReportingProcess,
    TaskOverview,
    UnreachableBroker,
    WorkerOverview,
    WorkersOverview,
    add_deaths,
    get_rate_window,
    group_starts,
    judge_worker,
    select_unrepaired,
)
from celery5.protocol.observability.queue_depth import sum_deaths
from celery5.protocol.observability.recent import (
    DeadCount,
    RecentHistory,
    find_error,
    find_first_minute,
    find_open_failures,
    make_task_overviews,
)
from celery5.protocol.observability.report import (
    MetricsReport,
    Series,
    get_labels,
    unpack_gauges,
)
from celery5.protocol.observability.rollup import (
    HOUR,
    MINUTE,
    STALE_AFTER,
)
from celery5.protocol.observability.storage import describe_filling
from celery5.protocol.process.standing import (
    MAX_LOST,
    ReportFlow,
    count_unnamed_lost,
    get_report_limit,
    judge_standing,
)
from celery5.protocol.scaling.resource_budget import ResourceUse
from celery5.protocol.scaling.slot_use import SlotUse
from celery5.protocol.scheduling.periodic import decode_schedule
from celery5.protocol.shards import get_queue_of_shard, take_queues
from celery5.results.job_details import MAX_SCHEDULE_QUEUES, AppState, read_app_state

MAX_SINCE = 6 * HOUR
"""Seconds that an overview looks back at most: it reads minutes."""
MAX_QUEUES = 200
"""Queues that are shown."""
MAX_HISTORIES = 100
"""Queues whose history is read: those with the most jobs first."""
MAX_TASKS = 200
"""Tasks that are shown: those that failed first, then the busiest."""
MAX_WORKERS = 200
"""Workers that are shown: those with something wrong first."""
MAX_REPORTS = 20_000
"""Reports of processes that are read for an overview, the newest: the first one reads those of an interval."""
REPORTS_AT_ONCE = 500
"""Reports that are read in one trip."""
MAX_DEAD_QUEUES = 20
"""Queues whose newest dead letters are read for the last errors of tasks."""
DEAD_READ = 5
"""Dead letters that are read of each."""
DEAD_KEPT = 30.0
"""Seconds for which they count, unless the number of dead letters changes."""
ATTEMPTS_READ = 300
"""Failed attempts that are read in one trip for the last errors of tasks that have no such dead letter."""
MAX_ATTEMPTS_READ = 900
"""The most of them, the newest."""
FILLED_KEPT = 30.0
"""Seconds for which it counts what fills a server that is almost full."""
MAX_DUE = 10
"""Schedules that are shown."""
MAX_MESSAGE = 200
"""Characters of an error's message."""


class ProcessNews(NamedTuple):
    """What the last report of a process says of the process itself: a hundredth of the report."""

    # When it came, by the clock of Redis.
    at: float
    host: str
    # `worker`, `router`, `scheduler`, `controller` or `publisher`.
    kind: str
    # Its full name, and the name of its inbox; '' if it has not reported them.
    incarnation: str
    name: str
    # When it started, in seconds since 1970; 0: not known.
    started: float
    # What its kind of process runs: which code.
    code: str
    ended: int
    is_ready: bool
    # Seconds by which its event loop woke up late.
    lag: float
    running: int
    slots: int
    # In bytes; None: not known.
    memory: int | None
    # Its circuit breakers that hold something up.
    breakers: tuple[str, ...]
    # What it has of each resource, and what is taken.
    resources: dict[str, ResourceUse]
    slots_by_kind: dict[str, SlotUse]


class DeadNews(NamedTuple):
    """The last errors of tasks on one queue."""

    # When they were read, and how many dead letters there were.
    at: float
    dead: int
    errors: Mapping[str, LastError]


class AttemptNews(NamedTuple):
    """The last errors of tasks among the newest failed attempts."""

    # When they were read.
    at: float
    errors: Mapping[str, LastError]


class WorkerReader:
    """Reads how the workers of an application stand: the live ones, and those that were lost in the last hour."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._processes: dict[str, ProcessNews] = {}
        self._last_report: str = ""
        self._report_flow = ReportFlow()

    async def read(self, state: AppState | None = None) -> WorkersOverview:
        """Return them, of a state that was read just now or else is read. Raises BrokerError when no broker can be
        reached.
        """
        redis = await self._app.connections.get_async_driver()
        memory: ServerMemory | None = None
        with skip_unreachable():
            state = state or await read_app_state(self._app, redis, None, most=MAX_QUEUES)
            now = await redis.perform(SERVER_TIME)
            with suppress(*UNREACHABLE):  # the default broker, which has the reports
                await self.read_reports(redis, now)
            lost = await self.read_lost(redis, state, now)
            with suppress(*UNREACHABLE):
                memory = await read_broker_memory(DEFAULT_BROKER, redis)
        is_full = memory is not None and memory.is_full
        return WorkersOverview(
            tuple(self.list_workers(state, now, is_full=is_full)),
            tuple(lost),
            count_unnamed_lost(state.list_lost_counts()),
        )

    async def read_processes(self) -> list[ReportingProcess]:
        """Return all live processes, and those that have reported lately, with the age of the last report of each."""
        redis = await self._app.connections.get_async_driver()
        with skip_unreachable():
            state = await read_app_state(self._app, redis, None, most=MAX_QUEUES)
            now = await redis.perform(SERVER_TIME)
            await self.read_reports(redis, now)
        return self._list_processes(state, now)

    def _list_processes(self, state: AppState, now: float) -> list[ReportingProcess]:
        by_kind: dict[str, Sequence[str]] = {
            "worker": state.workers,
            "router": state.routers,
            "scheduler": state.schedulers,
            "controller": state.controllers,
            "publisher": state.publishers,
        }
        live = {(kind, self._get_name(name)): name for kind, of_kind in by_kind.items() for name in of_kind}
        queues: defaultdict[str, list[str]] = defaultdict(list)
        for queue in state.queues.values():
            for worker in queue.workers:
                if worker.alive:
                    queues[worker.name].append(queue.queue)
        # Of a process that has started again under its name, the last incarnation counts.
        by_start = sorted(self._processes.values(), key=lambda news: (news.started, news.at))
        found = {(news.kind, news.name): news for news in by_start}
        interval = self._app.settings.metrics_interval
        processes: list[ReportingProcess] = []
        for kind, name in sorted({*live, *found}):
            news, whole_name = found.get((kind, name)), live.get((kind, name))
            is_its_own = self._app.brokers.is_multi_broker or whole_name is None
            if news is not None and not is_its_own and news.incarnation != whole_name:
                news = None
            age = None if news is None else max(0.0, now - news.at)
            is_stale = whole_name is not None and age is not None and age > get_report_limit(interval)
            process = ReportingProcess(
                name=name,
                kind=kind,
                queues=() if whole_name is None else tuple(queues[whole_name]),
                reported=age,
                is_live=whole_name is not None,
                is_stale=is_stale,
            )
            processes.append(process)
        return processes

    @property
    def starts(self) -> list[tuple[str, float]]:
        """The code of the processes that have reported lately, and when each started, in seconds since 1970."""
        return [(news.code, news.started) for news in self._processes.values() if news.started]

    async def read_reports(self, redis: AsyncDriver, now: float) -> None:
        """Read the reports that have come since the last overview, and forget processes that are silent."""
        processes, times = dict(self._processes), list[float]()
        seen, looked_at, newest, before = set[str](), 0, "", ""
        while looked_at < MAX_REPORTS:
            page = await redis.perform(
                calls.read_latest_reports(
                    self._app.keys, self._last_report, before=before, count=REPORTS_AT_ONCE
                )
            )
            for stored in page:  # the newest first
                times.append(stored.at)
                report = unpack_gauges(stored.packed)
                if report is not None and report.process not in seen:
                    seen.add(report.process)
                    processes[report.process] = _read_news(stored.at, report)
                await sleep(0)  # many reports take time
            looked_at += len(page)
            if page:
                newest, before = newest or page[0].id, page[-1].id
            if len(page) < REPORTS_AT_ONCE or page[-1].at < now - self._get_stale_after():
                break  # each process has reported since
        self._last_report = newest or self._last_report
        self._report_flow = self._report_flow.add(times, self._app.settings.metrics_interval)
        self._processes = {
            name: news for name, news in processes.items() if news.at > now - self._get_stale_after() * 4
        }

    def _get_stale_after(self) -> float:
        return max(STALE_AFTER, 3 * self._app.settings.metrics_interval)

    def list_workers(self, state: AppState, now: float, *, is_full: bool) -> list[WorkerOverview]:
        """Return the live workers: the incarnations of a process on several brokers are one.

        While the server of the reports `is_full`, none comes: that says nothing of the workers.
        """
        found: defaultdict[str, list[tuple[str, WorkerState]]] = defaultdict(list)
        for queue in state.queues.values():
            for worker in queue.workers:
                if worker.alive:
                    found[self._get_name(worker.name)].append((queue.queue, worker))
        # If a worker has started again under its name, the last report of its previous incarnation does not count.
        by_start = sorted(self._processes.values(), key=lambda process: (process.started, process.at))
        news = {process.name: process for process in by_start}
        settings = self._app.settings
        return [
            _make_worker(
                name,
                on_queues,
                self._check_news(news.get(name), on_queues),
                now,
                settings.lease,
                settings.metrics_interval,
                self._report_flow,
                is_full=is_full,
            )
            for name, on_queues in found.items()
        ]

    def _check_news(
        self, news: ProcessNews | None, on_queues: Sequence[tuple[str, WorkerState]]
    ) -> ProcessNews | None:
        """Return the report of a live worker; None if its previous incarnation sent it."""
        is_its_own = news is not None and any(worker.name == news.incarnation for _, worker in on_queues)
        # On several brokers a worker has an incarnation for each, and reports under one of them.
        return news if is_its_own or self._app.brokers.is_multi_broker else None

    async def read_lost(self, redis: AsyncDriver, state: AppState, now: float) -> list[LostWorker]:
        """Return the workers and Routers that were lost, the last ones first, with what Controllers know of them."""
        lost = self._list_lost(state, now)
        names = list(dict.fromkeys(process.name for process in lost[:MAX_LOST]))
        ends: Mapping[str, MemberEnd] = {}
        if names:
            with suppress(*UNREACHABLE):
                ends = await redis.perform(cluster_calls.read_member_ends(self._app.keys, names))
        last = {process.name: process.worker for process in reversed(lost)}
        return [
            replace(process, controller=end.text)
            if (end := ends.get(process.name)) is not None
            and process.worker == self._find_ended(end, last[process.name])
            else process
            for process in lost
        ]

    def _find_ended(self, end: MemberEnd, last: str) -> str:
        """Return the whole name of the process that ended: the `last` of its name, where nobody said which.

        On several brokers a process has a whole name for each, and tells its Controller one of them.
        """
        return last if self._app.brokers.is_multi_broker else end.worker or last

    def _list_lost(self, state: AppState, now: float) -> list[LostWorker]:
        live = {
            "scheduler": state.schedulers,
            "controller": state.controllers,
            "publisher": state.publishers,
        }
        return list_lost(
            state.queues.values(), state.events, state.lost, live, brokers=self._app.brokers.names, now=now
        )

    def _get_name(self, worker: str) -> str:
        return get_process_name(worker, self._app.brokers.names)


class OverviewReader:
    """Reads overviews of one application, and remembers of its history what does not change any more."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._history = RecentHistoryReader(app.keys)
        self._onsets = FailureOnsetReader(app.keys)
        self._workers = WorkerReader(app)
        self._pauses = QueuePauseReader(app.keys)
        self._dead: dict[str, DeadNews] = {}
        self._attempts = AttemptNews(0.0, {})
        # What fills each server that is almost full, and when that was read.
        self._filled_by: dict[str, str] = {}
        self._filled_at = 0.0

    async def read(self, get_driver: GetDriver, since: float) -> Overview:
        """Return the overview. Raises BrokerError when no broker can be reached, Misconfigured for a wrong time."""
        if not MINUTE <= since <= MAX_SINCE:
            raise Misconfigured(f"since is {since!r}: give seconds, {MINUTE} to {MAX_SINCE}")
        redis = await self._app.connections.get_async_driver()
        with skip_unreachable() as unreachable:
            state = await read_app_state(self._app, redis, None, most=MAX_QUEUES)
            # Minutes and reports have their times from there, too.
            now = await redis.perform(SERVER_TIME)
            try:
                busiest = sorted(state.queues.values(), key=lambda queue: -queue.backlog - queue.running)
                names = [queue.queue for queue in busiest]
                histories = await self._history.read(
                    redis, names, most=MAX_HISTORIES, begin=now - since, now=now
                )
                earlier = await self._onsets.read(
                    redis, find_open_failures(histories, now), begin=now - since, now=now
                )
                await self._workers.read_reports(redis, now)
            except UNREACHABLE:  # the default broker, which has the history
                histories, earlier = {}, {}
            lost = await self._workers.read_lost(redis, state, now)
            errors = await self._read_last_errors(redis, state, now)
            tasks = make_task_overviews(histories, errors, now, earlier, _count_dead(state, now))
            tasks = await self._add_attempt_errors(redis, tasks, now)
            schedules = await self._read_schedules(redis, now)
            pauses = await self._read_pauses(redis, state)
            memory = await self._read_memory(get_driver, now)
        return self._assemble(
            state,
            histories,
            now,
            since=now - since,
            lost=lost,
            tasks=add_deaths(tasks, sum_deaths(state.queues), lost, now),
            schedules=schedules,
            pauses=pauses,
            memory=memory,
            unreachable=tuple(
                UnreachableBroker(broker, get_error_text(error)) for broker, error in unreachable.items()
            ),
        )

    def _assemble(
        self,
        state: AppState,
        histories: Mapping[str, RecentHistory],
        now: float,
        *,
        since: float,
        lost: Sequence[LostWorker],
        tasks: Sequence[TaskOverview],
        schedules: tuple[DueSchedule, ...],
        pauses: Mapping[str, QueuePause],
        memory: tuple[ServerMemory, ...],
        unreachable: tuple[UnreachableBroker, ...],
    ) -> Overview:
        queues = [_make_queue(queue, pauses.get(queue.queue)) for queue in state.queues.values()]
        is_full = any(server.is_full for server in memory if server.broker == DEFAULT_BROKER)
        workers = self._workers.list_workers(state, now, is_full=is_full)
        workers.sort(key=lambda worker: (worker.health == "ok", worker.name))
        unnamed = count_unnamed_lost(state.list_lost_counts())
        left_out = LeftOut(
            queues=state.left_out,
            tasks=max(0, len(tasks) - MAX_TASKS),
            workers=max(0, len(workers) - MAX_WORKERS),
            histories=max(0, len(state.queues) - MAX_HISTORIES),
            lost=max(0, len(lost) - MAX_LOST) + unnamed,
            missing=state.further_missing,
        )
        begin, end = get_rate_window(find_first_minute(histories, now), now)
        return Overview(
            app=self._app.name,
            at=now,
            since=since,
            totals=_make_totals(state, queues, tasks, len(workers), len(select_unrepaired(lost)) + unnamed),
            queues=tuple(queues),
            tasks=tuple(tasks[:MAX_TASKS]),
            workers=tuple(sorted(workers[:MAX_WORKERS], key=lambda worker: worker.name)),
            schedules=schedules,
            lost=tuple(lost[:MAX_LOST]),
            missing=state.missing,
            starts=group_starts(self._workers.starts),
            unreachable=unreachable,
            memory=memory,
            left_out=left_out,
            rates_since=begin,
            rates_until=end,
        )

    async def _read_last_errors(
        self, redis: AsyncDriver, state: AppState, now: float
    ) -> dict[str, LastError]:
        """Return the last errors of tasks, from the newest dead letters of the queues that have most."""
        with_dead = sorted(
            (queue for queue in state.queues.values() if queue.dead), key=lambda queue: -queue.dead
        )[:MAX_DEAD_QUEUES]
        wanted = [
            queue
            for queue in with_dead
            if (known := self._dead.get(queue.queue)) is None
            or known.dead != queue.dead
            or known.at < now - DEAD_KEPT
        ]
        of_shards: list[tuple[QueueState, str]] = []
        replies: list[list[DeadLetterEntry]] = []
        with suppress(*UNREACHABLE):
            shards = await self._list_shards(redis, [queue.queue for queue in wanted])
            of_shards = [(queue, shard) for queue in wanted for shard in shards[queue.queue]]
            reads = [
                dead_letter_calls.list_entries_backwards(
                    self._app.queue(shard), first="-", last="+", count=DEAD_READ
                )
                for _, shard in of_shards
            ]
            replies = await redis.perform_all(reads) if reads else []
        kept = {queue.queue: self._dead[queue.queue] for queue in with_dead if queue.queue in self._dead}
        found: dict[str, dict[str, LastError]] = {}
        for (queue, shard), entries in zip(of_shards, replies, strict=False):
            jobs = [
                make_dead_job(
                    shard, entry.entry, entry.message, entry.document, self._app.settings.message_limit
                )
                for entry in reversed(entries)
                if not entry.sink
            ]
            errors = found.setdefault(queue.queue, {})
            for job in jobs:
                if job.task not in errors or job.died >= errors[job.task].at:
                    errors[job.task] = self._make_last_error(job)
            kept[queue.queue] = DeadNews(now, queue.dead, errors)
        self._dead = await self._add_onsets(redis, kept)
        last: dict[str, LastError] = {}
        for news in self._dead.values():
            for task, error in news.errors.items():
                if task not in last or last[task].at < error.at:
                    last[task] = error
        return last

    def _make_last_error(self, job: DeadJob) -> LastError:
        return LastError(
            type=job.type or job.reason,
            message=mask_text(self._app, job.message)[:MAX_MESSAGE],
            at=job.died,
            queue=job.queue,
            job=job.id,
            group=job.group,
        )

    async def _add_attempt_errors(
        self, redis: AsyncDriver, tasks: list[TaskOverview], now: float
    ) -> list[TaskOverview]:
        """Add the error of the newest failed attempt to tasks that fail without a dead letter that shows theirs.

        Their attempts are retried, their dead jobs were purged or replayed, or those of other tasks are newer.
        """
        missing = frozenset(
            task.name for task in tasks if task.failing_since is not None and task.last_error is None
        )
        is_known = all(find_error(self._attempts.errors, task) is not None for task in missing)
        if missing and not (is_known and self._attempts.at > now - DEAD_KEPT):
            with suppress(*UNREACHABLE):
                self._attempts = AttemptNews(now, await self._read_attempts(redis, missing, now))
        errors = self._attempts.errors
        return [
            replace(task, last_error=find_error(errors, task.name)) if task.name in missing else task
            for task in tasks
        ]

    async def _read_attempts(
        self, redis: AsyncDriver, missing: frozenset[str], now: float
    ) -> dict[str, LastError]:
        """Return the error of the newest failed attempt of each task, until all that are missing are found."""
        found: dict[str, LastError] = {}
        before, looked_at = "+", 0
        while looked_at < MAX_ATTEMPTS_READ and any(find_error(found, task) is None for task in missing):
            page = await redis.perform(
                history_calls.read_history(
                    self._app.keys.failed_jobs,
                    before=before,
                    since_ms=int((now - MAX_SINCE) * 1000),
                    count=ATTEMPTS_READ,
                )
            )
            for entry in page:  # the newest first
                record = unpack_record(entry.packed)
                if record is not None and record.error_type and record.task not in found:
                    found[record.task] = self._make_attempt_error(record)
                await sleep(0)  # many records take time
            looked_at += len(page)
            if len(page) < ATTEMPTS_READ:
                break
            before = f"({page[-1].id}"
        return found

    def _make_attempt_error(self, record: JobRecord) -> LastError:
        return LastError(
            type=record.error_type,
            message=mask_text(self._app, record.error_message)[:MAX_MESSAGE],
            at=record.ended,
            queue=record.queue,
            job=record.id,
        )

    async def _add_onsets(self, redis: AsyncDriver, kept: dict[str, DeadNews]) -> dict[str, DeadNews]:
        """Add to each last error when the first job died of its cause, on any of these queues.

        What is known is not read again until dead jobs leave: the first one may be among those.
        """
        has_lost_some = any(
            name not in kept or kept[name].dead < news.dead for name, news in self._dead.items()
        )
        before = {} if has_lost_some else self._dead
        first = {error.group: error.first for news in before.values() for error in news.errors.values()}
        if any(first.get(error.group) is None for news in kept.values() for error in news.errors.values()):
            with suppress(*UNREACHABLE):
                shards = await self._list_shards(redis, list(kept))
                reads = [
                    dead_letter_calls.read_causes(self._app.queue(shard))
                    for of_queue in shards.values()
                    for shard in of_queue
                ]
                causes = sum_causes(await redis.perform_all(reads))
                first |= {group: cause.first_died for group, cause in causes.items()}
        return {
            name: news._replace(
                errors={
                    task: replace(error, first=first.get(error.group)) for task, error in news.errors.items()
                }
            )
            for name, news in kept.items()
        }

    async def _list_shards(self, redis: AsyncDriver, queues: Sequence[str]) -> dict[str, list[str]]:
        """Return the shards of queues, those of an earlier number included."""
        names = await redis.perform(queue_calls.list_queues(self._app.keys)) if queues else []
        return {queue: self._app.brokers.list_shards(queue, names) for queue in queues}

    async def _read_memory(self, get_driver: GetDriver, now: float) -> tuple[ServerMemory, ...]:
        """Return how full the servers are, and what fills those that are almost full."""
        memories = await read_memory(self._app, get_driver)
        if any(memory.is_almost_full for memory in memories) and now - self._filled_at > FILLED_KEPT:
            storage = await read_storage(self._app, get_driver)
            self._filled_by = {name: describe_filling(storage, name) for name in self._app.brokers.names}
            self._filled_at = now
        return tuple(
            replace(memory, filled_by=self._filled_by.get(memory.broker, ""))
            if memory.is_almost_full
            else memory
            for memory in memories
        )

    async def _read_pauses(self, redis: AsyncDriver, state: AppState) -> Mapping[str, QueuePause]:
        """Return who paused the queues that are paused; the default broker has the audit trail."""
        paused = {queue.queue for queue in state.queues.values() if queue.paused}
        with suppress(*UNREACHABLE):
            return await self._pauses.read(redis, paused)
        return {}

    async def _read_schedules(self, redis: AsyncDriver, now: float) -> tuple[DueSchedule, ...]:
        """Return the schedules that fire next."""
        keys, limit = self._app.keys, self._app.settings.message_limit
        try:
            queues = await redis.perform(scheduling_calls.list_schedule_queues(keys))
            reads = [
                scheduling_calls.list_schedules(keys, queue)
                for queue in take_queues(queues, MAX_SCHEDULE_QUEUES)
            ]
            replies = await redis.perform_all(reads) if reads else []
        except UNREACHABLE:
            return ()
        found = [decode_schedule(record, limit) for records in replies for record in records.values()]
        due = [
            DueSchedule(
                schedule.name,
                schedule.of.task,
                get_queue_of_shard(schedule.of.queue),
                schedule.next / 1000,
            )
            for schedule in found
            if schedule is not None and schedule.is_active and schedule.next is not None
        ]
        return tuple(sorted(due, key=lambda schedule: (schedule.at, schedule.name))[:MAX_DUE])


def _count_dead(state: AppState, now: float) -> dict[str, DeadCount]:
    return {
        queue.queue: DeadCount(queue.dead, math.inf if queue.oldest_dead is None else now - queue.oldest_dead)
        for queue in state.queues.values()
    }


def _make_queue(queue: QueueState, pause: QueuePause | None) -> QueueOverview:
    return QueueOverview(
        name=queue.queue,
        backlog=queue.backlog,
        held_by=queue.held_by,
        lacks=queue.lacks,
        awaits=queue.awaits,
        waiting=queue.waiting,
        running=queue.running,
        held=queue.held,
        scheduled=queue.scheduled,
        dead=queue.dead,
        runs=queue.runs,
        oldest=queue.oldest_waiting,
        workers=queue.live_workers,
        is_paused=queue.paused,
        flow=queue.flow,
        idle=queue.idle,
        verdict=queue.verdict,
        pause=pause,
    )


def _make_worker(
    name: str,
    on_queues: Sequence[tuple[str, WorkerState]],
    news: ProcessNews | None,
    now: float,
    lease: float,
    interval: float,
    flow: ReportFlow,
    *,
    is_full: bool,
) -> WorkerOverview:
    queues, states = tuple(queue for queue, _ in on_queues), [state for _, state in on_queues]
    latest = max(states, key=lambda state: state.lease)
    reported = None if news is None else max(0.0, now - news.at)
    standing = judge_standing(
        lease_left=latest.lease,
        lease=lease,
        reported=None if news is None else flow.measure_silence(news.at, now, interval),
        interval=0.0 if is_full else interval,
        silent_for=latest.silent_for,
    )
    if news is None:
        health = judge_worker(standing, has_reported=False, is_full=is_full)
        return WorkerOverview(name=name, queues=queues, health=health, standing=standing.condition)
    return WorkerOverview(
        name=name,
        queues=queues,
        health=judge_worker(
            standing, is_ready=news.is_ready, is_full=is_full, lag=news.lag, breakers=news.breakers
        ),
        standing=standing.condition,
        host=news.host,
        uptime=now - news.started if news.started else None,
        running=news.running,
        slots_used=news.running,
        slots=news.slots,
        slots_by_kind=news.slots_by_kind,
        ended=news.ended,
        lag=news.lag,
        memory=news.memory,
        breakers=news.breakers,
        resources=news.resources,
        reported=reported,
    )


def _read_news(at: float, report: MetricsReport) -> ProcessNews:
    gauges, origin = report.measurements.gauges, report.origin
    memory = gauges.get(("process_resident_memory_bytes",))
    return ProcessNews(
        at=at,
        host=report.process.rsplit(":", 2)[0],
        kind=report.kind,
        incarnation=origin.name,
        name=get_inbox_name(origin.name),
        started=origin.started,
        code=f"{report.kind} {origin.code}",
        ended=origin.ended,
        is_ready=bool(gauges.get(("celery5_process_ready",))),
        lag=gauges.get(("celery5_loop_lag_seconds",), 0.0),
        running=int(gauges.get(("celery5_jobs_running",), 0)),
        slots=int(sum(value for series, value in gauges.items() if series[0] == "celery5_slots")),
        memory=int(memory) if memory is not None else None,
        breakers=_find_open_breakers(gauges),
        resources=_read_resources(gauges),
        slots_by_kind=_read_slots(gauges),
    )


def _read_resources(gauges: Mapping[Series, float]) -> dict[str, ResourceUse]:
    """Return what a worker has of each resource, and what is taken."""
    found: dict[str, dict[str, float]] = {"celery5_worker_capacity": {}, "celery5_worker_capacity_taken": {}}
    for series, value in gauges.items():
        if series[0] in found:
            found[series[0]][get_labels(series).get("resource", "")] = value
    has, taken = found.values()
    return {name: ResourceUse(amount, taken.get(name, 0.0)) for name, amount in has.items()}


def _read_slots(gauges: Mapping[Series, float]) -> dict[str, SlotUse]:
    """Return the slots of each kind that a worker has tasks of; none of one whose version does not report them."""
    found: dict[str, dict[str, int]] = {
        "celery5_slots_used": {}, "celery5_slots": {}, "celery5_slots_max": {},
    }  # fmt: skip
    for series, value in gauges.items():
        if series[0] in found:
            found[series[0]][get_labels(series).get("kind", "")] = int(value)
    used, current, most = found.values()
    # A report leaves out gauges that are 0.
    return {kind: SlotUse(used.get(kind, 0), current.get(kind, 0), maximum) for kind, maximum in most.items()}


def _find_open_breakers(gauges: Mapping[Series, float]) -> tuple[str, ...]:
    """Return the circuit breakers that hold something up; those that only watch do not."""
    open_ones: set[str] = set()
    for series, value in gauges.items():
        labels = get_labels(series)
        if value and series[0] == "celery5_breaker_state" and labels.get("mode") != "watch":
            open_ones.add(labels.get("of", ""))
    return tuple(sorted(open_ones))


def _make_totals(
    state: AppState,
    queues: Sequence[QueueOverview],
    tasks: Sequence[TaskOverview],
    workers: int,
    lost: int,
) -> OverviewTotals:
    return OverviewTotals(
        # Both of the same attempts in the same minute: so no more fail than end.
        ended_per_second=sum(task.ended_per_minute for task in tasks) / MINUTE,
        failed_per_second=sum(task.failed_per_minute for task in tasks) / MINUTE,
        backlog=sum(queue.backlog for queue in queues),
        waiting=sum(queue.waiting for queue in queues),
        running=sum(queue.running for queue in queues),
        held=sum(queue.held for queue in queues),
        scheduled=sum(queue.scheduled for queue in queues),
        dead=state.dead,
        workers=workers,
        lost=lost,
        routers=len(state.routers),
        schedulers=len(state.schedulers),
        controllers=len(state.controllers),
        publishers=len(state.publishers),
    )
