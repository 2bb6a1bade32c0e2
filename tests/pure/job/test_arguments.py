"""Arguments: from Python to JSON and back as the annotations say; whatever a worker would refuse, the producer does."""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Never, NoReturn, TypeVar
from uuid import UUID, uuid4

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from celery5.errors import BadArguments, BadResult
from celery5.protocol.job.arguments import Parameters, ResultType, encode_value
from tests.night import examples
from tests.pure.job import annotated
from tests.pure.tasks.shop_types import (
    Address,
    Box,
    Colour,
    Customer,
    Line,
    Pair,
    Point,
    Size,
    taking,
    there_and_back,
)

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
    "datetime": (datetime, (st.datetimes() | zoned).map(lambda at: at.replace(fold=0))),
    "date": (date, st.dates()),
    "time": (time, st.times().map(lambda at: at.replace(fold=0))),
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes_back_equal_and_of_its_type(kind: str) -> None:
    annotation, values = KINDS[kind]
    parameters = taking(annotation, Any)

    @given(values)
    @settings(max_examples=examples(40), deadline=None)
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
    @settings(max_examples=examples(20), deadline=None)
    def returned(value: Any) -> None:
        assert ResultType(annotation).decode(encode_value(value)) == value

    returned()


anything = st.one_of([values for _, values in KINDS.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_either_refused_or_arrives_as_the_annotation_says(kind: str) -> None:
    annotation, _ = KINDS[kind]
    parameters = taking(annotation)

    @given(anything)
    @settings(max_examples=examples(60), deadline=None)
    def sent(value: Any) -> None:
        try:
            raw = parameters.encode([value], {})
        except BadArguments as refused:
            error = str(refused)
        else:
            (back,), _ = parameters.decode(*raw)
            # What has arrived is of the declared type: a second trip accepts it and changes nothing.
            again = there_and_back(parameters, back)
            assert again == ([back], {}) or str(again) == str(([back], {}))  # no NaN is equal to itself
            return
        assert error.startswith("shop.t: ")
        assert "\n" not in error

    sent()


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


T = TypeVar("T")


@pytest.mark.parametrize("annotation", [Any, T, object, "unquoted"])
def test_an_annotation_that_says_little_lets_everything_pass(annotation: Any) -> None:
    assert there_and_back(taking(annotation), {"a": [1, None]}) == ([{"a": [1, None]}], {})


@pytest.mark.parametrize("annotation", [NoReturn, Never, Any, T])
def test_a_task_may_say_that_it_never_returns(annotation: Any) -> None:
    assert ResultType(taking(returns=annotation).return_annotation).decode(b"[1]") == [1]


def test_annotations_that_are_text_are_resolved() -> None:
    parameters = Parameters("shop.known", annotated.known)
    order = annotated.Order(uuid4(), [1, 2])
    assert there_and_back(parameters, order, order.id) == ([order, order.id], {})
    assert ResultType(parameters.return_annotation).decode(encode_value([order])) == [order]
    with pytest.raises(BadArguments, match="parameter 'order' takes Order, got int"):
        parameters.encode([5], {})


def test_unresolvable_annotation_counts_as_any() -> None:
    parameters = Parameters("shop.partly", annotated.partly)
    order = annotated.Order(uuid4(), [1, 2])
    assert there_and_back(parameters, order, {"any": "thing"}, 3) == ([order, {"any": "thing"}, 3], {})
    with pytest.raises(BadArguments, match=r"parameter 'count' takes int, got str$"):
        parameters.encode([order, None, "3"], {})
    assert parameters.return_annotation is Any


def test_an_annotation_that_is_no_type_does_no_harm() -> None:
    def broken(a: int, b: int, c: int) -> None: ...

    broken.__annotations__.update(b="1 / 0", c="][")  # which cannot be resolved at any time
    parameters = Parameters("shop.broken", broken)
    assert there_and_back(parameters, 1, "b", [3]) == ([1, "b", [3]], {})
    with pytest.raises(BadArguments, match="parameter 'a' takes int, got str"):
        parameters.encode(["1", 2, 3], {})


def test_a_model_travels_under_its_aliases() -> None:
    customer = Customer(id=NEAR, born=date(1980, 2, 29), **{"e-mail": "a@b"})
    raw, _ = taking(Customer).encode([customer], {})
    assert msgspec.json.decode(bytes(raw)) == [{"id": str(NEAR), "born": "1980-02-29", "e-mail": "a@b"}]


def test_a_result_that_does_not_fit_its_annotation_says_both() -> None:
    with pytest.raises(BadResult, match=r"the result is not what the task declares, int: got str$"):
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
