"""Arguments: from Python to JSON and back as the annotations say; whatever a worker would refuse, the producer does.

Floor: tests. Reads: nothing. Writes: nothing.
"""

import contextlib
import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Never, NoReturn, TypedDict, TypeVar
from uuid import UUID, uuid4

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from celery5.errors import BadArguments, BadResult, Misconfigured
from celery5.protocol.arguments import Parameters, ResultType, encode_value
from tests.pure import annotated


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0
    tags: frozenset[str] = field(default_factory=frozenset)


@attrs.frozen
class Address:
    street: str
    since: date


class Line(msgspec.Struct, frozen=True):
    product: UUID
    price: Decimal
    at: Path = Path(".")


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    id: UUID
    born: date
    mail: str = pydantic.Field(alias="e-mail")


class Pair(NamedTuple):
    a: int
    b: str


class Box(TypedDict):
    wide: int
    label: str


text = st.text(st.characters(codec="utf-8"), max_size=10)
decimals = st.decimals(allow_nan=False)
zoned = st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.just(UTC))
paths = st.sampled_from([Path("/tmp/a b.txt"), Path("ä/ö"), Path(".")])
lines = st.builds(Line, product=st.uuids(), price=decimals, at=paths)
customers = st.builds(lambda i, b, m: Customer(id=i, born=b, **{"e-mail": m}), st.uuids(), st.dates(), text)

KINDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "bool": (bool, st.booleans()),
    "int": (int, st.integers(-(2**63), 2**63 - 1)),
    "float": (float, st.floats(allow_nan=False, allow_infinity=False)),
    "str": (str, text),
    "bytes": (bytes, st.binary(max_size=20)),
    "none": (None, st.none()),
    "uuid": (UUID, st.uuids()),
    "decimal": (Decimal, decimals),
    "datetime": (datetime, st.datetimes() | zoned),
    "date": (date, st.dates()),
    "time": (time, st.times()),
    "timedelta": (timedelta, st.timedeltas(timedelta(days=-(10**5)), timedelta(days=10**5))),
    "path": (Path, paths),
    "enum": (Colour, st.sampled_from(Colour)),
    "int enum": (Size, st.sampled_from(Size)),
    "literal": (Literal["a", 1], st.sampled_from(["a", 1])),
    "dataclass": (Point, st.builds(Point, x=st.floats(0, 9), tags=st.frozensets(text, max_size=2))),
    "attrs": (Address, st.builds(Address, street=text, since=st.dates())),
    "struct": (Line, lines),
    "pydantic": (Customer, customers),
    "named tuple": (Pair, st.builds(Pair, a=st.integers(0, 9), b=text)),
    "typed dict": (Box, st.fixed_dictionaries({"wide": st.integers(0, 9), "label": text})),
    "list": (list[UUID], st.lists(st.uuids(), max_size=3)),
    "list of models": (list[Customer], st.lists(customers, max_size=2)),
    "set": (set[int], st.sets(st.integers(0, 99), max_size=3)),
    "frozenset": (frozenset[Colour], st.frozensets(st.sampled_from(Colour))),
    "pair": (tuple[int, Path], st.tuples(st.integers(0, 9), paths)),
    "many": (tuple[date, ...], st.lists(st.dates(), max_size=3).map(tuple)),
    "dict": (dict[str, Line], st.dictionaries(text, lines, max_size=2)),
    "dict by uuid": (dict[UUID, list[Path]], st.dictionaries(st.uuids(), st.lists(paths), max_size=2)),
    "dict by enum": (dict[Colour, int], st.dictionaries(st.sampled_from(Colour), st.integers(0, 9))),
    "optional": (Line | None, st.none() | lines),
    "either": (int | str | None, st.integers(0, 9) | text | st.none()),
    "sequence": (Sequence[int], st.lists(st.integers(0, 9))),
    "mapping": (Mapping[str, int], st.dictionaries(text, st.integers(0, 9))),
    "bounded": (Annotated[int, msgspec.Meta(gt=0)], st.integers(1, 9)),
}


def taking(*annotations: Any, returns: Any = None) -> Parameters:
    """The parameters of a function `t(p0, p1, ...)`."""
    names = [f"p{at}" for at in range(len(annotations))]
    made: dict[str, Any] = {}
    exec(f"def t({', '.join(names)}): ...", made)
    made["t"].__annotations__ = {**dict(zip(names, annotations, strict=True)), "return": returns}
    return Parameters("shop.t", made["t"])


