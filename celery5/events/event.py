"""Declare events, send them, and subscribe tasks to them.

A sender does not know the subscribers: workers register these in Redis, and Routers make the jobs.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    dataclass_transform,
    get_type_hints,
    overload,
)
from weakref import WeakKeyDictionary

import msgspec

from celery5.application import Application
from celery5.broker.colour import blocking
from celery5.broker.keys import EVENTS
from celery5.broker.wall_clock import wall_time
from celery5.errors import BadArguments, Misconfigured
from celery5.logs.trace import get_current_trace
from celery5.protocol.events.messages import VERSION, EventMessage, Subscription, encode, make_job_template
from celery5.protocol.job.arguments import Parameters, encode_value
from celery5.protocol.job.job import Job, SendOptions, new_id
from celery5.protocol.names import get_module_name
from celery5.similar_names import did_you_mean


def get_field_parameters(kind: Any, name: str) -> Parameters:
    """Return the fields of an event as parameters, which are checked and encoded like a task's arguments."""
    hints = get_type_hints(kind, include_extras=True)

    def call(**_fields: Any) -> None: ...

    call.__annotations__ = {field: hints[field] for field in kind.__struct_fields__}
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    vars(call)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(
                field.name,
                keyword_only,
                annotation=hints[field.name],
                default=empty if field.required else _get_constant_default(field),
            )
            for field in msgspec.structs.fields(kind)
        ]
    )
    try:
        return Parameters(name, call)
    except Misconfigured as error:
        text = str(error).replace("task ", "event ", 1).replace("parameter ", "field ", 1)
        raise Misconfigured(text) from None


def get_field_defaults(kind: Any, takes: Sequence[str] | None) -> dict[str, msgspec.Raw]:
    """Return the constant defaults of those fields that a task takes, as JSON."""
    defaults: dict[str, msgspec.Raw] = {}
    for field in msgspec.structs.fields(kind):
        is_fixed = field.default is not msgspec.NODEFAULT or field.default_factory in _CONSTANT_FACTORIES
        if not field.required and is_fixed and (takes is None or field.name in takes):
            with suppress(TypeError):  # a default without a JSON form is refused when the event is made
                defaults[field.name] = msgspec.Raw(encode_value(_get_constant_default(field)))
    return defaults


def check_field_names(event: str, fields: Sequence[str], names: Iterable[str]) -> None:
    """Raise BadArguments for a field that the event does not have."""
    unknown = next((name for name in names if name not in fields), None)
    if unknown is not None:
        similar = did_you_mean(unknown, fields)
        suggestion = f": {similar}" if similar else ";"
        raise BadArguments(
            f"event {event} has no field {unknown!r}{suggestion} its fields: {', '.join(fields) or 'none'}"
        )


def _get_constant_default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field; None where a function makes it for each event."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return cast("Any", field.default_factory)() if field.default_factory in _CONSTANT_FACTORIES else None


def as_field_error(error: BadArguments) -> BadArguments:
    """Return the same error, about fields instead of arguments."""
    text = str(error).replace(": parameter ", ": field ", 1).replace(": an argument ", ": a field ", 1)
    return BadArguments(text.replace("keyword argument", "field"))


