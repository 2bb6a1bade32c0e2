"""Describe the parameters of operations: what forms, commands and the JSON API show of each, and how it is given."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.protocol.durations import format_range
from celery5.protocol.text_values import parse_seconds, parse_time

Widget = Literal["text", "number", "duration", "time", "checkbox", "select", "lines", "json"]
"""How a parameter is given: `lines` are several texts, one on each line of a form."""


def about(
    text: str,
    *,
    flag: str = "",
    metavar: str = "",
    label: str = "",
    is_option: bool = False,
    is_argument: bool = False,
) -> Meta:
    """Return what surfaces show of a parameter, as an annotation of its field.

    Args:
        text: What it is, in one line without a full stop at the end: forms, `--help` and the OpenAPI document have it.
        flag: Its flag on the command line, where that is not its name: `--error-group`.
        metavar: What stands for its value in `--help`; its name in capitals unless given.
        label: Its label in a form; its name unless given.
        is_option: Whether it is a flag on the command line although it is required.
        is_argument: Whether it is an argument on the command line although it is not required.
    """
    extra = {"flag": flag, "metavar": metavar, "is_option": is_option, "is_argument": is_argument}
    return Meta(title=label or None, description=text, extra=extra)


def as_duration(*, at_least: float = 0, at_most: float) -> Meta:
    """Return the annotation of a time span in seconds, which may also be given as a text such as `15m`."""
    return Meta(
        ge=at_least,
        le=at_most,
        extra={"widget": "duration"},
        extra_json_schema={"examples": ["15m", 900]},
    )


Text = Annotated[str, Meta(min_length=1, max_length=500)]
"""A text that may not be empty."""
Pattern = Annotated[str, Meta(max_length=200)]
"""A condition on a name, or a part of a text; '' for none."""
Patterns = Annotated[list[Pattern], Meta(max_length=50)]
"""Conditions of which any may match: each costs time for each job that is looked at."""
Names = Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=1000)]
"""Ids, or names of processes, keys and the like."""
Limit = Annotated[int, Meta(ge=1, le=1000)]
"""How many rows are returned at most."""
Seconds = Annotated[float, as_duration(at_most=90 * 86400)]
"""A time span that history is kept for."""
Span = Annotated[float, as_duration(at_most=36_500 * 86400)]
"""A time span of any length that means something: dead letters are kept until somebody deletes them."""
Rate = Annotated[
    Annotated[str, Meta(max_length=20)] | None,
    about("At most so many per second, such as 50/s; default: no limit.", metavar="N/s"),
]
"""The rate of a change of many things; '' also means no limit."""


class Nothing(msgspec.Struct, frozen=True):
    """The parameters of an operation that takes none."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operation, as surfaces show it."""

    name: str
    # As a form shows it: `dry run`.
    label: str
    # What it is, in one line; '' where nothing is to say.
    help: str
    widget: Widget
    # The type of its value, without annotations and without None.
    kind: Any
    required: bool
    # The default, None for none.
    default: Any = None
    # The choices of a `select`.
    choices: Sequence[str] = ()
    # The least and the greatest number; None for no bound.
    least: float | None = None
    most: float | None = None
    # The fewest and the most characters of a text, or of each of several; None for no bound.
    shortest: int | None = None
    longest: int | None = None
    # On the command line; see `about`.
    flag: str = ""
    metavar: str = ""
    is_option: bool = False
    is_argument: bool = False


def list_parameters(parameters: type[msgspec.Struct]) -> list[Parameter]:
    """Return the parameters of an operation, in the order of their fields."""
    return [_describe(field) for field in msgspec.structs.fields(parameters)]


def read_texts(parameters: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters, with durations and times that are texts as numbers and times.

    Commands, forms, addresses and the JSON API have them read here. Raises Misconfigured, which names the parameter,
    also for a duration beyond its bounds.
    """
    read = dict(values)
    for parameter in list_parameters(parameters):
        given = read.get(parameter.name)
        parse = _READERS.get(parameter.widget)
        if parse is None or given is None:
            continue
        least, most = parameter.least or 0.0, math.inf if parameter.most is None else parameter.most
        try:
            value = read[parameter.name] = parse(given) if isinstance(given, str) else given
            if isinstance(value, int | float) and not least <= value <= most:
                raise Misconfigured(f"{given} is not in the range {format_range(least, most)}")
        except Misconfigured as error:
            raise Misconfigured(f"`{parameter.name}`: {error}") from None
    return read


_READERS: Mapping[Widget, Callable[[str], object]] = {"duration": parse_seconds, "time": parse_time}
"""What reads a text as the value of a parameter."""


def _describe(field: Any) -> Parameter:
    kind, metas = _unwrap(field.type)
    extra: dict[str, Any] = {}
    for meta in metas:
        extra |= meta.extra or {}
    default = None if field.default is msgspec.NODEFAULT else field.default
    origin = get_origin(kind)
    widget: Widget = extra.get("widget") or _choose_widget(kind)
    of_text = _unwrap(get_args(kind)[0])[1] if widget == "lines" else metas
    return Parameter(
        name=field.name,
        label=_find(metas, "title") or re.sub(r"_", " ", field.name),
        help=_find(metas, "description") or "",
        widget=widget,
        kind=kind,
        required=field.required,
        default=default,
        choices=tuple(str(choice) for choice in get_args(kind)) if origin is Literal else (),
        least=_find(metas, "ge"),
        most=_find(metas, "le"),
        shortest=_find(of_text, "min_length"),
        longest=_find(of_text, "max_length"),
        flag=extra.get("flag", ""),
        metavar=extra.get("metavar", ""),
        is_option=extra.get("is_option", False),
        is_argument=extra.get("is_argument", False),
    )


def _find(metas: Sequence[Meta], name: str) -> Any:
    """Return the value of the outermost annotation that has one."""
    return next((value for meta in metas if (value := getattr(meta, name)) is not None), None)


def _unwrap(hint: Any) -> tuple[Any, list[Meta]]:
    """Return a type without annotations and None, and its annotations, the outermost first."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *annotations = get_args(hint)
        kind, metas = _unwrap(inner)
        return kind, [
            *(annotation for annotation in reversed(annotations) if isinstance(annotation, Meta)),
            *metas,
        ]
    if origin in (Union, UnionType):
        return _unwrap(next(part for part in get_args(hint) if part is not NoneType))
    return hint, []


_WIDGETS: Mapping[Any, Widget] = {bool: "checkbox", int: "number", float: "number", datetime: "time"}


def _choose_widget(kind: Any) -> Widget:
    origin = get_origin(kind)
    if origin is Literal:
        return "select"
    if origin in (list, tuple):
        return "json" if Any in get_args(kind) else "lines"
    if origin is dict or kind is Any:
        return "json"
    return _WIDGETS.get(kind, "text")
