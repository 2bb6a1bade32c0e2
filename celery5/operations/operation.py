"""Define operations: a name, a function with its parameters, and an effect. The surfaces follow from them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from celery5.errors import CeleryError, Misconfigured
from celery5.similar_names import did_you_mean

Role = Literal["viewer", "operator", "admin"]
"""What a user may do: see; act on jobs, queues, tasks and schedules; act on processes, and destroy."""
ROLES: tuple[Role, ...] = get_args(Role)
Access = Literal["see", "change", "danger"]
"""How a page offers an operation: to see, to change something, or to change what it asks about first."""


class Effect(Enum):
    """What an operation does, and to what. The role that it needs, and whether a page asks first, follow from it."""

    # It changes nothing and shows nothing confidential.
    SEE = ("viewer", "see")
    # It changes nothing, and shows values, settings or source code.
    INSPECT = ("operator", "see")
    # It changes jobs, queues, tasks, schedules or runs.
    CHANGE = ("operator", "change")
    # It changes many of them, or stops one that is named, which cannot be taken back.
    CHANGE_AT_ONCE = ("operator", "danger")
    # It changes how processes work.
    CONTROL = ("admin", "change")
    # It deletes or revokes all that a filter selects, moves a stream's groups, or ends processes.
    DESTROY = ("admin", "danger")

    @property
    def role(self) -> Role:
        """What a user must at least be."""
        return self.value[0]

    @property
    def access(self) -> Access:
        """How a page offers it."""
        return self.value[1]

    def allows(self, role: Role) -> bool:
        """Return whether a user of this role may have it."""
        return ROLES.index(role) >= ROLES.index(self.role)


class NotFound(CeleryError):
    """There is no such thing."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation has done."""

    # One sentence for people.
    summary: str
    # How many jobs, records, keys or processes it has changed; None where nothing is counted.
    count: int | None = None
    # Whether nothing was changed because it was a dry run.
    dry_run: bool = False
    # What was made or changed, as it is now, where there is more to know of it: a schedule, the id of a job.
    value: Any = None
    # What each process has answered, by name.
    replies: dict[str, Any] = {}
    # The bulk action that goes on with it; '' for none.
    bulk: str = ""
    # Why some of it has failed; '' if nothing has.
    failure: str = ""


Perform = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        name: A noun and a verb, those of its command: `queue:purge`.
        perform: Does it; a coroutine function of the application and of its parameters, a `Struct`. Its docstring's
            first line says what it does.
        effect: What it does, and to what.
        find_continued: Returns the name of the operation whose work it continues, '' for none: whoever performs it
            needs the role of that one, too. A coroutine function, as `perform`.
    """

    name: str
    perform: Perform
    effect: Effect = Effect.SEE
    find_continued: Callable[..., Awaitable[str]] | None = None

    @property
    def noun(self) -> str:
        """The noun of its name."""
        return self.name.partition(":")[0]

    @property
    def verb(self) -> str:
        """The verb of its name."""
        return self.name.partition(":")[2]

    @property
    def role(self) -> Role:
        """What a user must at least be."""
        return self.effect.role

    @property
    def access(self) -> Access:
        """How a page offers it."""
        return self.effect.access

    @property
    def is_change(self) -> bool:
        """Whether it changes something."""
        return self.access != "see"

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return (self.perform.__doc__ or "").strip().partition("\n")[0]

    @cached_property
    def hints(self) -> Mapping[str, Any]:
        """The annotations of its function, by name; `return` is its result's."""
        return get_type_hints(self.perform, include_extras=True)

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """The class of its parameters."""
        kind: type[msgspec.Struct] = next(
            hint for name, hint in self.hints.items() if name not in ("app", "return")
        )
        return kind

    @property
    def result(self) -> Any:
        """The type of its result."""
        return self.hints["return"]

    def allows(self, role: Role) -> bool:
        """Return whether a user of this role may do it."""
        return self.effect.allows(role)

    def parse(self, raw: Mapping[str, Any], *, is_text: bool) -> Any:
        """Return the parameters.

        Args:
            raw: The values by name. An empty text stands for a value that was left out.
            is_text: Numbers and truth values are texts, as in a form.

        Raises:
            Misconfigured: A parameter is unknown, missing or wrong.
        """
        fields = {field.name: field for field in msgspec.structs.fields(self.parameters)}
        for name in raw:
            if name not in fields:
                raise Misconfigured(f"{self.name} has no parameter {name!r}{did_you_mean(name, fields)}")
        given = {name: value for name, value in raw.items() if value not in ("", [])}
        for name, field in fields.items():
            if field.required and name not in given:
                raise Misconfigured(f"{self.name}: give {name}")
        try:
            return msgspec.convert(given, self.parameters, strict=not is_text)
        except msgspec.ValidationError as error:
            raise Misconfigured(f"{self.name}: {_name_field(str(error))}") from None


def _name_field(error: str) -> str:
    """Return an error of msgspec with the name of the field in front: `Expected `int` - at `$.count`."""
    what, at, path = error.rpartition(" - at `$.")
    return f"{path.rstrip('`')}: {what[0].lower()}{what[1:]}" if at else error