def there_and_back(parameters: Parameters, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Encode, send, decode."""
    values, named = parameters.decode(*parameters.encode(args, kwargs))
    return list(values), dict(named)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes_back_equal_and_of_its_type(kind: str) -> None:
    annotation, values = KINDS[kind]
    parameters = taking(annotation, Any)

    @given(values)
    @settings(max_examples=40, deadline=None)
    def sent(value: Any) -> None:
        (back, _), _ = there_and_back(parameters, value, 0)
        assert back == value
        assert type(back) is type(value)
        _, named = there_and_back(parameters, p1=0, p0=value)
        assert named == {"p0": value, "p1": 0}

    sent()


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_comes_back_equal(kind: str) -> None:
    annotation, values = KINDS[kind]

    @given(values)
    @settings(max_examples=20, deadline=None)
    def returned(value: Any) -> None:
        assert ResultType(annotation).decode(encode_value(value)) == value

    returned()


anything = st.one_of([values for _, values in KINDS.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_either_refused_or_arrives_as_the_annotation_says(kind: str) -> None:
    annotation, _ = KINDS[kind]
    parameters = taking(annotation)

    @given(anything)
    @settings(max_examples=60, deadline=None)
    def sent(value: Any) -> None:
        try:
            raw = parameters.encode([value], {})
        except BadArguments as refused:
            error = str(refused)
        else:
            (back,), _ = parameters.decode(*raw)
            # What has arrived is of the declared type: a second trip accepts it and changes nothing.
            assert there_and_back(parameters, back) == ([back], {})
            return
        assert error.startswith("shop.t: ")
        assert "\n" not in error

    sent()


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


@pytest.mark.parametrize(("annotation", "value", "shown"), WRONG, ids=lambda each: str(each)[:30])
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
        assert f"got {type(value).__name__} (" in message


@pytest.mark.parametrize(("annotation", "value", "shown"), WRONG, ids=lambda each: str(each)[:30])
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
    ("args", "kwargs"),
    [
        ((1,), {"d": Decimal("1.10")}),
        ((1, NEAR), {"d": Decimal(1), "c": "x"}),
        ((1, NEAR, "x", Path("p"), Path("q")), {"d": Decimal(1), "e": True}),
        (
            (1, None, "x"),
            {"d": Decimal(1), "a": date(2020, 1, 1), "rest": date(2020, 1, 2), "more": date(2020, 1, 3)},
        ),
    ],
)
def test_every_kind_of_parameter_is_converted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert there_and_back(FULL, *args, **kwargs) == (list(args), kwargs)


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
        (lambda a: a, b"[" * 3000 + b"]" * 3000, b"{}"),
        (lambda a: a, b"[" + b"[" * 30000 + b"]" * 30000 + b"]", b"{}"),
        (lambda a=1: a, b'["\xff"]', b"{}"),
    ],
    ids=lambda each: str(each)[:20],
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
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_arguments_or_refused(args: bytes, kwargs: bytes) -> None:
    with contextlib.suppress(BadArguments):
        FULL.decode(Raw(args), Raw(kwargs))


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
    ids=lambda each: repr(each)[:20],
)
def test_what_has_no_json_form_is_refused_as_argument_and_as_result(value: Any) -> None:
    with pytest.raises(BadArguments, match=r"^shop\.t: an argument cannot be encoded: .+"):
        taking(Any).encode([value], {})
    with pytest.raises(BadArguments, match=r"^shop\.t: an argument cannot be encoded: .+"):
        taking(Any).encode([], {"p0": value})
    with pytest.raises(TypeError, match=r"^a result of type .+ cannot be encoded: .+"):
        encode_value(value)


def test_what_would_fail_only_at_the_worker_is_refused_here() -> None:
    with pytest.raises(BadArguments, match=r"^shop\.t: parameter 'p0' takes .*PathLike.* has no JSON form"):
        taking(os.PathLike[str]).encode([Path("a")], {})


def test_null_and_the_word_null_are_not_taken_for_nan() -> None:
    assert there_and_back(taking(Any), [None, "null", 1.5]) == ([[None, "null", 1.5]], {})
    assert encode_value({"null": None}) == b'{"null":null}'


def test_an_optional_float_that_is_nan_does_not_become_none_in_silence() -> None:
    with pytest.raises(BadArguments, match="nan has no JSON form"):
        taking(float | None).encode([math.nan], {})
    assert there_and_back(taking(float | None), None) == ([None], {})


T = TypeVar("T")


@pytest.mark.parametrize("annotation", [Any, T, object, "unquoted"])
def test_an_annotation_that_says_little_lets_everything_pass(annotation: Any) -> None:
    assert there_and_back(taking(annotation), {"a": [1, None]}) == ([{"a": [1, None]}], {})


@pytest.mark.parametrize("annotation", [NoReturn, Never, Any, T])
def test_a_task_may_say_that_it_never_returns(annotation: Any) -> None:
    assert ResultType(taking(returns=annotation).returns).decode(b"[1]") == [1]


@pytest.mark.parametrize("annotation", [int | Point | Line, Path | str, list[Path | int], Literal[1.5]])
def test_an_annotation_with_no_json_form_is_refused_at_declaration(annotation: Any) -> None:
    with pytest.raises(Misconfigured, match=r"^task shop\.t: parameter 'p0' has no JSON form: "):
        taking(annotation)
    with pytest.raises(Misconfigured, match=r"^task shop\.t: the result has no JSON form: "):
        taking(returns=annotation)


def test_annotations_that_are_text_are_resolved() -> None:
    parameters = Parameters("shop.known", annotated.known)
    order = annotated.Order(uuid4(), [1, 2])
    assert there_and_back(parameters, order, order.id) == ([order, order.id], {})
    assert ResultType(parameters.returns).decode(encode_value([order])) == [order]
    with pytest.raises(BadArguments, match="parameter 'order' takes Order, got int"):
        parameters.encode([5], {})


def test_what_only_a_type_checker_can_resolve_counts_as_any_and_the_others_stand() -> None:
    parameters = Parameters("shop.partly", annotated.partly)
    order = annotated.Order(uuid4(), [1, 2])
    assert there_and_back(parameters, order, {"any": "thing"}, 3) == ([order, {"any": "thing"}, 3], {})
    with pytest.raises(BadArguments, match="parameter 'count' takes int, got str"):
        parameters.encode([order, None, "3"], {})
    assert parameters.returns is Any


def test_an_annotation_that_is_no_type_does_no_harm() -> None:
    def broken(a: int, b: int, c: int) -> None: ...

    broken.__annotations__.update(b="1 / 0", c="][")
    parameters = Parameters("shop.broken", broken)
    assert there_and_back(parameters, 1, "b", [3]) == ([1, "b", [3]], {})
    with pytest.raises(BadArguments, match="parameter 'a' takes int, got str"):
        parameters.encode(["1", 2, 3], {})


def test_a_model_travels_under_its_aliases() -> None:
    customer = Customer(id=NEAR, born=date(1980, 2, 29), **{"e-mail": "a@b"})
    raw, _ = taking(Customer).encode([customer], {})
    assert msgspec.json.decode(bytes(raw)) == [{"id": str(NEAR), "born": "1980-02-29", "e-mail": "a@b"}]


def test_a_result_that_does_not_fit_its_annotation_says_both() -> None:
    with pytest.raises(
        BadResult, match="the result is not what the task declares, int: Expected `int`, got `str`"
    ):
        ResultType(int).decode(b'"5"')
    with pytest.raises(BadResult, match=r"the result is not what the task declares, Customer: .*id"):
        ResultType(Customer).decode(b"{}")
    assert issubclass(BadResult, TypeError)


def test_a_path_is_of_the_kind_that_is_declared() -> None:
    (back,), _ = there_and_back(taking(PurePosixPath), PurePosixPath("a/b"))
    assert back == PurePosixPath("a/b")
    assert type(back) is PurePosixPath


def test_defaults_stay_with_the_worker() -> None:
    raw, named = Parameters("t", lambda a, b=[1]: a).encode([1], {})
    assert (bytes(raw), bytes(named)) == (b"[1]", b"{}")


def test_keyword_names_from_outside_leave_nothing_behind() -> None:
    parameters = Parameters("shop.t", lambda **more: more)
    before = sizes(parameters)
    for at in range(1000):
        parameters.decode(Raw(b"[]"), Raw(b'{"k%d":1}' % at))
    assert sizes(parameters) == before


def sizes(parameters: Parameters) -> dict[str, int]:
    """How much each part of it holds."""
    return {name: len(value) for name, value in vars(parameters).items() if hasattr(value, "__len__")}
