"""The application: its tasks, its settings, and its brokers.

Making an App only stores its arguments: it opens no connection, sets up no logging and imports no tasks.
"""

import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    Never,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from weakref import WeakSet

from celery5.application import Application
from celery5.boot_step import BootStep, check_boot_steps
from celery5.broker.call import Call
from celery5.broker.colour import blocking
from celery5.broker.keys import Keys, QueueKeys
from celery5.commands.declaration import DeclareCommand
from celery5.config.include import check_includes, find_modules, import_modules, is_included
from celery5.config.setting_options import SettingOptions
from celery5.config.settings import (
    ExplicitSettings,
    LoadedConfiguration,
    Settings,
    find_changed_settings,
    find_source,
    read_settings,
)
from celery5.connections.broker_connections import Connections
from celery5.connections.brokers import Brokers
from celery5.connections.guarded import GuardedConnections
from celery5.errors import BrokerUnavailable, MessageTooLarge, Misconfigured
from celery5.events.event import DeclareEvent, find_events, get_event_declaration
from celery5.events.registry import Events
from celery5.events.sources import DeclareSource, source
from celery5.health.health_check import DeclareCheck, HealthCheck
from celery5.hints import describe_option, make_attribute_error
from celery5.limits.overrides import Limits
from celery5.limits.rules import DeclareLimitRule
from celery5.middleware.middleware import Middleware, MiddlewareStack, check_middleware
from celery5.observability.alert_declaration import DeclareAlert
from celery5.observability.configured import lacks_middleware, make_configured_middleware
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.brokers import parse_broker_url
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.job import Job
from celery5.protocol.job.retry_policy import (
    CustomBackoff,
    RetryPolicy,
    UnpublishableChoice,
    UnpublishableFallback,
)
from celery5.protocol.job.story import JobDetails
from celery5.protocol.scaling.budget import Budget, check_budgets
from celery5.protocol.shards import choose_shard
from celery5.protocol.task_kinds import EventLoop, check_loop
from celery5.results.async_result import ANY_RESULT, AsyncResult
from celery5.results.job_details import AppState, empty_queue, find_job, read_app_state
from celery5.runners.context import CURRENT_JOB
from celery5.scheduling.timers import DeclareStart, DeclareTimer
from celery5.sending.memory_backlog import Backlog
from celery5.sending.own_backlog import OwnBacklog, split_own_backlog
from celery5.sending.sender import (
    JobReceiver,
    Sender,
    check_job_id,
    check_jobs,
    check_signatures,
    check_tasks_declared,
    without_traceback,
)
from celery5.similar_names import join_names
from celery5.tasks.declaration import TaskDecorator, TaskRegistry, find_tasks
from celery5.tasks.task import Signature, Task

if TYPE_CHECKING:
    from builtins import (
        property as lazy_property,  # a Protocol with a property does not accept a cached_property
    )

    from celery5.audit.trail import Audit
    from celery5.bulk.actions import Bulk
    from celery5.commands.control import Control
    from celery5.config.configuration import Configuration
    from celery5.dead_letters.queues import DeadLetters
    from celery5.observability.alerts import Alerts
    from celery5.observability.job_search import Jobs
    from celery5.observability.metrics import Metrics
    from celery5.scheduling.schedules import Schedules
    from celery5.streams.processor import ProcessorFunction, ProcessorOptions
    from celery5.streams.registry import Streams
    from celery5.streams.stream import Keep, Stream
    from celery5.workflows.declared import DeclaredWorkflow, Flow, WorkflowOptions
    from celery5.workflows.registry import Workflows
