"""Records, their encodings, and their keys."""

import gzip
import re
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, TypedDict, cast
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest

from celery5.errors import BadRecord, Misconfigured
from celery5.protocol.streams.routing import canonical_key
from celery5.streams import Record
from celery5.streams.codec import MAX_DECOMPRESSED, make_codec
from tests.night import NIGHTLY


class Order(Record):
    order_id: int
    amount: Decimal = Decimal(0)
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)


class Reading(Record, primitive=True):
    sensor: str
    value: float
    ok: bool = True
    raw: bytes = b""
    count: int = 0


class Customer(Record, version=3):
    first: str
    last: str
    language: str


@Customer.upcast(from_version=1)
def split_name(fields: dict[str, Any]) -> dict[str, Any]:
    first, _, last = fields.pop("name").partition(" ")
    return {**fields, "first": first, "last": last}


@Customer.upcast(from_version=2)
def add_language(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "language": "en"}


@dataclass
class Point:
    x: int
    y: int


@attrs.define
class Person:
    name: str


class Struct(msgspec.Struct):
    name: str


class Model(pydantic.BaseModel):
    name: str
    age: int = 3


class Mapped(TypedDict):
    k: int


class Named(NamedTuple):
    name: str


class Colour(Enum):
    RED = "red"


def words_of(codec: Any, record: Any) -> list[bytes]:
    return [word if isinstance(word, bytes) else word.encode() for word in codec.encode(record)]


