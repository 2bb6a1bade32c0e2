"""Make rules of alerts, from code, from settings and built in, and apply them to what was measured of the cluster."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_duration
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.observability.alerting import (
    AlertCondition,
    AlertInstance,
    AlertKey,
    AlertReading,
    AlertRule,
    Measure,
    Severity,
)
from celery5.protocol.observability.overview import (
    IS_REPAIRED,
    LostWorker,
    are_deaths_open,
    describe_deaths,
    describe_flow,
    judge_queue,
    select_unrepaired,
)
from celery5.protocol.observability.queue_depth import QueueDepth, TaskDeaths, sum_deaths
from celery5.protocol.observability.report import compress, decompress, get_labels
from celery5.protocol.observability.rollup import FAILED_STATES, FINISHED_STATES, MetricsGroup
from celery5.protocol.process.missing import MembersReport, MissingMember
from celery5.protocol.process.standing import BLOCKED, make_lost
from celery5.protocol.text_values import DURATION
from celery5.similar_names import suggest_known

MAX_WITHIN = 3600.0
"""The longest time over which failures and dead letters are counted, in seconds."""
SAMPLES_WITHIN = 5
"""Samples of counters in the shortest of these times."""
MAX_SAMPLES = 60
"""Samples that are kept."""
MAX_SUBJECTS = 500
"""Queues, tasks and groups that are looked at."""
MEMORY_RESOLVES = 0.95
"""The share of its threshold at which the built-in rule on memory resolves."""
WHY_JOBS_WAIT = ("paused", "unserved", "stalled")
"""Verdicts that say more of an old job than rates do."""
COUNTED = ("failures", "dead-letters", "worker-deaths")
"""What is counted over some time."""
WITHOUT_THRESHOLD = ("no-workers", "worker-deaths", "worker-lost", "member-missing", "not-undone")
"""What alerts from the first on unless a rule says otherwise."""
MAX_LOST_SUBJECTS = 20
"""Lost processes, and silent workers, with their own alert; further lost ones have one together."""
MAX_NAME = 100
"""Characters of the name of a rule."""


def oldest(queue: str = "", *, above: float, below: float | None = None) -> AlertCondition:
    """Return the condition that the oldest job of a queue, or of any, has waited for more than `above` seconds."""
    return AlertCondition(measure="oldest", queue=queue, above=above, below=below)


def failures(
    task: str = "", *, above: float, below: float | None = None, within: float = 300.0, least: int = 20
) -> AlertCondition:
    """Return the condition that too many attempts of a task, or of any, fail.

    Args:
        task: The name of the task; '': each one by itself.
        above: The share of the attempts that were retried or became dead letters, between 0 and 1.
        below: The share at which it resolves; None: 0.8 of `above`.
        within: Seconds over which attempts are counted.
        least: With fewer attempts than this the share counts as 0.
    """
    return AlertCondition(measure="failures", task=task, above=above, below=below, within=within, least=least)


def no_workers(queue: str = "", *, above: float = 0) -> AlertCondition:
    """Return the condition that more than `above` jobs wait on a queue, or on any, that no live worker reads."""
    return AlertCondition(measure="no-workers", queue=queue, above=above)


def dead_letters(
    queue: str = "", *, above: float, below: float | None = None, within: float = 600.0
) -> AlertCondition:
    """Return the condition that more than `above` dead letters were added to a queue, or to any, within a time."""
    return AlertCondition(measure="dead-letters", queue=queue, above=above, below=below, within=within)


def worker_deaths(task: str = "", *, above: float = 0, within: float = 600.0) -> AlertCondition:
    """Return the condition that jobs of a task, or of any, took more than `above` workers down within a time.

    It counts from the first one on: each death is noted where the jobs of the worker are put back. A single one within
    the time counts until it is repaired, as `worker_lost` defines it.
    """
    return AlertCondition(measure="worker-deaths", task=task, above=above, within=within)


def worker_lost(queue: str = "", *, within: float = 600.0) -> AlertCondition:
    """Return the condition that a worker of a queue, or any process, was lost within a time: it died, or was frozen or
    cut off for longer than its lease. One that ends in order is not lost.

    It counts until its loss is repaired: another process works in its place, and of its jobs none is held or became a
    dead letter that is there still. Without a queue, Routers, Schedulers, Controllers and publishers count, too.
    """
    return AlertCondition(measure="worker-lost", queue=queue, above=0, within=within)


def member_missing(group: str = "", *, above: float = 0) -> AlertCondition:
    """Return the condition that more than `above` members of a group of the cluster, or of any, are missing.

    The Controller has given them up, or they have been down for 30 seconds.

    Args:
        group: The group, such as `worker-mail`. '': each one by itself, and whether schedules wait while no Scheduler
            works at all, with or without a Controller.
        above: How many may be missing.
    """
    return AlertCondition(measure="member-missing", group=group, above=above)


def not_undone(queue: str = "", *, above: float = 0, within: float = 300.0) -> AlertCondition:
    """Return the condition that more than `above` runs of workflows of a queue, or of any, are not completely undone.

    An undo job of them is dead, expired or revoked; or they stop, or are undone, for more than `within` seconds.
    """
    return AlertCondition(measure="not-undone", queue=queue, above=above, within=within)


def stream_lag(
    stream: str = "", group: str = "", *, above: float, below: float | None = None
) -> AlertCondition:
    """Return the condition that the first record that a group has not done is older than `above` seconds."""
    return AlertCondition(measure="stream-lag", stream=stream, group=group, above=above, below=below)


def loop_lag(*, above: float, below: float | None = None) -> AlertCondition:
    """Return the condition that the event loop of a process wakes up more than `above` seconds late.

    A worker whose event loop is blocked cannot report it: its sidecar does, and it has its own alert.
    """
    return AlertCondition(measure="loop-lag", above=above, below=below)


def memory_used(*, above: float, below: float | None = None) -> AlertCondition:
    """Return the condition that more than this share of the memory of a broker's server is used, between 0 and 1."""
    return AlertCondition(measure="memory", above=above, below=below)


