"""Wiring: builds a process out of its parts, by the names of their constructors' parameters.

Besides the process pages this is the only place that knows the injector; the parts never know that they are injected.
Type checkers cannot see through an injector: `tests/pure/process/test_wiring.py` writes the calls that it makes out in
full and has mypy check them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from dependencies import Injector, value

from celery5.bootsteps.boot import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Factory:
    """A part that a function makes, and not a constructor."""

    function: Callable[..., Any]


def made_by(function: Callable[..., Any]) -> Any:
    """Declare a part that `function` makes: it asks by its parameters' names, as a constructor does."""
    return Factory(function)


def list_parts(parts: type) -> dict[str, Any]:
    """Return the parts that a class declares as its attributes, by name; what it inherits comes first.

    A class statement of `Injector` itself does not work on Python 3.13 (docs/decisions/0002), so the process pages
    declare plain classes.
    """
    return {
        name: part
        for owner in reversed(parts.__mro__[:-1])
        for name, part in vars(owner).items()
        if not name.startswith("_")
    }


def list_values(*values: object) -> dict[str, Any]:
    """Return the fields of these dataclass instances by name. Raises TypeError when two of them have one name."""
    found: dict[str, Any] = {}
    for owner in values:
        for each in fields(cast("Any", owner)):
            if each.name in found:
                raise TypeError(f"two values are named {each.name!r}, one of them in {type(owner).__name__}")
            found[each.name] = getattr(owner, each.name)
    return found


def build(root: type[T], parts: type, /, *values: object, **overrides: object) -> T:
    """Build one `root` with everything that its constructor asks for, directly or not.

    It is asked for once, so that every part in it exists once.

    Args:
        root: The class to build.
        parts: A class whose attributes are the parts: classes, and functions marked by `made_by`.
        values: Dataclass instances, whose fields are what the parts ask for besides each other.
        overrides: Parts or values that win over those of the same name.
    """
    scope = {
        name: value(part.function) if isinstance(part, Factory) else part
        for name, part in list_parts(parts).items()
    }
    scope |= list_values(*values)
    return cast("T", cast("Any", Injector(**{**scope, **overrides, "root": root})).root)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of a boot table: a step but for its service, which is the value of the field."""

    name: str
    requires: Sequence[str]
    start_limit: float
    stop_limit: float


def step(
    name: str, *, requires: Sequence[str] = (), start_limit: float = 30.0, stop_limit: float = 30.0
) -> Any:
    """Declare a field of a boot table: what it holds is the service of this step.

    Args:
        name: The name of the step, which others require and which logs and health checks show.
        requires: The names of the steps that must be up before it.
        start_limit: Seconds that it may take to come up.
        stop_limit: Seconds that it may take to end.
    """
    return field(metadata={"row": StepRow(name, requires, start_limit, stop_limit)})


@dataclass(frozen=True, kw_only=True)
class BootTable:
    """The boot graph of a process: one field for each step, with its service as the type and what it requires.

    Steps come up from the top, each when what it requires is up, and go down from the bottom. A field may hold a
    mapping of services: then each of them is a step, `name-key`. One that requires it requires all of them, and in
    another mapping the one of the same key.
    """

    def list_steps(self) -> tuple[Step, ...]:
        """Return the steps of the table, in its order."""
        rows: list[tuple[StepRow, Any]] = [
            (each.metadata["row"], getattr(self, each.name)) for each in fields(self) if each.metadata
        ]
        keys: dict[str, list[str]] = {
            row.name: list(cast("Mapping[str, Any]", service))
            for row, service in rows
            if isinstance(service, Mapping)
        }
        return tuple(
            Step(
                name,
                service,
                tuple(_expand(row.requires, keys, key)),
                start_limit=row.start_limit,
                stop_limit=self.get_stop_limit(row),
            )
            for row, services in rows
            for name, key, service in _list_services(row.name, services)
        )

    def get_stop_limit(self, row: StepRow) -> float:
        """Return how many seconds a step may take to end, where that is known only at run time."""
        return row.stop_limit


def _list_services(name: str, services: Any) -> Iterator[tuple[str, str | None, Any]]:
    if not isinstance(services, Mapping):
        yield name, None, services
        return
    for key, service in cast("Mapping[str, Any]", services).items():
        yield f"{name}-{key}", key, service


def _expand(requires: Sequence[str], keys: Mapping[str, Sequence[str]], own: str | None) -> Iterator[str]:
    for name in requires:
        if name not in keys:
            yield name
        elif own is not None:
            yield f"{name}-{own}"
        else:
            yield from (f"{name}-{key}" for key in keys[name])


def list_steps(boot_table: BootTable) -> tuple[Step, ...]:
    """Return the steps of a process' boot table."""
    return boot_table.list_steps()
