"""Declare tasks by `@task` and `@app.task`, check their options, and register them."""

import inspect
import sys
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from celery5.application import Application
from celery5.config.include import find_modules
from celery5.errors import DuplicateTask, Misconfigured, UnknownTask
from celery5.events.sources import Source
from celery5.health.health_check import HealthCheck
from celery5.limits.declaration import LimitKey
from celery5.protocol.boxes.box import Box
from celery5.protocol.events.sinks import RedisResults, Sink
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.job import CALL_ONLY_OPTIONS, JobOptions, Options
from celery5.protocol.limits import Limit, Range, Rate
from celery5.protocol.scheduling.declaration import Periodic
from celery5.protocol.task_kinds import EventLoop
from celery5.runners.context import CurrentJob
from celery5.tasks.deduplication import DeduplicationPolicy
from celery5.tasks.task import (
    DECLARATION_OPTIONS,
    CoroutineTask,
    FunctionTask,
    Task,
    TaskApplication,
    describe_unknown_option,
)

if TYPE_CHECKING:
    from celery5.protocol.scheduling.declaration import When


def find_tasks(app: Application) -> Iterator[Task[Any, Any]]:
    """Yield all tasks in the included modules and in the application's own module, of any owner. `App.load` checks
    that each include matches.
    """
    for module in (*find_modules(app.include, may_be_empty=app.include), app.module):
        for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
            if isinstance(value, Task):
                yield cast("Task[Any, Any]", value)


P = ParamSpec("P")
R = TypeVar("R")


class TaskRegistry(dict[str, Task[Any, Any]]):
    """The tasks of an application by name. A missing name raises UnknownTask, which suggests a similar one.

    Tasks are added by their declarations, and never removed: a worker looks each job's task up here, so whatever a job
    did to `app.tasks` would be done to all jobs after it.

    A subclass of dict, since each job makes four lookups: a Mapping of our own takes three times as long.
    """

    def __missing__(self, name: str) -> Never:
        raise UnknownTask(name, self)

    def add(self, task: Task[Any, Any]) -> None:
        """Add a task. Raises DuplicateTask when another function has its name."""
        registered = self.add_missing(task.name, lambda: task)
        if registered.__wrapped__ is not task.__wrapped__:
            raise DuplicateTask(f"two tasks are named {task.name!r}: give one of them @task(name=...)")

    def add_missing(self, name: str, make: Callable[[], Task[Any, Any]]) -> Task[Any, Any]:
        """Return the task of that name; add the one that `make` returns when there is none."""
        return self[name] if name in self else super().setdefault(name, make())

    def _refuse(self, *_arguments: object, **_named: object) -> Never:
        raise TypeError(
            "app.tasks is read-only: to add a task, use @app.task; to remove one, leave its module out of include"
        )

    if not TYPE_CHECKING:  # a type checker would ask for the signatures of dict
        __setitem__ = __delitem__ = __ior__ = _refuse
        clear = pop = popitem = setdefault = update = _refuse


class TaskOptions(JobOptions, total=False):
    """The options of `@task(...)` besides `bind`.

    They set the name, where the code runs, and how jobs are sent: see `Options`.
    """

    name: str | None
    loop: EventLoop | None
    expires: float | timedelta | None
    retry_backoff: Callable[[int], float] | None
    deduplicate: DeduplicationPolicy | None
    abandon_on_cancel: bool
    continue_without_lease: bool
    boxed: bool | Box
    breaker: BreakerPolicy | None
    checks: Sequence[HealthCheck]
    sinks: Sequence[Sink | RedisResults]
    source: Source | type | Sequence[Source | type]  # a type checker sees a decorated class as a class
    schedule: "When | Periodic | Sequence[Periodic] | None"
    redact: Collection[str]
    resources: Mapping[str, float] | None
    limit: int | Limit | Range | None
    rate_limit: str | Rate | None
    concurrency_key: LimitKey | None
    fair_key: LimitKey | None


class ConfiguredTaskDecorator(Protocol):
    """The type of `@app.task(...)` with options."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...


class BoundTaskDecorator(Protocol):
    """The type of `@app.task(bind=True)`: the function's first parameter is the running job, which is not sent."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, function: Callable[Concatenate[CurrentJob, P], Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[CurrentJob, P], R], /) -> FunctionTask[P, R]: ...


class TaskDecorator:
    """The type of `@task` and `@app.task`: a decorator that works with and without a call, fully typed."""

    def __init__(
        self,
        app: TaskApplication | None = None,
        register: Callable[[Task[Any, Any]], None] | None = None,
        find_owner: Callable[[Task[Any, Any]], TaskApplication] | None = None,
    ) -> None:
        # An application registers its tasks at once. A free task calls `find_owner` when it needs its application.
        self._app = app
        self._register = register
        self._find_owner = find_owner

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionTask[P, R]: ...
    @overload
    def __call__(self, *, bind: Literal[True], **options: Unpack[TaskOptions]) -> BoundTaskDecorator: ...
    @overload
    def __call__(
        self, *, bind: Literal[False] = False, **options: Unpack[TaskOptions]
    ) -> ConfiguredTaskDecorator: ...
    def __call__(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """Declare a task. Raises Misconfigured and DuplicateTask at once, not when a job runs."""
        own = {name: options.pop(name) for name in DECLARATION_OPTIONS if name in options}
        connected = {name: own.pop(name) for name in ("sinks", "source") if name in own}
        task_options = _merge_options(options)

        def declared(function: Callable[..., Any]) -> Task[Any, Any]:
            kind: type[CoroutineTask[..., Any] | FunctionTask[..., Any]] = (
                CoroutineTask if inspect.iscoroutinefunction(function) else FunctionTask
            )
            task = kind(function, app=self._app, find_owner=self._find_owner, options=task_options, **own)
            if connected:
                task.connect_data(**connected)
            if self._register is not None:
                self._register(task)
            return task

        return declared if function is None else declared(function)


def _merge_options(options: dict[str, Any]) -> Options:
    """Return the options of a declaration. Raises Misconfigured for one that a declaration does not take."""
    for name in sorted(set(options) - set(_DECLARED)):
        if name in CALL_ONLY_OPTIONS:
            raise Misconfigured(f"{name} is for one call: task.options({name}=...)")
        raise Misconfigured(describe_unknown_option(name, _DECLARED))
    return Options().merge(options)


_DECLARED = (
    *DECLARATION_OPTIONS,
    *(name for name in Options.__struct_fields__ if name not in CALL_ONLY_OPTIONS),
)
