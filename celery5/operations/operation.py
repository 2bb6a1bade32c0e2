"""Define operations: a name, a function with its parameters, and an effect.

All surfaces follow from them: the command and its flags, the form, button and JSON route of the dashboard, the OpenAPI
document, the table of commands in the guide, the entry in the audit trail, and the role that is needed.

A module of operations imports the values of its parameters alone, so that the help of a command is shown at once. What
performs an operation is imported when it is performed. The type of a result that is imported under TYPE_CHECKING alone
is found in the module that the operation names as its `result_module`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

import msgspec

from celery5.errors import CeleryError, Misconfigured
from celery5.operations.columns import ResultColumn, list_columns
from celery5.operations.parameters import list_parameters, read_texts
from celery5.similar_names import join_names, suggest_known

if TYPE_CHECKING:
    from celery5.app import App


Role = Literal["viewer", "operator", "admin"]
"""What a user may do: see; act on jobs, queues, tasks and schedules; act on processes, and destroy."""
ROLES: tuple[Role, ...] = get_args(Role)
Access = Literal["see", "change", "danger"]
"""How a page offers an operation: to see, to change something, or to change what it asks about first."""
ACCESSES: tuple[Access, ...] = get_args(Access)


class Effect(Flag):
    """What an operation does. One that does several things has all of their effects: `SEND_JOBS | AT_ONCE`.

    It needs the highest role that one of its effects needs. So whatever does all that another operation does needs
    at least the role of that one.
    """

    # It changes nothing and shows nothing confidential.
    SEE = auto()
    # It changes nothing, and shows values, settings or source code.
    SEE_CONFIDENTIAL = auto()
    # It sends jobs, or has them sent: new ones, those of a schedule, dead ones and failed ones again.
    SEND_JOBS = auto()
    # It sends events.
    SEND_EVENTS = auto()
    # It sends records to a stream: new ones, and dead ones again.
    SEND_RECORDS = auto()
    # It sends a notification.
    NOTIFY = auto()
    # It gives a value to a run.
    SIGNAL = auto()
    # It adds, pauses, resumes, limits or silences something, which can be taken back.
    ADJUST = auto()
    # It acts on many things at once.
    AT_ONCE = auto()
    # It stops jobs or a run that are named, which cannot be taken back.
    STOP_NAMED = auto()
    # It has a partition not processed, or processed again.
    QUARANTINE = auto()
    # It changes how processes work.
    CONTROL = auto()
    # It ends processes.
    END_PROCESSES = auto()
    # It revokes all jobs that a filter selects.
    REVOKE_SELECTED = auto()
    # It deletes dead letters, a schedule, a subscription or a group of a stream.
    DELETE = auto()
    # It has the groups of a stream continue elsewhere.
    MOVE_GROUPS = auto()

    @property
    def role(self) -> Role:
        """What a user must at least be."""
        return ROLES[max(ROLES.index(_NEEDS[effect][0]) for effect in self)]

    @property
    def access(self) -> Access:
        """How a page offers it."""
        return ACCESSES[max(ACCESSES.index(_NEEDS[effect][1]) for effect in self)]

    @property
    def destroys(self) -> bool:
        """Whether it removes what nobody can bring back: its command asks first, or needs `--yes`."""
        return bool(self & DESTROYING)

    def allows(self, role: Role) -> bool:
        """Return whether a user of this role may have it."""
        return ROLES.index(role) >= ROLES.index(self.role)


_NEEDS: Mapping[Effect, tuple[Role, Access]] = {
    Effect.SEE: ("viewer", "see"),
    Effect.SEE_CONFIDENTIAL: ("operator", "see"),
    Effect.SEND_JOBS: ("operator", "change"),
    Effect.SEND_EVENTS: ("operator", "change"),
    Effect.SEND_RECORDS: ("operator", "change"),
    Effect.NOTIFY: ("operator", "change"),
    Effect.SIGNAL: ("operator", "change"),
    Effect.ADJUST: ("operator", "change"),
    Effect.AT_ONCE: ("operator", "danger"),
    Effect.STOP_NAMED: ("operator", "danger"),
    Effect.QUARANTINE: ("operator", "danger"),
    Effect.CONTROL: ("admin", "change"),
    Effect.END_PROCESSES: ("admin", "danger"),
    Effect.REVOKE_SELECTED: ("admin", "danger"),
    Effect.DELETE: ("admin", "danger"),
    Effect.MOVE_GROUPS: ("admin", "danger"),
}
"""The role that each effect needs, and how a page offers it."""
DESTROYING = Effect.REVOKE_SELECTED | Effect.DELETE
"""The effects that destroy: what they remove is selected or stored, and not a job or a run that is named by its id."""


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

    @property
    def has_failed(self) -> bool:
        """Whether nothing was changed, since all of it has failed."""
        return bool(self.failure) and not self.count


DRY_RUN = "nothing is done; this would be: "
"""What stands before the summary of a dry run."""
Perform = Callable[..., Awaitable[Any]]
"""A coroutine function of the application and of the parameters of an operation."""


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        name: A noun and a verb, those of its command: `queue:purge`.
        function: Does it; a coroutine function of the application and of its parameters, a `Struct`. Its docstring's
            first line says what it does.
        effect: What it does, and to what.
        columns: What tables show of its result; default: all fields.
        find_continued: Returns the name of the operation whose work it continues, '' for none: whoever performs it
            needs the role of that one, too. A coroutine function, as `function`.
        is_recorded_later: Whether what it stops records how it has ended. What has begun a bulk action always does.
        result_module: The module that has the type of its result, where the function's module does not import it at
            runtime; '' where it does.
    """

    name: str
    function: Perform
    effect: Effect = Effect.SEE
    columns: Sequence[ResultColumn] = ()
    find_continued: Callable[..., Awaitable[str]] | None = None
    is_recorded_later: bool = False
    result_module: str = ""

    async def perform(self, app: "App", asked: Any) -> Any:
        """Return the result. A change has an entry in the audit trail.

        The API records much of what it does, whoever calls it. What has no entry by that gets one from the
        operation: its name, its first parameter as the target if it is required, and the others.
        """
        if not self.is_change or self.is_recorded_later:
            return _say_if_dry(await self.function(app, asked))
        from celery5.audit.recording import (  # when it runs, and not for its help
            noting_actions,
            record_action,
        )

        with noting_actions() as noted:
            changed: Changed = await self.function(app, asked)
        if not (noted or changed.dry_run or changed.bulk or changed.count == 0):
            target, selection = self._describe(asked)
            await record_action(
                app, self.name, target, selection, count=changed.count, failure=changed.failure
            )
        return _say_if_dry(changed)

    def _describe(self, asked: Any) -> tuple[str, dict[str, Any]]:
        """Return what is acted on, and how. JSON is left out: it has the arguments of jobs, and values."""
        parameters = list_parameters(self.parameters)
        target = ""
        if parameters and parameters[0].required:
            value: str | int | list[str] = getattr(asked, parameters.pop(0).name)
            target = join_names(value) if isinstance(value, list) else str(value)
        given = {
            parameter.name: getattr(asked, parameter.name)
            for parameter in parameters
            if parameter.widget != "json"
        }
        return target, {
            parameter.name: given[parameter.name]
            for parameter in parameters
            if given.get(parameter.name, parameter.default) != parameter.default
        }

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
    def destroys(self) -> bool:
        """Whether it removes what nobody can bring back."""
        return self.effect.destroys

    @property
    def is_change(self) -> bool:
        """Whether it changes something."""
        return self.access != "see"

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """The class of its parameters."""
        hints = self.function.__annotations__
        kind: type[msgspec.Struct] = next(
            hint for name, hint in hints.items() if name not in ("app", "return")
        )
        return kind

    @cached_property
    def result(self) -> Any:
        """The type of its result. Its module is imported."""
        types = vars(import_module(self.result_module or self.function.__module__))
        returned = SimpleNamespace(__annotations__={"return": self.function.__annotations__["return"]})
        return get_type_hints(returned, types, include_extras=True)["return"]

    @cached_property
    def shown_columns(self) -> Sequence[ResultColumn]:
        """What tables show of its result; empty where it is neither a struct nor a list of such."""
        return self.columns or list_columns(self.result)

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
                raise Misconfigured(f"{self.name} has no parameter {name!r}; {suggest_known(name, fields)}")
        given = {name: value for name, value in raw.items() if value not in ("", [])}
        for name, field in fields.items():
            if field.required and name not in given:
                raise Misconfigured(f"{self.name}: give {name}")
        return self.make(given, is_text=is_text)

    def make(self, values: Mapping[str, Any], *, is_text: bool = False) -> Any:
        """Return the parameters with these values. Raises Misconfigured for one that is wrong, or beyond its bound.

        A duration or a time may be a text, whoever gives it.
        """
        try:
            return msgspec.convert(read_texts(self.parameters, values), self.parameters, strict=not is_text)
        except msgspec.ValidationError as error:
            raise Misconfigured(f"{self.name}: {_name_field(str(error))}") from None


def _say_if_dry(result: Any) -> Any:
    """Return the result, whose summary says so when it was a dry run: functions say what is done in either case."""
    if not (isinstance(result, Changed) and result.dry_run):
        return result
    return msgspec.structs.replace(result, summary=f"{DRY_RUN}{result.summary}")


def _name_field(error: str) -> str:
    """Return an error of msgspec with the name of the field in front: `Expected `int` - at `$.count`."""
    what, at, path = error.rpartition(" - at `$.")
    return f"{path.rstrip('`')}: {what[0].lower()}{what[1:]}" if at else error
