"""Arguments refused: whatever a worker would refuse the producer refuses first, and says why."""

import contextlib
import dataclasses
import importlib
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from celery5 import App
from celery5.errors import BadArguments, Corrupt, Misconfigured
from celery5.protocol.job.arguments import Parameters, encode_value
from celery5.protocol.job.messages import MAX_DEPTH, Command, encode, read_command
from tests.night import examples
from tests.pure.tasks.shop_types import Address, Colour, Customer, Line, Point, Size, taking, there_and_back

WRONG: list[tuple[Any, Any, str]] = [
    (UUID, 5, "UUID"),
    (int, "5", "int"),
    (int, True, "int"),
    (int, 1.5, "int"),
    (str, 5, "str"),
    (str, b"a", "str"),
    (float, None, "float"),
    (float, math.nan, "float"),
    (Decimal, [], "Decimal"),
    (datetime, "yesterday", "datetime"),
    (Path, 5, "Path"),
    (Colour, "green", "Colour"),
    (Size, 7, "Size"),
    (Point, "1,2", "Point"),
    (Address, 5, "Address"),
    (Line, Point(1), "Line"),
    (Customer, 5, "Customer"),
    (list[int], ["a"], r"list\[int\]"),
    (dict[str, int], {"a": "b"}, r"dict\[str, int\]"),
    (tuple[int, str], (1,), r"tuple\[int, str\]"),
    (Line | None, 5, "Line | None"),
    (Annotated[int, msgspec.Meta(gt=0)], 0, "int"),
]


