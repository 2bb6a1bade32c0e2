"""The table of types: what becomes of each type of argument and result, made by sending values there and back.

`python -m tests.house.types_table` writes it to the page of the guide.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import annotated_types
import attrs
import msgspec
import pydantic

from celery5 import App
from celery5.errors import BadArguments, BadResult, Misconfigured
from celery5.protocol.job.verdict import Returned
from celery5.runners.outcome import get_result_outcome
from tests.house.sources import HERE

PAGE = HERE / "docs" / "guide" / "types.md"
START, END = "<!-- types:start -->\n", "\n<!-- types:end -->"


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Item:
    name: str
    price: Decimal


@dataclasses.dataclass
class SaleItem(Item):
    discount: int = 0


@attrs.define
class Box:
    side: int


class Point(NamedTuple):
    x: int
    y: int


class Address(TypedDict):
    street: str


class Struct(msgspec.Struct):
    number: int


class Customer(pydantic.BaseModel):
    name: str


class Secret(pydantic.BaseModel):
    key: pydantic.SecretStr


class SafeString(str):
    """As Django has one."""

    __slots__ = ()


class float64(float):
    """As numpy has one."""


class int64:
    """As numpy has one: it is no `int`, and `item` is its plain value."""

    shape = ()
    dtype = "int64"

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return self.number == other

    __hash__ = None  # type: ignore[assignment]

    def item(self) -> int:
        return self.number


class ndarray:
    """As numpy has one."""


class Plain:
    """A class without fields."""


BERLIN = ZoneInfo("Europe/Berlin")
NEPAL = timezone(timedelta(hours=5, minutes=45))
CLASSES = (
    Access,
    Address,
    Box,
    Colour,
    Customer,
    Item,
    Level,
    Plain,
    Point,
    SafeString,
    SaleItem,
    Secret,
    Struct,
)
OF_OTHERS = (Decimal, Fraction, Mapping, Path, Sequence, UUID, ZoneInfo)
OF_TIME = (date, datetime, time, timedelta)
NAMES: dict[str, Any] = {
    **{getattr(cls, "__name__", ""): cls for cls in (*CLASSES, *OF_OTHERS, *OF_TIME)},
    "UTC": UTC,
    "BERLIN": BERLIN,
    "NEPAL": NEPAL,
    "Annotated": Annotated,
    "Literal": Literal,
    "annotated_types": annotated_types,
    "msgspec": msgspec,
    "pydantic": pydantic,
    "np": type("np", (), {"float64": float64, "int64": int64, "ndarray": ndarray}),
}
"""What the rows are evaluated with."""

ROWS: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        "Numbers",
        (
            ("int", "10**30"),
            ("int", "True"),
            ("int", "1.0"),
            ("int", "'1'"),
            ("float", "1"),
            ("float", "10**30"),
            ("float", "float('nan')"),
            ("float", "float('inf')"),
            ("bool", "1"),
            ("Decimal", "Decimal('9.90')"),
            ("Decimal", "'9.90'"),
            ("Decimal", "9.9"),
            ("Decimal", "Decimal('NaN')"),
            ("complex", "1j"),
            ("Fraction", "Fraction(1, 3)"),
            ("float", "np.float64(0.5)"),
            ("int", "np.int64(5)"),
            ("np.ndarray", "np.ndarray()"),
        ),
    ),
    (
        "Text and bytes",
        (
            ("str", "'tea'"),
            ("str", "SafeString('tea')"),
            ("str", "b'tea'"),
            ("str", r"'\ud800'"),
            ("bytes", r"b'\xff\x00'"),
            ("bytearray", "bytearray(b'ab')"),
            ("Path", "Path('a/b')"),
            ("UUID", "UUID(int=1)"),
            ("UUID", "'00000000-0000-0000-0000-000000000001'"),
        ),
    ),
    (
        "Times",
        (
            ("datetime", "datetime(2026, 3, 1, 12)"),
            ("datetime", "datetime(2026, 3, 1, 12, tzinfo=UTC)"),
            ("datetime", "datetime(2026, 3, 1, 12, tzinfo=NEPAL)"),
            ("datetime", "datetime(2026, 3, 1, 12, tzinfo=ZoneInfo('UTC'))"),
            ("datetime", "datetime(2026, 3, 1, 12, tzinfo=BERLIN)"),
            ("datetime", "datetime(2026, 3, 1, 12, fold=1)"),
            ("date", "date(2026, 3, 1)"),
            ("date", "datetime(2026, 3, 1, 12)"),
            ("time", "time(12, 30)"),
            ("timedelta", "timedelta(days=1, microseconds=1)"),
        ),
    ),
    (
        "Collections",
        (
            ("list[int]", "[1, 2]"),
            ("list[int]", "(1, 2)"),
            ("tuple[int, str]", "(1, 'a')"),
            ("tuple[int, ...]", "(1, 2)"),
            ("set[int]", "{1}"),
            ("frozenset[int]", "frozenset({1})"),
            ("dict[str, int]", "{'a': 1}"),
            ("dict[int, str]", "{1: 'a'}"),
            ("dict[UUID, int]", "{UUID(int=1): 1}"),
            ("Mapping[str, int]", "{'a': 1}"),
            ("Sequence[int]", "[1]"),
        ),
    ),
    (
        "Enums and classes",
        (
            ("Colour", "Colour.RED"),
            ("Colour", "'red'"),
            ("Level", "Level.LOW"),
            ("Access", "Access.READ | Access.WRITE"),
            ("Literal['a', 'b']", "'a'"),
            ("Literal['a', 'b']", "'c'"),
            ("Item", "Item('tea', Decimal('3.20'))"),
            ("Item", "SaleItem('tea', Decimal('3.20'), 5)"),
            ("Box", "Box(3)"),
            ("Point", "Point(1, 2)"),
            ("Address", "{'street': 'High Street'}"),
            ("Struct", "Struct(7)"),
            ("Customer", "Customer(name='Ada')"),
            ("Secret", "Secret(key='k')"),
            ("Plain", "Plain()"),
        ),
    ),
    (
        "Constraints and unions",
        (
            ("Annotated[int, annotated_types.Gt(0)]", "5"),
            ("Annotated[int, annotated_types.Gt(0)]", "0"),
            ("Annotated[str, msgspec.Meta(max_length=3)]", "'long'"),
            ("pydantic.PositiveInt", "-1"),
            ("int | None", "None"),
            ("int | str", "'1'"),
            ("Item | None", "Item('tea', Decimal('3.20'))"),
        ),
    ),
    (
        "No annotation",
        (
            ("", "(1, 2)"),
            ("", "{1}"),
            ("", "Decimal('9.90')"),
            ("", "datetime(2026, 3, 1, 12, tzinfo=UTC)"),
            ("", "UUID(int=1)"),
            ("", "Colour.RED"),
            ("", "b'ab'"),
            ("", "Item('tea', Decimal('3.20'))"),
            ("", "Customer(name='Ada')"),
            ("", "float('nan')"),
            ("", "Plain()"),
        ),
    ),
)
"""For each group, annotations and what is passed, as they are written. An annotation may be empty."""


def evaluate(text: str) -> Any:
    """What an annotation or a value says."""
    return eval(text, NAMES)


def make_task(annotation: str) -> Any:
    """A task with one parameter and a result of this annotation. Raises Misconfigured if it cannot be declared."""

    def echo(value: Any) -> Any:
        return value

    if annotation:
        kind = evaluate(annotation)
        echo.__annotations__ = {"value": kind, "return": kind}
    else:
        echo.__annotations__ = {}
    return App("types").task(echo)


def describe(sent: Any, arrived: Any) -> str:
    """What has arrived: that it is as it was, or what it is now."""
    is_same = type(arrived) is type(sent) and repr(arrived) == repr(sent)
    return "as it was" if is_same else code(repr(arrived))


def code(text: str) -> str:
    """A piece of Python in a cell of a table."""
    text = re.sub(r"\b(?:tests\.house\.types_table|__main__|datetime)\.(?=[A-Za-z])", "", text)
    return f"`{text}`".replace("|", "\\|")


def send_argument(annotation: str, value: str) -> str:
    """What a task receives for an argument."""
    sent = evaluate(value)
    try:
        task = make_task(annotation)
    except Misconfigured:
        return "`Misconfigured`"
    try:
        message = task.parameters.encode((sent,), {})
    except BadArguments:
        return "`BadArguments`"
    (arrived,), _ = task.parameters.decode(*message)
    return describe(sent, arrived)


def send_result(annotation: str, value: str) -> str:
    """What `get` returns for a result."""
    sent = evaluate(value)
    try:
        task = make_task(annotation)
    except Misconfigured:
        return "`Misconfigured`"
    outcome = get_result_outcome(sent)
    if not isinstance(outcome, Returned):
        return "dead letter"
    try:
        return describe(sent, task.result_type.decode(outcome.value))
    except BadResult:
        return "`BadResult`"


def make_table() -> str:
    """The whole table."""
    lines: list[str] = []
    for group, rows in ROWS:
        lines += [
            "",
            f"### {group}",
            "",
            "| declared as | passed | arrives in the task | as a result, from `get` |",
            "|---|---|---|---|",
        ]
        for annotation, value in rows:
            shown = code(annotation) if annotation else "nothing"
            cells = [shown, code(value), send_argument(annotation, value), send_result(annotation, value)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(before + START + make_table() + END + rest.partition(END)[2])
