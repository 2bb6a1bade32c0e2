"""Wiring: builds a process out of its parts, by the names of their constructors' parameters.

A process is a class with one line for each part: what makes it, and if it is a boot step, after which others it starts.
A parameter is a value, else another part, else the setting of that name.
Besides the process pages this is the only place that knows the injector; the parts never know that they are injected.
Type checkers cannot see through an injector: `tests/pure/process/test_wiring.py` writes the calls that it makes out in
full and has mypy check them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, ismethoddescriptor
from typing import Any, Generic, TypeVar, cast

from dependencies import Injector, value
from msgspec import Struct
from msgspec.structs import asdict

from celery5.bootsteps.boot import Service, Step

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AnyService = TypeVar("AnyService", bound=Service)


class Part(Generic[T_co]):
    """One part of a process, which each incarnation makes once.

    `make` is a class or a function: it gets what its parameters name, each another part or a value.
    """

    def __init__(self, make: Callable[..., T_co]) -> None:
        self.make = make
        self.name = ""
        """The attribute that holds it, by which other parts ask for it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name


class StepPart(Part[T_co]):
    """A part that is a service and runs as a boot step; or a mapping of services, of which each is a step."""

    def __init__(
        self,
        make: Callable[..., T_co],
        *,
        after: Sequence["StepPart[object]"],
        step_name: str,
        start_limit: float,
        stop_limit: float | Part[float],
        is_mapping: bool,
    ) -> None:
        super().__init__(make)
        self.after = after
        self._step_name = step_name
        self._start_limit = start_limit
        self.stop_limit = stop_limit
        self.is_mapping = is_mapping

    @property
    def step_name(self) -> str:
        """The name of the step in logs and health checks, and for the steps of an application."""
        return self._step_name or self.name.replace("_", "-")

    def list_steps(self, made: Mapping[str, Any]) -> Iterator[Step]:
        """Yield the step, or one for each service of the mapping. `made` has the parts by name."""
        services: Mapping[str, Any] = made[self.name] if self.is_mapping else {"": made[self.name]}
        for key, service in services.items():
            yield Step(
                f"{self.step_name}-{key}" if key else self.step_name,
                service,
                tuple(self._list_requirements(key, made)),
                start_limit=self._start_limit,
                stop_limit=self.get_stop_limit(made),
            )

    def get_stop_limit(self, made: Mapping[str, Any]) -> float:
        """Return how many seconds the step may take to end."""
        limit = self.stop_limit
        return cast("float", made[limit.name]) if isinstance(limit, Part) else limit

    def _list_requirements(self, key: str, made: Mapping[str, Any]) -> Iterator[str]:
        for part in self.after:
            if not part.is_mapping:
                yield part.step_name
            elif key:
                yield f"{part.step_name}-{key}"
            else:
                yield from (f"{part.step_name}-{name}" for name in made[part.name])


def part(make: Callable[..., T]) -> Part[T]:
    """Declare a part that is no boot step."""
    return Part(make)


def step(
    make: Callable[..., AnyService],
    *,
    after: Sequence[StepPart[object]] = (),
    name: str = "",
    start_limit: float = 30.0,
    stop_limit: float | Part[float] = 30.0,
) -> StepPart[AnyService]:
    """Declare a part that runs as a boot step.

    Args:
        make: The class of the service, or a function that returns it.
        after: The steps that must be up before it. It stops before them.
        name: The name of the step, which users see; default: that of the attribute, with dashes.
        start_limit: Seconds that it may take to come up.
        stop_limit: Seconds that it may take to end, or a part that is this number.
    """
    return StepPart(
        make,
        after=after,
        step_name=name,
        start_limit=start_limit,
        stop_limit=stop_limit,
        is_mapping=False,
    )


def steps(
    make: Callable[..., Mapping[str, AnyService]],
    *,
    after: Sequence[StepPart[object]] = (),
    name: str = "",
    stop_limit: float | Part[float] = 30.0,
) -> StepPart[Mapping[str, AnyService]]:
    """Declare a mapping of services, each of which runs as a boot step `name-key`.

    A step after it starts after all of them, but in another mapping only after the one of the same key.
    """
    return StepPart(
        make, after=after, step_name=name, start_limit=30.0, stop_limit=stop_limit, is_mapping=True
    )


def list_parts(parts: type) -> dict[str, Part[object]]:
    """Return the parts that a class declares as its attributes, by name; what it inherits comes first.

    A class statement of `Injector` itself does not work on Python 3.13 (docs/decisions/0002), so the process pages
    declare plain classes.
    """
    return {
        name: part
        for owner in reversed(parts.__mro__)
        for name, part in vars(owner).items()
        if isinstance(part, Part)
    }


def list_step_parts(parts: type) -> list[StepPart[object]]:
    """Return the boot steps of a process, in order: those that its class declares itself.

    What it inherits are parts, and none of its steps: a process that cannot reach its broker runs few of them.
    """
    return [part for part in vars(parts).values() if isinstance(part, StepPart)]


class StepsMaker:
    """Makes the boot steps of a process. The injector learns from its signature that it needs their services."""

    def __init__(self, parts: type) -> None:
        self._steps = list_step_parts(parts)
        limits = [step.stop_limit for step in self._steps if isinstance(step.stop_limit, Part)]
        names = dict.fromkeys(part.name for part in [*self._steps, *limits])
        self.__name__ = "make_steps"
        self.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])

    def __call__(self, **made: Any) -> tuple[Step, ...]:
        return tuple(step for part in self._steps for step in part.list_steps(made))


def steps_of(parts: type) -> Part[tuple[Step, ...]]:
    """Declare the boot steps of a class of parts as a part: for a boot graph within another."""
    return Part(StepsMaker(parts))


def list_values(*values: Struct) -> dict[str, Any]:
    """Return the fields of these values by name. Raises TypeError when two of them have one name."""
    found: dict[str, Any] = {}
    for owner in values:
        for name in owner.__struct_fields__:
            if name in found:
                raise TypeError(f"two values are named {name!r}, one of them in {type(owner).__name__}")
            found[name] = getattr(owner, name)
    return found


def list_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the value `settings`, by name; nothing without such a value."""
    settings = values.get("settings")
    return asdict(settings) if isinstance(settings, Struct) else {}


def build(root: type[T], parts: type, /, *values: Struct, **overrides: object) -> T:
    """Build one `root` with everything that its constructor asks for, directly or not.

    It is asked for once, so that every part in it exists once.

    Args:
        root: The class to build.
        parts: A class whose attributes are the parts. `steps` is added: its boot steps.
        values: Structs, whose fields are what the parts ask for besides each other. A field `settings`
            has the settings of the application: a part gets one by its name, where no part and no value has that name.
        overrides: Values that win over those of the same name.
    """
    declared = {"steps": steps_of(parts), **list_parts(parts)}
    given = list_values(*values)
    scope = list_settings(given)
    for name, part in declared.items():
        scope[name] = part.make if isinstance(part.make, type) else value(part.make)
    known = {name: _as_value(found) for name, found in {**scope, **given, **overrides}.items()}
    return cast("T", cast("Any", Injector(**known, root=root)).root)


def _as_value(found: object) -> object:
    """Return what an injector takes for a part or value. From CPython 3.14 on, it takes a partial for a descriptor."""
    return value(lambda: found) if ismethoddescriptor(found) else found
