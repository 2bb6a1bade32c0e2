"""Encode and decode the records of a stream, and find their keys.

The name of an entry's field says how its value is encoded, `=json` or `=msgpack+gzip/2`: encoding, compression, and the
version of the record unless that is 1. So each of them may change while older entries are there. Only JSON, and what
the stream declares or once declared, is decoded, within a bound of memory: other programs write, too.
"""

import gzip
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, cast, is_typeddict

import msgspec

from celery5.errors import BadRecord, Misconfigured
from celery5.extras import describe_installation
from celery5.logs.fence import pass_cancellation
from celery5.protocol.bounded_decoding import (
    MAX_DECODED,
    TooCostly,
    check_bytes,
    check_json,
    check_msgpack,
    decode_json,
    decode_msgpack,
    inflate,
)
from celery5.protocol.job.annotations import adapt_annotation, is_simple, make_check
from celery5.protocol.job.json_values import (
    FAULTS,
    REPETITION,
    SHORT,
    equals,
    find_difference,
    from_json,
    make_plain,
    refuse_changes,
    refuse_repetition,
    to_json,
)
from celery5.protocol.masking import MAX_ERROR_LENGTH, get_error_text, get_type_name, show_error
from celery5.protocol.streams.routing import canonical_key
from celery5.similar_names import did_you_mean
from celery5.streams.record import (
    get_record_version,
    get_unknown_fields,
    is_primitive,
    is_record,
    keep_unknown_fields,
    upcast_fields,
)

R = TypeVar("R")

MAX_DECOMPRESSED = MAX_DECODED
"""The most bytes that a record may have when it is decompressed, where the setting `message_limit` is not more."""
PLAIN = "json"
"""The encoding that every stream reads."""
MAX_KNOWN_FIELDS = 100
"""Names of fields that are remembered as those of a declared encoding."""
VERSION_FIELD = b"=v"
"""The field that holds the version of a primitive record."""
HEADERS_FIELD = b"=h"
"""The last field of an entry that has headers: texts by name, as JSON. No decoder of a record looks at it."""
MAX_HEADERS = 64 * 1024
"""The most bytes of headers that are read."""
_HEADERS = msgspec.json.Decoder(dict[str, str])


def get_headers_field(fields: Sequence[bytes]) -> Sequence[bytes]:
    """Return the field with the headers of an entry and its value; nothing without any."""
    return fields[-2:] if len(fields) >= 2 and fields[-2] == HEADERS_FIELD else ()


