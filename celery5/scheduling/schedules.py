"""Read and change the schedules of an application in Redis: `app.schedule`."""

import builtins
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, cast

import msgspec

from celery5.audit.recording import AuditedAction
from celery5.broker.call import Call
from celery5.broker.calls import cluster
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.scheduling import JobToSend
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import not_found_error, retry_without_unreachable, skip_unreachable
from celery5.broker.wall_clock import wall_time
from celery5.config.settings import Settings
from celery5.errors import CeleryError, Misconfigured, UnknownName
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.job.job import Job, new_id, to_seconds
from celery5.protocol.job.messages import read_command
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.declaration import Periodic, When, resolve_parts
from celery5.protocol.scheduling.periodic import (
    Misfire,
    MisfirePolicy,
    OverlapPolicy,
    Schedule,
    ScheduleDefinition,
    ScheduleOrigin,
)
from celery5.protocol.scheduling.triggers import AnyTrigger, describe_trigger, with_zone
from celery5.protocol.shards import choose_shard, get_queue_of_shard
from celery5.results.async_result import AsyncResult
from celery5.scheduling.fire_times import get_next_fire_time, validate_trigger
from celery5.similar_names import did_you_mean, join_names, suggest_known
from celery5.tasks.task import Signature, Task, TaskApplication

TRIES = 20
"""Attempts at a change while others change the same schedule."""
ScheduleChange = Callable[[Schedule, int], Schedule | None]
"""Returns the changed schedule, or None to remove it; the second argument is the time."""


class ScheduleState(msgspec.Struct, frozen=True):
    """A schedule, as `list` and `show` return it. Times are seconds since 1970; None where there is none."""

    name: str
    task: str
    queue: str
    when: str
    # `active`, `paused`, `retired` (no code declares it any more), `done` (it will not fire again), or `declared` (by
    # the code here, and no Scheduler has taken it up).
    state: str
    last: float | None
    next: float | None
    # Fire times that were published.
    fired: int
    # Fire times that were not published in time.
    missed: int
    # Fire times that were left out because the previous job had not ended.
    skipped: int
    # Jobs that were sent by `trigger`.
    triggered: int
    origin: str
    job: str
    # A fire time that waits for the previous job to end.
    waiting: float | None
    overlap: str
    misfire: Misfire
    jitter: float


class DeclaredSchedule(msgspec.Struct, frozen=True):
    """A schedule as it was declared: the call, and when it is repeated."""

    name: str
    call: Any
    periodic: Periodic
    origin: ScheduleOrigin = "code"


def make_definition(app: TaskApplication, call: Signature[Any], declared: Periodic) -> ScheduleDefinition:
    """Return what a Scheduler needs to publish the jobs of a schedule without the code of their task.

    Raises:
        Misconfigured: The declaration makes no sense.
        BadArguments: The arguments do not fit the task.
        MessageTooLarge: The message exceeds the limit.
    """
    trigger, misfire, jitter = resolve_parts(declared)
    job = call.job()
    if job.at:
        raise Misconfigured(f"schedule of {job.task}: a countdown or an eta has no place beside a schedule")
    command = read_command(job.message)
    template = msgspec.structs.replace(command, id="-", sent=0.0, expires=None, trace="")
    expires = call.task.send_options.expires
    is_moment = hasattr(expires, "utcoffset")
    lifetime = None if is_moment else to_seconds(cast("float | timedelta | None", expires))
    fields = call.task.get_shared_fields()
    is_placed = bool(job.lock) or fields.is_sharded_by_key  # on the shard of its key
    return ScheduleDefinition(
        task=job.task,
        queue=job.queue
        if is_placed
        else choose_shard(fields.queue, fields.shards, declared.name or job.task),
        trigger=with_zone(trigger, app.settings.timezone),
        message=msgspec.json.encode(template).decode(),
        expires=lifetime,
        lane=job.lane,
        lock=job.lock,
        unique_for=job.unique_for,
        jitter=jitter,
        misfire=misfire,
        overlap=declared.overlap,
    )


class _WithSettings:
    """An application with other settings."""

    def __init__(self, app: TaskApplication, settings: Settings) -> None:
        self._app = app
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)


