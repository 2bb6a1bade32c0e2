"""Values: what arrives is what was sent, or the producer has refused it with one line."""

import collections
import dataclasses
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import annotated_types
import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.errors import BadArguments, BadResult, Misconfigured
from celery5.protocol.job.arguments import Parameters, ResultType, encode_value
from tests.night import examples
from tests.pure.tasks.shop_types import Address, Colour, Customer, Line, Point, taking, there_and_back


class SafeString(str):
    """As Django has one: its `__str__` returns itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


class float64(float):
    """As numpy has one: its `repr` is no number."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)})"


class Whole(int):
    pass


class Blob(bytes):
    pass


class Buffer(bytearray):
    pass


class Money(Decimal):
    pass


class Moment(datetime):
    pass


class Day(date):
    pass


class Clock(time):
    pass


class Span(timedelta):
    pass


class Mode(str, enum.Enum):  # noqa: UP042  the older spelling
    FAST = "fast"


class Level(int, enum.Enum):
    LOW = 1


class Ratio(float, enum.Enum):
    HALF = 0.5


class Pair(NamedTuple):
    a: int
    b: str


class Row(dict[str, Any]):
    pass


class Rows(list[Any]):
    pass


class numpy_number:
    """As numpy's numbers that are no subclasses: `int64`, `float32`, `bool_`."""

    dtype, shape = "int64", ()

    def __init__(self, value: Any) -> None:
        self._value = value

    def item(self) -> Any:
        return self._value