CODECS = ["json", "msgpack", "json+gzip", "msgpack+gzip", "json+lz4", "msgpack+lz4"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "record",
    [
        Order(order_id=1, amount=Decimal("9.90")),
        Point(1, 2),
        Person("Ada"),
        Struct("Ada"),
        Model(name="Ada"),
        Customer(first="Ada", last="Lovelace", language="en"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_as_it_was(record: Any, codec: str) -> None:
    made = make_codec(type(record), codec=codec)
    words = words_of(made, record)
    assert words[0].decode().partition("/")[0] == f"={codec}"
    assert made.decode(words) == record


@pytest.mark.parametrize("written", CODECS)
@pytest.mark.parametrize("reading", CODECS)
def test_the_encoding_may_change_while_older_entries_are_there(written: str, reading: str) -> None:
    order = Order(order_id=1, amount=Decimal("9.90"))
    words = words_of(make_codec(Order, codec=written), order)
    assert make_codec(Order, codec=reading, reads=[written]).decode(words) == order
    later = make_codec(Order, codec=reading)
    assert later.has_undeclared([words]) == (written not in (reading, "json"))
    if later.has_undeclared([words]):
        with pytest.raises(
            BadRecord, match=f"encoded as '{re.escape(written)}', which this stream has never declared"
        ):
            later.decode(words)
        assert written in later.undeclared
        later.declare([written])
    assert later.decode(words) == order
    assert later.without_class().decode(words)["order_id"] == 1
    assert not later.has_undeclared([words])


def test_a_value_that_does_not_fit_its_field_is_refused_before_it_is_sent() -> None:
    codec = make_codec(Order)
    wrong: Any = Order(order_id="one")  # type: ignore[arg-type]
    with pytest.raises(BadRecord, match=r"^no Order: Expected `int`, got `str` - at `\$.order_id`"):
        codec.encode(wrong)
    with pytest.raises(BadRecord, match=r"^no Order: "):
        codec.encode(Point(1, 2))
    with pytest.raises(BadRecord, match=r"^no Point: "):
        make_codec(Point).encode({"x": 1, "y": 2})
    with pytest.raises(BadRecord, match="has no JSON form"):
        make_codec(None).encode(object())


@pytest.mark.parametrize("codec", ["json", "msgpack+gzip"])
def test_unknown_fields_survive_reading_replacing_and_sending(codec: str) -> None:
    class Newer(Record):
        order_id: int
        amount: Decimal = Decimal(0)
        at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
        coupon: dict[str, int]

    made = make_codec(Order, codec=codec)
    newer = make_codec(Newer, codec=codec)
    order = made.decode(words_of(newer, Newer(order_id=1, coupon={"percent": 5})))
    assert order == Order(order_id=1)
    changed = order.replace(amount=Decimal(3))
    assert newer.decode(words_of(made, changed)) == Newer(
        order_id=1, amount=Decimal(3), coupon={"percent": 5}
    )


def test_records_of_earlier_versions_are_upcast_step_by_step() -> None:
    codec = make_codec(Customer)
    ada = Customer(first="Ada", last="Lovelace", language="en")
    assert words_of(codec, ada)[0] == b"=json/3"
    assert codec.decode([b"=json", b'{"name":"Ada Lovelace"}']) == ada
    assert codec.decode([b"=json/2", b'{"first":"Ada","last":"Lovelace"}']) == ada
    with pytest.raises(BadRecord, match="of version 4: this code knows up to version 3"):
        codec.decode([b"=json/4", b"{}"])


def test_a_missing_upcaster_is_one_clear_error() -> None:
    class Late(Record, version=2):
        name: str

    with pytest.raises(BadRecord, match=r"declare @Late.upcast\(from_version=1\)"):
        make_codec(Late).decode([b"=json", b"{}"])
    with pytest.raises(Misconfigured, match="nothing is to be upcast from version 2"):
        Late.upcast(from_version=2)


def test_a_primitive_record_is_native_fields() -> None:
    codec = make_codec(Reading, by="sensor")
    reading = Reading(sensor="a", value=1.5, ok=False, raw=b"\xff\x00", count=-3)
    words = words_of(codec, reading)
    assert words == [b"sensor", b"a", b"value", b"1.5", b"ok", b"false", b"raw", b"\xff\x00", b"count", b"-3"]
    assert codec.decode(words) == reading
    assert codec.key(reading) == b"a"
    assert codec.decode([b"sensor", b"a", b"value", b"2"]) == Reading(sensor="a", value=2.0)
    kept = codec.decode([*words, b"unit", b"C"])
    assert words_of(codec, kept.replace(count=1))[-2:] == [b"unit", b"C"]


def declare_bad() -> type[Record]:
    class Bad(Record, primitive=True):
        items: list[int]

    return Bad


def test_a_primitive_record_refuses_what_has_no_native_form() -> None:
    with pytest.raises(Misconfigured, match=r"Bad is primitive, and its field 'items' is no int, float"):
        declare_bad()
    with pytest.raises(Misconfigured, match="stored as they are, without a codec"):
        make_codec(Reading, codec="msgpack")
    with pytest.raises(BadRecord, match="field value is 'high', of type str, not float"):
        make_codec(Reading).encode(Reading(sensor="a", value="high"))  # type: ignore[arg-type]
    with pytest.raises(BadRecord, match="'maybe' is no boolean"):
        make_codec(Reading).decode([b"sensor", b"a", b"value", b"2", b"ok", b"maybe"])


def test_what_cannot_be_decoded_is_one_error_whatever_it_is() -> None:
    codec = make_codec(Order)
    for fields in (
        [b"=json", b"{"],
        [b"=json", b"[]"],
        [b"=what", b"{}"],
        [b"=json+what", b"{}"],
        [b"=json+gzip", b"{}"],
        [b"=json/x", b"{}"],
        [b"name", b"a"],
        [b"\xff", b"\xff"],
        [b"=msgpack", b"\xc1"],
    ):
        with pytest.raises(BadRecord, match=r"^no Order: "):
            codec.decode(fields)


class Wordy(msgspec.Struct):
    """A record whose own code raises an error of a long text, when it is read and when it is shown."""

    name: str = ""

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("x" * 3_000_000)
        if self.name == "secret":
            self.name = cast("Any", Secret())

    def __repr__(self) -> str:
        raise KeyboardInterrupt


class Secret:
    """A value that has no JSON form and cannot be shown."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def test_an_error_of_a_records_own_code_has_a_short_text() -> None:
    codec = make_codec(Wordy)
    with pytest.raises(BadRecord) as caught:
        codec.decode([b"=json", b'{"name":"bad"}'])
    assert len(str(caught.value)) < 600
    with pytest.raises(BadRecord, match=r"^no Wordy: "):
        codec.to_document([b"=json", b'{"name":"secret"}'])


@pytest.mark.parametrize("compression", ["gzip", "lz4"])
def test_a_bomb_is_refused(compression: str) -> None:
    huge = make_codec(None, codec=f"json+{compression}")
    words = words_of(huge, "a" * (MAX_DECOMPRESSED + 1))
    assert len(words[1]) < 200_000
    with pytest.raises(BadRecord, match="bytes when decompressed"):
        huge.decode(words)
    with pytest.raises(BadRecord, match="bytes when decompressed"):  # what is sent can be read
        huge.encode("a" * (MAX_DECOMPRESSED + 1), limit=MAX_DECOMPRESSED)
    larger = make_codec(None, codec=f"json+{compression}", limit=lambda: 2 * MAX_DECOMPRESSED)
    assert len(larger.decode(words)) == MAX_DECOMPRESSED + 1


EMPTY_LISTS = b"\xdd" + (16 * 1024 * 1024 - 5).to_bytes(4, "big") + b"\x90" * (16 * 1024 * 1024 - 5)
SMALLER = b"\xdd" + (1024 * 1024 - 5).to_bytes(4, "big") + b"\x80" * (1024 * 1024 - 5)
NESTED = b"\x82\xa8customer\xa1a\xa4more" + SMALLER[: 1024 * 1024 - 20]
JSON_BOMB = b'{"order_id": 1, "more": [' + b"{}," * 300_000 + b"{}]}"


@pytest.mark.parametrize("kind", [Order, Model, None, *([Point, Struct] if NIGHTLY else [])], ids=str)
@pytest.mark.parametrize(
    ("encoding", "raw"),
    [
        ("msgpack+gzip", gzip.compress(EMPTY_LISTS)),
        ("msgpack+gzip", gzip.compress(SMALLER)),
        ("msgpack+gzip", gzip.compress(NESTED)),
        ("msgpack", SMALLER),
        ("msgpack", NESTED),
        ("json+gzip", gzip.compress(JSON_BOMB)),
        ("json", JSON_BOMB),
        ("json", b"[" * 100_000),
        ("msgpack", b"\x91" * 100_000),
        ("json+gzip", gzip.compress(b"[1,2")[:-4]),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-bytes",
)
@pytest.mark.parametrize("is_declared", [True, False])
def test_an_entry_costs_little_memory_whatever_is_in_it(
    encoding: str, raw: bytes, kind: Any, is_declared: bool
) -> None:
    codec = make_codec(kind, codec=encoding) if is_declared else make_codec(kind)
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord):
            codec.decode([f"={encoding}".encode(), raw])
        with pytest.raises(BadRecord):
            codec.to_document([f"={encoding}".encode(), raw])
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_what_has_too_many_values_to_be_read_is_not_sent() -> None:
    for codec in CODECS:
        with pytest.raises(BadRecord, match="more than 200,000 values"):
            make_codec(None, codec=codec).encode([[]] * 200_000)
    numbers = list(range(150_000))
    made = make_codec(None, codec="msgpack+gzip")
    assert made.decode(words_of(made, numbers)) == numbers
    text = "[{,:" * 60_000  # what is in a string is no value
    plain = make_codec(None)
    assert plain.decode(words_of(plain, [text, '"' + text])) == [text, '"' + text]


@pytest.mark.parametrize("is_inside", [False, True], ids=["plain", "inside"])
def test_a_record_that_repeats_its_parts_without_end_is_refused(is_inside: bool) -> None:
    shared: Any = [0]
    for _ in range(22):  # four million parts; forty levels would have no end without the refusal
        shared = [shared, shared]
    with pytest.raises(BadRecord, match="it refers to the same parts again and again"):
        make_codec(None).encode({"a": Point(shared, 1) if is_inside else shared})


def test_a_codec_of_the_users_own_is_marked_in_the_entry() -> None:
    class Reversed:
        name = "reversed"

        def dumps(self, value: Any) -> bytes:
            return msgspec.json.encode(value)[::-1]

        def loads(self, raw: bytes) -> Any:
            return msgspec.json.decode(raw[::-1])

    class Packed:
        name = "packed"

        def compress(self, raw: bytes) -> bytes:
            return gzip.compress(raw)

        def decompress(self, raw: bytes) -> bytes:
            return gzip.decompress(raw)

    codec = make_codec(Point, codec=(Reversed(), Packed()))
    words = words_of(codec, Point(1, 2))
    assert words[0] == b"=reversed+packed"
    assert codec.decode(words) == Point(1, 2)
    with pytest.raises(BadRecord, match="encoded as 'packed', which this stream does not know"):
        make_codec(Point).decode(words)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"kind": Order, "by": "order"}, "Order has no field 'order'; did you mean 'order_id'"),
        ({"kind": Point, "by": "z"}, "Point has no field 'z'; its fields: x, y"),
        ({"kind": None, "by": "z"}, "the stream has no class of records: give a function"),
        ({"kind": Order, "by": 3}, "by is 3: give the name of a field, or a function"),
        ({"kind": "Order"}, "instances of a class, not of 'Order'"),
        ({"kind": Order, "codec": "jsn"}, "codec 'jsn': did you mean 'json'"),
        ({"kind": Order, "codec": "json+zip"}, "compression 'zip': did you mean 'gzip'"),
        ({"kind": Order, "codec": object()}, "has no dumps and loads"),
        ({"kind": Order, "reads": ["msgpack+gz"]}, "reads 'msgpack+gz': did you mean 'msgpack+gzip'"),
        (
            {"kind": dict, "by": "k"},
            "dict has no fields: give a function, such as lambda record: record['k']",
        ),
        (
            {"kind": Mapped, "by": "k"},
            "Mapped has no fields: give a function, such as lambda record: record['k']",
        ),
        ({"kind": list, "by": "k"}, "list has no fields: give a function"),
        ({"kind": int, "by": "k"}, "int has no fields: give a function"),
        ({"kind": Named, "by": "k"}, "Named has no field 'k'; its fields: name"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_one_clear_line(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(why)):
        make_codec(arguments.pop("kind"), **arguments)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("ada", b"ada"),
        ("ä", "ä".encode()),
        (1, b"1"),
        ("1", b"1"),
        (-5, b"-5"),
        (True, b"true"),
        (None, b"null"),
        (1.5, b"1.5"),
        (b"\xff", b"\xff"),
        (Decimal("1.50"), b"1.50"),
        (date(2026, 1, 31), b"2026-01-31"),
        (UUID(int=7), b"00000000-0000-0000-0000-000000000007"),
        (Colour.RED, b"red"),
        (("a", 1), b'["a",1]'),
        ({"b": 1, "a": 2}, b'{"a":2,"b":1}'),
    ],
)
def test_keys_are_alike_in_every_language(value: object, key: bytes) -> None:
    assert canonical_key(value) == key


class Encoding:
    """A serializer and a compressor of a user's own that make whatever they are told to."""

    name = "own"

    def __init__(self, made: object) -> None:
        self.made: Any = made

    def dumps(self, _value: Any) -> Any:
        return self.made

    def loads(self, raw: bytes) -> Any:
        return {"read": raw.decode()}

    def compress(self, _raw: bytes) -> Any:
        return self.made

    def decompress(self, raw: bytes) -> bytes:
        return b'{"read":"' + raw + b'"}'


class Plain(Encoding):
    """A serializer that makes bytes."""

    name = "plain"

    def __init__(self) -> None:
        super().__init__(b"{}")


@pytest.mark.parametrize("made", [None, 5, [1], object(), {"a": 1}], ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("method", ["dumps", "compress"])
def test_an_encoding_that_makes_no_bytes_is_named_where_the_record_is_sent(method: str, made: Any) -> None:
    own = Encoding(made)
    codec = make_codec(dict, codec=own if method == "dumps" else (Plain(), own))
    with pytest.raises(
        BadRecord, match=rf"^the encoding own: {method}\(\) gave {type(made).__name__}: give bytes"
    ):
        codec.encode({"a": 1})


@pytest.mark.parametrize("made", ["xyz", b"xyz", bytearray(b"xyz"), memoryview(b"xyz")])
def test_an_encoding_may_make_text_and_whatever_else_has_bytes(made: Any) -> None:
    codec = make_codec(dict, codec=Encoding(made))
    assert codec.decode(words_of(codec, {"a": 1})) == {"read": "xyz"}