else:
    from functools import cached_property as lazy_property

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class App:
    """An application.

    A setting's value is that of the keyword, else of the environment, else of the configuration, else the default.

    Args:
        name: The scope of every key in Redis.
        broker: The URL of Redis or Valkey; default `CELERY5_BROKER`, then redis://127.0.0.1:6379/0.
        include: Modules that `load` imports, and whose free tasks (declared with `celery5.task`) belong to this
            application. `shop.**.tasks` means every module `tasks` in the package shop.
        retry_policy: The retry policy of tasks that have none.
        retry_backoff: Returns the seconds before a retry, by its number.
        log_detectors: Choose where the log goes: see `celery5.logs.destination`.
        bootsteps: What its workers run besides jobs: see `BootStep`.
        services: The same, as services: see `service`.
        config: The configuration: a module, a .toml file, 'redis', or a backend of your own; default
            `CELERY5_CONFIG`. See `celery5.config.configuration`.
        breaker: The circuit breaker of tasks that have none; by default it only counts and warns.
        checks: Health checks.
        budgets: How many jobs of a kind run at once, where a setting does not suffice.
        when_unpublishable: The setting, or a function that decides for each retry that cannot be published.
        middleware: What surrounds the sending and running of its jobs, the outermost first: see `Middleware`.
        loop: The event loop of each `async def` that declares none: of tasks, processors, timers, boot steps, Data
            Sources and Data Sinks.
        settings: Any setting: see `celery5.config.settings`. `backlog` may also be a backlog of your own, with the
            methods of `OwnBacklog`, in place of the memory.

    Raises:
        Misconfigured: An argument or a setting makes no sense.
        BadBrokerURL: A broker's URL is invalid.
    """

    timer: DeclareTimer
    alert: DeclareAlert
    module: str
    _is_recorded = False
    _broker_check: Callable[[], None] | None = None

    def __init__(
        self,
        name: str,
        *,
        broker: str | None = None,
        include: str | Sequence[str] = (),
        retry_policy: RetryPolicy | Mapping[str, Any] | None = None,
        retry_backoff: Callable[[int], float] | None = None,
        log_detectors: Sequence[Callable[[Any], Any]] = (),
        bootsteps: Sequence[BootStep] = (),
        services: Sequence[Any] = (),
        config: "str | Configuration | None" = None,
        breaker: BreakerPolicy | None = None,
        checks: Sequence[HealthCheck] = (),
        budgets: Mapping[str, Budget] | None = None,
        when_unpublishable: UnpublishableChoice | UnpublishableFallback | None = None,
        middleware: Sequence[Middleware] = (),
        loop: EventLoop = "trio",
        **settings: Unpack[SettingOptions],
    ) -> None:
        if "django.core.management" in sys.modules:
            from celery5.config.django_command import RefusalReport  # most processes do not need it

            RefusalReport.install()
        self.name: str = check_app_name(name)
        self.include: tuple[str, ...] = check_includes(include)
        self._discovered: frozenset[str] = frozenset()  # the patterns of `include` that need not match
        self.module, self._package = _get_origin(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        own_backlog = self._set_settings(settings, broker, when_unpublishable, config)
        self.retry_policy: RetryPolicy = RetryPolicy.parse({} if retry_policy is None else retry_policy)
        self.retry_backoff: CustomBackoff | None = (
            None if retry_backoff is None else CustomBackoff(retry_backoff)
        )
        check_loop(loop, f"App({name!r})")
        self.loop: EventLoop = loop
        self.bootsteps: tuple[BootStep, ...] = check_boot_steps(bootsteps, services, loop)
        self.budgets: Mapping[str, Budget] = check_budgets(budgets or {})
        self.log_detectors: Sequence[Callable[[Any], Any]] = log_detectors
        self._own_middleware = check_middleware(middleware)
        self.tasks: TaskRegistry = TaskRegistry()
        self.task: TaskDecorator = TaskDecorator(self, self.tasks.add)
        self.events: Events = Events(self)
        self.event: DeclareEvent = DeclareEvent(self)
        self.breaker: BreakerPolicy = breaker or WATCH_ONLY_BREAKER
        self.health_check: DeclareCheck = DeclareCheck(checks)
        self.publisher_check: DeclareCheck = DeclareCheck(has_asyncio=False)
        self.source: DeclareSource = source
        self.command: DeclareCommand = DeclareCommand(loop)
        self.keys: Keys = Keys(name)
        self.brokers: Brokers = Brokers(self)
        self.backlog: Backlog = self._make_backlog(own_backlog)
        self.limit_rule: DeclareLimitRule = DeclareLimitRule(loop)
        self.limits: Limits = Limits(self, self.limit_rule)
        self.timer, self.alert = DeclareTimer(loop), DeclareAlert()
        _APPS.add(self)

    @lazy_property
    def on_start(self) -> DeclareStart:
        """The decorator of functions that run once when a worker process, or the cluster, has started."""
        return DeclareStart(self.timer)

    def _set_settings(
        self,
        settings: SettingOptions,
        broker: str | None,
        when_unpublishable: UnpublishableChoice | UnpublishableFallback | None,
        config: "str | Configuration | None",
    ) -> OwnBacklog | None:
        """Set what the constructor gets; raise for what is wrong, as far as this shows without the configuration.

        Returns the backlog of the application's own, if it is among the settings.
        """
        own_backlog, values = split_own_backlog(settings)
        self._is_loaded = False
        is_function = callable(when_unpublishable)
        refuse_injected(when_unpublishable, "when_unpublishable")
        self.unpublishable_fallback: UnpublishableFallback | None = (
            when_unpublishable if callable(when_unpublishable) else None
        )
        self.explicit_settings: ExplicitSettings = ExplicitSettings(
            broker=broker, when_unpublishable=None if is_function else when_unpublishable, **values
        )
        self.config: str | Configuration | None = config or os.environ.get("CELERY5_CONFIG") or None
        effective = self._settled() if self.config else self.settings
        for url in (effective.broker, *effective.brokers.values()):
            parse_broker_url(url)
        return own_backlog

    @property
    def has_chosen_backlog(self) -> bool:
        """Whether the setting `backlog` is set, or there is a backlog of the application's own."""
        if self.backlog.own is not None:
            return True
        return (
            find_source("backlog", self.explicit_settings, os.environ, self.read_configuration()) is not None
        )

    def _make_backlog(self, own: OwnBacklog | None) -> Backlog:
        self._sender = Sender(self)
        return Backlog(
            publish=self._sender.publish,
            app=self.name,
            broker_of_queue=self.brokers.broker_of_queue,
            own=own,
        )

    def __repr__(self) -> str:
        return f"<App {self.name!r} at {self.connections.masked_url}>"

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("app", self, name)

    @lazy_property
    def settings(self) -> Settings:
        """The settings. The first access reads the configuration. Raises Misconfigured."""
        settings = self._settled(self.read_configuration())
        if self._is_stored and self._is_loaded:
            # What is checked with the tasks needs settings.
            self.__dict__["settings"] = settings
            settings = self._settled(self.read_configuration())
        return settings

    @lazy_property
    def connections(self) -> Connections:
        """The connections to the broker, or to all brokers, which are opened when they are used."""
        return self._connect(self.settings.broker)

    @lazy_property
    def middleware(self) -> MiddlewareStack:
        """What surrounds the sending and running of its jobs."""
        given = {type(middleware) for middleware in self._own_middleware}
        configured = [
            candidate
            for candidate in make_configured_middleware(self.settings)
            if type(candidate) not in given
        ]
        middleware = [*configured, *self._own_middleware]
        for item in middleware:
            item.added(self)
        return MiddlewareStack(middleware)

    def add_middleware(self, middleware: Middleware) -> None:
        """Add middleware, inside of that which there is. Workers that run already do without it.

        Raises:
            Misconfigured: It is no middleware.
        """
        self._own_middleware += check_middleware([middleware])
        self.__dict__.pop("middleware", None)

    @contextmanager
    def with_middleware(self, middleware: Middleware) -> Generator[None, None, None]:
        """Add middleware, inside of that which there is, for what is sent and which workers start within this block."""
        self.add_middleware(middleware)
        try:
            yield
        finally:
            self._own_middleware.remove(middleware)
            self.__dict__.pop("middleware", None)

    @lazy_property
    def configuration(self) -> "Configuration | None":
        """The source of settings besides code and the environment. Raises Misconfigured."""
        if self.config is None:
            return None
        from celery5.config.configuration import make_configuration

        return make_configuration(
            self.config,
            broker=lambda: self._settled().broker,
            key=self.keys.settings,
            filter_fields=self._filter_stored,
        )

    @property
    def _is_stored(self) -> bool:
        """Whether the configuration is a hash in the broker, where anyone may have written."""
        return self.config == "redis"

    def _filter_stored(
        self, fields: Mapping[str, str], last: Mapping[str, str]
    ) -> tuple[dict[str, str], list[str]]:
        """Return the fields of the hash that this application can use, and the faults of the others."""
        from celery5.stored_settings import check_environment, filter_fields, make_budget_check

        checks: list[Callable[[Settings], object]] = [check_environment]
        if self._is_loaded and "settings" in self.__dict__:
            kinds = {name: task.kind for name, task in self.tasks.items()}
            checks += [make_budget_check(kinds, self.budgets), self.schedule.check_configured]
        return filter_fields(fields, last, self._settled(), checks)

    @lazy_property
    def audit(self) -> "Audit":
        """The audit trail: who has done what to the application."""
        from celery5.audit.trail import Audit

        return Audit(self)

    @lazy_property
    def bulk(self) -> "Bulk":
        """The bulk actions of the application: those that run, and those of the last day."""
        from celery5.bulk.actions import Bulk

        return Bulk(self)

    @lazy_property
    def streams(self) -> "Streams":
        """The streams of records of the application, and its processors."""
        from celery5.streams.registry import Streams

        return Streams(self)

    @overload
    def workflow(self, function: "Callable[Concatenate[Flow, P], R]", /) -> "DeclaredWorkflow[P, R]": ...
    @overload
    def workflow(
        self, /, **options: "Unpack[WorkflowOptions]"
    ) -> "Callable[[Callable[Concatenate[Flow, P], R]], DeclaredWorkflow[P, R]]": ...
    def workflow(self, function: Any = None, /, **options: Any) -> Any:
        """Declare a workflow as a function of a `Flow` and of its arguments, as a decorator.

        The options are those of `celery5.workflows.WorkflowOptions`.

        Raises:
            Misconfigured: An option makes no sense, or another workflow has the name.
        """
        if function is not None:
            return self.workflows.declare(function)
        return partial(self.workflows.declare, **options)

    @lazy_property
    def metrics(self) -> "Metrics":
        """The metrics of the application: their history, and where else they are sent."""
        from celery5.observability.metrics import Metrics

        return Metrics(self)

    @lazy_property
    def dlq(self) -> "DeadLetters":
        """The dead-letter queues of the application: read, replay and purge what failed for good."""
        from celery5.dead_letters.queues import DeadLetters

        return DeadLetters(self)

    @lazy_property
    def control(self) -> "Control":
        """The control commands: what the processes of the application are told to do, and what they answer."""
        from celery5.commands.control import Control

        return Control(self)

    @lazy_property
    def schedule(self) -> "Schedules":
        """The schedules of the application, those that are declared and those that are added while it runs."""
        from celery5.scheduling.schedules import Schedules

        return Schedules(self)

    @lazy_property
    def jobs(self) -> "Jobs":
        """The jobs of the application: those that live, and the history of those that have ended."""
        from celery5.observability.job_search import Jobs

        return Jobs(self)

    @lazy_property
    def alerts(self) -> "Alerts":
        """The alerts of the application: what fires, what is silenced, and what has fired."""
        from celery5.observability.alerts import Alerts

        return Alerts(self, self.alert)

    @lazy_property
    def workflows(self) -> "Workflows":
        """The workflows of the application: start runs, and find them again."""
        from celery5.workflows.registry import Workflows

        return Workflows(self)

    @overload
    def stream(
        self,
        name: str,
        kind: type[R],
        *,
        by: str | Callable[[R], object] | None = None,
        partitions: int = 16,
        keep: "Keep | None" = None,
        codec: Any = "json",
        reads: Collection[str] = (),
    ) -> "Stream[R]": ...
    @overload
    def stream(
        self,
        name: str,
        kind: None = None,
        *,
        by: Callable[[Any], object] | None = None,
        partitions: int = 16,
        keep: "Keep | None" = None,
        codec: Any = "json",
        reads: Collection[str] = (),
    ) -> "Stream[Any]": ...
    def stream(
        self,
        name: str,
        kind: Any = None,
        *,
        by: Any = None,
        partitions: int = 16,
        keep: "Keep | None" = None,
        codec: Any = "json",
        reads: Collection[str] = (),
        **unknown: Never,
    ) -> "Stream[Any]":
        """Declare a stream of records.

        Args:
            name: Its name, part of its keys in Redis.
            kind: The class of its records; None for any value that has a JSON form.
            by: The field, or a function of a record, by which records are ordered; None for no order.
            partitions: How many partitions a new stream gets.
            keep: How many records are kept, and what happens when a group is too slow.
            codec: How records are encoded.
            reads: Encodings of records that other programs send, such as `msgpack+gzip`. JSON, and what this stream
                has once declared, are read, too.

        Raises:
            Misconfigured: An argument makes no sense, or another stream has the name.
        """
        for option in unknown:
            known = ("by", "partitions", "keep", "codec", "reads")
            raise Misconfigured(f"stream {name}: {describe_option('stream option', option, known)}")
        return self.streams.declare(
            name, kind, by=by, partitions=partitions, keep=keep, codec=codec, reads=reads
        )

    def processor(
        self, stream: "Stream[R]", **options: "Unpack[ProcessorOptions]"
    ) -> "Callable[[ProcessorFunction[R]], ProcessorFunction[R]]":
        """Declare a processor of a stream, as a decorator. Raises Misconfigured.

        The options are those of `celery5.streams.Processor`.
        """
        return self.streams.declare_processor(stream, dict(options))

    def configure(self, **settings: Any) -> None:
        """Change settings, with precedence over all others, as a command's flags do.

        Raises:
            Misconfigured: A setting is wrong; or a job of this application called it, whose worker has these settings.
        """
        self._check_outside_of_jobs("app.configure()")
        own_backlog, values = split_own_backlog(settings)
        if own_backlog is not None:
            self.backlog.use_own(own_backlog)
        self.explicit_settings.add_flags(values)
        self.__dict__.pop("settings", None)
        self.__dict__.pop("middleware", None)
        self.use_broker(self.settings.broker)

    def use_config(self, config: "str | Configuration | None") -> None:
        """Use another configuration from now on, or none. Raises Misconfigured, as `configure` does."""
        self._check_outside_of_jobs("app.use_config()")
        self.config = config
        self.__dict__.pop("configuration", None)
        self.configure()

    def reload_configuration(self) -> tuple[tuple[str, ...], Callable[[], None]]:
        """Read the configuration and check it. This may block.

        Returns:
            The names of the settings that changed, and a function that applies them.

        Raises:
            Misconfigured: A setting is wrong, or one changed that needs a restart.
        """
        from celery5.config.configuration import check_usable

        settings, before = (
            check_usable(self._settled(self.read_configuration()), self.name, self.settings.broker),
            self.settings,
        )
        if (settings.brokers, settings.routes) != (before.brokers, before.routes):
            raise Misconfigured(
                "brokers and routes take effect with a restart of all processes, not with a reload"
            )

        def apply() -> None:
            self.__dict__["settings"] = settings
            self.__dict__.pop("middleware", None)
            if settings.broker != before.broker:
                self.use_broker(settings.broker)

        return find_changed_settings(before, settings), apply

    def read_configuration(self) -> LoadedConfiguration | None:
        """Return the current content of the configuration; None without one. Raises Misconfigured."""
        if self.configuration is None:
            return None
        from celery5.config.configuration import load_values

        return load_values(self.configuration)

    def _settled(self, found: LoadedConfiguration | None = None) -> Settings:
        return read_settings(self.explicit_settings, os.environ, found)

    def use_broker(self, url: str) -> None:
        """Use a different broker from now on; connections to the previous one are closed.

        Raises:
            Misconfigured: What is sent is recorded at the moment; or a job of this application called it.
        """
        self._check_outside_of_jobs("app.use_broker()")
        if self._is_recorded:
            raise Misconfigured(
                f"recorded(app) is in force for application {self.name!r}, which opens no connection: end it before "
                "another broker is used; running_worker(app) may be outside of it"
            )
        if "connections" in self.__dict__:
            self.connections.close()
        self.__dict__["connections"] = self._connect(url)
        self._sender.reset()

    def guard_broker(self, check: Callable[[], None] | None) -> Callable[[], None] | None:
        """Call `check` before each use of the settings' broker. It raises an error if that broker must not be used.

        A broker that `use_broker` sets, as the testing kit does, is not checked. None removes the check. Returns the
        previous check.
        """
        previous, self._broker_check = self._broker_check, check
        if "connections" in self.__dict__:
            self.connections.close()
            del self.__dict__["connections"]
        return previous

    def _connect(self, url: str) -> Connections:
        connections, check = self.brokers.connect(url), self._broker_check
        return (
            connections
            if check is None or url != self.settings.broker
            else GuardedConnections(connections, check)
        )

    def _check_outside_of_jobs(
        self,
        what: str,
        remedy: str = "start the worker with other settings, or make another App for what is sent elsewhere",
    ) -> None:
        """Raise Misconfigured in a job of this application: its worker, and all other jobs there, share the settings.

        A job may well do that to another application, of which it is a client only.
        """
        job = CURRENT_JOB.get()
        if job is not None and job.task in self.tasks:
            raise Misconfigured(
                f"{what} in a job would change application {self.name!r} for all jobs of its worker: {remedy}"
            )

    def queue(self, name: str) -> QueueKeys:
        """Return the keys of one of the application's queues."""
        return self._sender.queue(name)

    def autodiscover(self, packages: str | Sequence[str] = (), *, module: str = "tasks") -> None:
        """Include every module of one name in some packages, however deep: `load` imports it.

        `app.autodiscover("shop")` is `App(include="shop.**.tasks")`, but a package may have no such module. A working
        directory is never searched.

        Args:
            packages: The dotted names of packages; default: the package whose module made this application.
            module: The name of the modules.

        Raises:
            Misconfigured: A name is invalid; or none is given, and the module of this application is in no package.
        """
        names = (packages,) if isinstance(packages, str) else tuple(packages)
        if not (names or self._package):
            raise Misconfigured(
                f"module {self.module!r} is in no package: name those that are searched: app.autodiscover('shop')"
            )
        patterns = check_includes([f"{name}.**.{module}" for name in names or (self._package,)])
        self._discovered |= {pattern for pattern in patterns if pattern not in self.include}
        self.extend_include(patterns)

    def extend_include(self, modules: Sequence[str]) -> None:
        """Include more modules, or patterns of modules: the next `load` imports them. Raises Misconfigured."""
        self.include = tuple(dict.fromkeys((*self.include, *check_includes(modules))))

    def load(self) -> None:
        """Import the modules of `include`, and adopt their free tasks and events.

        Those of the application's own module are adopted, too.

        Raises:
            Misconfigured: A module is missing or fails, an included task or event is bound to an application that
                does not include it, or an annotation cannot be resolved or has no JSON form.
        """
        import_modules(find_modules(self.include, may_be_empty=self._discovered))
        for task in find_tasks(self):
            if task.has_no_app:
                task.adopt(self)
                self.tasks.add(task)
            elif task.app is not self:
                self._take_shared(task)
        self._adopt_events()
        for declared_task in self.tasks.values():
            declared_task.parameters.resolve()
        if "workflows" in self.__dict__:
            self.workflows.resolve()
        if "middleware" in self.__dict__ and lacks_middleware(self.middleware):
            del self.__dict__["middleware"]
        is_first, self._is_loaded = not self._is_loaded, True
        if is_first and self._is_stored and "settings" in self.__dict__:
            # Only now it shows which fields fit the tasks.
            self.__dict__["settings"] = self._settled(self.read_configuration())

    def _take_shared(self, task: Task[Any, Any]) -> None:
        """Add an included task that another application has adopted, if that includes it, too.

        Its own workers would not have it otherwise. A task that is only imported here is its owner's alone.
        """
        if self._may_share("task", task.name, task.__module__, task.app, free=task.had_no_app):
            self.tasks.add_missing(task.name, lambda: task.copy_for(self))

    def _adopt_events(self) -> None:
        """Adopt included free events. One that two applications include stays with the first: there is one class."""
        modules = find_modules(self.include, may_be_empty=self.include)  # `load` has checked them
        for event in find_events((*modules, self.module)):
            if event.has_no_app:
                event.adopt(self)
            elif event.app is not self:
                self._may_share("event", event.name, event.kind.__module__, event.app, free=event.had_no_app)

    def _may_share(
        self, noun: Literal["task", "event"], name: str, module: str, owner: Application, *, free: bool
    ) -> bool:
        """Return whether something of another application is this one's, too: whether it is `free` and both include it.

        False for what is only imported here. Raises Misconfigured for what is included here and bound to an application
        that does not include it.
        """
        if not is_included(self.include, module) or owner.name == self.name:
            return False
        if free and is_included(owner.include, module):
            return True
        remedy = (
            f"import the module of {self.name!r} before the {noun} is used, and choose no default application"
            if isinstance(owner, DefaultApp)
            else f"declare it with celery5.{noun}, or leave its module out of include=[...] of {self.name!r}"
        )
        effect = "whose workers would not have it" if noun == "task" else "whose Routers would never get it"
        raise Misconfigured(
            f"{noun} {name} is included by application {self.name!r}, {effect}: it is bound to application "
            f"{owner.name!r}; {remedy}"
        )

    def signature(self, name: str, /, *args: Any, **kwargs: Any) -> Signature[Any]:
        """Return a call of the task named `name`. Raises UnknownTask when the application has no such task."""
        self.load()
        return Signature(self.tasks[name], args, kwargs)

    async def asend_many(self, signatures: Sequence[Signature[R]]) -> list[AsyncResult[R]]:
        """Send many jobs in few round trips; return their handles in order.

        Raises:
            BadArguments: Before anything is sent.
            MessageTooLarge: Before anything is sent.
            Misconfigured: Before anything is sent: a task belongs to a different application.
            BrokerUnavailable: Redis cannot be reached, and there is no `backlog`.
            BacklogFull: Redis cannot be reached, and the jobs do not fit the `backlog`.
            NotReplicated: Fewer replicas than the setting `replicas` have the jobs.
        """
        signatures = check_signatures(signatures)
        jobs = check_tasks_declared(self, [signature.job() for signature in signatures])
        holders = await self.adispatch(jobs)
        return [
            self.make_handle(job, signature.task, holders)
            for job, signature in zip(jobs, signatures, strict=True)
        ]

    @blocking(asend_many)
    def send_many(self) -> None: ...

    async def asend_jobs(self, jobs: Sequence[Job]) -> list[AsyncResult[Any]]:
        """Send jobs that were made before, with `Task.job`, as an outbox does.

        A job that is sent twice runs once, since it has its id already. The backlog is never used: after this
        returns, the caller may delete its own copy.

        Raises:
            BrokerUnavailable: Redis cannot be reached.
        """
        jobs = check_tasks_declared(self, check_jobs(jobs))
        self._check_sendable(jobs)
        holders = await self._sender.asend(jobs, use_backlog=False)
        return [self.make_handle(job, self._task_of(job), holders) for job in jobs]

    @blocking(asend_jobs)
    def send_jobs(self) -> None: ...

    def result(
        self, job_id: str, *, queue: str | None = None, task: Task[..., R] | None = None
    ) -> AsyncResult[R]:
        """Return the handle of a job that was sent before, by any process.

        Args:
            queue: The job's queue. Without it the handle locates the job when it is used: on the task's queue, or
                the default one, then on all.
            task: The job's task, which determines the type of the result.
        """
        job_id = check_job_id(job_id)
        if task is not None and not isinstance(cast("object", task), Task):
            raise TypeError(f"task is {task!r}: give the task itself, not its name")
        likely = queue or (self.settings.default_queue if task is None else task.queue)
        if shards := self.brokers.shards.get(likely):  # the shard of a job without a unique key
            likely, queue = choose_shard(likely, shards, job_id), None
        return AsyncResult(
            self,
            job_id,
            queue=likely,
            task="" if task is None else task.name,
            type=ANY_RESULT if task is None else task.result_type,
            is_located=bool(queue),
        )

    async def afind(self, job_id: str, *, queue: str | None = None) -> JobDetails | None:
        """Return all that Redis has on a job, on one queue or on any; None if it has nothing."""
        checked_id = check_job_id(job_id)
        redis = await self.connections.get_async_driver()
        return await find_job(self, redis, checked_id, queue)

    @blocking(afind)
    def find(self) -> None: ...

    async def ainfo(
        self, queue: str | None = None, *, limit: int | None = None, shards: bool = False
    ) -> AppState:
        """Return what is in the queues, or in one of them, and which processes are live.

        Args:
            queue: Only this queue. Default: all of them.
            limit: Queues that are read at most, the first by name; 0 for none. Default: all of them.
            shards: Show each shard of a queue in place of the queue, and on a Redis Cluster its node.

        Raises:
            UnknownQueue: There is no such queue.
            Misconfigured: `limit` is below 0.
        """
        _check_limit(limit)
        redis = await self.connections.get_async_driver()
        return await read_app_state(self, redis, queue, most=limit, shards=shards)

    @blocking(ainfo)
    def info(self) -> None: ...

    async def aempty(self, queue: str) -> int:
        """Revoke all jobs that wait on a queue, also scheduled and held ones; return how many.

        Running and dead jobs stay. Pause the queue first, so that no job begins.

        Raises:
            UnknownQueue: There is no such queue.
        """
        redis = await self.connections.get_async_driver()
        return await empty_queue(self, redis, queue)

    @blocking(aempty)
    def empty(self) -> None: ...

    def check_message_size(self, message: bytes, what: str) -> bytes:
        """Return `message`. Raises MessageTooLarge when it exceeds the limit."""
        limit = self.settings.message_limit
        if len(message) > limit:
            raise MessageTooLarge(
                f"{what}: {len(message)} bytes are over the limit of {limit}: "
                "pass a reference, such as a path or a key, or raise message_limit"
            )
        return message

    async def aperform(self, call: Call[T]) -> T:
        """Perform one call on the broker."""
        return await (await self.connections.get_async_driver()).perform(call)

    @blocking(aperform)
    def perform(self) -> None: ...

    def close(self) -> None:
        """Close the connections of plain Python. They open again when needed."""
        self._sender.close()
        if "connections" in self.__dict__:
            self.connections.close()

    async def adispatch(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        """Send jobs, now or by the backlog; return the holder of its key for each job that was not sent, by ids."""
        self._check_sendable(jobs)
        try:
            return await self._sender.asend(jobs)
        except BrokerUnavailable as error:
            raise without_traceback(error) from None

    @blocking(adispatch)
    def dispatch(self) -> None: ...

    def _check_sendable(self, jobs: Sequence[Job]) -> None:
        """Raise Misconfigured when this application must not send."""
        check = self._broker_check
        if check is not None and not self._is_recorded and isinstance(self.connections, GuardedConnections):
            check()

    @contextmanager
    def redirect(self, receiver: JobReceiver, check: Callable[[], None]) -> Generator[None, None, None]:
        """Pass jobs to `receiver` instead of sending them, within this block, as `celery5.testing` does.

        Args:
            receiver: What takes the jobs.
            check: Raises for each other use of a connection that is not to be made.

        Raises:
            Misconfigured: A job of this application called it: what other jobs of its worker send would be lost.
        """
        self._check_outside_of_jobs("recorded(app)", "use it in tests, outside of jobs")
        is_outermost = not self._is_recorded
        reads_hash = is_outermost and self.config == "redis" and "settings" not in self.__dict__
        if reads_hash:  # no connection is opened for the settings, either: those of the code are used
            self.__dict__["settings"] = self._settled()
        previous_connections = self.connections
        previous_receiver = self._sender.redirect(receiver)
        self._is_recorded, self.__dict__["connections"] = (
            True,
            GuardedConnections(previous_connections, check),
        )
        try:
            yield
        finally:
            self._sender.redirect(previous_receiver)
            self._is_recorded, self.__dict__["connections"] = not is_outermost, previous_connections
            if reads_hash:
                for name in ("settings", "connections", "middleware"):
                    self.__dict__.pop(name, None)

    def make_handle(self, job: Job, task: Task[..., R] | None, holders: Mapping[str, str]) -> AsyncResult[R]:
        """Return the handle of a job of `task` that `adispatch` was called with; `holders` is what that returned."""
        holder = holders.get(job.id)
        return AsyncResult(
            self,
            holder or job.id,
            queue=job.queue,
            task=job.task,
            type=task.result_type if task else ANY_RESULT,
            ignore_result=job.ignore_result,
            duplicate=holder is not None,
        )

    def _task_of(self, job: Job) -> Task[..., Any] | None:
        return self.tasks[job.task] if job.task in self.tasks else None  # noqa: SIM401  it raises UnknownTask


WATCH_ONLY_BREAKER = BreakerPolicy(mode="watch")
"""The default breaker of tasks: it counts and warns, and stops nothing (docs/decisions/0009)."""
_APPS: WeakSet[App] = WeakSet()
DEFAULT_APP = "celery5"
"""The name of the default application."""
_DEFAULT: "list[DefaultApp]" = []


def _get_origin(frame: FrameType) -> tuple[str, str]:
    """Return the names of the module whose code a frame runs, and of its package; '' for none."""
    names = frame.f_globals
    return names.get("__name__", ""), names.get("__package__") or ""


class DefaultApp(App):
    """The application of tasks and events that belong to no other one. It sends nothing until somebody has chosen it:
    a module keeps it (`app = celery5.default_app()`), it was configured, or a command was started for it.

    Most often they are there because the module of their application was not imported before they were used, and no
    worker reads the default one: what is sent there would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__(DEFAULT_APP)
        self._is_chosen = False
        self._searched_modules = 0

    @property
    def is_chosen(self) -> bool:
        """Whether somebody has chosen it."""
        if not self._is_chosen:
            self._is_chosen = self._is_kept_by_a_module()
        return self._is_chosen

    def choose(self) -> Self:
        """Let what belongs to it be sent from now on. Returns the application."""
        self._is_chosen = True
        return self

    def _is_kept_by_a_module(self) -> bool:
        """Search all modules when there are new ones, which takes milliseconds, and the program's own each time."""
        count = len(sys.modules)
        modules = (
            [sys.modules.get("__main__")] if count == self._searched_modules else list(sys.modules.values())
        )
        self._searched_modules = count
        return any(
            value is self for module in modules for value in list(getattr(module, "__dict__", {}).values())
        )

    @lazy_property
    def connections(self) -> Connections:
        """The connections to the broker. They are used only when the application was chosen."""
        return GuardedConnections(self.brokers.connect(self.settings.broker), self._check_chosen)

    def use_broker(self, url: str) -> None:
        """Use a different broker from now on. That is a choice of this application."""
        self._is_chosen = True
        super().use_broker(url)

    def _check_sendable(self, jobs: Sequence[Job]) -> None:
        """Raise Misconfigured unless the application was chosen."""
        self._check_chosen(jobs)

    def _check_chosen(self, jobs: Sequence[Job] = ()) -> None:
        if self.is_chosen or self._is_recorded:
            return
        from celery5.config.unincluded import advise_including  # reads files, which only mistakes need

        names = [job.task for job in jobs[:1]] or list(self.tasks)
        apps = [app for app in _APPS if app is not self]
        task = self.tasks[names[0]] if names and names[0] in self.tasks else None
        remedy = (
            advise_including(task.__module__, task.__name__, apps[0].module)
            if len(apps) == 1 and task is not None
            else "import the module of your App first, one that includes or imports the task (App(include=[...]))"
        )
        raise Misconfigured(
            f"{join_names(names, 3) or 'this'} belongs to no application, and nobody has chosen the default one, which "
            f"no worker may read: {remedy}; or write app = celery5.default_app() in a module, if workers run the "
            "default one"
        )


def default_app() -> DefaultApp:
    """Return the application of tasks that belong to no other one; its name is `celery5`.

    It sends when a module keeps it (`app = celery5.default_app()`), or it was configured: see `DefaultApp`.
    """
    if not _DEFAULT:
        _DEFAULT.append(DefaultApp())
    return _DEFAULT[0]


def list_unincluded() -> list[str]:
    """Return a line for each module of the project whose tasks no application has, with what to write.

    There are none if the default application was chosen: it has all tasks.
    """
    from celery5.config.unincluded import advise_including, find_unincluded  # as above

    apps = list(_APPS)
    if any(isinstance(app, DefaultApp) and app.is_chosen for app in apps):
        return []
    apps = [app for app in apps if not isinstance(app, DefaultApp)]
    include = [name for app in apps for name in (app.module, *app.include)]
    declared = {(task.__module__, task.__name__) for app in apps for task in app.tasks.values()}
    own = apps[0].module if len(apps) == 1 else ""
    return [
        f"module {module!r} declares tasks that no application has ({join_names(tasks, 3)}): "
        f"{advise_including(module, tasks[0], own)}"
        for module, tasks in find_unincluded(include, declared).items()
    ]


def find_owner(module: str, free: object) -> App:
    """Return the application that owns an object from `module` that was declared without one.

    It is the application that includes the module or imports the object, else the default one. While nobody has chosen
    that, the object may find another one later: see `is_settled_owner`.
    """
    for app in list(_APPS):
        own = vars(sys.modules[app.module]).values() if app.module in sys.modules else ()
        if is_included(app.include, module) or any(value is free for value in own):
            return app
    return default_app()


def is_settled_owner(app: object) -> bool:
    """Return whether what found that application as its owner stays with it."""
    return not isinstance(app, DefaultApp) or app.is_chosen


def _find_owner_of_task(free: Task[Any, Any]) -> App:
    owner = find_owner(free.__module__, free)
    owner.tasks.add(free)
    if is_settled_owner(owner):
        free.adopt(owner)
    return owner


def _find_owner_of_event(module: str, kind: object) -> App:
    owner = find_owner(module, kind)
    if is_settled_owner(owner):
        get_event_declaration(cast("type[Any]", kind)).adopt(owner)
    return owner


task: TaskDecorator = TaskDecorator(find_owner=_find_owner_of_task)
"""Declare a task without naming an application (the CEP's spelling): the one that includes or imports it owns it."""
event: DeclareEvent = DeclareEvent(find_owner=_find_owner_of_event)
"""Declare an event without naming an application: the one that includes or imports it owns it."""


MAX_APP_NAME = 200
"""Characters of the name of an application: it is in every key."""


def check_app_name(name: str) -> str:
    """Return the name of an application. Raises Misconfigured for one that cannot be part of a key."""
    is_text = isinstance(cast("object", name), str) and 0 < len(name) <= MAX_APP_NAME and name.isprintable()
    if not is_text or any(c.isspace() or c in "{}:" for c in name):
        shown = repr(name)[:MAX_APP_NAME]
        raise Misconfigured(
            f"application name {shown}: use 1 to {MAX_APP_NAME} printable characters without spaces, braces or colons"
        )
    if name in (".", ".."):
        raise Misconfigured(
            f"application name {name!r}: folders are named after it, and no folder can have this name"
        )
    return name


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise Misconfigured(f"limit is {limit!r}: give a number of queues, 0 or more")