def iterate_declared(app: TaskApplication, by_call: Sequence[DeclaredSchedule]) -> Iterator[DeclaredSchedule]:
    """Yield all schedules that the application's code and its configuration declare. Raises Misconfigured."""
    yield from by_call
    for task in list(app.tasks.values()):
        yield from iterate_task_schedules(task)
    for name, options in app.settings.schedules.items():
        yield _make_from_settings(app, name, options)


def iterate_task_schedules(task: Task[Any, Any]) -> Iterator[DeclaredSchedule]:
    """Yield the schedules that a task was declared with."""
    for declared in task.schedule:
        call = Signature(task, tuple(declared.args), dict(declared.kwargs))
        yield DeclaredSchedule(declared.name or task.name, call, declared)


def _advise(app: TaskApplication, task: object) -> str:
    """Return what to write for a task that the application does not have, or what it has."""
    from celery5.config.unincluded import advise_including, find_unincluded  # for an error alone

    module, _, function = str(task).rpartition(".")
    if function in find_unincluded((), ()).get(module, ()):
        return advise_including(module, function, app.module)
    return suggest_known(str(task), app.tasks)


def _make_from_settings(app: TaskApplication, name: str, table: Mapping[str, Any]) -> DeclaredSchedule:
    remaining = dict(table)
    task = remaining.pop("task", None)
    if not isinstance(task, str) or task not in app.tasks:
        raise Misconfigured(
            f"schedule {name!r} in the settings: task is {task!r}, which is none of this application; "
            f"{_advise(app, task)}"
        )
    options = remaining.pop("options", None)
    scheduled_task = app.tasks[task] if options is None else app.tasks[task].options(**options)
    try:
        given_options = {
            option: remaining.pop(option)
            for option in ("args", "kwargs", "overlap", "jitter")
            if option in remaining
        }
        misfire = remaining.pop("misfire", "once")
        if isinstance(misfire, Mapping):
            misfire = msgspec.convert(misfire, Misfire)
        declared = Periodic(remaining.pop("when", None) or remaining, name, misfire=misfire, **given_options)
        resolve_parts(declared)
    except (TypeError, msgspec.ValidationError, Misconfigured) as error:
        raise Misconfigured(f"schedule {name!r} in the settings: {error}") from None
    call = Signature(scheduled_task, tuple(declared.args), dict(declared.kwargs))
    return DeclaredSchedule(name, call, declared, "configuration")


def make_declaration(call: Signature[Any], declared: Periodic) -> DeclaredSchedule:
    """Return a schedule that code declares. Raises Misconfigured."""
    resolve_parts(declared)
    return DeclaredSchedule(declared.name or call.task.name, call, declared)


def collect_declarations(
    app: TaskApplication, by_call: list[DeclaredSchedule]
) -> dict[str, DeclaredSchedule]:
    """Return all declared schedules by name. Raises Misconfigured for a name that occurs twice."""
    declarations: dict[str, DeclaredSchedule] = {}
    for declared in iterate_declared(app, by_call):
        if declarations.setdefault(declared.name, declared) is not declared:
            raise Misconfigured(f"two schedules are named {declared.name!r}: give one of them another name")
    return declarations


def make_checked_definition(
    app: TaskApplication, call: Signature[Any], when: object, name: str, options: Mapping[str, Any]
) -> ScheduleDefinition:
    """Return the definition of a call and its repetition. Raises Misconfigured, also for an invalid trigger."""
    try:
        declared = Periodic(when, name, **options)
    except TypeError as error:
        raise Misconfigured(f"a schedule: {error}") from None
    of = make_definition(app, call, declared)
    validate_trigger(of.trigger)
    return of


def make_fired_job(of: ScheduleDefinition, job_id: str, now: float) -> JobToSend:
    """Return the job of one fire time, as it is sent at `now`, in seconds since 1970."""
    command = read_command(of.message.encode())
    expires = None if of.expires is None else now + of.expires
    message = msgspec.structs.replace(command, id=job_id, sent=now, expires=expires)
    return job_id, msgspec.json.encode(message), of.lock, of.unique_for