def read_record_headers(fields: Sequence[bytes]) -> dict[str, str]:
    """Return the headers of an entry, whose fields and values come in turns; none for what can be none."""
    found = get_headers_field(fields)
    if not found or len(found[1]) > MAX_HEADERS:
        return {}
    try:
        return _HEADERS.decode(found[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


class Serializer(Protocol):
    """An encoding of a user's own. Its name is part of each entry: it is never changed."""

    @property
    def name(self) -> str:
        """Its name, of lower-case letters and digits."""
        ...

    def dumps(self, value: Any, /) -> bytes:
        """Return a value as bytes: mappings, lists, text, numbers, booleans and None."""
        ...

    def loads(self, raw: bytes, /) -> Any:
        """Return the value that `dumps` was given."""
        ...


class Compressor(Protocol):
    """A compression of a user's own. Its name is part of each entry: it is never changed."""

    @property
    def name(self) -> str:
        """Its name, of lower-case letters and digits."""
        ...

    def compress(self, raw: bytes, /) -> bytes:
        """Return fewer bytes."""
        ...

    def decompress(self, raw: bytes, /) -> bytes:
        """Return the bytes that `compress` was given."""
        ...


def _to_bytes(made: object, name: str, method: str) -> bytes:
    """Return what an encoding of the user's own has made. Raises BadRecord for what cannot stand in an entry."""
    if isinstance(made, str):
        return made.encode()
    if isinstance(made, bytes | bytearray | memoryview):
        return bytes(cast("bytes", made))
    raise BadRecord(f"the encoding {name}: {method}() gave {get_type_name(made)}: give bytes")


class _Json:
    name = "json"

    def dumps(self, value: Any) -> bytes:
        return msgspec.json.encode(value, enc_hook=to_json)

    def loads(self, raw: bytes) -> Any:
        return decode_json(raw)


class _Msgpack:
    name = "msgpack"

    def dumps(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value, enc_hook=to_json)

    def loads(self, raw: bytes) -> Any:
        return decode_msgpack(raw)


class _Gzip:
    name = "gzip"

    def compress(self, raw: bytes) -> bytes:
        return gzip.compress(raw, 6, mtime=0)

    def decompress(self, raw: bytes) -> bytes:
        return self.decompress_within(raw, MAX_DECOMPRESSED)

    def decompress_within(self, raw: bytes, limit: int) -> bytes:
        return inflate(raw, limit=limit)


class _Lz4:
    name = "lz4"

    def __init__(self) -> None:
        try:
            self._frame: Any = import_module("lz4.frame")
        except ImportError:
            raise Misconfigured(f"codec lz4 needs the package lz4: {describe_installation('lz4')}") from None

    def compress(self, raw: bytes) -> bytes:
        return bytes(self._frame.compress(raw))

    def decompress(self, raw: bytes) -> bytes:
        return self.decompress_within(raw, MAX_DECOMPRESSED)

    def decompress_within(self, raw: bytes, limit: int) -> bytes:
        found = bytes(self._frame.LZ4FrameDecompressor().decompress(raw, max_length=limit + 1))
        check_bytes(found, limit)
        return found


_SERIALIZERS: Mapping[str, Callable[[], Serializer]] = {"json": _Json, "msgpack": _Msgpack}
_COMPRESSORS: Mapping[str, Callable[[], Compressor]] = {"gzip": _Gzip, "lz4": _Lz4}


class RecordCodec(Generic[R]):
    """Encodes and decodes the records of one stream. `make_codec` makes one.

    Args:
        kind: The class of the records; None for any value that has a JSON form.
        serializer: The encoding of what is sent.
        compressor: The compression of what is sent; None for none.
        by: The field, or a function of a record, that is its key; None for records without keys.
        limit: Returns the most bytes that a record may have when it is decompressed.
        declared: The encodings that the stream is known to have declared; None for its own and JSON.
    """

    def __init__(
        self,
        kind: type[R] | None,
        serializer: Serializer,
        compressor: Compressor | None,
        by: str | Callable[[R], object] | None,
        limit: Callable[[], int] = lambda: MAX_DECOMPRESSED,
        declared: set[str] | None = None,
    ) -> None:
        self.kind = kind
        self._limit = limit
        self._serializer = serializer
        self._compressor = compressor
        self._get_key = attrgetter(by) if isinstance(by, str) else by
        self._name = "value" if kind is None else kind.__name__
        self._is_record = is_record(kind)
        self._version = get_record_version(kind)
        suffix = f"/{self._version}" if self._version > 1 else ""
        packing = f"+{compressor.name}" if compressor else ""
        # The encoding of what is sent, without the version.
        self.encoding: str = f"{serializer.name}{packing}"
        self._field = f"={self.encoding}{suffix}".encode()
        self._is_plain = type(serializer) is _Json and compressor is None
        self._encoder = msgspec.json.Encoder(enc_hook=to_json)
        self._msgpack_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            adapt_annotation(kind) if kind else Any, dec_hook=from_json
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            adapt_annotation(kind) if kind else Any, dec_hook=from_json
        )
        self._check = make_check(kind)
        # Whether records that arrive equal arrive unchanged.
        self._is_simple = self._check is None and _is_simple(kind)
        self._serializers = {serializer.name: serializer}
        self._compressors = {} if compressor is None else {compressor.name: compressor}
        self._declared = {PLAIN, self.encoding} if declared is None else declared
        # The names of fields that were found to be of a declared encoding, with their versions.
        self._known_fields = {self._field}

    @property
    def has_keys(self) -> bool:
        """Whether records have keys."""
        return self._get_key is not None

    @property
    def undeclared(self) -> list[str]:
        """The encodings that could be decoded, if the stream had declared them."""
        serializers = dict.fromkeys([*self._serializers, *_SERIALIZERS])
        packings = ["", *(f"+{name}" for name in dict.fromkeys([*self._compressors, *_COMPRESSORS]))]
        names = [f"{serializer}{packing}" for serializer in serializers for packing in packings]
        return [name for name in names if name not in self._declared]

    def declare(self, encodings: Iterable[str]) -> None:
        """Decode these encodings, too: the stream has once declared them."""
        self._declared.update(encodings)

    def has_undeclared(self, fields: Iterable[Sequence[bytes]]) -> bool:
        """Return whether an entry has an encoding that the stream is not known to have declared.

        Args:
            fields: The fields and values of entries, in turns.
        """
        names = {words[0] for words in fields if words} - self._known_fields
        for name in names:
            if name[:1] == b"=" and name not in (VERSION_FIELD, HEADERS_FIELD):
                if _get_encoding(name.decode(errors="replace")) not in self._declared:
                    return True
                if len(self._known_fields) < MAX_KNOWN_FIELDS:
                    self._known_fields.add(name)
        return False

    def without_class(self) -> "RecordCodec[Any]":
        """Return a codec that decodes the same encodings to plain values, whatever the class of the records is."""
        return RecordCodec(None, self._serializer, self._compressor, None, self._limit, self._declared)

    def encode(self, record: R, *, limit: int | None = None) -> tuple[str | bytes, ...]:
        """Return the fields and values of an entry, in turns.

        Args:
            record: The record.
            limit: The most bytes that it may have before it is compressed: a reader takes no more.

        Raises:
            BadRecord: A value does not fit its field, or there are too many values.
        """
        try:
            refuse_repetition(record)
            plain = self._encoder.encode(record)
            self._refuse_changes(record, self._decoder.decode(plain))
            plain = self._add_unknown_fields(record, plain)
        except (*FAULTS, OverflowError) as error:
            # The text of what repeats its parts may have no end, either.
            shown = type(record).__name__ if REPETITION in str(error) else SHORT.repr(record)
            raise BadRecord(f"no {self._name}: {error}: {shown}"[:500]) from None
        if self.kind is not None and not isinstance(record, self.kind):
            raise BadRecord(f"no {self._name}: {record!r}"[:500])
        try:
            check_json(plain)
            if self._is_plain:
                return (self._field, plain)
            raw = _to_bytes(
                self._serializer.dumps(msgspec.json.decode(plain)), self._serializer.name, "dumps"
            )
            if self._compressor is None:
                return (self._field, raw)
            if limit is not None:
                check_bytes(raw, limit)
        except TooCostly as error:
            raise BadRecord(f"no {self._name}: {error}: {record!r}"[:500]) from None
        return (self._field, _to_bytes(self._compressor.compress(raw), self._compressor.name, "compress"))

    def _refuse_changes(self, record: R, arrived: Any) -> None:
        """Raise ValueError when a record would not arrive as it is."""
        if equals(arrived, record) and (self.kind is None or self._is_simple):
            return
        refuse_changes(record)
        if self.kind is not None and (difference := find_difference(record, arrived)):
            raise ValueError(f"it would not arrive as it is: {difference}")
        if self._check is not None:
            self._check(arrived)

    def _add_unknown_fields(self, record: R, plain: bytes) -> bytes:
        unknown: Mapping[str, Any] = get_unknown_fields(record) if self._is_record else {}
        if not unknown:
            return plain
        return self._encoder.encode({**unknown, **msgspec.json.decode(plain, type=dict[str, msgspec.Raw])})

    def to_document(self, fields: Sequence[bytes]) -> Any:
        """Return the JSON value of an entry, by the class of its records: `parse` takes its text. Raises BadRecord."""
        record = self.decode(fields)
        try:
            return msgspec.json.decode(self._add_unknown_fields(record, self._encoder.encode(record)))
        except BaseException as error:  # the class of the record may be the user's, with its own form
            raise self._make_refusal(error) from error

    def decode(self, fields: Sequence[bytes]) -> R:
        """Return the record of an entry, whose fields and values come in turns. Raises BadRecord."""
        try:
            if fields[0] == b"=json" and self._version == 1:
                check_json(fields[1])
                record: R = self._decoder.decode(fields[1])
                return record
        except msgspec.ValidationError:
            pass  # it may have unknown fields
        except BaseException as error:
            raise self._make_refusal(error) from error
        return self._decode_slowly(fields)

    def parse(self, raw: bytes | str) -> R:
        """Return the record of a JSON text that has the fields of the current version. Raises BadRecord."""
        try:
            record: R = self._decoder.decode(raw)
            return record
        except BaseException as error:
            raise self._make_refusal(error) from error

    def _make_refusal(self, error: BaseException) -> BadRecord:
        """Return the error of a record that cannot be read.

        The class, a serializer and an upcaster of the user's own may raise anything, and end no process by that.
        """
        pass_cancellation(error)
        return BadRecord(f"no {self._name}: {get_error_text(error, MAX_ERROR_LENGTH)}")

    def _decode_slowly(self, fields: Sequence[bytes]) -> R:
        """Return the record of an entry of another encoding or version, or with unknown fields."""
        try:
            if fields[0] == self._field and type(self._serializer) in (_Json, _Msgpack):
                record = self._decode_straight(fields[1])
                if record is not None:
                    return record
            value, version = self._load(fields)
            if self.kind is None:
                return cast("R", value)
            if self._is_record and version != self._version:
                value = upcast_fields(self.kind, dict(value), version)
            return self._convert(value)
        except BadRecord:
            raise
        except BaseException as error:
            raise self._make_refusal(error) from error

    def _decode_straight(self, raw: bytes) -> R | None:
        """Return a record of the stream's own encoding and version; None when it has unknown fields, or is wrong."""
        content = raw if self._compressor is None else self._decompress(self._compressor, raw)
        is_json = type(self._serializer) is _Json
        check = check_json if is_json else check_msgpack
        decoder: Any = self._decoder if is_json else self._msgpack_decoder
        check(content)
        try:
            return cast("R", decoder.decode(content))
        except msgspec.ValidationError:
            return None

    def _decompress(self, compressor: Any, raw: bytes) -> bytes:
        """Return what was compressed. A compressor of the user's own has its own bound, before this one."""
        limit = max(MAX_DECOMPRESSED, self._limit())
        if isinstance(compressor, _Gzip | _Lz4):
            return compressor.decompress_within(raw, limit)
        content: bytes = compressor.decompress(raw)
        check_bytes(content, limit)
        return content

    def _convert(self, value: Any) -> R:
        kind: Any = self.kind
        if not self._is_record or not isinstance(value, Mapping):
            return cast("R", msgspec.convert(value, kind, dec_hook=from_json))
        fields = cast("Mapping[str, Any]", value)
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        record = msgspec.convert(
            {name: fields[name] for name in fields if name in known}, kind, dec_hook=from_json
        )
        unknown = {name: fields[name] for name in fields if name not in known}
        return cast("R", keep_unknown_fields(record, unknown))

    def _load(self, fields: Sequence[bytes]) -> tuple[Any, int]:
        """Return what an entry holds, and its version."""
        name, raw = fields[0].decode(errors="replace"), fields[1]
        if not name.startswith("="):
            raise BadRecord(
                f"no {self._name}: the entry has the fields of a primitive record, such as {name!r}"
            )
        encoding, version = _get_encoding(name), name.partition("/")[2]
        serializer, _, compressor = encoding.partition("+")
        unpack = self._find(self._compressors, _COMPRESSORS, compressor) if compressor else None
        serializer = self._find(self._serializers, _SERIALIZERS, serializer)
        if encoding not in self._declared:
            raise BadRecord(
                f"no {self._name}: the entry is encoded as {encoding!r}, which this stream has never declared"
            )
        return serializer.loads(raw if unpack is None else self._decompress(unpack, raw)), int(version or 1)

    def _find(self, found: dict[str, Any], makers: Mapping[str, Callable[[], Any]], name: str) -> Any:
        if name not in found:
            if name not in makers:
                raise BadRecord(
                    f"no {self._name}: the entry is encoded as {name!r}, which this stream does not know"
                )
            found[name] = makers[name]()
        return found[name]

    def key(self, record: R) -> bytes | None:
        """Return the canonical key of a record; None without one. Raises BadRecord."""
        if self._get_key is None:
            return None
        try:
            return canonical_key(self._get_key(record))
        except BaseException as error:  # a function of the user's own may raise anything
            if not isinstance(error, Exception):
                pass_cancellation(error)
            raise BadRecord(f"no key of {SHORT.repr(record)}: {show_error(error)}"[:500]) from error


def _is_simple(kind: Any) -> bool:
    """Return whether a class is a Struct whose fields are all compared by `==`, and are simple."""
    if not is_record(kind):
        return False
    hints = msgspec.structs.fields(kind)
    return bool(kind.__struct_config__.eq) and all(is_simple(field.type) for field in hints)


class PrimitiveCodec(RecordCodec[R]):
    """Stores the fields of a record as native ones of Redis, which needs less memory."""

    def __init__(
        self,
        kind: type[R],
        by: str | Callable[[R], object] | None,
        limit: Callable[[], int] = lambda: MAX_DECOMPRESSED,
    ) -> None:
        super().__init__(kind, _Json(), None, by, limit)
        self._native = {
            field.encode_name: cast("type[Any]", field.type)
            for field in msgspec.structs.fields(cast("Any", kind))
        }

    def encode(self, record: R, *, limit: int | None = None) -> tuple[str | bytes, ...]:
        """Return the fields and values of an entry, in turns. Raises BadRecord."""
        words: list[str | bytes] = []
        for name, native in self._native.items():
            value = make_plain(getattr(record, name))
            if type(value) is not native and not (native is float and type(value) is int):
                raise BadRecord(
                    f"no {self._name}: field {name} is {value!r}, of type {type(value).__name__}, not {native.__name__}"
                )
            words += (name, _to_native(value))
        for name, value in get_unknown_fields(record).items():
            words += (name, value)
        if self._version > 1:
            words += (VERSION_FIELD, str(self._version))
        return tuple(words)

    def _load(self, fields: Sequence[bytes]) -> tuple[Any, int]:
        if fields[0].startswith(b"=") and fields[0] not in (VERSION_FIELD, HEADERS_FIELD):
            return super()._load(fields)
        version, value = 1, dict[str, Any]()
        for name, raw in zip(fields[::2], fields[1::2], strict=True):
            if name == VERSION_FIELD:
                version = int(raw)
            elif name != HEADERS_FIELD:
                text = name.decode()
                value[text] = _from_native(raw, self._native[text]) if text in self._native else raw
        return value, version


def make_codec(
    kind: Any,
    *,
    codec: Any = PLAIN,
    by: Any = None,
    reads: Collection[str] = (),
    limit: Callable[[], int] = lambda: MAX_DECOMPRESSED,
) -> RecordCodec[Any]:
    """Return the codec of a stream.

    Args:
        kind: The class of its records: a `Record`, a dataclass, or one of msgspec, attrs or pydantic; None for any
            value that has a JSON form.
        codec: `json`, `msgpack`, with `+gzip` or `+lz4`; a Serializer; or a pair of that and a Compressor.
        by: The field, or a function of a record, that is its key; None for records without keys.
        reads: Encodings of entries that are read besides that of `codec` and JSON, such as `msgpack+gzip`.
        limit: Returns the most bytes that a record may have when it is decompressed; never less than 1 MiB.

    Raises:
        Misconfigured: An argument makes no sense.
    """
    made = _make_codec(kind, codec, by, limit)
    decodable = made.undeclared
    for name in reads:
        if name not in decodable and name not in (PLAIN, made.encoding):
            raise Misconfigured(
                f"reads {name!r}: {did_you_mean(name, decodable, otherwise='there are ' + ', '.join(decodable))}"
            )
    made.declare(reads)
    return made


def _make_codec(kind: Any, codec: Any, by: Any, limit: Callable[[], int]) -> RecordCodec[Any]:
    name = getattr(kind, "__name__", "value")
    if kind is not None and not isinstance(kind, type):
        raise Misconfigured(f"a stream's records are instances of a class, not of {kind!r}")
    if isinstance(by, str):
        _check_field(kind, name, by)
    elif by is not None and not callable(by):
        raise Misconfigured(f"by is {by!r}: give the name of a field, or a function of a record")
    if is_primitive(kind):
        if codec != "json":
            raise Misconfigured(
                f"record {name} is primitive: its fields are stored as they are, without a codec"
            )
        return PrimitiveCodec(cast("type[Any]", kind), by, limit)
    serializer, compressor = _parse_codec(codec)
    try:
        return RecordCodec(kind, serializer, compressor, by, limit)
    except TypeError as error:
        raise Misconfigured(f"records of {name} cannot be decoded: {error}") from None


def _get_encoding(field: str) -> str:
    """Return the encoding of an entry by the name of its field, without the version."""
    return field[1:].partition("/")[0]


def _check_field(kind: Any, name: str, by: str) -> None:
    if kind is None:
        raise Misconfigured(
            f"by={by!r} names a field, and the stream has no class of records: give a function"
        )
    fields = sorted(_list_fields(kind))
    if not fields and (issubclass(kind, _WITHOUT_FIELDS) or is_typeddict(kind)):
        how = f", such as lambda record: record[{by!r}]" if issubclass(kind, Mapping) else ""
        raise Misconfigured(f"by={by!r}: {name} has no fields: give a function{how}")
    if fields and by not in fields:
        hint = did_you_mean(by, fields, otherwise=f"its fields: {', '.join(fields)}")
        raise Misconfigured(f"{name} has no field {by!r}; {hint}")


_WITHOUT_FIELDS = (Mapping, list, tuple, set, frozenset, str, bytes, int, float)
"""Classes of records that are their own value."""


def _list_fields(kind: Any) -> set[str]:
    """Return the names of the fields of a class; none when it does not tell."""
    for attribute in ("__struct_fields__", "__dataclass_fields__", "model_fields"):
        if hasattr(kind, attribute):
            return set(getattr(kind, attribute))
    if issubclass(kind, tuple):
        return set(getattr(cast("Any", kind), "_fields", ()))
    return {field.name for field in getattr(kind, "__attrs_attrs__", ())}


def _parse_codec(codec: Any) -> tuple[Serializer, Compressor | None]:
    serializer, compressor = cast("Any", codec) if isinstance(codec, tuple) else (codec, None)
    if isinstance(serializer, str):
        serializer, _, packing = serializer.partition("+")
        compressor = compressor or (packing or None)
        serializer = _make("codec", serializer, _SERIALIZERS)
    if isinstance(compressor, str):
        compressor = _make("compression", compressor, _COMPRESSORS)
    for part, methods in ((serializer, ("dumps", "loads")), (compressor, ("compress", "decompress"))):
        if part is not None and not all(callable(getattr(part, method, None)) for method in methods):
            raise Misconfigured(f"codec {part!r} has no {' and '.join(methods)}")
        if part is not None and not (isinstance(name := getattr(part, "name", None), str) and name.isalnum()):
            raise Misconfigured(f"codec {part!r}: its name is letters and digits")
    return serializer, compressor


def _make(what: str, name: str, makers: Mapping[str, Callable[[], Any]]) -> Any:
    if name not in makers:
        raise Misconfigured(
            f"{what} {name!r}: {did_you_mean(name, makers, otherwise='there are ' + ', '.join(makers))}"
        )
    return makers[name]()


def _to_native(value: Any) -> str | bytes:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str | bytes) else repr(value)


def _from_native(raw: bytes, native: type[Any]) -> Any:
    if native is bytes:
        return raw
    text = raw.decode()
    if native is bool:
        if text not in ("true", "false", "True", "False", "1", "0"):
            raise ValueError(f"{text!r} is no boolean")
        return text.lower() in ("true", "1")
    return native(text)
