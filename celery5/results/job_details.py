"""Overview: what is known of a job, and what is in an application's queues.

Fennel counted by going through all keys of the server, and failed before the first worker came.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from celery5.broker.call import Call
from celery5.broker.calls import cluster, commands, jobs
from celery5.broker.calls import dead_letters as graveyard
from celery5.broker.calls import events as events_calls
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.jobs import JobInspection, QueueState
from celery5.broker.calls.scaling import Scaling
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import EVENTS
from celery5.broker.routing.unreachable import (
    UNREACHABLE,
    get_unreachable,
    not_found_error,
    retry_without_unreachable,
    skip_unreachable,
)
from celery5.errors import UnknownQueue
from celery5.protocol.cluster.leadership import LeaderRecord
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails, make_job_details
from celery5.results.sinks import get_sink_names
from celery5.scaling.strategies import is_scaled

if TYPE_CHECKING:
    from celery5.application import Application


LEASED_PROCESS_KINDS = ("scheduler", "controller", "publisher")
"""The kinds of processes that run no jobs, and tell that they live by a lease of their own."""


class AppState(msgspec.Struct, frozen=True):
    """What is in an application's queues, by their names, and who works on them; how it is scaled, if it is; what waits
    for a Router (`events`); and the `schedulers`, `controllers` and `publishers` that live, and
    which Controller is the `leader`, '' for none."""

    app: str
    queues: dict[str, QueueState]
    scaling: Scaling | None
    events: QueueState
    schedulers: tuple[str, ...]
    controllers: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    leader: str = ""

    @property
    def unfinished(self) -> int:
        """Jobs that have not ended."""
        return sum(each.waiting + each.running + each.held + each.scheduled for each in self.queues.values())

    @property
    def dead(self) -> int:
        """Jobs in the dead-letter queues."""
        return sum(each.dead for each in self.queues.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that live, by name."""
        names = {one.name for each in self.queues.values() for one in each.workers if one.alive}
        return tuple(sorted(names))

    @property
    def routers(self) -> tuple[str, ...]:
        """The Routers that live, by name: those who read events."""
        return tuple(sorted(one.name for one in self.events.workers if one.alive))


async def read_app_state(app: "Application", redis: AsyncDriver, queue: str | None) -> AppState:
    """What is in the application's queues, or in one of them. Raises UnknownQueue."""
    return await retry_without_unreachable(lambda: _state_of_app(app, redis, queue))


async def _state_of_app(app: "Application", redis: AsyncDriver, queue: str | None) -> AppState:
    used = await redis.perform(jobs.list_queues(app.keys))
    paused = await redis.perform(commands.list_paused_queues(app.keys))
    known = sorted({*used, *paused})  # one may be paused before anything was sent to it
    if queue is not None and queue not in known:
        await _refuse_unknown(app, redis, queue, known)
    names = known if queue is None else [queue]
    asked: list[Call[Any]] = [jobs.get_queue_state(app.queue(name)) for name in names]
    states: list[QueueState] = await redis.perform_all(asked) if asked else []
    events, schedulers, controllers, publishers, record, scaled = await _beside(app, redis)
    leader = record.leader if record.leader in controllers else ""  # it is remembered for long who led
    waiting = await _documents(app, redis, names)
    queues = {
        each.queue: replace(each, paused=each.queue in paused, documents=waiting.get(each.queue, {}))
        for each in states
    }
    return AppState(app.name, queues, scaled, events, schedulers, controllers, publishers, leader)


async def _beside(app: "Application", redis: AsyncDriver) -> Sequence[Any]:
    """What is on the default broker: the events, who lives besides workers, who leads, how it is scaled. As good as
    nothing of it, when that is left out."""
    living: list[Call[Any]] = [cluster.list_live_processes(app.keys, kind) for kind in LEASED_PROCESS_KINDS]
    asked: list[Call[Any]] = [
        jobs.get_queue_state(app.queue(EVENTS)),
        *living,
        cluster.get_leader(app.keys),
    ]
    if is_scaled(app.settings):
        asked.append(scaling_calls.get_scaling(app.keys))
    try:
        found: list[Any] = await redis.perform_all(asked)
    except UNREACHABLE:
        if not get_unreachable():
            raise
        return (_no_events(), (), (), (), LeaderRecord(), None)
    return found if is_scaled(app.settings) else [*found, None]


def _no_events() -> QueueState:
    return QueueState(EVENTS, 0, 0, 0, None, 0, None, 0, ())


async def _documents(app: "Application", redis: AsyncDriver, queues: list[str]) -> dict[str, dict[str, int]]:
    """How many documents wait for each sink that a task has, by queue. Asks nothing when there is none."""
    asked = [(queue, sink) for queue in queues for sink in get_sink_names(app.tasks.values())]
    counts = [events_calls.count_documents(app.queue(queue), sink) for queue, sink in asked]
    found: dict[str, dict[str, int]] = {}
    for (queue, sink), number in zip(asked, await redis.perform_all(counts) if counts else [], strict=True):
        found.setdefault(queue, {})[sink] = number
    return found


async def find_job(
    app: "Application", redis: AsyncDriver, job_id: str, queue: str | None
) -> JobDetails | None:
    """What is known of a job, on one queue or wherever it is; None when nothing is. Raises UnknownQueue, and the error
    of a broker that is away when the job is on none of the others: it may be there."""
    with skip_unreachable() as away:
        found = await retry_without_unreachable(lambda: _story_of(app, redis, job_id, queue))
    if found is None and away and (queue is None or app.brokers.broker_of_queue(queue) in away):
        raise not_found_error(f"job {job_id!r}", away)
    return found


async def _story_of(
    app: "Application", redis: AsyncDriver, job_id: str, queue: str | None
) -> JobDetails | None:
    known = await redis.perform(jobs.list_queues(app.keys))
    if queue is not None and queue not in known:
        await _refuse_unknown(app, redis, queue, known)
    names = known if queue is None else [queue]
    seen = (
        await redis.perform_all([jobs.inspect_job(app.queue(name), job_id) for name in names])
        if names
        else []
    )
    stories = [_story(app, job_id, name, each) for name, each in zip(names, seen, strict=True)]
    found = [each for each in stories if each.state is not JobState.UNKNOWN]
    return min(found, key=lambda each: each.has_ended, default=None)  # of several, one that has not ended


def _story(app: "Application", job_id: str, queue: str, seen: JobInspection) -> JobDetails:
    story = make_job_details(
        job_id,
        queue,
        place=seen.place,
        message=seen.message,
        document=seen.document,
        worker=seen.worker,
        taken=0.0 if seen.held_for is None else seen.now - seen.held_for,
        due=seen.due or 0.0,
        deliveries=seen.deliveries,
        before=seen.jobs_ahead,
        limit=app.settings.message_limit,
    )
    if story.max_retries is None and seen.message and story.task in app.tasks:
        # A message without a policy leaves it to its task, as a worker reads it.
        return replace(story, max_retries=app.tasks[story.task].policy.max_retries)
    return story


async def _refuse_unknown(app: "Application", redis: AsyncDriver, queue: str, known: list[str]) -> None:
    """A raw producer may have sent to a queue that is in no list."""
    if not await redis.perform(graveyard.queue_exists(app.queue(queue))):
        raise UnknownQueue(queue, known)