@contextmanager
def sending_fired(
    app: ObservedApplication, of: ScheduleDefinition, fired: Sequence[JobToSend]
) -> Generator[Sequence[JobToSend], None, None]:
    """Surround the sending of jobs of a schedule by the middleware; yield them with its headers."""
    if not fired or not app.middleware.sends:
        yield fired
        return
    with app.middleware.sending(
        [Job(fired_job[0], of.task, of.queue, fired_job[1]) for fired_job in fired]
    ) as jobs:
        yield [(job.id, job.message, *fired_job[2:]) for job, fired_job in zip(jobs, fired, strict=True)]


def to_schedule_state(schedule: Schedule) -> ScheduleState:
    """Return the state of a schedule for users."""
    done = schedule.next is None and schedule.waiting is None
    state = "retired" if schedule.retired else "paused" if schedule.paused else "done" if done else "active"
    return ScheduleState(
        name=schedule.name,
        task=schedule.of.task,
        queue=get_queue_of_shard(schedule.of.queue),
        when=describe_trigger(schedule.of.trigger),
        state=state,
        last=_seconds(schedule.last),
        next=_seconds(schedule.next) if state == "active" else None,
        fired=schedule.fired,
        missed=schedule.missed,
        skipped=schedule.skipped,
        triggered=schedule.triggered,
        origin=schedule.origin,
        job=schedule.job,
        waiting=_seconds(schedule.waiting),
        overlap=schedule.of.overlap,
        misfire=schedule.of.misfire,
        jitter=schedule.of.jitter,
    )


def make_declared_state(app: TaskApplication, declared: DeclaredSchedule) -> ScheduleState:
    """Return the state of a schedule that no Scheduler has taken up. Raises as `make_definition`."""
    of = make_definition(app, declared.call, declared.periodic)
    schedule = Schedule(declared.name, of, origin=declared.origin)
    return msgspec.structs.replace(to_schedule_state(schedule), state="declared")


async def read_schedules(app: TaskApplication, redis: AsyncDriver) -> list[tuple[Schedule, bytes]]:
    """Return all schedules in Redis that this version can read, each with its record."""
    return await retry_without_unreachable(lambda: _read_all(app, redis))


async def _read_all(app: TaskApplication, redis: AsyncDriver) -> list[tuple[Schedule, bytes]]:
    queues = await redis.perform(scheduling_calls.list_schedule_queues(app.keys))
    calls = [scheduling_calls.list_schedules(app.keys, queue) for queue in queues]
    records_by_queue = await redis.perform_all(calls) if calls else []
    limit = app.settings.message_limit
    schedules = [
        (periodic.decode_schedule(record, limit), record)
        for records in records_by_queue
        for record in records.values()
    ]
    return [(schedule, record) for schedule, record in schedules if schedule is not None]


async def get_broker_time(app: TaskApplication, redis: AsyncDriver, queue: str) -> int:
    """Return the time of the Redis server, in ms since 1970."""
    return (await redis.perform(scheduling_calls.get_due_schedules(app.keys, app.queue(queue), limit=0))).now


async def list_states(app: TaskApplication, redis: AsyncDriver) -> list[ScheduleState]:
    """Return all schedules, by name."""
    states = [
        to_schedule_state(schedule)
        for schedule, _ in await read_schedules(app, redis)
        if schedule.stage == "settled"
    ]
    return sorted(states, key=lambda state: state.name)


async def find_schedule(app: TaskApplication, redis: AsyncDriver, name: str) -> tuple[Schedule, bytes]:
    """Return one schedule and its record.

    Raises:
        Misconfigured: There is no such schedule.
        BrokerUnavailable: No reachable broker has it, and an unreachable one may have it.
    """
    with skip_unreachable() as unreachable:
        schedule_and_record = await retry_without_unreachable(lambda: _look_up(app, redis, name))
        if schedule_and_record is not None:
            return schedule_and_record
        if unreachable:
            raise not_found_error(f"schedule {name!r}", unreachable)
        names = [state.name for state in await list_states(app, redis)]
    others = f"there are: {join_names(names) or 'none'}"
    raise NoSuchSchedule(f"no schedule {name!r}; {did_you_mean(name, names, otherwise=others)}")


class NoSuchSchedule(UnknownName):
    """There is no schedule of this name in Redis."""


