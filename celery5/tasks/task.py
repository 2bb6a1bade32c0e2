"""Send the jobs of a declared function in its different ways."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec
from msgspec import UNSET, Raw

from celery5.broker.colour import blocking
from celery5.broker.wall_clock import WALL_CLOCK, wall_time
from celery5.config.settings import Settings
from celery5.errors import Misconfigured
from celery5.events.sources import Source, parse_sources
from celery5.health.health_check import HealthCheck, validate_checks
from celery5.hints import NameKind, find_hint, make_attribute_error
from celery5.limits.declaration import LimitDeclaration, LimitOptions, declare_limits
from celery5.logs.trace import get_current_trace
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.boxes.box import Box, parse_box
from celery5.protocol.events.documents import group_recipients
from celery5.protocol.events.sinks import RedisResults, Sink, SinkOptions, parse_sinks
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.arguments import Parameters, ResultType
from celery5.protocol.job.failure_call import make_failure_call
from celery5.protocol.job.history import CallShape
from celery5.protocol.job.job import (
    Job,
    Options,
    SendOptions,
    SharedFields,
    check_not_by_key,
    hash_call,
    new_id,
)
from celery5.protocol.job.messages import VERSION, Command, FailureCall, encode
from celery5.protocol.job.retry_policy import CustomBackoff, RetryPolicy
from celery5.protocol.limits import DeclaredLimits, format_expiry
from celery5.protocol.names import get_module_name
from celery5.protocol.scaling.resource_budget import NOTHING, Amounts, parse_needs, to_numbers
from celery5.protocol.scheduling.declaration import Periodic, parse_schedule
from celery5.protocol.shards import choose_shard, get_placement
from celery5.protocol.task_kinds import TASK_KINDS, EventLoop, FunctionKind, TaskKind, choose_kind
from celery5.protocol.workflows.plan import OnError, check_on_error
from celery5.protocol.workflows.status import Outcome
from celery5.results.async_result import AsyncResult
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.similar_names import did_you_mean
from celery5.tasks.deduplication import DeduplicationPolicy, prepare_policy
from celery5.tasks.resources import Resource, check_loops, check_unsized, find_resources, inject_resources
from celery5.workflows.compose import ComposedPartial, ComposedWorkflow, Partial, Workflow, check_need
from celery5.workflows.on_failure import encode_on_failure
from celery5.workflows.tree import GroupOptions, Map, TaskCall


def bind_running_job(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls `function` with the running job as first argument. Raises Misconfigured."""
    signature = inspect.signature(function)
    first, *others = signature.parameters.values() or [None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise Misconfigured(f"task {name}: bind=True needs a first parameter, for the running job")

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(_running(name), *args, **kwargs)

    async def wait(*args: Any, **kwargs: Any) -> Any:
        return await function(_running(name), *args, **kwargs)

    bound: Callable[..., Any] = wait if inspect.iscoroutinefunction(function) else call
    functools.update_wrapper(bound, function)
    vars(bound)["__signature__"] = signature.replace(
        parameters=[parameter for parameter in others if parameter]
    )
    annotations = getattr(function, "__annotations__", {})
    bound.__annotations__ = {
        parameter: annotation for parameter, annotation in annotations.items() if parameter != first.name
    }
    return bound


def _get_bound(function: Callable[..., Any], bind: bool) -> str:
    """Return the name of the parameter for the running job; '' where a keyword of its name is another one."""
    if not bind:
        return ""
    first = next(iter(inspect.signature(function).parameters.values()))
    return "" if first.kind is first.POSITIONAL_ONLY else first.name


def _running(task: str) -> CurrentJob:
    """Return the running job. Outside of a worker, where a task is called like any function, return a substitute."""
    return CURRENT_JOB.get() or CurrentJob(new_id(), task, "", 1, "")


A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class MapOptions(TypedDict, total=False):
    """The options of `map`, `starmap` and `chunks`, for type checkers."""

    at_once: int | None
    need: float | None
    on_error: OnError | None


class Task(Generic[P, R_co]):
    """A task: `delay` sends a job whose function runs on a worker; a call runs the function in place.

    `name` is by default the module and qualified name of the function. `kind` follows from the function: `async def`
    runs on Trio (on asyncio if declared so), `def` in a thread; with `boxed` either runs in its own process, which
    a `Box` describes, and there on the event loop that `loop` names. With `bind` the function's first parameter is the
    running job, a `CurrentJob`, which callers leave out.
    """

    sinks: tuple[SinkOptions, ...] = ()
    """The Data Sinks that get the documents of its results."""
    recipients: Mapping[str, str] | None = None
    """The names of the sinks, by the final states that they take."""
    sources: tuple[Source, ...] = ()
    """The Data Sources whose documents it takes."""

    def __init__(
        self,
        function: Callable[P, R_co] | Callable[P, Awaitable[R_co]],
        *,
        app: "TaskApplication | None" = None,
        find_owner: "Callable[[Task[Any, Any]], TaskApplication] | None" = None,
        name: str | None = None,
        loop: EventLoop | None = None,
        options: Options | None = None,
        deduplicate: DeduplicationPolicy | None = None,
        bind: bool = False,
        retry_backoff: Callable[[int], float] | None = None,
        abandon_on_cancel: bool = False,
        continue_without_lease: bool = False,
        boxed: bool | Box = False,
        breaker: BreakerPolicy | None = None,
        checks: Sequence[HealthCheck] = (),
        schedule: object = None,
        redact: Collection[str] = (),
        resources: Mapping[str, float] | None = None,
        **limit_options: Unpack[LimitOptions],
    ) -> None:
        if not _is_function(function):
            raise Misconfigured(f"@task takes a function, got {function!r}")
        self.name: str = name or _name_of(function)
        self.box: Box | None = parse_box(boxed, self.name)
        self.injected: Mapping[str, Resource] = find_resources(function, f"task {self.name}")
        code = inject_resources(function, self.injected) if self.injected else function
        self.amounts: Amounts = _parse_amounts(resources, self.name)
        self._declared_loop: EventLoop | None = loop
        self.loop: FunctionKind = "trio"
        self.kind: TaskKind = "trio"
        self._set_kind(function, app)
        self.function: Callable[..., Any] = bind_running_job(code, self.name) if bind else code
        self.send_options: Options = (options or Options()).checked()
        self._app, self._find_owner = app, find_owner
        self.had_no_app: bool = app is None
        self._policy: RetryPolicy | None = None
        self._settings: Settings | None = None
        self._shared_fields: SharedFields | None = None
        self._backoff: CustomBackoff | None = None if retry_backoff is None else CustomBackoff(retry_backoff)
        self.parameters: Parameters = Parameters(self.name, self.function, redact, _get_bound(code, bind))
        self.limits: LimitDeclaration | None = declare_limits(
            self.name, self.function, self.send_options.queue, **limit_options
        )
        self.deduplicate: DeduplicationPolicy | None = (
            None if deduplicate is None else prepare_policy(deduplicate, self.function, self.name)
        )
        self.abandon_on_cancel: bool = _may_abandon(abandon_on_cancel, self.kind, self.name)
        self.continue_without_lease: bool = _may_continue(continue_without_lease, self.kind, self.name)
        if self.box is not None and not self.box.is_python:
            self.function = _make_command_stub(self.name, self.box, bind or deduplicate is not None)
        self._breaker: BreakerPolicy | None = breaker
        self.checks: tuple[HealthCheck, ...] = validate_checks(checks, breaker, f"task {self.name}")
        self.schedule: tuple[Periodic, ...] = parse_schedule(schedule, self.name)
        self._take_names(function)

    def _set_kind(self, function: Callable[..., Any], app: "TaskApplication | None") -> None:
        """Set where the code runs. An `async def` without a loop of its own runs in that of the application."""
        default: EventLoop = "trio" if app is None else app.loop
        self.loop = _find_kind(function, self._declared_loop, default, self.name)
        self.kind = self.loop if self.box is None else "boxed"
        check_loops(self.injected, self.loop, f"task {self.name}")
        if self.kind == "boxed":
            check_unsized(self.injected, f"task {self.name}")

    def _take_names(self, function: Callable[..., Any]) -> None:
        """Copy names and docstring of the function, for `help` and `inspect`."""
        self.__doc__, self.__module__ = function.__doc__, getattr(function, "__module__", "")
        self.__name__: str = getattr(function, "__name__", self.name)
        self.__wrapped__ = function

    def connect_data(
        self,
        sinks: Sequence[Sink | RedisResults] = (),
        source: Source | type[Any] | Sequence[Source | type[Any]] = (),
    ) -> None:
        """Send results to `sinks`, and take the documents of `source`. Raises Misconfigured."""
        self.sinks, results = parse_sinks(sinks, self.name)
        if results is not None and results.ttl is not None:
            self.send_options = self.send_options.merge({"results_ttl": results.ttl})
        self.recipients = group_recipients([(sink.name, sink.states) for sink in self.sinks])
        self.sources = parse_sources(source, self.parameters, self.name)

    def add_source(self, source: Source) -> None:
        """Take the documents of another source from now on. Raises Misconfigured."""
        if source not in self.sources:
            self.sources = (*self.sources, *parse_sources(source, self.parameters, self.name))

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    if not TYPE_CHECKING:  # a checker knows what is there

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("task", self, name)

    @property
    def app(self) -> "TaskApplication":
        """The application of this task. Raises Misconfigured when it has none."""
        if self._app is None:
            if self._find_owner is None:
                raise Misconfigured(f"task {self.name} belongs to no application: declare it with @app.task")
            return self._find_owner(self)
        return self._app

    def adopt(self, app: "TaskApplication") -> None:
        """Set the application, unless the task has one already."""
        if self._app is None:
            self._app, self._policy = app, None
            self._set_kind(self.__wrapped__, app)

    def copy_for(self, app: "TaskApplication") -> Self:
        """Return a copy of this task that belongs to another application."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._app, copy._policy, copy._settings = app, None, None
        copy._set_kind(copy.__wrapped__, app)
        return copy

    def _find_owner_of_copy(self, copy: "Task[Any, Any]") -> "TaskApplication":
        owner = self.app
        if self._app is not None:
            copy.adopt(owner)
        return owner

    @property
    def has_no_app(self) -> bool:
        """Whether the task was declared with no application and has not been adopted by one."""
        return self._app is None

    @property
    def queue(self) -> str:
        """The queue of its jobs. Raises Misconfigured when the queue is on another broker than the task's `broker`."""
        return self.app.brokers.queue_of_task(self.name, self.send_options)

    @property
    def resources(self) -> Mapping[str, float]:
        """What each job takes of its worker's `capacity`, by name."""
        return to_numbers(self.amounts)

    @property
    def takes_resources(self) -> bool:
        """Whether its jobs take anything of the worker's capacity, or need something open that does."""
        return bool(self.amounts) or any(resource.size for resource in self.injected.values())

    @property
    def result_type(self) -> ResultType:
        """The type of its results, by its annotation."""
        return self.parameters.result_type

    @property
    def call_shape(self) -> CallShape:
        """What must be known to show the arguments of its jobs."""
        return self.parameters.call_shape

    @property
    def policy(self) -> RetryPolicy:
        """The policy by which failed jobs of this task are tried again."""
        if self._policy is None:
            policy = self.send_options.get_retry_policy(self.app.retry_policy)
            if self._app is None:
                return policy  # of an application that may not be its own in the end
            self._policy = policy
        return self._policy

    @property
    def backoff(self) -> CustomBackoff | None:
        """The function that computes the seconds before the next attempt, in place of the policy's numbers."""
        return self._backoff or self.app.retry_backoff

    @property
    def breaker(self) -> BreakerPolicy:
        """How its circuit breaker behaves.

        Without one of its own, a task with health checks has a breaker that only the checks trip; other tasks have the
        application's.
        """
        return self._breaker or (CHECKS_ONLY_BREAKER if self.checks else self.app.breaker)

    def options(self, **options: Unpack[SendOptions]) -> Self:
        """Return a copy of this task with other options.

        They are `queue`, `countdown`, `eta`, `expires`, `key`, `priority`, `time_limit`, `max_retries` and all other
        fields of `Options`. Raises Misconfigured.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._policy, copy._settings, copy._find_owner = None, None, self._find_owner_of_copy
        copy.send_options = _options(dict(options), self.send_options)
        if copy.limits is not None:
            copy.limits.check_queue(copy.send_options.queue)
        return copy

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Return the job that `delay` would send with these arguments. Raises BadArguments and MessageTooLarge."""
        if self.limits is None:
            return self._job_of(*self.parameters.encode(args, kwargs))
        return self._job_of(*self.parameters.encode(args, kwargs), *self.limits.make_keys(args, kwargs))

    def make_template(self) -> Job:
        """Return a job without arguments, for those who send jobs and have only the task's name.

        Its `shards` are those of its queue: each job chooses by its id. Raises Misconfigured.
        """
        fields = self.get_shared_fields()
        check_not_by_key(self.name, fields, "the job of an event")
        template = self._job_of(Raw(b"[]"), NO_ARGUMENTS)
        return msgspec.structs.replace(template, queue=fields.queue, shards=fields.shards)

    def make_failure_call(
        self, args: Sequence[Raw], kwargs: Mapping[str, Raw], *, takes_failures: bool
    ) -> FailureCall:
        """Return the call of this task that jobs name as their `on_failure`, with these encoded arguments."""
        # The job of a failure has none of its own. Its arguments differ each time, so they are no key.
        changes: SendOptions = {"on_failure": None}
        if self.send_options.key is None:
            changes["unique_for"] = None
        task = self.options(**changes)
        raw_args = Raw(b"[" + b",".join(args) + b"]")
        fields = task.get_shared_fields()
        check_not_by_key(self.name, fields, "on_failure")
        job = task._job_of(raw_args, Raw(encode(kwargs)) if kwargs else NO_ARGUMENTS)
        job = msgspec.structs.replace(job, queue=fields.queue)  # the first shard: it has no id yet
        return make_failure_call(job, takes_failures=takes_failures)

    @property
    def declared_limits(self) -> DeclaredLimits | None:
        """The limits that it declares; None for none."""
        return self.limits.declared if self.limits else None

    def _job_of(self, raw_args: Raw, raw_kwargs: Raw, concurrency_key: str = "", fair_key: str = "") -> Job:
        options, app, now = self.send_options, self._app or self.app, wall_time()
        shared_fields = self._shared_fields
        if shared_fields is None or self._settings is not app.settings:
            shared_fields = self._compute_shared_fields(app.settings)
        fields = shared_fields.fields.copy()
        if shared_fields.unique_for is not None and "key" not in fields and raw_kwargs is not NO_ARGUMENTS:
            fields["key"] = hash_call(self.parameters.encode_canonical(raw_args, raw_kwargs))
        if options.expires is not None:
            fields["expires"] = options.get_expiry(now)
        waiting_list = ""
        if concurrency_key or fair_key:
            fields["concurrency_key"], fields["fair_key"] = concurrency_key, fair_key
            waiting_list = self.limits.get_waiting_list(concurrency_key, fair_key) if self.limits else ""
        if trace := get_current_trace():
            fields["trace"] = trace
        job_id = options.id or new_id()
        # If it goes straight on its queue, its entry there tells the time, but for one that a test has set.
        is_queued = not (shared_fields.is_delayed or waiting_list or WALL_CLOCK.is_virtual)
        if not is_queued:
            fields["sent"] = now
        command = Command(VERSION, job_id, self.name, raw_args, raw_kwargs, **fields)
        queue = shared_fields.queue
        if shared_fields.shards > 1:
            word = concurrency_key if shared_fields.is_sharded_by_key else command.lock or job_id
            queue = choose_shard(queue, shared_fields.shards, word)
        return Job(
            job_id,
            self.name,
            queue,
            app.check_message_size(encode(command), self.name),
            options.format_start() if shared_fields.is_delayed else "",
            command.ignore_result,
            command.lock,
            shared_fields.unique_for,
            app.name,
            shared_fields.lane,
            waiting_list,
            format_expiry(command.expires) if waiting_list else "",
            now if is_queued else UNSET,
            shared_fields.replicas,
        )

    def get_shared_fields(self) -> SharedFields:
        """Return the queue, and the fields that all messages of this task share."""
        settings = (self._app or self.app).settings
        if self._shared_fields is None or self._settings is not settings:
            return self._compute_shared_fields(settings)
        return self._shared_fields

    def _compute_shared_fields(self, settings: Settings) -> SharedFields:
        if self.send_options.queue is not None:
            self.app.brokers.warn_if_misspelled(self.name, self.send_options.queue)
        shared_fields = self.send_options.shared_fields(
            self.policy,
            queue=self.queue,
            ignore_result=settings.ignore_result,
            results_ttl=settings.results_ttl,
        )
        if self.app.brokers.is_sharded(shared_fields.queue):
            shared_fields = self._spread(shared_fields, self.app.brokers.shards[shared_fields.queue])
        if self.send_options.on_failure is not None:
            shared_fields.fields["on_failure"] = encode_on_failure(self.send_options.on_failure)
        self._shared_fields, self._settings = shared_fields, settings
        return shared_fields

    def _spread(self, fields: SharedFields, shards: int) -> SharedFields:
        """Return the shared fields of jobs of a queue with so many shards. Raises Misconfigured."""
        placement = get_placement(self.declared_limits)
        if placement == "first":
            return fields
        # A sender that chooses the id sends the same arguments each time.
        if placement == "keyed" and self.send_options.key is not None and self.send_options.id is None:
            raise Misconfigured(
                f"task {self.name}: its limit is counted by concurrency key, and so its jobs on the shards of queue "
                f"{fields.queue!r} have no key of their own: leave out key, or send it to a queue without shards"
            )
        return msgspec.structs.replace(fields, shards=shards, is_sharded_by_key=placement == "keyed")

    if TYPE_CHECKING:  # its two kinds define it

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> object: ...

    # Type checkers find the first parameter of the function by `__call__`, not by the parameters of the class.
    @overload
    def s(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, /, *args: P.args, **kwargs: P.kwargs
    ) -> "Signature[R_co]": ...
    @overload
    def s(
        self: Callable[Concatenate[A, Q], object], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> "PartialSignature[A, R_co]": ...
    def s(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return a signature: this call, to be sent later, in bulk, or in a workflow. Sending it raises like `job`.

        Without its first argument it is a `Partial`: in a workflow that is the value of the step before it.
        """
        if self.parameters.has_missing(len(args), kwargs):
            return PartialSignature[Any, Any](self, args, kwargs)
        return Signature(self, args, kwargs)

    def partial(
        self: Callable[Concatenate[A, Q], object],  # pyright: ignore[reportGeneralTypeIssues]
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> "PartialSignature[A, R_co]":
        """Return a signature without its first argument, also for a task whose parameters all have defaults."""
        return PartialSignature(cast("Task[..., R_co]", self), args, kwargs)

    @overload
    def map(
        self: Callable[Concatenate[A, Q], object], items: Iterable[A], /, **options: Unpack[MapOptions]
    ) -> Workflow[list[R_co]]: ...
    @overload
    def map(
        self: Callable[Concatenate[A, Q], object], /, **options: Unpack[MapOptions]
    ) -> Partial[Iterable[A], list[R_co]]: ...
    def map(self: Any, items: Any = None, /, **options: Any) -> Any:
        """Return a workflow with a job for each item. Its value is the list of their results, in order.

        Args:
            items: The first argument of each job; without them they are the value of the step before it. Read once,
                when the run is started: a generator is not kept in memory.
            options: `at_once`: how many of its jobs are on their queue at once; default: as many as keep workers busy.
                `need`: the fraction of jobs that must succeed, such as 0.95; the results of the others are left out.
                `on_error`: what becomes of the run when a job fails.

        Raises:
            Misconfigured: An option makes no sense.
        """
        return self._make_map(items, False, None, options)

    @overload
    def starmap(
        self, items: Iterable[Iterable[Any]], /, **options: Unpack[MapOptions]
    ) -> Workflow[list[R_co]]: ...
    @overload
    def starmap(self, /, **options: Unpack[MapOptions]) -> Partial[Iterable[Iterable[Any]], list[R_co]]: ...
    def starmap(self, items: Any = None, /, **options: Any) -> Any:
        """Return a workflow like `map`, in which each item has all the arguments of a job, in order."""
        return self._make_map(items, True, None, options)

    @overload
    def chunks(
        self: Callable[Concatenate[A, Q], object],
        items: Iterable[A],
        n: int,
        /,
        **options: Unpack[MapOptions],
    ) -> Workflow[list[R_co]]: ...
    @overload
    def chunks(
        self: Callable[Concatenate[A, Q], object], /, *, n: int, **options: Unpack[MapOptions]
    ) -> Partial[Iterable[A], list[R_co]]: ...
    def chunks(self: Any, items: Any = None, n: int = 0, /, **options: Any) -> Any:
        """Return a workflow like `map`, in which a job runs the function for `n` items, one after another.

        Its value is the list of the results of all items, in order.
        """
        return self._make_map(items, False, options.pop("n", n), options)

    def _make_map(self, items: Any, star: bool, chunk: int | None, options: dict[str, Any]) -> Any:
        unknown = sorted(set(options) - {"at_once", "need", "on_error"})
        if unknown:
            raise Misconfigured(
                f"{self.name}.map has no option {unknown[0]!r}: it has at_once, need and on_error"
            )
        for name, number in (("at_once", options.get("at_once")), ("n", chunk)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise Misconfigured(f"{self.name}.map: {name} is {number!r}: give 1 or more")
        if isinstance(items, str | bytes) or not (items is None or hasattr(items, "__iter__")):
            raise Misconfigured(f"{self.name}.map takes an iterable of items, got {items!r}")
        check_on_error(options.get("on_error"), f"{self.name}.map")
        group_options = GroupOptions(
            on_error=options.get("on_error"), need=check_need(options.get("need"), f"{self.name}.map")
        )
        tree = Map(
            task=self,
            items=items,
            star=star,
            chunk=chunk,
            at_once=options.get("at_once"),
            options=group_options,
        )
        return ComposedPartial[Any, Any](tree) if items is None else ComposedWorkflow[Any](tree)

    async def adelay(self, /, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """Send a job and return its handle. Raises as `App.send_many`."""
        job, app = self.job(*args, **kwargs), self._app or self.app
        return app.make_handle(job, self, await app.adispatch((job,)))

    @blocking(adelay)
    def delay(self) -> None: ...

    async def adelay_on_commit(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a job after the commit of Django's current transaction; at once without one, never after a rollback.

        The arguments are checked and encoded now. For another database than the default one there is
        `Signature.delay_on_commit(using=...)`.

        Raises:
            Misconfigured: Django is not installed, or the caller runs on Trio.
            BadArguments: The arguments do not fit: raised inside of the transaction.
        """
        await Signature(cast("Task[..., R_co]", self), args, kwargs).adelay_on_commit()

    @blocking(adelay_on_commit)
    def delay_on_commit(self) -> None: ...


class CoroutineTask(Task[P, R_co]):
    """A task declared with `async def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Return a coroutine that runs the function in this process, without a queue."""
        return cast("Coroutine[Any, Any, R_co]", self.function(*args, **kwargs))


class FunctionTask(Task[P, R_co]):
    """A task declared with `def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function in this process, without a queue."""
        return cast("R_co", self.function(*args, **kwargs))


class Signature(Workflow[R_co]):
    """A task with its arguments, to be sent later, in bulk, or in a workflow: `charge.s(7, amount)`. Immutable."""

    __slots__ = ("_args", "_kwargs", "task")

    hints: ClassVar[NameKind] = "signature"

    def __init__(self, task: "Task[..., R_co]", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task: Task[..., R_co] = task
        self._args = args
        self._kwargs = kwargs

    @property
    def tree(self) -> TaskCall:
        """The call."""
        return TaskCall(self.task, self._args, self._kwargs)

    def outcome(self) -> "Signature[Outcome[R_co]]":
        """Return the same call for a workflow: what depends on it gets an `Outcome`, and so it may fail.

        The same as the option `on_error="continue"`, for type checkers.
        """
        return Signature(cast("Any", self.task.options(on_error="continue")), self._args, self._kwargs)

    def job(self) -> Job:
        """Return the job, with a new id each time, unless the options have one."""
        return self.task.job(*self._args, **self._kwargs)

    async def adelay(self) -> AsyncResult[R_co]:
        """Send it."""
        return await self.task.adelay(*self._args, **self._kwargs)

    @blocking(adelay)
    def delay(self) -> None: ...

    async def adelay_on_commit(self, *, using: str | None = None, robust: bool = False) -> None:
        """Send it after the commit of Django's current transaction; at once without one, never after a rollback.

        Args:
            using: The alias of the database whose transaction it is; None for the default one.
            robust: Log an error of the sending; else it is raised after the commit, as `transaction.on_commit` does.

        Raises:
            Misconfigured: Django is not installed, or the caller runs on Trio.
            BadArguments: The arguments do not fit: raised inside of the transaction.
        """
        from celery5.tasks.on_commit import call_on_commit  # only projects with Django have it

        job, app = self.job(), self.task.app
        await call_on_commit(lambda: app.dispatch((job,)), using=using, robust=robust)

    @blocking(adelay_on_commit)
    def delay_on_commit(self) -> None: ...


class PartialSignature(Partial[A_contra, R_co]):
    """A task without its first argument, which is the value of the step before it in a workflow. Immutable."""

    __slots__ = ("_args", "_kwargs", "task")

    hints: ClassVar[NameKind] = "signature"

    def __init__(self, task: "Task[..., R_co]", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task: Task[..., R_co] = task
        self._args = args
        self._kwargs = kwargs

    @property
    def tree(self) -> TaskCall:
        """The call."""
        return TaskCall(self.task, self._args, self._kwargs, is_partial=True)

    def outcome(self) -> "PartialSignature[A_contra, Outcome[R_co]]":
        """Return the same call; what depends on it gets an `Outcome`: see `Signature.outcome`."""
        task: Any = self.task.options(on_error="continue")
        return PartialSignature(task, self._args, self._kwargs)

    def describe_missing(self) -> str:
        """Return what it lacks, for an error."""
        return self.task.parameters.describe_missing(len(self._args), self._kwargs)


class TaskApplication(ObservedApplication, Protocol):
    """The application of a task."""

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """Its tasks, by name."""
        ...

    @property
    def retry_policy(self) -> RetryPolicy:
        """The retry policy of tasks without one of their own."""
        ...

    @property
    def retry_backoff(self) -> CustomBackoff | None:
        """The function that computes delays of retries, for tasks that have none of their own."""
        ...

    @property
    def breaker(self) -> BreakerPolicy:
        """How the circuit breakers of its tasks behave."""
        ...

    def dispatch(self, jobs: Sequence[Job], /) -> Mapping[str, str]:
        """Send jobs in plain Python; return the holder of its key for each job that was not sent, by ids."""
        ...

    def make_handle(
        self, job: Job, task: Task[..., R] | None, holders: Mapping[str, str], /
    ) -> AsyncResult[R]:
        """Return the handle of a job that `adispatch` was called with; `holders` is what that returned."""
        ...


def _is_function(thing: object) -> bool:
    return callable(thing) and not isinstance(thing, type)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the task's name. In a module that runs as a script this is the name by which a worker imports it."""
    qualified = getattr(function, "__qualname__", None)
    if qualified is None:
        raise Misconfigured(f"{function!r} has no name of its own: give it one with @task(name=...)")
    return f"{get_module_name(function)}.{qualified}"


def _make_command_stub(task: str, box: Box, wants_a_function: bool) -> Callable[..., Any]:
    """Return the function of a task whose box runs a command; it raises TypeError. Raises Misconfigured."""
    if wants_a_function:
        raise Misconfigured(
            f"task {task} runs the command {box.command[0]!r}: bind and deduplicate are for functions"
        )

    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(
            f"task {task} is the command {' '.join(box.command)!r}: it runs in its box only, so send it"
        )

    return call


def _options(options: dict[str, Any], base: Options) -> Options:
    """Return options merged over others. Raises Misconfigured for an unknown option."""
    for name in sorted(set(options) - set(Options.__struct_fields__)):
        if name in DECLARATION_OPTIONS:
            raise Misconfigured(f"{name} is for a declaration: @app.task({name}=...)")
        raise Misconfigured(describe_unknown_option(name, Options.__struct_fields__))
    return base.merge(options)


def describe_unknown_option(name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown option, with the most similar one, and where all are."""
    suggestion = f"{did_you_mean(name, known)} ".lstrip()
    hint = find_hint("option", name)
    return f"task option {name!r} is not known{hint}; {suggestion}all options: celery5 docs tasks"


def _find_kind(
    function: Callable[..., Any], loop: EventLoop | None, default: EventLoop, name: str
) -> FunctionKind:
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise Misconfigured(f"task {name} is a generator function: a task returns one value")
    return choose_kind(function, loop, default, f"task {name}", is_task=True)


def _may_abandon(abandon_on_cancel: bool, kind: TaskKind, task: str) -> bool:
    if abandon_on_cancel and kind != "thread":
        what = "boxed" if kind == "boxed" else "async"
        raise Misconfigured(
            f"task {task} is {what}: abandon_on_cancel is for def, whose threads nobody can end"
        )
    return abandon_on_cancel


def _may_continue(continue_without_lease: bool, kind: TaskKind, task: str) -> bool:
    """Return the option. Raises Misconfigured where it would have no effect."""
    if continue_without_lease and kind not in ("trio", "asyncio"):
        what = "boxed" if kind == "boxed" else "def"
        raise Misconfigured(
            f"task {task} is {what}, which goes on anyway: continue_without_lease is for async def"
        )
    return continue_without_lease


NO_ARGUMENTS = Raw(b"{}")
"""The arguments of a template, which has none."""
CHECKS_ONLY_BREAKER = BreakerPolicy(threshold=None)
"""The breaker of a task that declares health checks and no breaker."""


def _parse_amounts(resources: Mapping[str, float] | None, task: str) -> Amounts:
    """Return what each job of a task takes of its worker's capacity. Raises Misconfigured."""
    amounts = NOTHING if resources is None else parse_needs(resources, f"task {task}: resources")
    if amounts and task in TASK_KINDS:
        raise Misconfigured(f"task {task}: resources: {task} is a kind of tasks: give the task another name")
    return amounts


DECLARATION_OPTIONS = (
    "name",
    "loop",
    "bind",
    "deduplicate",
    "retry_backoff",
    "abandon_on_cancel",
    "continue_without_lease",
    "boxed",
    "breaker",
    "checks",
    "sinks",
    "source",
    "schedule",
    "redact",
    "resources",
    "limit",
    "rate_limit",
    "concurrency_key",
    "fair_key",
)
"""The options that only a declaration takes; each call may replace the others."""
