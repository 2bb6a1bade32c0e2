"""Read what is known of a job and what is in an application's queues, and empty a queue."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from celery5.audit.recording import AuditedAction
from celery5.broker.call import Call
from celery5.broker.calls import cluster, commands, health, jobs, scheduling, workflows
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import events as events_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.queues import QueueState, merge_queue_states
from celery5.broker.calls.scaling import Scaling
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import EVENTS, Keys, QueueKeys
from celery5.broker.routing.unreachable import (
    UNREACHABLE,
    get_unreachable,
    not_found_error,
    retry_without_unreachable,
    skip_unreachable,
)
from celery5.config.scaling import is_scaled
from celery5.connections.long_operations import persist
from celery5.errors import UnknownQueue
from celery5.limits.holds import LimitHolds
from celery5.protocol.cluster.leadership import LeaderRecord
from celery5.protocol.events.sinks import get_sink_names
from celery5.protocol.hash_slots import get_key_slot
from celery5.protocol.job.foreign import describe_awaited
from celery5.protocol.job.history import redact_call
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails, JobInspection, make_job_details
from celery5.protocol.process.missing import (
    MembersReport,
    MissingMember,
    StartAdvice,
    list_missing,
    make_start_advice,
)
from celery5.protocol.scaling.resource_budget import describe_lacking
from celery5.protocol.scheduling.periodic import decode_schedule
from celery5.protocol.shards import get_queue_of_shard, take_queues

if TYPE_CHECKING:
    from celery5.application import Application, DeclaredTask


MAX_SCHEDULE_QUEUES = 20
"""Queues whose schedules are read for an overview, and counted while no Scheduler lives."""
LONGEST_SCHEDULE = 1024 * 1024
"""Bytes of the message of a schedule that is counted."""
LEASED_PROCESS_KINDS = ("scheduler", "controller", "publisher")
"""The kinds of processes that run no jobs, and have their own lease while they are live."""


class AppState(msgspec.Struct, frozen=True):
    """What is in an application's queues, and which processes are live."""

    app: str
    # By name.
    queues: dict[str, QueueState]
    # None when the application is not scaled.
    scaling: Scaling | None
    # The events that wait for a Router.
    events: QueueState
    # The names of live processes.
    schedulers: tuple[str, ...]
    controllers: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    # The Controller that leads; '' for none.
    leader: str = ""
    # How many more queues there are.
    left_out: int = 0
    # The Schedulers, Controllers and publishers that were lost in the last hour, by kind.
    lost: dict[str, dict[str, cluster.LostLease]] = {}
    # The worker that is being recycled, by the name that its next process has, too; "" for none.
    recycling: str = ""
    # What the leading Controller says of its members; None if none leads.
    cluster: MembersReport | None = None
    # The processes that should work and do not: members that were given up or stay down, Schedulers if none works.
    missing: tuple[MissingMember, ...] = ()

    @property
    def start_advice(self) -> StartAdvice:
        """How a process is made to work: by hand, or by the Controller."""
        return make_start_advice(self.controllers, self.cluster)

    @property
    def further_missing(self) -> int:
        """How many more members are missing than are listed."""
        return 0 if self.cluster is None else self.cluster.further

    def list_lost_counts(self) -> list[tuple[int, int]]:
        """Return of each queue how many workers were lost in the last hour, and of how many the names are known."""
        return [(queue.lost_count, len(queue.lost)) for queue in (*self.queues.values(), self.events)]

    @property
    def unfinished(self) -> int:
        """The number of jobs that have not ended."""
        return sum(queue.running + queue.count_unbegun() for queue in self.queues.values())

    @property
    def dead(self) -> int:
        """The number of jobs in the dead-letter queues."""
        return sum(queue.dead for queue in self.queues.values())

    @property
    def runs(self) -> int:
        """The number of live runs of workflows."""
        return sum(queue.runs for queue in self.queues.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """The live workers, by name."""
        names = {worker.name for queue in self.queues.values() for worker in queue.workers if worker.alive}
        return tuple(sorted(names))

    @property
    def routers(self) -> tuple[str, ...]:
        """The live Routers, which read events, by name."""
        return tuple(sorted(router.name for router in self.events.workers if router.alive))


async def read_app_state(
    app: "Application",
    redis: AsyncDriver,
    queue: str | None,
    *,
    most: int | None = None,
    shards: bool = False,
) -> AppState:
    """Return the state of all queues, of the first `most` by name, or of one of them. Raises UnknownQueue.

    With `shards` each shard is shown in place of its queue.
    """
    return await retry_without_unreachable(lambda: _state_of_app(app, redis, queue, most, shards))


async def _state_of_app(
    app: "Application", redis: AsyncDriver, queue: str | None, most: int | None, shards: bool
) -> AppState:
    used = await redis.perform(queue_calls.list_queues(app.keys))
    paused = await redis.perform(commands.list_paused_queues(app.keys))
    # A queue may be paused before its first job was sent.
    known_queues = sorted({*map(get_queue_of_shard, used), *paused})
    if queue is not None and queue not in (*known_queues, *used):
        await _refuse_unknown(app, redis, queue, known_queues)
    queue_names = known_queues[:most] if queue is None else [queue]
    names = [shard for name in queue_names for shard in app.brokers.list_shards(name, used)]
    calls: list[Call[Any]] = [queue_calls.get_queue_state(app.queue(name)) for name in names]
    calls += [workflows.count_live_runs(app.queue(name)) for name in names]
    replies: list[Any] = await redis.perform_all(calls) if calls else []
    states: list[QueueState] = replies[: len(names)]
    runs = dict(zip(names, replies[len(names) :], strict=True))
    beside = await _beside(app, redis)
    events, schedulers, controllers, publishers, record, recycling, members_report, *lost, scaled = beside
    idle_schedules = 0 if schedulers else await count_active_schedules(app.keys, redis)
    documents = await _documents(app, redis, names)
    states = [
        replace(state, documents=documents.get(state.queue, {}), runs=runs[state.queue]) for state in states
    ]
    if shards:
        states = await _add_nodes(app, states)
    elif queue is None or get_queue_of_shard(queue) == queue:  # else of one shard alone
        states = merge_queue_states(states)
    judged = await _judge_queues(app, redis, states, paused)
    advice = make_start_advice(controllers, members_report)
    return AppState(
        app.name,
        _leave_out_only_named(judged) if queue is None else judged,
        scaled,
        events,
        schedulers,
        controllers,
        publishers,
        record.leader if record.leader in controllers else "",  # the record outlives its Controller
        len(known_queues) - len(queue_names) if queue is None else 0,
        dict(zip(LEASED_PROCESS_KINDS, lost, strict=True)),
        recycling,
        advice.report,
        list_missing(advice, idle_schedules=idle_schedules),
    )


async def _judge_queues(
    app: "Application", redis: AsyncDriver, states: Sequence[QueueState], paused: Collection[str]
) -> dict[str, QueueState]:
    """Return the states by queue, with what holds their jobs, and whether each queue keeps up."""
    held_by = await LimitHolds(app).describe(redis, {state.queue: state.held_tasks for state in states})
    known = [
        replace(
            state,
            paused=get_queue_of_shard(state.queue) in paused,
            held_by=held_by.get(state.queue, ""),
            lacks=describe_lacking(state.lacking, partial(_find_needs, app)),
            awaits=describe_awaited(state.unknown, state.unfit),
        )
        for state in states
    ]
    return {state.queue: replace(state, verdict=state.judge()) for state in known}


def _leave_out_only_named(states: Mapping[str, QueueState]) -> dict[str, QueueState]:
    """Return the states without queues of which there is nothing but the name, such as one that was misspelt.

    The name stays in the set of queues: a sender that registered it before may send at any moment.
    """
    shown = {get_queue_of_shard(name) for name, state in states.items() if not state.is_only_named}
    return {name: state for name, state in states.items() if get_queue_of_shard(name) in shown}


async def count_active_schedules(keys: Keys, redis: AsyncDriver) -> int:
    """Return how many schedules are to fire; of very many queues the first ones are read. None on a broker that is left
    out as unreachable.
    """
    try:
        queues = await redis.perform(scheduling.list_schedule_queues(keys))
        reads = [scheduling.list_schedules(keys, queue) for queue in take_queues(queues, MAX_SCHEDULE_QUEUES)]
        replies = await redis.perform_all(reads) if reads else []
    except UNREACHABLE:
        if not get_unreachable():
            raise
        return 0
    found = [decode_schedule(record, LONGEST_SCHEDULE) for records in replies for record in records.values()]
    return sum(schedule is not None and schedule.is_active for schedule in found)


def _find_needs(app: "Application", task: str) -> Mapping[str, float]:
    return app.tasks[task].resources if task in app.tasks else {}


async def _beside(app: "Application", redis: AsyncDriver) -> Sequence[Any]:
    """Return what is on the default broker: events, live processes besides workers, the leader, the scaling.

    All of it is empty when that broker is left out as unreachable.
    """
    process_calls: list[Call[Any]] = [
        cluster.list_live_processes(app.keys, kind) for kind in LEASED_PROCESS_KINDS
    ]
    calls: list[Call[Any]] = [
        queue_calls.get_queue_state(app.queue(EVENTS)),
        *process_calls,
        cluster.get_leader(app.keys),
        cluster.get_recycling_worker(app.keys),
        cluster.read_members_report(app.keys),
        *[cluster.list_lost_processes(app.keys, kind) for kind in LEASED_PROCESS_KINDS],
    ]
    if is_scaled(app.settings):
        calls.append(scaling_calls.get_scaling(app.keys))
    try:
        replies: list[Any] = await redis.perform_all(calls)
    except UNREACHABLE:
        if not get_unreachable():
            raise
        return (_no_events(), (), (), (), LeaderRecord(), "", None, {}, {}, {}, None)
    return replies if is_scaled(app.settings) else [*replies, None]


async def _add_nodes(app: "Application", states: Sequence[QueueState]) -> list[QueueState]:
    """Return states with the node that each queue or shard is on, where that is a Redis Cluster that can be reached."""
    nodes: dict[str, str] = {}
    for name in app.brokers.names:
        connections = app.brokers.get(name)
        if connections.endpoint.topology == "cluster":
            redis = await connections.get_async_driver()
            try:
                slots = await redis.perform(health.get_slot_map(connections.endpoint))
            except UNREACHABLE:
                continue
            owners = {
                state.queue: slots.find_node(get_key_slot(app.queue(state.queue).stream))
                for state in states
                if app.brokers.broker_of_queue(state.queue) == name
            }
            nodes |= {queue: str(node) for queue, node in owners.items() if node is not None}
    return [replace(state, node=nodes.get(state.queue, "")) for state in states]


def _no_events() -> QueueState:
    return QueueState(EVENTS, 0, 0, 0, None, 0, None, 0, ())


async def _documents(app: "Application", redis: AsyncDriver, queues: list[str]) -> dict[str, dict[str, int]]:
    """Return how many documents wait for each sink of a task, by queue. Reads nothing when no task has a sink."""
    pairs = [(queue, sink) for queue in queues for sink in get_sink_names(app.tasks.values())]
    counts = [events_calls.count_documents(app.queue(queue), sink) for queue, sink in pairs]
    documents: dict[str, dict[str, int]] = {}
    for (queue, sink), count in zip(pairs, await redis.perform_all(counts) if counts else [], strict=True):
        documents.setdefault(queue, {})[sink] = count
    return documents


async def find_job(
    app: "Application", redis: AsyncDriver, job_id: str, queue: str | None
) -> JobDetails | None:
    """Return what is known of a job, on one queue or on any; None when nothing is.

    Raises:
        UnknownQueue: There is no such queue.
        BrokerUnavailable: No reachable broker has the job, and an unreachable one may have it.
    """
    with skip_unreachable() as unreachable:
        details = await retry_without_unreachable(lambda: _story_of(app, redis, job_id, queue))
    if (
        details is None
        and unreachable
        and (queue is None or app.brokers.broker_of_queue(queue) in unreachable)
    ):
        raise not_found_error(f"job {job_id!r}", unreachable)
    return details


async def _story_of(
    app: "Application", redis: AsyncDriver, job_id: str, queue: str | None
) -> JobDetails | None:
    known_queues = await redis.perform(queue_calls.list_queues(app.keys))
    names = known_queues if queue is None else app.brokers.list_shards(queue, known_queues)
    if queue is not None and not set(names).intersection(known_queues):
        await _refuse_unknown(app, redis, queue, known_queues)
    inspections = (
        await redis.perform_all([jobs.inspect_job(app.queue(name), job_id) for name in names])
        if names
        else []
    )
    stories = [
        _story(app, job_id, name, inspection) for name, inspection in zip(names, inspections, strict=True)
    ]
    found_stories = [story for story in stories if story.state is not JobState.UNKNOWN]
    return min(
        found_stories, key=lambda story: story.has_ended, default=None
    )  # of several, one that has not ended


def _story(app: "Application", job_id: str, queue: str, inspection: JobInspection) -> JobDetails:
    story = make_job_details(job_id, queue, inspection, limit=app.settings.message_limit)
    task = app.tasks.get(story.task)
    if story.revoked and not story.has_ended:
        story = replace(story, stops_when=explain_stop(task))
    if task is None or not inspection.message:
        return story
    args, kwargs = redact_call(task.call_shape, story.args, story.kwargs)
    story = replace(story, args=args, kwargs=kwargs)
    if story.max_retries is None:
        # A message without a policy leaves it to its task, as a worker reads it.
        return replace(story, max_retries=task.policy.max_retries)
    return story


def explain_stop(task: "DeclaredTask | None") -> str:
    """Return when a running job of this task stops that is revoked; '' if that is at once.

    Args:
        task: None when it is not declared here.
    """
    if task is None:
        return f"if its task is a def: {STOP_OF_THREAD}"
    return STOP_OF_THREAD if task.kind == "thread" and not task.abandon_on_cancel else ""


async def _refuse_unknown(app: "Application", redis: AsyncDriver, queue: str, known: list[str]) -> None:
    """Raise UnknownQueue, unless the queue exists: a raw producer may have sent to a queue that is not listed."""
    if not await redis.perform(dead_letter_calls.queue_exists(app.queue(queue))):
        raise UnknownQueue(queue, known)


STOP_OF_THREAD = (
    "its thread cannot be interrupted: it ends when it returns, when it calls trio.from_thread.check_cancelled(), "
    "or by its time_limit"
)
"""When a running job of a `def` task stops that is revoked, for people."""
WAITING_STATES = frozenset({JobState.SENT, JobState.SCHEDULED, JobState.HELD, JobState.RETRY})
"""The states of jobs that are revoked: those that no worker has."""


async def empty_queue(app: "Application", redis: AsyncDriver, queue: str) -> int:
    """Revoke the jobs that wait on a queue; return how many. Raises UnknownQueue.

    They are revoked rather than deleted: callers that wait for one get `TaskRevoked`, keys become free, and Data Sinks
    get their documents.
    """
    redis = persist(redis, "queue:purge")
    queues = await redis.perform(queue_calls.list_queues(app.keys))
    shards = app.brokers.list_shards(queue, queues)
    if not set(shards).intersection(queues):
        raise UnknownQueue(queue, queues)
    async with AuditedAction(app, redis, "queue:purge", queue) as action:
        count = 0
        for keys in map(app.queue, shards):
            cursor, is_first = "0", True
            while is_first or cursor != "0":
                cursor, ids = await redis.perform(jobs.scan_jobs(keys, cursor))
                is_first = False
                for start in range(0, len(ids), jobs.REVOCATION_BATCH):
                    batch = ids[start : start + jobs.REVOCATION_BATCH]
                    count += await _revoke_waiting(app, redis, keys, batch)
                    action.set_count(count)
        action.set_count(count)
        return count


async def _revoke_waiting(app: "Application", redis: AsyncDriver, keys: QueueKeys, ids: list[str]) -> int:
    calls: list[Call[Any]] = [jobs.locate_job(keys, job_id) for job_id in ids]
    places = await redis.perform_all(calls)
    waiting = [job_id for job_id, place in zip(ids, places, strict=True) if place.state in WAITING_STATES]
    if not waiting:
        return 0
    states = await redis.perform(jobs.revoke(keys, waiting, ttl=app.settings.results_ttl))
    return states.count(JobState.REVOKED)