def get_taken_fields(task: "SubscribedTask", event: str, fields: Sequence[str]) -> tuple[str, ...] | None:
    """Return the fields that a task takes; None for all. Raises Misconfigured if it needs others."""
    parameters = inspect.signature(task.function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and (parameter.name not in fields or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if missing:
        raise Misconfigured(
            f"task {task.name} needs {missing[0]!r}, which event {event} does not give by that name; "
            f"its fields: {', '.join(fields) or 'none'}"
        )
    return None if inspect.Parameter.VAR_KEYWORD in kinds else tuple(parameter.name for parameter in by_name)


class SubscribedTask(Protocol):
    """A task, as events need it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def function(self) -> Callable[..., Any]:
        """What its jobs call."""
        ...

    @property
    def app(self) -> Application:
        """The application that it belongs to."""
        ...

    def options(self, **options: Unpack[SendOptions]) -> Self:
        """Return the task with these options for its jobs. Raises Misconfigured."""
        ...

    def make_template(self) -> Job:
        """Return a job without id and arguments, as the task's options make it."""
        ...


P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="Event")
TaskT = TypeVar("TaskT", bound=SubscribedTask)


class SentEvent(msgspec.Struct, frozen=True):
    """An event that was sent. There is no result to wait for: each subscriber's job has its own."""

    id: str
    event: str
    version: int


if TYPE_CHECKING:

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    class _Fields:
        __struct_fields__: ClassVar[tuple[str, ...]]

else:  # type checkers require `frozen=True` in each class that derives from a frozen Struct

    class _Fields(msgspec.Struct, frozen=True): ...


class Event(_Fields):
    """The base of event classes; `@app.event` derives one from a plain annotated class.

    An instance is immutable, and its fields are checked against their annotations: a wrong value raises
    BadArguments, which is a TypeError. Derive from it where a type checker needs `delay` and the fields.
    """

    def __post_init__(self) -> None:
        """Check the fields."""
        get_event_declaration(type(self)).encode_fields(self)

    @overload
    @classmethod
    def subscribe(cls, task: TaskT, /, **options: Any) -> TaskT: ...
    @overload
    @classmethod
    def subscribe(cls, /, **options: Any) -> Callable[[TaskT], TaskT]: ...
    @classmethod
    def subscribe(cls, task: Any = None, /, **options: Any) -> Any:
        """Run `task` for each such event, with those fields as arguments that it takes.

        Also a decorator of a task, with and without options. Its jobs have retries and dead letters of their own. A
        second subscription of a task replaces the first.

        Args:
            options: `versions`, the versions of the event that it takes (default: that of this class), and options
                of a task: `queue`, `countdown`, `expires`, `max_retries` and so on.

        Raises:
            Misconfigured: An option makes no sense, or the task needs arguments that are no fields.
        """
        declaration = get_event_declaration(cls)

        def subscribe(task: TaskT) -> TaskT:
            declaration.subscribe(task, options)
            return task

        return subscribe if task is None else subscribe(task)

    @classmethod
    def unsubscribe(cls, task: SubscribedTask, /) -> bool:
        """Withdraw a task's subscription at once, whatever workers declare. For plain Python.

        See `app.events.unsubscribe`.
        """
        app = cast("EventApplication", task.app)  # an application of tasks is one of events, too
        return app.events.unsubscribe(get_event_declaration(cls).name, task.name)

    # `cls` is typed as a callable with the fields, so that type checkers know them in `delay`, as in the constructor.
    @classmethod
    def job(cls: Callable[P, Any], /, *args: P.args, **fields: P.kwargs) -> Job:
        """Return the message that `delay` with these fields would publish.

        An outbox stores it and sends it with `send_jobs`.

        Raises:
            BadArguments: A field is wrong; it is a TypeError.
            MessageTooLarge: The message exceeds the limit.
        """
        declaration, event = _make_event(cls, args, fields)
        return declaration.make_job(event)

    @classmethod
    def delay(cls: Callable[P, Any], /, *args: P.args, **fields: P.kwargs) -> SentEvent:
        """Send the event. For plain Python; in an event loop await `adelay`. Raises as `job`, and BrokerUnavailable."""
        return _delay(cls, args, fields)

    @classmethod
    async def adelay(cls: Callable[P, Any], /, *args: P.args, **fields: P.kwargs) -> SentEvent:
        """Send the event, from Trio or asyncio."""
        return await _adelay(cls, args, fields)


class EventClass(Generic[T]):
    """The type of a plain class that is an event. Type checkers know fields only in subclasses of `Event`."""

    if TYPE_CHECKING:

        def __call__(self, **fields: Any) -> T: ...
        @overload
        def subscribe(self, task: TaskT, /, **options: Any) -> TaskT: ...
        @overload
        def subscribe(self, /, **options: Any) -> Callable[[TaskT], TaskT]: ...
        def subscribe(self, task: Any = None, /, **options: Any) -> Any: ...
        def unsubscribe(self, task: SubscribedTask, /) -> bool:
            """See `Event.unsubscribe`."""
            ...

        def job(self, /, **fields: Any) -> Job:
            """See `Event.job`."""
            ...

        def delay(self, /, **fields: Any) -> SentEvent:
            """See `Event.delay`."""
            ...

        async def adelay(self, /, **fields: Any) -> SentEvent:
            """See `Event.adelay`."""
            ...


class EventSender(Protocol):
    """The events of an application, as an event needs them: `app.events`."""

    def add(self, declaration: "EventDeclaration") -> None:
        """Add an event. Raises Misconfigured when a different class has its name and version."""
        ...

    async def asend(self, events: Sequence[Event]) -> list[SentEvent]:
        """Send events, in any colour."""
        ...

    def unsubscribe(self, event: str, task: str) -> bool:
        """Withdraw the subscription of a task, in plain Python. Return whether there was one."""
        ...


class EventApplication(Application, Protocol):
    """The application that an event belongs to."""

    @property
    def events(self) -> EventSender:
        """Its events."""
        ...


FindOwner = Callable[[str, object], EventApplication]
"""Return the application of something from a module that was declared with none; if it stays with that, adopt it."""


class EventDeclaration:
    """The declaration of an event, and the tasks of this process that are subscribed to it."""

    def __init__(
        self,
        kind: type[Event],
        *,
        name: str,
        version: int,
        app: EventApplication | None = None,
        of: str = "",  # the name of another application whose event it is
        is_of_every_application: bool = False,  # whether it is an event of every application
        find_owner: FindOwner | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.version = version
        self.fields: tuple[str, ...] = tuple(kind.__struct_fields__)
        self.is_of_every_application = is_of_every_application
        self._of = of
        self._app = app
        self._find_owner = find_owner
        self.had_no_app: bool = app is None
        self._parameters = get_field_parameters(kind, name)
        self._subscribed: dict[str, tuple[SubscribedTask, tuple[int, ...], tuple[str, ...] | None]] = {}

    @property
    def app(self) -> EventApplication:
        """The application that sends the event, or, with `of`, subscribes to a foreign one."""
        if self.is_of_every_application:
            raise Misconfigured(f"event {self.name} is of every application: app.events.send([...]) sends it")
        if self._app is None:
            if self._find_owner is None:
                raise Misconfigured(
                    f"event {self.name} belongs to no application: declare it with @app.event"
                )
            return self._find_owner(self.kind.__module__, self.kind)
        return self._app

    @property
    def of(self) -> str:
        """The name of the application whose event it is."""
        return self._of or self.app.name

    def adopt(self, app: "EventApplication") -> None:
        """Belong to `app` from now on, unless it belongs to an application already."""
        if self._app is None and not self.is_of_every_application:
            self._app = app
            app.events.add(self)

    @property
    def has_no_app(self) -> bool:
        """Whether it was declared with no application and has not been adopted by one."""
        return self._app is None

    def make_event(self, fields: dict[str, Any]) -> Event:
        """Return an event with these fields. Raises BadArguments."""
        try:
            return self.kind(**fields)
        except BadArguments:
            raise
        except TypeError as error:
            check_field_names(self.name, self.fields, fields)  # msgspec would name a missing field first
            known = ", ".join(self.fields) or "none"
            raise BadArguments(
                f"{self.name}: {str(error).replace('argument', 'field')}; its fields: {known}"
            ) from None

    def parse_event(self, fields: Mapping[str, object]) -> Event:
        """Return an event from fields in their JSON form. Raises BadArguments."""
        check_field_names(self.name, self.fields, fields)
        try:
            _, values = self._parameters.decode(msgspec.Raw(b"[]"), msgspec.Raw(msgspec.json.encode(fields)))
        except BadArguments as error:
            raise as_field_error(error) from None
        return self.make_event(dict(values))

    def encode_fields(self, event: Event) -> dict[str, msgspec.Raw]:
        """Return the fields as JSON. Raises BadArguments."""
        try:
            _, raw = self._parameters.encode((), {name: getattr(event, name) for name in self.fields})
        except BadArguments as error:
            raise as_field_error(error) from None
        return _FIELDS.decode(raw)

    def make_job(self, event: Event, app: Application | None = None) -> Job:
        """Return the message of an event for the Routers of its application."""
        app = app if self.is_of_every_application and app is not None else self.app
        if self._of and self._of != app.name:
            raise Misconfigured(f"event {self.name} is of application {self._of!r}: it is sent there")
        message = EventMessage(
            v=VERSION,
            id=new_id(),
            event=self.name,
            version=self.version,
            fields=self.encode_fields(event),
            sent=wall_time(),
            trace=get_current_trace(),
        )
        return Job(
            message.id, self.name, EVENTS, app.check_message_size(encode(message), self.name), app=app.name
        )

    def subscribe(self, task: Any, options: Mapping[str, Any]) -> None:
        """Record a subscription. Raises Misconfigured."""
        if not hasattr(cast("type[object]", type(task)), "make_template"):
            raise Misconfigured(f"{self.name}.subscribe takes a task, got {task!r}: put @app.task below it")
        task = cast("SubscribedTask", task)
        options = dict(options)
        versions = _parse_versions(options.pop("versions", self.version), self.name)
        unsuitable = [name for name in ("id", "key", "eta", "unique_for") if options.get(name) is not None]
        if unsuitable:
            raise Misconfigured(
                f"{unsuitable[0]} is not for a subscription: each event's job has an id of its own"
            )
        takes = get_taken_fields(task, self.name, self.fields)
        self._subscribed[task.name] = (task.options(**options) if options else task, versions, takes)

    def list_subscriptions(self, app: Application) -> list[Subscription]:
        """Return the subscriptions of an application's tasks, as the registry stores them."""
        subscriptions: list[Subscription] = []
        for task, versions, takes in self._subscribed.values():
            if task.app is app:
                job, expires_in = make_job_template(task.make_template())
                # This class does not know the defaults of other versions.
                defaults = get_field_defaults(self.kind, takes) if versions == (self.version,) else {}
                subscriptions.append(Subscription(self.name, versions, job, takes, expires_in, defaults))
        return subscriptions


class DeclareEvent:
    """The decorators `@event` and `@app.event`, which work with and without arguments."""

    def __init__(
        self,
        app: EventApplication | None = None,
        *,
        of_every_application: bool = False,
        find_owner: FindOwner | None = None,
    ) -> None:
        self._app = app
        self._is_of_every_application = of_every_application
        self._find_owner = find_owner

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first one that fits is meant
        self, kind: type[E], /
    ) -> type[E]: ...
    @overload
    def __call__(self, kind: type[T], /) -> EventClass[T]: ...
    @overload
    def __call__(
        self, *, name: str | None = None, version: int = 1, of: str | None = None
    ) -> Callable[[type[Any]], Any]: ...
    def __call__(  # type: ignore[misc]
        self,
        kind: type[Any] | None = None,
        /,
        *,
        name: str | None = None,
        version: int = 1,
        of: str | None = None,
    ) -> Any:
        """Declare an event.

        Args:
            name: By default the module and the qualified name of the class.
            version: The version of its meaning.
            of: The name of the application whose event it is, to subscribe to a foreign event.

        Raises:
            Misconfigured: An argument makes no sense, or the name and version are taken.
        """

        def declare(kind: type[Any]) -> Any:
            if not isinstance(cast("object", kind), type):
                raise Misconfigured(f"@event takes a class, got {kind!r}")
            full_name = name or f"{get_module_name(kind)}.{kind.__qualname__}"
            if not _is_version(version):
                raise Misconfigured(f"event {full_name}: version is {version!r}: give 1 or more")
            event_class = _make_event_class(kind, full_name)
            declaration = EventDeclaration(
                event_class,
                name=full_name,
                version=version,
                app=self._app,
                of=of or "",
                is_of_every_application=self._is_of_every_application,
                find_owner=self._find_owner,
            )
            _DECLARED[event_class] = declaration
            if self._app is not None:
                self._app.events.add(declaration)
            return event_class

        return declare if kind is None else declare(kind)


def _make_event(kind: Any, args: Sequence[object], fields: dict[str, Any]) -> tuple[EventDeclaration, Event]:
    """Return the event's declaration, and an event with these fields. Raises BadArguments."""
    declaration = get_event_declaration(kind)
    if args:
        raise BadArguments(f"{declaration.name}: pass fields by name, not {args[0]!r}")
    return declaration, declaration.make_event(fields)


def get_event_declaration(kind: type[Any]) -> EventDeclaration:
    """Return the declaration of an event. Raises Misconfigured for a class without one."""
    declaration = _DECLARED.get(kind)
    if declaration is None:
        raise Misconfigured(f"{kind.__qualname__} is no event yet: put @app.event above the class")
    return declaration


def list_event_declarations() -> list[EventDeclaration]:
    """Return all events that were declared in this process."""
    return list(_DECLARED.values())


def find_events(modules: Iterable[str]) -> Iterator[EventDeclaration]:
    """Yield all events in these modules, of any owner, but for those of every application."""
    for module in modules:
        for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
            declaration = _DECLARED.get(value) if isinstance(value, type) else None
            if declaration is not None and not declaration.is_of_every_application:
                yield declaration


async def _adelay(kind: Any, args: Sequence[object], fields: dict[str, Any]) -> SentEvent:
    declaration, event = _make_event(kind, args, fields)
    return (await declaration.app.events.asend([event]))[0]


@blocking(_adelay)
def _delay() -> None: ...


def _make_event_class(kind: type[Any], name: str) -> type[Event]:
    """Return the class of an event: `kind` itself if it derives from Event, else a new class with its content."""
    if issubclass(kind, Event):
        return kind
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception as error:  # an annotation is code: it may raise anything
        raise Misconfigured(f"event {name}: an annotation cannot be read: {error}") from None
    own = {field: hint for field, hint in hints.items() if getattr(hint, "__origin__", hint) is not ClassVar}
    reserved = sorted(set(own) & set(_RESERVED))
    if reserved:
        raise Misconfigured(
            f"event {name}: a field cannot be called {reserved[0]!r}: events have that themselves"
        )
    fields = [
        (field, hint, getattr(kind, field)) if hasattr(kind, field) else (field, hint)
        for field, hint in own.items()
    ]
    namespace = {
        name: value for name, value in vars(kind).items() if name not in own and name not in _SET_BY_PYTHON
    }
    namespace["__qualname__"] = kind.__qualname__
    bases: tuple[Any, ...] = (Event, *(base for base in kind.__bases__ if base is not object))
    try:
        return cast(
            "type[Event]",
            msgspec.defstruct(
                kind.__name__,
                fields,
                bases=bases,
                module=kind.__module__,
                namespace=namespace,
                frozen=True,
                kw_only=True,
            ),
        )
    except TypeError as error:
        raise Misconfigured(f"event {name}: {error}") from None


def _parse_versions(option: object, name: str) -> tuple[int, ...]:
    versions = (option,) if isinstance(option, int) else tuple(cast("Sequence[object]", option))
    if not versions or not all(map(_is_version, versions)):
        raise Misconfigured(f"{name}.subscribe: versions is {option!r}: give a version, or several")
    return tuple(sorted(set(cast("tuple[int, ...]", versions))))


def _is_version(version: object) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and version >= 1


_CONSTANT_FACTORIES = (list, dict, set)
"""Factories of defaults that make the same each time."""
_DECLARED: WeakKeyDictionary[type[Any], EventDeclaration] = WeakKeyDictionary()
_RESERVED = ("subscribe", "unsubscribe", "delay", "adelay", "job")
_SET_BY_PYTHON = ("__dict__", "__weakref__", "__annotations__", "__qualname__", "__module__")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