async def _look_up(app: TaskApplication, redis: AsyncDriver, name: str) -> tuple[Schedule, bytes] | None:
    queues = await redis.perform(scheduling_calls.list_schedule_queues(app.keys))
    calls = [scheduling_calls.get_schedule(app.keys, queue, name) for queue in queues]
    for record in await redis.perform_all(calls) if calls else []:
        schedule = periodic.decode_schedule(record, app.settings.message_limit) if record else None
        if schedule is not None and schedule.stage == "settled":
            return schedule, record
    return None


async def get_schedule_state(app: TaskApplication, redis: AsyncDriver, name: str) -> ScheduleState:
    """Return one schedule. Raises Misconfigured."""
    return to_schedule_state((await find_schedule(app, redis, name))[0])


def replace_schedule(
    app: TaskApplication,
    schedule: Schedule,
    record: bytes,
    after: Schedule | None,
    now: int,
    jobs: Sequence[JobToSend] = (),
) -> Call[bool]:
    """Return a call that replaces a schedule's record, sends jobs and notifies the Schedulers.

    It returns False, and does nothing, when Redis has a different record.

    Args:
        record: The expected record; b"" for none.
        after: The new schedule; None to delete it.
    """
    raw, look = (b"", None) if after is None else (periodic.encode_schedule(after), after.get_next_look(now))
    queue = app.queue(schedule.of.queue)
    if jobs:  # without jobs the lane does not matter: even a schedule with an unknown lane can be removed
        queue = queue.on_lane(schedule.of.lane)
    return scheduling_calls.fire_schedule(
        app.keys,
        queue,
        schedule.name,
        expected_state=record,
        new_state=raw,
        next_look=look,
        jobs=jobs,
        notify=True,
    )


async def add_schedule(
    app: TaskApplication, redis: AsyncDriver, name: str, of: ScheduleDefinition
) -> ScheduleState:
    """Add a schedule. Raises Misconfigured for a name that is taken, and for one that would never fire."""
    what = {"task": of.task, "queue": get_queue_of_shard(of.queue), "when": describe_trigger(of.trigger)}
    async with AuditedAction(app, redis, "schedule:add", name, what):
        return await _add_schedule(app, redis, name, of)


async def _add_schedule(
    app: TaskApplication, redis: AsyncDriver, name: str, of: ScheduleDefinition
) -> ScheduleState:
    if any(state.name == name for state in await list_states(app, redis)):
        raise Misconfigured(f"a schedule {name!r} is there already: remove it first, or give another name")
    now = await get_broker_time(app, redis, of.queue)
    schedule = periodic.make_schedule(name, of, now, get_next_fire_time, origin="runtime")
    if schedule.next is None:
        raise Misconfigured(f"schedule {name!r} would never fire: {describe_trigger(of.trigger)}")
    await redis.perform(scheduling_calls.register_schedule_queue(app.keys, of.queue))
    if not await redis.perform(replace_schedule(app, schedule, b"", schedule, now)):
        raise Misconfigured(f"a schedule {name!r} was just added by somebody else")
    return to_schedule_state(schedule)


async def change_schedule(
    app: TaskApplication,
    redis: AsyncDriver,
    name: str,
    action: str,
    change: ScheduleChange,
    what: Mapping[str, Any] | None = None,
) -> ScheduleState:
    """Change a schedule, with retries while others change it; return the new state, or the last one before removal.

    Raises:
        Misconfigured: There is no such schedule, or it changes too often.
    """
    async with AuditedAction(app, redis, action, name, what):
        return await _change_schedule(app, redis, name, change)


async def _change_schedule(
    app: TaskApplication, redis: AsyncDriver, name: str, change: ScheduleChange
) -> ScheduleState:
    for _ in range(TRIES):
        before, record = await find_schedule(app, redis, name)
        now = await get_broker_time(app, redis, before.of.queue)
        after = change(before, now)
        if await redis.perform(replace_schedule(app, before, record, after, now)):
            return to_schedule_state(before if after is None else after)
    raise Misconfigured(f"schedule {name!r} changes too quickly: try again")


async def trigger_schedule(app: TaskApplication, redis: AsyncDriver, name: str) -> AsyncResult[Any]:
    """Send a job of a schedule now. Raises Misconfigured."""
    async with AuditedAction(app, redis, "schedule:trigger", name, is_routine=True):
        return await _trigger_schedule(app, redis, name)


