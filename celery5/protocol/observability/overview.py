"""What the overview of an application says, and how it judges queues and tasks by their last minutes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec

from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.observability.queue_depth import TaskDeaths
from celery5.protocol.observability.queue_flow import QueueFlow
from celery5.protocol.observability.rollup import MINUTE
from celery5.protocol.process.missing import MissingMember
from celery5.protocol.process.standing import (
    LostJob,
    ProcessCondition,
    ProcessStanding,
    get_repair_time,
)
from celery5.protocol.scaling.resource_budget import ResourceUse, read_use
from celery5.protocol.scaling.slot_use import SlotUse, format_slots, read_slots
from celery5.similar_names import join_names

RATE_MINUTES = 1
"""Whole minutes by which the rates of tasks are measured."""
STEADY_SHARE = 0.02
"""A queue whose depth changes by less than this share of what ends is steady."""
STEADY_RATE = 0.05
"""Jobs per second: a queue whose depth changes by less is steady, too."""
PROMPT = 10.0
"""Seconds: a queue is steady, too, while fewer jobs wait than end in this time."""
STALLED_AFTER = 60.0
"""Seconds that the oldest job waits while nothing ends, before the queue counts as stalled and needs attention."""
STOPPED_AFTER = 10.0
"""Seconds after which it counts as stalled while, at its last rate, MISSED_ENDS attempts would have ended."""
MISSED_ENDS = 10
"""Attempts that would have ended: by chance, none of this many is missing."""
FAILING_SHARE = 0.05
"""A minute in which at least this share of the attempts of a task failed is one in which it fails."""
HEALED_MINUTES = 3
"""Minutes in a row without failures after which a task does not fail any more."""
FAILS_LATELY = 10 * MINUTE
"""Seconds: a task whose last failure is older does not fail now."""
KILLS_LATELY = 3600.0
"""Seconds after the last worker that a task took down in which a person should look at it."""
UNKNOWN_ERROR = "not known: none of the newest failed attempts is its own"
"""What is said of the last error of a task that fails, while no dead job and no attempt in the history shows it."""
NO_WORK = "it held no jobs"
LOST_JOBS_NAMED = 3
"""Jobs of a lost worker that a line names."""
DEATHS_SHOWN = 86_400.0
"""Seconds after that in which a task is shown that has ended nothing."""

QueueCondition = Literal["steady", "empties", "grows", "stalled", "paused", "unserved", "unknown"]


class QueueVerdict(msgspec.Struct, frozen=True):
    """Whether a queue keeps up."""

    condition: QueueCondition
    # In words: `empties in 4 min`, `grows by 12/s`, `steady`, `nobody works on it`.
    text: str
    # Whether a person should look at it.
    needs_attention: bool = False
    # Seconds until it is empty at this pace; None when it will not be.
    empty_in: float | None = None


class TaskMinute(NamedTuple):
    """A minute of a task."""

    # When it began, in seconds since 1970.
    at: int
    # Attempts that have run to their end, and those of them that failed.
    ended: int
    failed: int
    # Its seconds: more than a minute where only hours are known.
    span: int = MINUTE


class LastError(msgspec.Struct, frozen=True, kw_only=True):
    """The last error of a task, as far as it is known: of its newest dead job, or else of its newest failed attempt."""

    type: str
    message: str
    # When, in seconds since 1970.
    at: float
    queue: str
    job: str
    # The id of its cause, as groups of dead jobs have it, and when the first job died of it. The task may have failed
    # before, of another cause. None: not known, as after dead jobs of the task were purged or replayed, which may have
    # been of this cause; and of an attempt that was retried.
    group: str = ""
    first: float | None = None

    @property
    def text(self) -> str:
        """Its class and its message."""
        return f"{self.type}: {self.message}" if self.message else self.type

    def describe(self, now: float) -> str:
        """Return it in words, with when it was, and when the first job died of its cause.

        `4 s ago, first 5 min ago: ValueError: no`.
        """
        times = [format_age(min(self.at, now), now)]
        if self.first is not None:
            times.append(f"first {format_age(min(self.first, now), now)}")
        return f"{', '.join(times)}: {self.text}"


class QueuePause(msgspec.Struct, frozen=True):
    """Who paused a queue for all workers, and when."""

    who: str
    # In seconds since 1970, by the clock of Redis.
    at: float

    def describe(self, now: float) -> str:
        """Return it in words: `4 min ago by ada@web1`."""
        return f"{format_age(min(self.at, now), now)} by {self.who}"


class QueueOverview(msgspec.Struct, frozen=True, kw_only=True):
    """How one queue stands."""

    name: str
    # The backlog, as QueueDepth defines it, and what holds those of it that wait at limits, in words.
    backlog: int
    held_by: str
    # Jobs that wait for a worker, jobs that workers have, that wait at limits, that wait for their time, and dead ones.
    waiting: int
    running: int
    held: int
    scheduled: int
    dead: int
    # Live runs of workflows.
    runs: int
    # Seconds that the oldest job of the backlog has waited; None when there is none.
    oldest: float | None
    # Live workers that read it.
    workers: int
    is_paused: bool
    # How fast jobs come and leave; None while there was no earlier look.
    flow: QueueFlow | None
    verdict: QueueVerdict
    # Seconds since an attempt ended; None when none did within a day.
    idle: float | None = None
    # Which of its tasks have jobs that wait for a worker with the resources that they take, in words; '' for none.
    lacks: str = ""
    # Which tasks have jobs here that wait for a worker whose code has them, in words; '' for none.
    awaits: str = ""
    # Who paused it, and when; None: it is not paused, or the audit trail does not know.
    pause: QueuePause | None = None


class TaskOverview(msgspec.Struct, frozen=True, kw_only=True):
    """How one task does, on all of its queues together."""

    name: str
    queues: tuple[str, ...]
    # Attempts that have ended in the time of the overview, and those of them that failed: were retried, or died.
    ended: int
    failed: int
    # The share of those that failed of those that have run to their end; None when none has.
    failed_share: float | None
    # Attempts that ended per minute, and those that failed, in the overview's time `rates_since` to `rates_until`.
    ended_per_minute: float
    failed_per_minute: float
    # Percentiles of the seconds that attempts ran, and that they waited: p50, p95 and p99; None when none has run. They
    # begin on the full hour.
    run: dict[str, float] | None
    wait: dict[str, float] | None
    # When it began to fail, in seconds since 1970, however long ago; None when it does not fail now. It is the minute
    # of that, or the second in which the first job died of the last error, if that was then.
    failing_since: int | None = None
    last_error: LastError | None = None
    # How many workers died with its jobs, how many jobs were given up for that, and when it was last, in seconds since
    # 1970.
    deaths: int = 0
    poisoned: int = 0
    last_death: float | None = None
    # The same in words, for an hour after the last one; '' for nothing that a person should look at, as when that was
    # the only one, and is repaired.
    kills: str = ""

    @property
    def unknown_error(self) -> str:
        """What is said in place of its last error while it fails and that is not known; '' otherwise."""
        return UNKNOWN_ERROR if self.failing_since is not None and self.last_error is None else ""

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at it: it fails, or takes workers down."""
        return self.failing_since is not None or bool(self.kills)


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker does. All of its figures are those of its last report; what that did not say is None.

    None is measured later than the others: so no two of them disagree. `app.info()` has how many jobs of each queue it
    has now.
    """

    # The name of its inbox.
    name: str
    queues: tuple[str, ...]
    # What a person should know of its health: `ok`, or what is wrong.
    health: str
    host: str | None = None
    # Seconds since its process started.
    uptime: float | None = None
    # Jobs that run, and the slots of all kinds together, those included of which it has no tasks.
    running: int | None = None
    slots_used: int | None = None  # the same: a job that runs takes a slot
    slots: int | None = None
    # The slots of each kind that it has tasks of; empty when its last report did not say.
    slots_by_kind: dict[str, SlotUse] = {}
    # Attempts that ended since it started.
    ended: int | None = None
    # Seconds by which its event loop woke up late.
    lag: float | None = None
    # Bytes.
    memory: int | None = None
    # Circuit breakers that are not closed.
    breakers: tuple[str, ...] = ()
    # What it has for jobs that take resources, and what is taken, by name.
    resources: dict[str, ResourceUse] = {}
    # Seconds since its last report: how old the figures are.
    reported: float | None = None
    # Whether it is `working` or `silent`.
    standing: ProcessCondition = "working"

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at it: neither while it works well nor before its first report."""
        return self.health not in ("ok", NO_REPORT_YET)

    @property
    def slots_text(self) -> str:
        """How many slots of each kind are taken, in words; '' when its last report did not say."""
        return format_slots(self.slots_by_kind)


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a worker in its answer to the command `stats`."""

    uptime: float | None = None
    running: int | None = None
    # Attempts that ended since it started, by their state.
    jobs: dict[str, int] = {}
    loop_lag: float | None = None
    memory: int | None = None
    # As `read_slots` and `read_use` take them.
    slots: Any = None
    resources: Any = None


def update_worker(worker: WorkerOverview, answer: object) -> WorkerOverview:
    """Return a worker with the figures of its answer to `stats` instead of those of its last report.

    All are replaced, so that they are of one time; none where the answer cannot be read.
    """
    try:
        figures = msgspec.convert(answer, WorkerAnswer)
    except msgspec.ValidationError:  # an earlier version, or a later one
        return worker
    slots = read_slots(figures.slots)
    reported_kinds = worker.slots_by_kind or slots
    return msgspec.structs.replace(
        worker,
        uptime=figures.uptime,
        running=figures.running,
        slots_used=figures.running,
        slots=sum(use.current for use in slots.values()),
        # Of the kinds that it has tasks of: an answer has the others, too.
        slots_by_kind={kind: use for kind, use in slots.items() if kind in reported_kinds},
        ended=sum(figures.jobs.values()),
        lag=figures.loop_lag,
        memory=figures.memory,
        resources=read_use(figures.resources),
    )


class LostWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or a Router that was lost: it died, or was frozen or cut off for longer than its lease."""

    # Its whole name, and that of its inbox.
    worker: str
    name: str = ""
    # `worker`, `router`, `scheduler`, `controller` or `publisher`.
    kind: str = "worker"
    queues: tuple[str, ...] = ()
    # When, in seconds since 1970, and in words: `lost 3 min ago`.
    at: float
    standing: ProcessCondition = "lost"
    health: str
    # Why it ended, for people; '' when nobody knows.
    why: str = ""
    # Jobs that it holds still, since nobody has put them back; that were put back; and that became dead letters.
    held: int = 0
    put_back: int = 0
    dead: int = 0
    # Of those dead letters how many may be there still: none while its queues have none.
    dead_left: int = 0
    # Some of the jobs that it had begun, and what became of them.
    jobs: tuple[LostJob, ...] = ()
    # The tasks of the jobs that it had begun.
    tasks: tuple[str, ...] = ()
    # Whether another process works in its place.
    is_back: bool = False
    # When another process of its name has joined since, in seconds since 1970; None: none has. It stays when that ends.
    repaired_at: float | None = None
    # Whether nobody needs to look at it any more: another process works, or has worked, in its place, and of its jobs
    # none is held or dead. `judge_repair` decides it.
    is_repaired: bool = False
    # What its Controller knows of its end, and has done then; '' when there is none.
    controller: str = ""

    @property
    def work(self) -> str:
        """What it held, and what became of that, in words."""
        return describe_lost_work(self)


class ReportingProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that reports its metrics, and how old its last report is."""

    # The name of its inbox.
    name: str
    # `worker`, `router`, `scheduler`, `controller` or `publisher`.
    kind: str
    # The queues that a live worker reads.
    queues: tuple[str, ...] = ()
    # Seconds since its last report, which is how old its figures are; None: it has made none lately.
    reported: float | None
    is_live: bool
    # Whether it is live and its report is overdue: it has measured what nobody has seen.
    is_stale: bool

    @property
    def state(self) -> str:
        """What its figures are, in words; '' for those of a live process that reports."""
        if not self.is_live:
            return "not live: these are its last figures"
        if self.reported is None:
            return NO_REPORT_YET
        return "stale: its next report is overdue" if self.is_stale else ""


class WorkersOverview(NamedTuple):
    """The live workers, and those that were lost in the last hour, the last ones first."""

    workers: tuple[WorkerOverview, ...]
    lost: tuple[LostWorker, ...]
    # How many more were lost on one queue: of very many the last ones are known by name.
    further_lost: int = 0


def judge_repair(lost: LostWorker) -> LostWorker:
    """Return what is known of a lost process, with whether its loss is repaired."""
    is_repaired = (lost.is_back or lost.repaired_at is not None) and not (lost.held or lost.dead_left)
    return msgspec.structs.replace(lost, is_repaired=is_repaired)


def select_unrepaired(lost: Sequence[LostWorker]) -> tuple[LostWorker, ...]:
    """Return the lost processes that people may have to look at."""
    return tuple(process for process in lost if not process.is_repaired)


def describe_repaired(lost: Sequence[LostWorker]) -> str:
    """Return how many losses of processes are repaired, in words: `lost in the last hour: 1, repaired`; '' for none."""
    count = sum(process.is_repaired for process in lost)
    return f"lost in the last hour: {count:,}, repaired" if count else ""


def are_deaths_open(task: str, lost: Iterable[LostWorker], since: float) -> bool:
    """Return whether a person should look at the workers that died with jobs of a task since some time.

    One worker may die of anything, so a single loss is over when it is repaired. Jobs that take down several are a
    pattern, and stay one however soon each worker is replaced. A loss that is not known by name counts, too.
    """
    found = [process for process in lost if task in process.tasks and process.at >= since]
    return len(found) != 1 or not found[0].is_repaired


def describe_lost_work(lost: LostWorker) -> str:
    """Return what a lost worker held, and what became of that, in words."""
    counts = (
        (lost.held, "not put back yet: no other worker reads its queues"),
        (lost.put_back, "put back"),
        (lost.dead, choose_form(lost.dead, "became a dead letter", "became dead letters")),
    )
    parts = [f"{format_count(count, 'job')} {fate}" for count, fate in counts if count]
    begun = join_names((f"{job.task} {job.id} ({job.fate})" for job in lost.jobs), LOST_JOBS_NAMED)
    had_begun = f"it had begun {begun}" if begun else ""
    is_worker = lost.kind in ("worker", "router")
    return "; ".join(filter(None, (lost.why, *parts, had_begun))) or (
        NO_WORK if is_worker else f"a {lost.kind}"
    )


def format_lost(lost: LostWorker) -> str:
    """Return a lost worker in a line: its name, when it was lost, and what it held."""
    return f"{lost.kind} {lost.name} {lost.health}: {describe_loss(lost)}"


def describe_loss(lost: LostWorker) -> str:
    """Return what is known of the loss of a worker: whether it is repaired, what its Controller knows, what it held."""
    then = IS_REPAIRED if lost.is_repaired else IS_BACK if lost.is_back else ""
    return "; ".join(filter(None, (then, lost.controller, lost.work)))


class DueSchedule(msgspec.Struct, frozen=True):
    """A schedule that fires soon."""

    name: str
    task: str
    queue: str
    # In seconds since 1970.
    at: float


class UnreachableBroker(msgspec.Struct, frozen=True):
    """A broker of which nothing is shown."""

    broker: str
    error: str


class OverviewTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over all that is shown."""

    # Attempts that ended, and those of them that failed, in the overview's time `rates_since` to `rates_until`.
    ended_per_second: float
    failed_per_second: float
    backlog: int
    waiting: int
    running: int
    held: int
    scheduled: int
    dead: int
    workers: int
    # Those that were lost in the last hour, without those whose loss is repaired.
    lost: int = 0
    routers: int
    schedulers: int
    controllers: int
    publishers: int


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are that are not shown."""

    queues: int = 0
    tasks: int = 0
    workers: int = 0
    # Queues that are shown without their history.
    histories: int = 0
    lost: int = 0
    missing: int = 0


class ProcessStarts(msgspec.Struct, frozen=True):
    """Processes that started at about the same time, as after a deployment."""

    # When the first of them did, in seconds since 1970.
    at: float
    processes: int


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """An application at one time: its queues, tasks and workers."""

    app: str
    # When it was read, and when the time begins that it looks back to, in seconds since 1970.
    at: float
    since: float
    totals: OverviewTotals
    queues: tuple[QueueOverview, ...]
    tasks: tuple[TaskOverview, ...]
    workers: tuple[WorkerOverview, ...]
    # Workers and Routers that were lost in the last hour, the last ones first.
    lost: tuple[LostWorker, ...] = ()
    # Processes that should work and do not: members that were given up or stay down, Schedulers if none works.
    missing: tuple[MissingMember, ...] = ()
    # The next ones first.
    schedules: tuple[DueSchedule, ...] = ()
    # When the processes started that live now, the last ones first.
    starts: tuple[ProcessStarts, ...] = ()
    unreachable: tuple[UnreachableBroker, ...] = ()
    # How full the servers are; of one that is almost full, with what fills it.
    memory: tuple[ServerMemory, ...] = ()
    left_out: LeftOut = LeftOut()
    # The time in which the rates of tasks were measured, in seconds since 1970: the last whole minute.
    rates_since: float = 0.0
    rates_until: float = 0.0

    @property
    def queue_window(self) -> str:
        """Over which time the rates of queues were measured: `in the last 60 s`; '' while none was."""
        return describe_window(queue.flow for queue in self.queues)

    @property
    def task_window(self) -> str:
        """Over which time the rates of tasks were measured: `12:03 to 12:04 UTC`.

        With seconds while the first minute is under way.
        """
        is_whole = self.rates_until % MINUTE == 0
        since, until = (
            datetime.fromtimestamp(at, UTC).strftime("%H:%M" if is_whole else "%H:%M:%S")
            for at in (self.rates_since, self.rates_until)
        )
        return f"{since} to {until} UTC"


def get_rate_window(first: int, now: float) -> tuple[int, float]:
    """Return when the time begins and ends by which rates are measured, in seconds since 1970.

    It consists of whole minutes. When there is none yet, it is the minute that is under way.

    Args:
        first: The first minute that was measured.
        now: The time.
    """
    end = int(now // MINUTE) * MINUTE
    begin = max(first, end - RATE_MINUTES * MINUTE)
    return (begin, end) if begin < end else (min(first, end), max(now, first + 1.0))


def judge_queue(
    *,
    backlog: int,
    upcoming: int,
    oldest: float | None,
    workers: int,
    is_paused: bool,
    flow: QueueFlow | None,
    idle: float | None = None,
    held_by: str = "",
) -> QueueVerdict:
    """Return whether a queue keeps up.

    Args:
        backlog: Jobs that no worker has and whose time has come, those that limits hold included.
        upcoming: Jobs that wait for their time.
        oldest: Seconds that the oldest job of the backlog has waited.
        workers: Live workers that read the queue.
        is_paused: Whether it is paused.
        flow: How fast jobs come and leave; None while that was not measured.
        idle: Seconds since an attempt ended; None when none did within a day, or nobody has counted.
        held_by: What holds jobs of the backlog that wait at limits, in words; '' when none is held.
    """
    why = f": {held_by}" if held_by else ""
    if is_paused:  # on purpose, which may be forgotten: jobs wait for the person who paused it
        return QueueVerdict("paused", "paused", needs_attention=backlog > 0)
    if not workers and backlog + upcoming:
        return QueueVerdict("unserved", "nobody works on it", needs_attention=True)
    if not backlog:
        return QueueVerdict("steady", "steady" if workers else "empty")
    stalled = get_stalled_time(oldest=oldest, flow=flow, idle=idle)
    if stalled:
        words = f"nothing ends, {format_duration(stalled)}{why}"
        return QueueVerdict("stalled", words, needs_attention=stalled > STALLED_AFTER)
    if flow is None:
        return QueueVerdict("unknown", f"not measured yet{why}")
    is_even = abs(flow.growth) <= max(STEADY_RATE, STEADY_SHARE * flow.outgoing)
    if is_even or backlog <= PROMPT * flow.outgoing:
        return QueueVerdict("steady", f"steady{why}")
    if flow.growth > 0:
        return QueueVerdict("grows", f"grows by {format_rate(flow.growth)}{why}", needs_attention=True)
    empty_in = backlog / -flow.growth
    return QueueVerdict("empties", f"empties in {format_duration(empty_in)}{why}", empty_in=empty_in)


def get_stalled_time(*, oldest: float | None, flow: QueueFlow | None, idle: float | None) -> float:
    """Return for how many seconds jobs have waited while nothing ended; 0 while a queue is not stalled.

    When the last attempt ended is known to the moment of the look, whatever the window of the rates is. So a queue that
    begins to drain is not stalled from its first attempt on, however long it stood; and one that has stopped is stalled
    as soon as more attempts are missing that this cannot be chance.
    """
    if flow is None and idle is None:
        return 0.0
    if idle is None and flow is not None and flow.outgoing:  # whatever has ended is forgotten, or not counted
        return 0.0
    waited = min(oldest or 0.0, math.inf if idle is None else idle)
    is_stopped = flow is not None and waited > STOPPED_AFTER and waited * flow.outgoing > MISSED_ENDS
    return waited if waited > STALLED_AFTER or is_stopped else 0.0


def describe_window(flows: Iterable[QueueFlow | None]) -> str:
    """Return over which time rates were measured, the longest of several: `in the last 60 s`; '' while none was."""
    seconds = max((flow.seconds for flow in flows if flow is not None), default=0.0)
    return f"in the last {seconds:.0f} s" if seconds else ""


def describe_flow(flow: QueueFlow | None) -> str:
    """Return how fast jobs come and leave, and over which time: `5/s in, 4/s out, in the last 60 s`; '' if unknown."""
    if flow is None:
        return ""
    rates = f"{format_rate(flow.incoming)} in, {format_rate(flow.outgoing)} out"
    return f"{rates}, {describe_window([flow])}"


class FailureOnset(NamedTuple):
    """Since when a task fails, as far as the minutes say that were looked at."""

    # The minute in which it began, in seconds since 1970.
    at: int
    # The last minute in which it failed.
    last: int
    # Whether earlier minutes can change nothing: it did well before.
    is_certain: bool

    def get_time(self, error: LastError | None) -> int:
        """Return when the task began to fail, in seconds since 1970: to the second if its last error began it.

        A minute has the attempts that were reported in it, so some of the minute before, too.
        """
        first = None if error is None else error.first
        is_same = first is not None and self.at - MINUTE <= first < self.at + MINUTE
        return int(first) if first is not None and is_same else self.at


def find_onset(minutes: Iterable[TaskMinute]) -> FailureOnset | None:
    """Return since when a task fails; None when it had healed after its last failure, or has not failed.

    Minutes without any attempt tell nothing. A few minutes without failures do not mean that it has healed: of a task
    that runs seldom, some attempts succeed by chance.
    """
    begin: int | None = None
    last, healed, is_certain = 0, 0, False
    for minute in sorted(minutes):
        if minute.ended <= 0:
            continue
        if minute.failed and minute.failed >= FAILING_SHARE * minute.ended:
            begin = minute.at if begin is None else begin
            last, healed = minute.at, 0
        else:
            healed += minute.span // MINUTE
            if healed >= HEALED_MINUTES:
                begin, is_certain = None, True
    return None if begin is None else FailureOnset(begin, last, is_certain)


def fails_now(onset: FailureOnset | None, now: float) -> bool:
    """Return whether a task fails now: its last failure is not long ago."""
    return onset is not None and now - onset.last <= FAILS_LATELY + MINUTE


def add_deaths(
    tasks: Iterable[TaskOverview],
    deaths: Mapping[str, TaskDeaths],
    lost: Sequence[LostWorker],
    now: float,
) -> list[TaskOverview]:
    """Return the overviews of tasks with the workers that their jobs took down; first those that need a person.

    A job that takes its worker down has ended no attempt: its task may have no overview yet.
    """
    found = {task.name: task for task in tasks}
    for name, task_deaths in deaths.items():
        before = found.get(name)
        if before is None:
            if now - task_deaths.last > DEATHS_SHOWN:
                continue
            before = TaskOverview(
                name=name,
                queues=task_deaths.queues,
                ended=0,
                failed=0,
                failed_share=None,
                ended_per_minute=0.0,
                failed_per_minute=0.0,
                run=None,
                wait=None,
            )
        is_open = now - task_deaths.last <= KILLS_LATELY and are_deaths_open(name, lost, now - KILLS_LATELY)
        found[name] = msgspec.structs.replace(
            before,
            deaths=task_deaths.workers,
            poisoned=task_deaths.poisoned,
            last_death=task_deaths.last or None,
            kills=describe_deaths(task_deaths, now) if is_open else "",
        )
    return sorted(found.values(), key=lambda task: not task.needs_attention)


def describe_deaths(deaths: TaskDeaths, now: float, jobs: str = "its jobs") -> str:
    """Return how many workers died with the jobs of a task, in words. It does not say that these were the cause."""
    workers = f"{format_count(deaths.workers, 'worker')} died with {jobs}"
    given_up = f"; {format_count(deaths.poisoned, 'job')} given up" if deaths.poisoned else ""
    last = f", the last {format_age(min(deaths.last, now), now)}" if deaths.last else ""
    return f"{workers}{last}{given_up}"


def judge_worker(
    standing: ProcessStanding,
    *,
    has_reported: bool = True,
    is_ready: bool = True,
    is_full: bool = False,
    lag: float = 0.0,
    breakers: Sequence[str] = (),
) -> str:
    """Return what a person should know of the health of a worker: `ok`, or what is wrong.

    Args:
        standing: How it stands. What a silent one has reported says nothing any more.
        has_reported: Whether it has reported yet.
        is_ready: Whether it was ready for work.
        is_full: Whether the server takes no writes, reports among them, since its memory is full.
        lag: Seconds by which its event loop woke up late.
        breakers: Its circuit breakers that are not closed.
    """
    if standing.condition != "working":
        return standing.text
    if is_full:
        return REFUSES_WRITES
    if not has_reported:
        return NO_REPORT_YET
    if not is_ready:
        return "not ready"
    if breakers:
        return f"breaker open: {', '.join(breakers)}"
    return f"loop late by {format_duration(lag)}" if lag >= LATE_LOOP else "ok"


def merge_lost(process: LostWorker, other: LostWorker) -> LostWorker:
    """Return what is known of a lost process on two queues as one."""
    first, _ = sorted((process, other), key=lambda part: part.at)
    return msgspec.structs.replace(
        first,
        queues=tuple(dict.fromkeys((*process.queues, *other.queues))),
        why=process.why or other.why,
        held=process.held + other.held,
        put_back=process.put_back + other.put_back,
        dead=process.dead + other.dead,
        dead_left=process.dead_left + other.dead_left,
        jobs=(*process.jobs, *other.jobs),
        tasks=tuple(dict.fromkeys((*process.tasks, *other.tasks))),
        repaired_at=get_repair_time(process.repaired_at, other.repaired_at),
    )


IS_BACK = "another process works in its place"
"""What is said of a lost process that has a successor."""
IS_REPAIRED = "repaired"
"""What is said of a loss that nobody needs to look at any more."""
NO_REPORT_YET = "no report yet"
"""What is said of the health of a worker that has just started: it needs no person."""
REFUSES_WRITES = "Redis is full, and refuses writes"
"""What is said of the health of a process whose server is full: it can settle no job, and makes no report."""
LATE_LOOP = 1.0
"""Seconds by which an event loop that wakes up late is worth a look."""
STARTED_TOGETHER = 120.0
"""Seconds between two starts that belong together."""


def group_starts(processes: Iterable[tuple[str, float]]) -> tuple[ProcessStarts, ...]:
    """Return when code was deployed, as far as live processes tell: the last one first.

    A process that starts again with code that others have run before, since it has crashed, is no deployment: of each
    code the first start counts, and those that follow it closely.

    Args:
        processes: The code of each process, and when it started, in seconds since 1970.
    """
    times: dict[str, list[float]] = {}
    for code, at in processes:
        times.setdefault(code, []).append(at)
    deployed = [at for found in times.values() for at in _take_together(sorted(found))]
    groups: list[list[float]] = []
    left = sorted(deployed)
    while left:
        groups.append(_take_together(left))
        left = left[len(groups[-1]) :]
    return tuple(ProcessStarts(group[0], len(group)) for group in reversed(groups))


def _take_together(times: Sequence[float]) -> list[float]:
    """Return the first of sorted times, and those that follow each other closely."""
    taken = list(times[:1])
    for at in times[1:]:
        if at - taken[-1] > STARTED_TOGETHER:
            break
        taken.append(at)
    return taken


def format_rate(per_second: float) -> str:
    """Return a rate as text: `12/s`, `0.5/s`, `3/min`."""
    if per_second >= 10 or not per_second:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{per_second * 60:.2g}/min"


def format_share(share: float) -> str:
    """Return a share in per cent: `33 %`, and with a tenth near the ends: only none is 0 %, and only all are 100 %."""
    percent = share * 100
    if 0 < percent < 1:
        return f"{percent:.1f} %" if percent >= 0.1 else "under 0.1 %"
    if 99 < percent < 100:
        return f"{math.floor(percent * 10) / 10:g} %"
    return f"{percent:.0f} %"