def check_rule(rule: AlertRule) -> AlertRule:
    """Return a rule. Raises Misconfigured where it makes no sense."""
    name, condition = rule.name, rule.condition
    if not isinstance(cast("object", name), str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise Misconfigured(f"alert {name!r}: use 1 to {MAX_NAME} characters on one line as name")
    if name == "*" or name != name.strip():
        raise Misconfigured(f"alert {name!r}: choose another name, without spaces around it")
    if not isinstance(cast("object", condition), AlertCondition):
        raise Misconfigured(
            f"alert {name!r}: {condition!r} is no condition: give one such as oldest(above=300)"
        )
    if condition.measure not in get_args(Measure):
        raise Misconfigured(
            f"alert {name!r}: nothing is measured as {condition.measure!r}; "
            + suggest_known(condition.measure, get_args(Measure))
        )
    if rule.severity not in get_args(Severity):
        raise Misconfigured(f"alert {name!r}: severity is {rule.severity!r}: give warning or critical")
    _check_numbers(rule)
    return rule


def _check_numbers(rule: AlertRule) -> None:
    name, condition = rule.name, rule.condition
    numbers = {
        "above": condition.above,
        "below": condition.resolves_at,
        "within": condition.within,
        "least": condition.least,
        "for_": rule.for_,
        "keep_firing_for": rule.keep_firing_for,
    }
    for option, value in numbers.items():
        if not _is_number(value):
            raise Misconfigured(f"alert {name!r}: {option} is {value!r}: give a number, 0 or more")
    if condition.resolves_at > condition.above:
        raise Misconfigured(f"alert {name!r}: below is {condition.below:g}, more than above")
    if condition.measure == "failures" and not condition.above < 1:
        raise Misconfigured(
            f"alert {name!r}: above is {condition.above:g}: give a share below 1, such as 0.2"
        )
    if not 0 < condition.within <= MAX_WITHIN:
        raise Misconfigured(
            f"alert {name!r}: within is {condition.within:g}: give up to {MAX_WITHIN:g} seconds"
        )


def check_names(rule: AlertRule, *, queues: Collection[str], tasks: Collection[str]) -> AlertRule:
    """Return a rule. Raises Misconfigured for a queue or a task that the application does not have."""
    for kind, name, names in (("queue", rule.condition.queue, queues), ("task", rule.condition.task, tasks)):
        if name and name not in names:
            known = suggest_known(name, sorted(names))
            raise Misconfigured(f"alert {rule.name!r}: there is no {kind} {name!r}; {known}")
    return rule


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_DURATIONS = ("for", "keep_firing_for", "within")
_TEXTS = ("queue", "task", "stream", "group", "severity")
_NUMBERS = ("above", "below", "least")
_OPTIONS = (*_TEXTS, *_DURATIONS, *_NUMBERS)


def parse_rules(written: Mapping[str, str]) -> tuple[AlertRule, ...]:
    """Return the rules of the setting `alerts`: texts such as `oldest queue=mail above=300 for=2m`, by name.

    Raises Misconfigured.
    """
    return tuple(_parse_rule(name, text) for name, text in written.items())


def _parse_rule(name: str, text: str) -> AlertRule:
    measure, *words = text.split() or [""]
    values: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals or option not in _OPTIONS:
            hint = suggest_known(option, _OPTIONS)
            raise Misconfigured(f"alert {name!r}: {word!r} is no option=value; {hint}")
        values[option] = value if option in _TEXTS else _parse_number(name, option, value)
    if "above" not in values and measure not in WITHOUT_THRESHOLD:
        raise Misconfigured(f"alert {name!r}: it has no threshold: add above=")
    rest: dict[str, Any] = {
        option: values.pop(option) for option in ("severity", "keep_firing_for") if option in values
    }
    if "for" in values:
        rest["for_"] = values.pop("for")
    if "least" in values:
        values["least"] = int(values["least"])
    above = values.pop("above", 0.0)
    condition = AlertCondition(measure=cast("Measure", measure), above=above, **values)
    return check_rule(AlertRule(name=name, condition=condition, **rest))


def _parse_number(name: str, option: str, text: str) -> float:
    try:
        parsed = DURATION.parse_unit(text)
        return float(parsed)
    except (ValueError, Misconfigured):
        raise Misconfigured(
            f"alert {name!r}: {option} is {text!r}: give a number, or a time such as 5m"
        ) from None


class AlertThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds of the built-in rules; 0 switches a rule off."""

    oldest: float
    failures: float
    no_workers: float
    dead: float
    stream_lag: float
    loop_lag: float
    memory: float = 0.0
    worker_deaths: float = 0
    worker_lost: float = 0
    member_missing: float = 0
    not_undone: float = 0


def make_builtin_rules(thresholds: AlertThresholds) -> tuple[AlertRule, ...]:
    """Return the rules that hold without any declaration."""
    deaths = worker_deaths(above=thresholds.worker_deaths - 1)
    lost = worker_lost(within=min(thresholds.worker_lost, MAX_WITHIN))
    undo = not_undone(within=min(thresholds.not_undone, MAX_WITHIN))
    # A server that is full takes no alert either: it fires before.
    memory = memory_used(above=thresholds.memory, below=thresholds.memory * MEMORY_RESOLVES)
    rules: tuple[tuple[float, AlertRule], ...] = (
        (thresholds.oldest, AlertRule(name="oldest-job", condition=oldest(above=thresholds.oldest))),
        (thresholds.failures, AlertRule(name="failure-rate", condition=failures(above=thresholds.failures))),
        (
            thresholds.no_workers,
            AlertRule(
                name="no-workers", condition=no_workers(), severity="critical", for_=thresholds.no_workers
            ),
        ),
        (
            thresholds.dead,
            AlertRule(name="dead-letters", condition=dead_letters(above=thresholds.dead), for_=0.0),
        ),
        (
            thresholds.worker_deaths,
            AlertRule(
                name="worker-deaths", condition=deaths, severity="critical", for_=0.0, keep_firing_for=0.0
            ),
        ),
        (
            thresholds.worker_lost,
            AlertRule(name="worker-lost", condition=lost, severity="critical", for_=0.0, keep_firing_for=0.0),
        ),
        (
            thresholds.member_missing,
            AlertRule(
                name="member-missing",
                condition=member_missing(),
                severity="critical",
                for_=thresholds.member_missing,
            ),
        ),
        (thresholds.not_undone, AlertRule(name="not-undone", condition=undo, severity="critical", for_=0.0)),
        (
            thresholds.stream_lag,
            AlertRule(name="stream-lag", condition=stream_lag(above=thresholds.stream_lag)),
        ),
        (thresholds.loop_lag, AlertRule(name="loop-lag", condition=loop_lag(above=thresholds.loop_lag))),
        (thresholds.memory, AlertRule(name="memory-full", condition=memory, severity="critical")),
    )
    return tuple(rule for threshold, rule in rules if threshold)


class StoppingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a workflow that stops, is undone, or was not completely undone."""

    id: str
    # Since when it stops, in seconds since 1970.
    since: float
    # How many of its undo jobs have not succeeded.
    failed: int
    # The workflow, and what is undone of it, in words.
    description: str


class MeasuredQueue(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a queue."""

    depth: QueueDepth
    # What holds the jobs that wait at limits, in words.
    held_by: str = ""
    # No worker is to read it, until it is resumed.
    is_paused: bool = False
    # The runs that live there and are not completely undone, those first that stop for longest.
    stopping_runs: tuple[StoppingRun, ...] = ()


class TaskCount(msgspec.Struct, frozen=True, array_like=True):
    """How many attempts of a task have failed and ended, since metrics are kept."""

    failed: float = 0
    ended: float = 0


def count_tasks(groups: Iterable[MetricsGroup], counts: dict[str, TaskCount]) -> Iterator[None]:
    """Enter in `counts` how many attempts of each task have failed and ended, one group of totals at each step."""
    for group in groups:
        for series, value in group.count_all().items():
            if series[0] != "celery5_jobs_total":
                continue
            labels = get_labels(series)
            task, state = labels.get("task", ""), labels.get("state", "")
            if state in FINISHED_STATES and (task in counts or len(counts) < MAX_SUBJECTS):
                before = counts.get(task, TaskCount())
                failed = value if state in FAILED_STATES else 0.0
                counts[task] = TaskCount(before.failed + failed, before.ended + value)
        yield


class MeasuredCluster(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a cluster at one time. What could not be measured is missing."""

    # In seconds since 1970, by the clock of Redis.
    at: float
    queues: Mapping[str, MeasuredQueue] = {}
    tasks: Mapping[str, TaskCount] = {}
    # The age of the first record that is not done, in seconds, by stream and group.
    lags: Mapping[tuple[str, str], float] = {}
    loop_lag: float | None = None
    # How full the servers are.
    memory: tuple[ServerMemory, ...] = ()
    # The processes that were lost in the last hour, the last ones first.
    lost: tuple[LostWorker, ...] = ()
    # What the leading Controller says of its members, and all processes that should work and do not.
    cluster: MembersReport | None = None
    missing: tuple[MissingMember, ...] = ()

    @property
    def deaths(self) -> Mapping[str, TaskDeaths]:
        """The workers that the jobs of each task took down."""
        return sum_deaths({name: queue.depth for name, queue in self.queues.items()})


class CounterSample(msgspec.Struct, frozen=True, array_like=True):
    """The counters at an earlier time."""

    at: float
    tasks: dict[str, TaskCount]
    # Of each queue that was measured.
    dead: dict[str, int]
    # On these queues; None in a sample from before they were counted.
    deaths: dict[str, int] | None = None

    def count_deaths_since(self, task: str, queues: Mapping[str, MeasuredQueue]) -> int:
        """Return how many workers the jobs of a task took down since then, on queues that were measured then.

        What a queue had before that could not be measured, or was not counted yet, is no news.
        """
        if self.deaths is None:
            return 0
        now = sum(queue.depth.deaths.get(task, 0) for name, queue in queues.items() if name in self.dead)
        return max(0, now - self.deaths.get(task, 0))


class StoredAlerts(msgspec.Struct, frozen=True, array_like=True):
    """What the evaluation continues from: the alerts that are pending or firing, and samples of counters."""

    instances: tuple[AlertInstance, ...] = ()
    samples: tuple[CounterSample, ...] = ()

    def pack(self) -> bytes:
        """Return it as it stands in Redis."""
        return compress(msgspec.to_builtins(self))

    @classmethod
    def unpack(cls, packed: bytes | None) -> "StoredAlerts":
        """Return it from what stands in Redis; an empty one where that cannot be read."""
        try:
            return cls() if not packed else msgspec.convert(decompress(packed), cls)
        except msgspec.ValidationError:
            return cls()


def add_sample(
    samples: Sequence[CounterSample], measured: MeasuredCluster, rules: Sequence[AlertRule]
) -> tuple[CounterSample, ...]:
    """Return the samples that are needed from now on: with a new one when it is time for that."""
    times = [rule.condition.within for rule in rules if rule.condition.measure in COUNTED]
    if not times:
        return ()
    step = max(min(times) / SAMPLES_WITHIN, max(times) / (MAX_SAMPLES - SAMPLES_WITHIN))
    past = [sample for sample in samples if sample.at <= measured.at]
    if not past or measured.at - past[-1].at >= step:
        dead = {name: queue.depth.dead for name, queue in measured.queues.items()}
        deaths = {task: task_deaths.workers for task, task_deaths in measured.deaths.items()}
        past.append(CounterSample(measured.at, dict(measured.tasks), dead, deaths))
    old = [number for number, sample in enumerate(past) if sample.at <= measured.at - max(times)]
    return tuple(past[old[-1] if old else 0 :][-MAX_SAMPLES:])


def read_conditions(
    rules: Sequence[AlertRule], measured: MeasuredCluster, samples: Sequence[CounterSample]
) -> dict[AlertKey, AlertReading]:
    """Return what was measured for each rule and each of its subjects."""
    readings: dict[AlertKey, AlertReading] = {}
    for rule in rules:
        for subject, reading in _read(rule.condition, measured, samples):
            readings[rule.name, subject] = reading
    return readings


def _read(
    condition: AlertCondition, measured: MeasuredCluster, samples: Sequence[CounterSample]
) -> Iterator[tuple[str, AlertReading]]:
    match condition.measure:
        case "oldest" | "no-workers" | "dead-letters" | "not-undone":
            for name, queue in measured.queues.items():
                if condition.queue in ("", name):
                    yield f"queue {name}", _read_queue(condition, name, queue, measured, samples)
        case "failures":
            base = _find_base(samples, measured.at - condition.within)
            for task, count in measured.tasks.items():
                if condition.task in ("", task):
                    yield f"task {task}", _read_failures(condition, task, count, base)
        case "worker-deaths":
            yield from _read_all_deaths(condition, measured, samples)
        case "memory":
            yield from _read_memory(measured)
        case "worker-lost" | "member-missing":
            yield from _read_processes(condition, measured)
        case _:
            yield from _read_lags(condition, measured)


def _read_processes(
    condition: AlertCondition, measured: MeasuredCluster
) -> Iterator[tuple[str, AlertReading]]:
    """Yield which processes were lost, or which members of the cluster are missing."""
    return (_read_lost if condition.measure == "worker-lost" else _read_missing)(condition, measured)


def _read_lags(condition: AlertCondition, measured: MeasuredCluster) -> Iterator[tuple[str, AlertReading]]:
    if condition.measure == "loop-lag":
        if measured.loop_lag is not None:
            words = f"the event loop of a process woke up {format_duration(measured.loop_lag)} late"
            yield "", AlertReading(measured.loop_lag, words)
        yield from _read_silent(measured)
        return
    for (stream, group), age in measured.lags.items():
        if condition.stream in ("", stream) and condition.group in ("", group):
            words = f"group {group} of stream {stream} is {format_duration(int(age))} behind"
            yield f"group {stream}:{group}", AlertReading(age, words)


def _read_silent(measured: MeasuredCluster) -> Iterator[tuple[str, AlertReading]]:
    """Yield for how long each worker has been silent whose event loop is blocked."""
    silent: dict[str, float] = {}
    for queue in measured.queues.values():
        for worker, seconds in queue.depth.silent_workers.items():
            silent[worker] = max(seconds, silent.get(worker, 0.0))
    for worker, seconds in sorted(silent.items(), key=lambda item: -item[1])[:MAX_LOST_SUBJECTS]:
        words = f"worker {worker} has been silent for {format_duration(int(seconds))}: {BLOCKED}"
        yield f"worker {get_inbox_name(worker)}", AlertReading(seconds, words)


def _read_queue(
    condition: AlertCondition,
    name: str,
    queue: MeasuredQueue,
    measured: MeasuredCluster,
    samples: Sequence[CounterSample],
) -> AlertReading:
    depth = queue.depth
    if condition.measure == "oldest":
        if depth.oldest is None:
            return AlertReading(0.0, f"no job waits on queue {name}")
        oldest = depth.oldest
        words = f"the oldest job of queue {name} has waited {format_duration(int(oldest))}"
        held = f"; {depth.held} of {depth.backlog} are held: {queue.held_by}" if queue.held_by else ""
        pace = _describe_pace(queue)
        return AlertReading(oldest, words + held + (f"; {pace}" if pace else ""))
    if condition.measure == "not-undone":
        return _read_stopping(condition, name, queue, measured.at)
    if condition.measure == "no-workers":
        waiting = 0 if depth.workers else depth.backlog
        if not waiting:
            return AlertReading(0, f"no job waits on queue {name} without a worker")
        words = f"{format_count(waiting, 'job waits', 'jobs wait')} on queue {name}, and no worker reads it"
        return AlertReading(waiting, words)
    base = _find_base(samples, measured.at - condition.within)
    added = max(0, depth.dead - (depth.dead if base is None else base.dead.get(name, 0)))
    letters = format_count(added, "new dead letter")
    within = format_duration(condition.within)
    return AlertReading(added, f"queue {name} has {letters} in {within}, and {depth.dead:,} in all")


def _describe_pace(queue: MeasuredQueue) -> str:
    """Return why jobs of a queue wait, as its verdict has it, or else how fast they come and leave."""
    depth = queue.depth
    verdict = judge_queue(
        backlog=depth.backlog,
        upcoming=depth.scheduled - depth.overdue,
        oldest=depth.oldest,
        workers=depth.workers,
        is_paused=queue.is_paused,
        flow=depth.flow,
        idle=depth.idle,
    )
    return verdict.text if verdict.condition in WHY_JOBS_WAIT else describe_flow(depth.flow)


def _read_failures(
    condition: AlertCondition, task: str, count: TaskCount, base: CounterSample | None
) -> AlertReading:
    before = count if base is None else base.tasks.get(task, TaskCount())
    if count.ended < before.ended:  # the totals have begun again
        before = TaskCount()
    failed, ended = max(0.0, count.failed - before.failed), count.ended - before.ended
    words = f"{failed:.0f} of {format_count(round(ended), 'attempt')} of task {task} failed"
    if not ended or ended < condition.least:
        return AlertReading(0.0, f"{words}: with fewer than {condition.least or 1} they do not count")
    share = failed / ended
    return AlertReading(share, f"{words} ({share:.0%})")


def _read_stopping(condition: AlertCondition, name: str, queue: MeasuredQueue, at: float) -> AlertReading:
    late = [run for run in queue.stopping_runs if run.failed or at - run.since > condition.within]
    if not late:
        return AlertReading(0, f"no run of queue {name} waits to be undone")
    first = max(late, key=lambda run: run.failed)
    what = format_count(len(late), "run is", "runs are")
    words = f"{what} not undone on queue {name}: {first.description}, since {format_duration(int(at - first.since))}"
    return AlertReading(len(late), words)


def _read_missing(condition: AlertCondition, measured: MeasuredCluster) -> Iterator[tuple[str, AlertReading]]:
    """Yield how many members of each group are missing, and whether schedules wait while no Scheduler works."""
    for group in measured.cluster.groups if measured.cluster else ():
        if condition.group in ("", f"{group.kind}-{group.name}"):
            members = [member for member in measured.missing if member.subject == group.subject]
            words = "; ".join(f"{member.describe(measured.at)}; {member.remedy}" for member in members)
            count = max(group.missing, len(members))
            named = words or f"all members of {group.kind}-{group.name} work"
            more = f"; and {count - len(members)} more" if count > len(members) else ""
            yield group.subject, AlertReading(count, named + more)
    if not condition.group:
        nobody = [member for member in measured.missing if not member.name]
        words = "; ".join(f"{member.describe(measured.at)}; {member.remedy}" for member in nobody)
        yield "scheduler", AlertReading(len(nobody), words or "no schedule waits for a Scheduler")


def _read_memory(measured: MeasuredCluster) -> Iterator[tuple[str, AlertReading]]:
    for server in measured.memory:
        limit = "no limit" if server.limit is None else f"{format_bytes(server.limit)} ({server.share:.0%})"
        words = f"broker {server.broker} uses {format_bytes(server.used)} of {limit}"
        yield f"broker {server.broker}", AlertReading(server.share, words)


def _read_all_deaths(
    condition: AlertCondition, measured: MeasuredCluster, samples: Sequence[CounterSample]
) -> Iterator[tuple[str, AlertReading]]:
    base = _find_base(samples, measured.at - condition.within)
    for task, deaths in measured.deaths.items():
        if condition.task in ("", task):
            # When the last one was is known: so the first counts that came before anything was sampled.
            begin = measured.at - condition.within
            is_open = deaths.last >= begin and are_deaths_open(task, measured.lost, begin)
            since = base.count_deaths_since(task, measured.queues) if base is not None else 0
            counted = max(1, since) if is_open else 0
            words = describe_deaths(deaths, measured.at, f"jobs of task {task}")
            within = format_duration(condition.within)
            if not is_open:
                words += f"; {IS_REPAIRED}" if deaths.last >= begin else f"; none in the last {within}"
            elif counted != deaths.workers:
                words += f"; {counted:,} of them in the last {within}"
            yield f"task {task}", AlertReading(counted, words)


def _read_lost(condition: AlertCondition, measured: MeasuredCluster) -> Iterator[tuple[str, AlertReading]]:
    """Yield whether a loss of each of the last processes that were lost is open; of the others how many are.

    A loss is open until it is repaired, or its time is over. One that keeps its name when it is started again may be
    lost several times: its newest open loss is described, or else its newest one.
    """
    losses: dict[str, list[LostWorker]] = {}
    for process in sorted(measured.lost, key=lambda process: -process.at):
        if condition.queue in ("", *process.queues):
            losses.setdefault(f"{process.kind} {get_inbox_name(process.worker)}", []).append(process)
    begin = measured.at - condition.within
    others = 0
    for number, (subject, found) in enumerate(losses.items()):
        open_losses = [process for process in select_unrepaired(found) if process.at >= begin]
        if number >= MAX_LOST_SUBJECTS:
            others += bool(open_losses)
            continue
        newest = (open_losses or found)[0]
        words = f"{newest.kind} {newest.worker} was {make_lost(measured.at - newest.at).text}"
        if newest.is_repaired:
            words += f"; {IS_REPAIRED}"
        elif newest.at < begin:
            words += f": not in the last {format_duration(condition.within)}"
        yield subject, AlertReading(float(bool(open_losses)), words)
    if len(losses) > MAX_LOST_SUBJECTS:
        further = format_count(others, "further process was", "further processes were")
        yield "further processes", AlertReading(others, f"{further} lost lately")


def _find_base(samples: Sequence[CounterSample], at: float) -> CounterSample | None:
    """Return the last sample that is as old as `at`; the oldest one when none is; None for no samples."""
    old = [sample for sample in samples if sample.at <= at]
    return old[-1] if old else (samples[0] if samples else None)