async def _trigger_schedule(app: TaskApplication, redis: AsyncDriver, name: str) -> AsyncResult[Any]:
    job = new_id()
    for _ in range(TRIES):
        before, record = await find_schedule(app, redis, name)
        now = await get_broker_time(app, redis, before.of.queue)
        after, sent = periodic.record_trigger(before, job), make_fired_job(before.of, job, wall_time())
        with sending_fired(app, before.of, [sent]) as jobs:
            trips = [
                queue_calls.register_queue(app.keys, before.of.queue),
                replace_schedule(app, before, record, after, now, jobs),
            ]
            _, done = await redis.perform_all(trips)
        if done:
            return AsyncResult(app, job, queue=before.of.queue)
    raise Misconfigured(f"schedule {name!r} changes too quickly: try again")


def paused_schedule(schedule: Schedule, _now: int) -> Schedule:
    """Return the schedule, paused."""
    return periodic.pause_schedule(schedule)


def resumed_schedule(schedule: Schedule, now: int) -> Schedule:
    """Return the schedule, resumed."""
    return periodic.resume_schedule(schedule, now, get_next_fire_time)


def schedule_with_trigger(trigger: AnyTrigger) -> ScheduleChange:
    """Return the change of a schedule's trigger to another."""
    return lambda schedule, now: periodic.change_trigger(schedule, trigger, now, get_next_fire_time)


def removed_schedule(_schedule: Schedule, _now: int) -> None:
    """Return None: remove the schedule."""


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