@pytest.mark.parametrize(("annotation", "value", "shown"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_argument_names_the_task_the_parameter_and_both_types(
    annotation: Any, value: Any, shown: str
) -> None:
    parameters = taking(int, annotation)
    for args, kwargs in (([1, value], {}), ([1], {"p1": value}), ([], {"p0": 1, "p1": value})):
        with pytest.raises(BadArguments) as caught:
            parameters.encode(args, kwargs)
        assert isinstance(caught.value, TypeError)
        message = str(caught.value)
        assert message.startswith("shop.t: ")
        if isinstance(value, float) and math.isnan(value):
            assert "nan has no JSON form" in message
            continue
        assert "parameter 'p1' takes " in message
        assert shown.replace("\\", "") in message
        assert f"got {type(value).__name__}" in message
        assert not re.search(r"\(Expected `[^`]+`, got `[^`]+`\)", message)  # which the message has already


@pytest.mark.parametrize(("annotation", "value", "shown"), WRONG, ids=lambda value: str(value)[:30])
def test_a_worker_names_the_parameter_too(annotation: Any, value: Any, shown: str) -> None:
    if annotation is Colour or not isinstance(value, int | float | str | list | None) or value != value:
        value = {"no": ["such", "thing"]}
    raw = Raw(msgspec.json.encode(value))
    parameters = taking(int, annotation)
    with pytest.raises(BadArguments, match=r"shop\.t: parameter 'p1' takes "):
        parameters.decode(Raw(b"[1," + bytes(raw) + b"]"), Raw(b"{}"))
    with pytest.raises(BadArguments, match=r"shop\.t: parameter 'p1' takes "):
        parameters.decode(Raw(b"[1]"), Raw(b'{"p1":' + bytes(raw) + b"}"))


def full(
    a: int, b: UUID | None = None, /, c: str = "c", *rest: Path, d: Decimal, e: bool = False, **more: date
) -> None:
    """Every kind of parameter."""


FULL = Parameters("shop.full", full)
NEAR = UUID(int=7)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {"d": Decimal(1)}, "missing a required argument: 'a'"),
        ((1,), {}, "missing a required( keyword-only)? argument: 'd'"),
        ((1, NEAR, "x"), {"d": Decimal(1), "c": "y"}, "multiple values for argument 'c'"),
        ((1, NEAR, "x", 5), {"d": Decimal(1)}, "parameter 'rest' takes Path, got int"),
        ((1,), {"d": Decimal(1), "z": 5}, "parameter 'more' takes date, got int"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadArguments, match=rf"^shop\.full.*{says}"):
        FULL.encode(args, kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (lambda: 0, b"[1]", b"{}"),
        (lambda a: a, b"[]", b"{}"),
        (lambda a: a, b"[1,2]", b"{}"),
        (lambda a, b=1: a, b"[1,2,3]", b"{}"),
        (lambda a, b=1: a, b"[]", b'{"b":1}'),
        (lambda a: a, b"[1]", b'{"b":1}'),
        (lambda a: a, b"[1]", b'{"a":1}'),
        (lambda a, /: a, b"[]", b'{"a":1}'),
        (lambda *, a: a, b"[1]", b"{}"),
        (lambda a: a, b"{}", b"{}"),
        (lambda a: a, b"null", b"{}"),
        (lambda a=1: a, b'"abc"', b"{}"),
        (lambda a=1: a, b"[]", b"[1]"),
        (lambda a=1: a, b"[]", b'"abc"'),
        (lambda a: a, b"[" + b"[" * 30000 + b"]" * 30000 + b"]", b"{}"),
        (lambda a=1: a, b'["\xff"]', b"{}"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_worker_refuses_a_call_that_does_not_fit_and_nothing_worse_happens(
    function: Callable[..., Any], args: bytes, kwargs: bytes
) -> None:
    parameters = Parameters("shop.t", function)
    if args.startswith(b"[[") and len(args) == 6000:
        assert parameters.decode(Raw(b"[" + b"[]]"), Raw(kwargs))  # nesting itself is fine
    with pytest.raises(BadArguments, match=r"^shop\.t"):
        parameters.decode(Raw(args), Raw(kwargs))


@given(st.binary(max_size=20), st.binary(max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_any_bytes_are_arguments_or_refused(args: bytes, kwargs: bytes) -> None:
    with contextlib.suppress(BadArguments):
        FULL.decode(Raw(args), Raw(kwargs))


def charge(order: int, amount: Decimal, /, note: str = "", *, currency: str = "") -> None:
    """A task whose arguments are easily misspelt."""


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"order": 1, "nota": "x"}, "'order'"),  # positional only: no keyword of that name
        ({"nota": "x"}, "'nota'; did you mean 'note'?"),
        ({"curency": "x"}, "'curency'; did you mean 'currency'?"),
        ({"zzz": "x"}, "'zzz'"),
    ],
)
def test_an_unknown_argument_is_named_though_others_are_missing_too(
    kwargs: dict[str, Any], says: str
) -> None:
    parameters = Parameters("shop.charge", charge)
    with pytest.raises(BadArguments) as caught:
        parameters.encode((), kwargs)
    assert str(caught.value).endswith(f"got an unexpected keyword argument {says}")
    with pytest.raises(BadArguments) as caught:
        parameters.decode(Raw(b"[]"), Raw(msgspec.json.encode(kwargs)))
    assert str(caught.value).endswith(f"got an unexpected keyword argument {says}")


EXACT: list[tuple[Any, Any, Any]] = [
    (Decimal, 9.9, "9.90"),
    (Decimal | None, 9.9, None),
    (Annotated[Decimal, msgspec.Meta(title="price")], 9.9, Decimal("9.90")),
    (list[Decimal], [Decimal(1), 9.9], ["1", 2]),
    (tuple[int, Decimal], (1, 9.9), (1, "2")),
    (tuple[Decimal, ...], (1, 9.9), (1, "2")),
    (set[Decimal], {9.9}, {Decimal(1)}),
    (dict[str, list[Decimal] | None], {"a": None, "b": [9.9]}, {"a": None, "b": [1]}),
]


@pytest.mark.parametrize(("annotation", "inexact", "exact"), EXACT, ids=lambda value: str(value)[:30])
def test_a_float_is_refused_where_a_decimal_is_declared(annotation: Any, inexact: Any, exact: Any) -> None:
    parameters = taking(int, annotation)
    for args, kwargs in (([1, inexact], {}), ([1], {"p1": inexact})):
        with pytest.raises(BadArguments, match=r"pass Decimal\('9\.9'\) or '9\.9'"):
            parameters.encode(args, kwargs)
    parameters.encode([1, exact], {})


def test_a_float_is_fine_where_a_float_is_declared_too() -> None:
    taking(float | Decimal).encode([9.9], {})
    taking(list[float | Decimal]).encode([[9.9]], {})
    taking(Any).encode([9.9], {})


class Opaque:
    """A class of which nobody knows how to make JSON."""


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Opaque(),
        lambda: 0,
        1j,
        LOOP,
        {(1, 2): 3},
        "\ud800",
        math.inf,
        [{"a": -math.inf}, None],
        open,
        Opaque,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_has_no_json_form_is_refused_as_argument_and_as_result(value: Any) -> None:
    with pytest.raises(BadArguments, match=r"^shop\.t: an argument cannot be encoded: .+"):
        taking(Any).encode([value], {})
    with pytest.raises(BadArguments, match=r"^shop\.t: an argument cannot be encoded: .+"):
        taking(Any).encode([], {"p0": value})
    with pytest.raises(TypeError, match=r"^a result of type .+ cannot be encoded: .+"):
        encode_value(value)


class Bare:
    """A class that JSON cannot carry."""


@dataclasses.dataclass
class HoldsBare:
    it: Bare


class NamedBare(NamedTuple):
    it: Bare


class TypedBare(TypedDict):
    it: Bare


class StructOfBare(msgspec.Struct):
    it: list[Bare]


@attrs.define
class AttrsOfBare:
    it: Bare


class Closes(Protocol):
    """A protocol that nobody can check."""

    def close(self) -> None: ...


WITHOUT_JSON = [
    *(Bare, os.PathLike, Closes, Callable[[int], int], type, Iterator[int]),
    *(list[Bare], set[Bare], dict[str, Bare], tuple[int, Bare], tuple[Bare, ...], Annotated[Bare, "it"]),
    *(
        list[dict[str, Bare]],
        HoldsBare,
        NamedBare,
        TypedBare,
        StructOfBare,
        AttrsOfBare,
        HoldsBare | list[Bare],
    ),
]


@pytest.mark.parametrize("annotation", WITHOUT_JSON, ids=str)
def test_a_class_that_json_cannot_carry_is_refused_where_the_task_is_declared(annotation: Any) -> None:
    with pytest.raises(
        Misconfigured, match=r"^task shop\.t: parameter 'p0' has no JSON form: \w+ is neither"
    ):
        taking(annotation)
    with pytest.raises(Misconfigured, match=r"^task shop\.t: the result has no JSON form: \w+ is neither"):
        taking(returns=annotation)


def test_a_declaration_that_cannot_be_sent_raises_one_line_that_names_the_class() -> None:
    def f1(x: Bare) -> None: ...

    with pytest.raises(Misconfigured) as caught:
        App("refusing").task(f1)
    line = str(caught.value)
    assert "f1: parameter 'x' has no JSON form: Bare is neither a dataclass nor another type" in line
    assert "\n" not in line


@dataclasses.dataclass
class Tree:
    """A type that contains itself."""

    parts: list["Tree"]
    beside: "Tree | None" = None


class Phantom(type):
    """A metaclass that looks at the value, as the library phantom-types has one."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int) and value > 10


class Large(metaclass=Phantom):
    pass


CARRIED = [
    (Tree, Tree([Tree([])])),
    (Path | None, Path("a")),
    (Bare | None, None),
    (Iterable[int], [1]),
    (Sized, "abc"),
    (numbers.Number, 1.5),
    (Large, 11),
    (object, [None]),
]


@pytest.mark.parametrize(("annotation", "value"), CARRIED, ids=lambda value: str(value)[:30])
def test_what_json_can_carry_is_declared_and_arrives(annotation: Any, value: Any) -> None:
    assert there_and_back(taking(annotation, returns=annotation), value) == ([value], {})


LATE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
from celery5 import App

if TYPE_CHECKING:
    from somewhere import Unknown

app = App("late")

@app.task
def good(x: Order, y: Unknown) -> Order: ...

@app.task
def bad(x: int, c: Bare) -> None: ...

@dataclass
class Order:
    id: int

class Bare: ...
"""


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that uses classes in annotations before it makes them."""
    (tmp_path / "late_annotations.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("late_annotations")
    del sys.modules["late_annotations"]


def test_an_annotation_that_names_a_later_class_is_read_when_the_first_job_is_made(late: Any) -> None:
    order = late.Order(7)
    job = late.good.options(queue="other").job(order, {"any": "thing"})
    command = read_command(job.message)
    args, kwargs = late.good.parameters.decode(command.args, command.kwargs)
    assert ([*args], kwargs) == ([order, {"any": "thing"}], {})
    assert late.good.result_type.decode(b'{"id":7}') == order
    with pytest.raises(BadArguments, match="parameter 'x' takes Order, got int"):
        late.good.job(5, None)
    with pytest.raises(Misconfigured, match="bad: parameter 'c' has no JSON form: Bare is neither"):
        late.bad.job(1, "anything")


def test_annotation_of_a_later_class_is_read_when_the_app_is_loaded(late: Any) -> None:
    with pytest.raises(Misconfigured, match="bad: parameter 'c' has no JSON form: Bare is neither"):
        late.app.load()


def test_a_dataclass_of_a_later_class_can_be_declared_and_is_read_later() -> None:
    def takes(it: Half) -> None: ...

    parameters = Parameters("shop.t", takes)
    Half.__annotations__["other"] = "Whole"
    globals()["Whole"] = Bare
    try:
        with pytest.raises(Misconfigured, match="parameter 'it' has no JSON form: Bare is neither"):
            parameters.encode([5], {})
    finally:
        del globals()["Whole"]


@dataclasses.dataclass
class Half:
    other: "Whole"  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def test_null_and_the_word_null_are_not_taken_for_nan() -> None:
    assert there_and_back(taking(Any), [None, "null", 1.5]) == ([[None, "null", 1.5]], {})
    assert encode_value({"null": None}) == b'{"null":null}'


def test_an_optional_float_that_is_nan_does_not_become_none_in_silence() -> None:
    with pytest.raises(BadArguments, match="nan has no JSON form"):
        taking(float | None).encode([math.nan], {})
    assert there_and_back(taking(float | None), None) == ([None], {})


@pytest.mark.parametrize("annotation", [int | Point | Line, Path | str, list[Path | int], Literal[1.5]])
def test_an_annotation_with_no_json_form_is_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(Misconfigured, match=r"^task shop\.t: parameter 'p0' has no JSON form: "):
        taking(annotation)
    with pytest.raises(Misconfigured, match=r"^task shop\.t: the result has no JSON form: "):
        taking(returns=annotation)


def test_values_nested_too_deep_for_scripts_are_refused_by_both_sides() -> None:
    parameters, limit = taking(Any), sys.getrecursionlimit()
    kept = Raw()
    sys.setrecursionlimit(5000)
    try:
        deep: Any = '"[{'
        for depth in range(2, 1200):
            deep = [deep, {}, "\\", "]}"] if depth % 2 else {"]": deep}
            if depth == MAX_DEPTH:
                kept, _ = parameters.encode([deep], {})
            if depth in (MAX_DEPTH + 1, 1100):
                with pytest.raises(BadArguments, match="deeper than 900"):
                    parameters.encode([deep], {})
                with pytest.raises(BadArguments, match="deeper than 900"):
                    parameters.encode([], {"p0": deep})
        read_command(encode(Command(v=1, id="a", task="t", args=kept)))
        with pytest.raises(Corrupt, match="deeper than 950"):
            read_command(encode(Command(v=1, id="a", task="t", args=Raw(msgspec.json.encode([deep])))))
        parameters.encode([[[{"[": n}] for n in range(10_000)]], {})
    finally:
        sys.setrecursionlimit(limit)