PLAIN: list[tuple[Any, Any, Any]] = [
    (str, SafeString("<b>é</b>"), "<b>é</b>"),
    (float, float64(1.5), 1.5),
    (int, Whole(7), 7),
    (int, Whole(10**30), 10**30),
    (bytes, Blob(b"\x00a"), b"\x00a"),
    (bytes, bytearray(b"ab"), b"ab"),
    (Decimal, Money("1.10"), Decimal("1.10")),
    (datetime, Moment(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    (date, Day(2026, 1, 2), date(2026, 1, 2)),
    (time, Clock(1, 2, 3), time(1, 2, 3)),
    (timedelta, Span(days=1, microseconds=1), timedelta(days=1, microseconds=1)),
    (list[str], [SafeString("a")], ["a"]),
    (list[float], Rows([float64(1), 2.0]), [1.0, 2.0]),
    (dict[str, float], Row({SafeString("a"): float64(2)}), {"a": 2.0}),
    (dict[int, str], {Whole(1): SafeString("a")}, {1: "a"}),
    (dict[str, int], collections.OrderedDict(a=1), {"a": 1}),
    (dict[str, int], collections.Counter("aab"), {"a": 2, "b": 1}),
    (tuple[int, str], Pair(1, SafeString("x")), (1, "x")),
    (set[str], {SafeString("a")}, {"a"}),
    (float | None, float64(0), 0.0),
    (str | int, SafeString("x"), "x"),
    (Mode, Mode.FAST, Mode.FAST),
    (Level, Level.LOW, Level.LOW),
    (Point, Point(float64(1.5)), Point(1.5)),
    (Annotated[str, msgspec.Meta(min_length=2)], SafeString("ab"), "ab"),
    (int, numpy_number(5), 5),
    (float, numpy_number(0.5), 0.5),
    (bool, numpy_number(True), True),
]


@pytest.mark.parametrize(("annotation", "value", "plain"), PLAIN, ids=lambda value: str(value)[:40])
def test_a_subclass_of_a_plain_type_arrives_as_its_plain_value(
    annotation: Any, value: Any, plain: Any
) -> None:
    (back,), _ = there_and_back(taking(annotation), value)
    assert back == plain
    assert type(back) is type(plain)
    _, named = there_and_back(taking(annotation), p0=value)
    assert named == {"p0": plain}
    raw = encode_value(value)
    assert ResultType(annotation).decode(raw) == plain
    assert json.loads(raw) == json.loads(encode_value(plain))


@pytest.mark.parametrize(("_annotation", "value", "plain"), PLAIN, ids=lambda value: str(value)[:40])
def test_a_subclass_passes_a_parameter_without_annotation(_annotation: Any, value: Any, plain: Any) -> None:
    (nested,), _ = there_and_back(taking(Any), {"deep": [value]})
    assert nested == json.loads(encode_value({"deep": [plain]}))


def test_an_enum_of_another_type_is_written_as_its_value() -> None:
    assert there_and_back(taking(Any), [Mode.FAST, Level.LOW, Ratio.HALF]) == ([["fast", 1, 0.5]], {})


class Nanoseconds(datetime):
    """As pandas.Timestamp: finer than a datetime, and equal to one only without the rest."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = datetime.__hash__


CHANGED: list[tuple[Any, Any, str]] = [
    (datetime, Nanoseconds(2026, 1, 1), "more than a datetime can hold"),
    (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")), "zone Europe/Berlin"),
    (datetime, datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), "fold=1"),
    (datetime, datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/London")), "zone Europe/London"),
    (datetime, datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=3601))), "whole minutes"),
    (datetime, datetime(2026, 10, 25, 2, 30, fold=1), "fold=1"),
    (time, time(2, 30, tzinfo=ZoneInfo("Europe/Berlin")), "zone Europe/Berlin"),
    (time, time(2, 30, fold=1), "fold=1"),
    (list[datetime], [datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/London"))], "zone Europe/London"),
    (dict[datetime, int], {datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/London")): 1}, "zone Europe/London"),
    (Any, {1: "one", "1": "text"}, "the same in JSON"),
    (Any, [{date(2026, 1, 1): 1, "2026-01-01": 2}], "the same in JSON"),
    (dict[int | str, int], {1: 2, "1": 3}, "the same in JSON"),
    (Any, {Colour.RED: 1, "red": 2}, "the same in JSON"),
    (Any, {True: 1}, "bool"),
]


@pytest.mark.parametrize(("annotation", "value", "why"), CHANGED, ids=lambda value: str(value)[:40])
def test_what_json_would_change_silently_is_refused(annotation: Any, value: Any, why: str) -> None:
    for parameters in (taking(annotation), taking(Any)):
        calls: list[tuple[Any, Any]] = [((value,), {}), ((), {"p0": value})]
        for call in calls:
            with pytest.raises(BadArguments, match=why) as caught:
                parameters.encode(*call)
            assert str(caught.value).startswith("shop.t: ")
            assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=why):
        encode_value([value])


@pytest.mark.parametrize(
    "zone", [UTC, ZoneInfo("UTC"), ZoneInfo("Etc/GMT+5"), timezone(timedelta(hours=5, minutes=30))]
)
def test_a_zone_with_one_offset_is_kept(zone: Any) -> None:
    moment = datetime(2026, 7, 1, 12, tzinfo=zone)
    (back,), _ = there_and_back(taking(datetime), moment)
    assert back == moment
    assert back.utcoffset() == moment.utcoffset()
    clock = time(1, 2, tzinfo=zone)
    assert there_and_back(taking(time), clock)[0][0].utcoffset() == clock.utcoffset()


@dataclasses.dataclass(frozen=True)
class Point3(Point):
    z: float = 0.0


@dataclasses.dataclass
class Hidden:
    a: int
    when: datetime | None = dataclasses.field(default=None, compare=False)


class Tagged(TypedDict):
    name: str


LOSING: list[tuple[Any, Any, str]] = [
    (Point, Point3(1.0, z=2.0), "Point3"),
    (list[Point], [Point3(1.0)], "Point3"),
    (Tagged, {"name": "a", "more": 1}, "without the key 'more'"),
    (Line, {"product": UUID(int=1), "price": Decimal(1), "prise": 1}, "'prise', which is no field of Line"),
    (Hidden, Hidden(1, datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/Berlin"))), "zone Europe/Berlin"),
]


@pytest.mark.parametrize(("annotation", "value", "why"), LOSING, ids=lambda value: str(value)[:40])
def test_a_field_that_would_be_lost_is_refused(annotation: Any, value: Any, why: str) -> None:
    with pytest.raises(BadArguments, match=why):
        taking(annotation).encode((value,), {})


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Account(pydantic.BaseModel):
    name: str
    balance: int = pydantic.Field(default=0, exclude=True)


class Holder(pydantic.BaseModel):
    accounts: list[Account]


class Animal(pydantic.BaseModel):
    name: str


class Cat(Animal):
    lives: int = 9


class Dog(Animal):
    breed: str


class Zoo(pydantic.BaseModel):
    star: Animal


class Opened(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    at: datetime


@pytest.mark.parametrize(
    ("annotation", "value", "why"),
    [
        (Login, Login(user="a", password=pydantic.SecretStr("hunter2")), "password"),
        (Account, Account(name="a", balance=5), "balance"),
        (Holder, Holder(accounts=[Account(name="a", balance=5)]), "balance"),
        (list[Account], [Account(name="a", balance=5)], "balance"),
        (pydantic.SecretStr, pydantic.SecretStr("hunter2"), "SecretStr"),
        (Animal, Cat(name="a"), "arrives as Animal"),
        (Zoo, Zoo(star=Dog(name="a", breed="b")), "arrives as Animal"),
        (Opened, Opened(at=datetime(2026, 7, 1, tzinfo=ZoneInfo("Europe/Berlin"))), "zone Europe/Berlin"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_would_arrive_changed_is_refused(annotation: Any, value: Any, why: str) -> None:
    with pytest.raises(BadArguments, match=why) as caught:
        taking(annotation).encode((value,), {})
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    if annotation is not Animal:
        with pytest.raises(TypeError, match=why):
            encode_value([value])


def test_a_model_without_a_changed_field_arrives() -> None:
    extra = Opened(at=datetime(2026, 7, 1, tzinfo=UTC), more=SafeString("x"))  # type: ignore[call-arg]
    account = Account(name="a")
    assert there_and_back(taking(Account, Opened), account, extra) == ([account, extra], {})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Cat | Dog, Dog(name="a", breed="b")),
        (Cat | Dog, Cat(name="a")),
        (list[Cat | Dog], [Cat(name="a"), Dog(name="b", breed="c")]),
        (Cat | Dog | None, None),
        (Cat | dict[str, int], {"a": 1}),
        (Cat | date, date(2026, 1, 2)),
        (dict[str, Cat | int], {"a": 1, "b": Cat(name="x")}),
        (pydantic.HttpUrl, pydantic.HttpUrl("http://a.b/c?d")),
        (pydantic.HttpUrl | None, pydantic.HttpUrl("http://a.b/")),
        (pydantic.HttpUrl | int, 5),
        (list[pydantic.AnyUrl], [pydantic.AnyUrl("x://y")]),
        (Annotated[Cat | Dog, pydantic.Field(title="pet")], Cat(name="a")),
        (pydantic.PositiveInt, 5),
        (pydantic.AwareDatetime, datetime(2026, 1, 1, tzinfo=UTC)),
        (Customer | Cat, Customer(id=UUID(int=1), born=date(2026, 1, 1), **{"e-mail": "a@b"})),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unions_of_models_and_types_of_pydantic_arrive(annotation: Any, value: Any) -> None:
    (back,), _ = there_and_back(taking(annotation), value)
    assert back == value
    assert type(back) is type(value)
    assert ResultType(annotation).decode(encode_value(value)) == value


def test_a_wrong_member_of_a_union_of_models_is_refused_on_both_sides() -> None:
    parameters = taking(Cat | Dog)
    with pytest.raises(BadArguments, match="parameter 'p0' takes"):
        parameters.encode((5,), {})
    with pytest.raises(BadArguments, match="parameter 'p0' takes"):
        parameters.decode(msgspec.Raw(b'[{"legs":4}]'), msgspec.Raw(b"{}"))
    with pytest.raises(BadArguments, match="parameter 'p0' takes HttpUrl"):
        taking(pydantic.HttpUrl).encode(("no url",), {})


def test_a_union_that_nobody_can_decode_is_refused_where_it_is_declared() -> None:
    with pytest.raises(Misconfigured, match="parameter 'p0' has no JSON form"):
        taking(Line | Cat)


@dataclasses.dataclass
class Basket:
    size: Annotated[int, annotated_types.Ge(1)]
    inner: "list[Basket]" = dataclasses.field(default_factory=list)


@attrs.define
class Shelf:
    name: Annotated[str, annotated_types.MinLen(2)]


class Slot(msgspec.Struct):
    at: Annotated[int, annotated_types.Interval(ge=0, lt=10)]


class Sized(TypedDict):
    n: Annotated[int, annotated_types.Gt(0)]


def must_be_even(value: int) -> int:
    if value % 2:
        raise ValueError("it must be even")
    return value


Positive = Annotated[int, annotated_types.Gt(0)]
CONSTRAINED: list[tuple[Any, Any, Any]] = [
    (Annotated[int, msgspec.Meta(gt=0)], 1, 0),
    (Positive, 1, 0),
    (Annotated[int, annotated_types.Interval(ge=1, le=3)], 3, 4),
    (Annotated[int, annotated_types.MultipleOf(5)], 10, 12),
    (Annotated[str, annotated_types.Len(1, 3)], "abc", "abcd"),
    (Annotated[list[int], annotated_types.MinLen(1)], [1], []),
    (Annotated[str, annotated_types.Predicate(str.islower)], "a", "A"),
    (Annotated[Decimal, annotated_types.Ge(Decimal("0.01"))], Decimal(1), Decimal(0)),
    (
        Annotated[datetime, annotated_types.Timezone(...)],
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1),
    ),
    (list[Positive], [1], [1, 0]),
    (dict[str, Positive], {"a": 1}, {"a": 0}),
    (dict[Positive, str], {1: "a"}, {0: "a"}),
    (tuple[int, Positive], (0, 1), (0, 0)),
    (tuple[Positive, ...], (1,), (1, -1)),
    (Positive | None, None, 0),
    (Positive | str, "a", 0),
    (Basket, Basket(1, [Basket(2)]), Basket(0)),
    (Basket, Basket(1), Basket(1, [Basket(0)])),
    (Shelf, Shelf("ab"), Shelf("a")),
    (Slot, Slot(9), Slot(10)),
    (Sized, {"n": 1}, {"n": 0}),
    (Annotated[int, pydantic.Field(gt=0)], 1, 0),
    (pydantic.PositiveInt, 1, 0),
    (list[pydantic.PositiveInt], [1], [0]),
    (Annotated[str, pydantic.StringConstraints(pattern="^a+$")], "aa", "b"),
    (Annotated[str, pydantic.StringConstraints(strip_whitespace=True)], "aa", " b "),
    (Annotated[int, pydantic.AfterValidator(must_be_even)], 2, 3),
    (
        Annotated[Point, pydantic.AfterValidator(lambda point: must_be_even(int(point.x)) and point)],
        Point(2),
        Point(3),
    ),
]


@pytest.mark.parametrize(("annotation", "right", "wrong"), CONSTRAINED, ids=lambda value: str(value)[:40])
def test_constraints_of_annotations_hold_for_producers_and_workers(
    annotation: Any, right: Any, wrong: Any
) -> None:
    parameters = taking(annotation)
    assert there_and_back(parameters, right) == ([right], {})
    assert there_and_back(parameters, p0=right) == ([], {"p0": right})
    calls: list[tuple[Any, Any]] = [((wrong,), {}), ((), {"p0": wrong})]
    for call in calls:
        with pytest.raises(BadArguments, match="parameter 'p0'"):
            parameters.encode(*call)
    raw = encode_value(wrong)
    with pytest.raises(BadArguments, match="parameter 'p0'"):
        parameters.decode(msgspec.Raw(b"[" + raw + b"]"), msgspec.Raw(b"{}"))
    assert ResultType(annotation).decode(encode_value(right)) == right
    with pytest.raises(BadResult):
        ResultType(annotation).decode(raw)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.times(timezones=st.none() | st.timezones())
    | st.uuids()
    | st.sampled_from([Mode.FAST, Level.LOW, SafeString("x"), float64(2.5), Whole(1), numpy_number(3)])
)
keys = (
    st.text(max_size=2)
    | st.integers(0, 3)
    | st.sampled_from(["1", "2", SafeString("1"), Whole(1), "fast", Mode.FAST])
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(st.integers(0, 3), max_size=3)
    ),
    max_leaves=8,
)


def send_or_refuse(parameters: Parameters, value: Any) -> list[Any] | None:
    """Return the arguments that arrive; None when the producer has refused them, in one line."""
    refusal = ""
    try:
        return there_and_back(parameters, value)[0]
    except BadArguments as error:
        refusal = str(error)
    assert "\n" not in refusal
    return None


def as_json_has_it(value: Any) -> Any:
    """An independent reading of what a parameter without annotation is said to receive."""
    if isinstance(value, enum.Enum):
        return as_json_has_it(value.value)
    if isinstance(value, Mapping):
        made = {
            key if isinstance(key, str) else str(as_json_has_it(key)): as_json_has_it(item)
            for key, item in value.items()
        }
        assert len(made) == len(value), "an entry was lost"
        return {str.__str__(key): item for key, item in made.items()}
    if isinstance(value, (list, tuple)):
        return [as_json_has_it(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(as_json_has_it, value))
    if isinstance(value, float):
        assert math.isfinite(value), "not finite"
        return float(value)
    if isinstance(value, numpy_number):
        return value.item()
    return value


@given(trees)
@settings(max_examples=examples(400), deadline=None)
def test_without_annotation_a_value_arrives_as_json_has_it_or_is_refused(value: Any) -> None:
    if (arrived := send_or_refuse(taking(Any), value)) is None:
        return
    back = arrived[0]
    check_arrived(as_json_has_it(value), back)


def check_arrived(sent: Any, back: Any) -> None:
    if isinstance(sent, dict):
        assert set(sent) == set(back)
        for key in sent:
            check_arrived(sent[key], back[key])
    elif isinstance(sent, list):
        back = sorted(back) if all(type(item) is int for item in back) and sorted(back) == sent else back
        assert len(sent) == len(back)
        for sent_item, other in zip(sent, back, strict=True):
            check_arrived(sent_item, other)
    elif isinstance(sent, (datetime, time)):
        arrived = type(sent).fromisoformat(back)
        assert arrived.replace(tzinfo=None) == sent.replace(tzinfo=None, fold=0)
        offset = sent.tzinfo.utcoffset(None) if sent.tzinfo else None
        assert arrived.utcoffset() == offset
        assert (arrived.tzinfo is None) is (sent.tzinfo is None)
    elif isinstance(sent, (bytes, Decimal, date, UUID)):
        assert isinstance(back, str)
    else:
        assert back == sent
        assert type(back) in (str, int, float, bool, type(None))


TIMES = st.datetimes(
    timezones=st.none() | st.timezones() | st.just(UTC) | st.just(timezone(timedelta(hours=-3)))
)
ANNOTATED: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "datetime": (datetime, TIMES),
    "datetimes": (list[datetime], st.lists(TIMES, max_size=2)),
    "time": (time, st.times(timezones=st.none() | st.timezones())),
    "by datetime": (dict[datetime, int], st.dictionaries(TIMES, st.integers(0, 2), max_size=2)),
    "hidden": (Hidden, st.builds(Hidden, a=st.integers(0, 3), when=st.none() | TIMES)),
    "opened": (Opened, st.builds(Opened, at=TIMES)),
    "account": (Account, st.builds(Account, name=st.text(max_size=3), balance=st.integers(0, 2))),
    "pets": (
        list[Cat | Dog],
        st.lists(
            st.builds(Cat, name=st.text(max_size=3)) | st.builds(Dog, name=st.just("d"), breed=st.just("x")),
            max_size=2,
        ),
    ),
    "either": (int | float | str, st.integers(-9, 9) | st.floats() | st.text(max_size=3)),
    "by number or text": (dict[int | str, int], st.dictionaries(keys, st.integers(0, 3), max_size=3)),
    "literal": (Literal["a", 1] | None, st.sampled_from(["a", 1, None, True, 1.0, "b"])),
    "sequence": (Sequence[Decimal], st.lists(st.decimals(), max_size=2)),
    "path": (Path, st.sampled_from([Path("a"), "a//b", SafeString("a/./b")])),
    "attrs": (Address, st.builds(Address, street=st.text(max_size=3).map(SafeString), since=st.dates())),
}


def zones(value: Any) -> list[Any]:
    """The offsets of all times in a value, by which zones without one are seen."""
    if isinstance(value, (datetime, time)):
        return [
            None if value.tzinfo is None else value.tzinfo.utcoffset(None) or value.utcoffset(),
            value.fold,
        ]
    if isinstance(value, enum.Enum):
        return []
    if isinstance(value, (list, tuple)):
        return [zones(item) for item in value]
    if isinstance(value, dict):
        return [zones(list(pair)) for pair in value.items()]
    return [zones(item) for item in vars(value).values()] if hasattr(value, "__dict__") else []


@pytest.mark.parametrize("kind", ANNOTATED)
def test_an_annotated_value_arrives_equal_or_is_refused(kind: str) -> None:
    annotation, values = ANNOTATED[kind]
    parameters = taking(annotation)

    @given(values)
    @settings(max_examples=examples(80), deadline=None)
    def sent(value: Any) -> None:
        if (arrived := send_or_refuse(parameters, value)) is None:
            return
        back = arrived[0]
        wanted = value if kind != "path" else Path(value)
        assert repr(back) == repr(wanted) or back == wanted  # no NaN is equal to itself
        if not isinstance(value, SafeString):
            assert zones(back) == zones(value)

    sent()


NAMES = (
    "self",
    "cls",
    "args",
    "kwargs",
    "task",
    "options",
    "name",
    "function",
    "app",
    "job",
    "fields",
    "flow",
    "value",
)


def collecting(**more: Any) -> Mapping[str, Any]:
    return more


@pytest.mark.parametrize("name", NAMES)
def test_a_keyword_may_have_any_name_in_the_parameters(name: str) -> None:
    parameters = Parameters("shop.t", collecting)
    values, named = parameters.decode(*parameters.encode((), {name: 1}))
    assert (list(values), dict(named)) == ([], {name: 1})


def hostile(function: Callable[[Any, Any], Any]) -> Any:
    """A value whose `==` is the user's code."""
    return type("Hostile", (dict,), {"__eq__": function, "__hash__": None})(a=1)


def raising(_self: Any, _other: Any) -> bool:
    raise RuntimeError("no comparison")


def test_a_value_that_cannot_be_compared_is_still_sent() -> None:
    assert there_and_back(taking(Any), hostile(raising)) == ([{"a": 1}], {})
    assert there_and_back(taking(dict[str, int]), hostile(raising)) == ([{"a": 1}], {})


@dataclasses.dataclass
class Parcel:
    number: int
    name: str
    weight: float
    labels: list[str]


class ParcelModel(pydantic.BaseModel):
    number: int
    name: str
    weight: float
    labels: list[str]


@pytest.mark.parametrize(("kind", "most"), [(Parcel, 175), (ParcelModel, 270)])
def test_a_check_of_an_argument_with_fields_takes_few_calls(kind: Callable[..., Any], most: int) -> None:
    """Counted, since time on a busy machine says little. Each text and number is compared without a call."""
    parameters = taking(kind)
    arguments = (kind(number=7, name="pear", weight=1.5, labels=["a", "b"]),)
    calls = list[str]()

    def record(_frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    parameters.encode(arguments, {})
    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        parameters.encode(arguments, {})
    finally:
        sys.setprofile(previous)
    assert len(calls) <= most