class Schedules:
    """The schedules of an application: `app.schedule`.

    Called, it declares one in code: `app.schedule(report.s("daily"), "0 3 * * *")`. Its methods manage those in
    Redis.

    Raises:
        Misconfigured: An argument makes no sense, or there is no schedule of that name.
        BrokerError: The broker cannot be reached, or refuses.
    """

    REACHED_AS: ClassVar[str] = "app.schedule."

    def __init__(self, app: TaskApplication) -> None:
        self._app = app
        self._declared: dict[str, DeclaredSchedule] = {}

    def __call__(
        self,
        call: Signature[Any],
        when: When,
        *,
        name: str = "",
        misfire: Misfire | MisfirePolicy = "once",
        overlap: OverlapPolicy = "allow",
        jitter: float = 0.0,
    ) -> None:
        """Declare that `call` is sent at the times of `when`. See `Periodic`."""
        declaration = make_declaration(
            call, Periodic(when, name, misfire=misfire, overlap=overlap, jitter=jitter)
        )
        if declaration.name in self._declared:
            raise Misconfigured(
                f"two schedules are named {declaration.name!r}: give one of them another name=..."
            )
        self._declared[declaration.name] = declaration

    def check_configured(self, settings: Settings) -> None:
        """Check whether the schedules of these settings, which need not be in force, can be used.

        Raises:
            Misconfigured: They cannot.
            BadArguments: The arguments of one do not fit its task.
        """
        app = cast("TaskApplication", _WithSettings(self._app, settings))
        for declared in collect_declarations(app, [*self._declared.values()]).values():
            make_definition(app, declared.call, declared.periodic)

    def list_declared(self) -> dict[str, DeclaredSchedule]:
        """Return all declared schedules by name. Raises Misconfigured for a name that occurs twice."""
        return collect_declarations(self._app, [*self._declared.values()])

    @property
    def is_used(self) -> bool:
        """Whether code or configuration declare any schedule."""
        tasks = self._app.tasks.values()
        return bool(self._declared or self._app.settings.schedules or any(task.schedule for task in tasks))

    async def alist(self, *, with_declared: bool = False) -> builtins.list[ScheduleState]:
        """Return all schedules in Redis, by name.

        Args:
            with_declared: Whether those that are declared here, and that no Scheduler has taken up, are there, too.
        """
        redis = await self._app.connections.get_async_driver()
        states = await list_states(self._app, redis)
        if with_declared:
            existing = {state.name for state in states}
            states += [state for name, state in self._make_declared_states().items() if name not in existing]
        return sorted(states, key=lambda state: state.name)

    @blocking(alist)
    def list(self) -> None: ...

    def _make_declared_states(self) -> dict[str, ScheduleState]:
        """Return the state of each declared schedule, if no Scheduler has it. Invalid schedules are left out."""
        states: dict[str, ScheduleState] = {}
        with suppress(CeleryError, TypeError):
            for name, declared in self.list_declared().items():
                with suppress(CeleryError, TypeError):
                    states[name] = make_declared_state(self._app, declared)
        return states

    @contextmanager
    def _explaining_declared(self, name: str) -> Generator[None, None, None]:
        """For a declared schedule that is not in Redis, raise an error with the command that stores it."""
        try:
            yield
        except NoSuchSchedule:
            if name not in self._make_declared_states():
                raise
            raise Misconfigured(
                f"schedule {name!r} is declared, and no Scheduler has taken it up: celery5 scheduler start"
            ) from None

    async def ashow(self, name: str) -> ScheduleState:
        """Return one schedule, also one that is declared here and that no Scheduler has taken up."""
        redis = await self._app.connections.get_async_driver()
        try:
            return await get_schedule_state(self._app, redis, name)
        except NoSuchSchedule:
            if (declared := self._make_declared_states().get(name)) is None:
                raise
            return declared

    @blocking(ashow)
    def show(self) -> None: ...

    async def aadd(self, call: Signature[Any], when: When, *, name: str = "", **how: Any) -> ScheduleState:
        """Add a schedule to those in Redis, from now on. `how` takes the options of a declaration."""
        of = make_checked_definition(self._app, call, when, name, how)
        redis = await self._app.connections.get_async_driver()
        return await add_schedule(self._app, redis, name or call.task.name, of)

    @blocking(aadd)
    def add(self) -> None: ...

    async def achange(self, name: str, when: When) -> ScheduleState:
        """Change when a schedule fires. Its counts stay, and it goes on with its first future fire time.

        Args:
            name: The schedule: one that was added while all runs.
            when: A crontab line, an interval in seconds or as a timedelta, an aware datetime, or a trigger.

        Raises:
            Misconfigured: There is no such schedule, code or a configuration declares it, or it would never fire.
        """
        trigger = with_zone(resolve_parts(Periodic(when))[0], self._app.settings.timezone)
        validate_trigger(trigger)
        what = {"when": describe_trigger(trigger)}
        redis = await self._app.connections.get_async_driver()
        with self._explaining_declared(name):
            return await change_schedule(
                self._app, redis, name, "schedule:change", schedule_with_trigger(trigger), what
            )

    @blocking(achange)
    def change(self) -> None: ...

    async def apause(self, name: str) -> ScheduleState:
        """Pause a schedule. Fire times in the pause count neither as fired nor as missed."""
        redis = await self._app.connections.get_async_driver()
        with self._explaining_declared(name):
            return await change_schedule(self._app, redis, name, "schedule:pause", paused_schedule)

    @blocking(apause)
    def pause(self) -> None: ...

    async def aresume(self, name: str) -> ScheduleState:
        """Resume a schedule, at its next fire time in the future."""
        redis = await self._app.connections.get_async_driver()
        with self._explaining_declared(name):
            return await change_schedule(self._app, redis, name, "schedule:resume", resumed_schedule)

    @blocking(aresume)
    def resume(self) -> None: ...

    async def aremove(self, name: str) -> ScheduleState:
        """Remove a schedule; return it as it was. Jobs that it has sent stay."""
        redis = await self._app.connections.get_async_driver()
        with self._explaining_declared(name):
            return await change_schedule(self._app, redis, name, "schedule:remove", removed_schedule)

    @blocking(aremove)
    def remove(self) -> None: ...

    async def atrigger(self, name: str) -> AsyncResult[Any]:
        """Send a job of a schedule now; return its handle.

        The overlap policy is ignored, and the fire times stay as they are.
        """
        redis = await self._app.connections.get_async_driver()
        with self._explaining_declared(name):
            return await trigger_schedule(self._app, redis, name)

    @blocking(atrigger)
    def trigger(self) -> None: ...

    async def aschedulers(self) -> tuple[str, ...]:
        """Return the live Schedulers, by name."""
        return await self._app.aperform(cluster.list_live_processes(self._app.keys, "scheduler"))

    @blocking(aschedulers)
    def schedulers(self) -> None: ...
