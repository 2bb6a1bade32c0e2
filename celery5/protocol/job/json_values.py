"""Make JSON of Python values, and find out what would arrive changed.

The one definition for arguments, results, progress, records, events and the values of workflows: a value arrives as it
was, or it is refused where it is encoded. What JSON has no word for is converted by `to_json` and `from_json`.
"""

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from reprlib import Repr
from typing import Any, cast, get_origin

import msgspec
from msgspec import Raw

from celery5.protocol.counts import format_count
from celery5.protocol.masking import get_error_text

FAULTS = (NotImplementedError, TypeError, ValueError, RecursionError)
"""What msgspec and the functions of this module raise; msgspec's own errors and pydantic's are ValueErrors."""


def to_json(value: Any) -> Any:
    """Return a value that msgspec can encode for one that it cannot. Raises NotImplementedError, or ValueError.

    A subclass of str, int, float and so on is written as its plain value. A pydantic model is read back from what it
    writes: a field that is left out, or written as asterisks, would arrive as something else.
    """
    if isinstance(value, _PLAIN):
        return _make_plain_scalar(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type):
        raise NotImplementedError(f"the class {value.__name__} has no JSON form")
    dump = getattr(value, "model_dump_json", None)  # pydantic, when the application uses it
    if callable(dump):
        return _check_dump(
            value, cast("Any", dump)(by_alias=True, round_trip=True, warnings=False), type(value)
        )
    convert = getattr(value, "convert_to_json", None)  # a class of celery5
    if callable(convert):
        return convert()
    if (adapter := get_adapter(cast("Hashable", type(value)))) is not None:
        return _check_dump(value, adapter.dump_json(value, warnings=False), adapter)
    if getattr(value, "shape", None) == () and hasattr(value, "dtype") and callable(value.item):
        number = value.item()  # a number of numpy that is no subclass of Python's
        if type(number) in KEPT:
            return number
    instead = (
        suggest_instead(cast("object", type(value)))
        or "use a dataclass, or numbers, text, lists and dicts (celery5 docs types)"
    )
    raise NotImplementedError(f"{type(value).__name__} has no JSON form: {instead}")


def suggest_instead(kind: object) -> str:
    """Return what to use instead of an object of a database, such as a model of Django; '' for any other class."""
    if hasattr(kind, "_meta") and hasattr(kind, "pk"):
        return "use its pk"
    if hasattr(kind, "values_list") and hasattr(kind, "as_manager"):
        return "use the pks of its rows: list(rows.values_list('pk', flat=True))"
    return "use its primary key" if hasattr(kind, "__mapper__") else ""


def from_json(kind: type[Any], value: Any) -> Any:
    """Return an instance of a class that msgspec does not know. Raises NotImplementedError, or ValueError."""
    if isinstance(kind, AdaptedType):
        return kind.convert(value)
    convert = getattr(
        kind, "convert_from_json", None
    )  # a class of celery5, which needs the type of its items
    if callable(convert) and not isinstance(value, get_origin(kind) or kind):
        return convert(kind, value, from_json)
    kind = get_origin(kind) or kind  # Iterable, of Iterable[int]
    if isinstance(value, kind):  # not from JSON at all: the producer checks its arguments
        return value
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    if (base := find_scalar_base(kind)) is not None and type(value) in (
        (int, float) if base is float else (base,)
    ):
        return kind(value)
    validate = getattr(kind, "model_validate_json", None)
    if callable(validate):
        # From JSON, so that strict models take their dates and ids, too.
        return validate(_ENCODER.encode(value))
    raise NotImplementedError(f"{kind.__name__} has no JSON form")


def find_scalar_base(kind: type[Any]) -> type[Any] | None:
    """Return str, int or float for a subclass of it; None for any other class."""
    return next((base for base in (str, int, float) if issubclass(kind, base)), None)


class AdaptedType(type):
    """A class that stands in an annotation for what only pydantic can decode: a union of models, a URL, an address."""

    adapter: Any
    classes: tuple[type[Any], ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return True  # `convert` has returned it

    def convert(cls, value: Any) -> Any:
        """Return a value as pydantic reads it from JSON. Raises ValueError."""
        if isinstance(value, cls.classes):
            return value
        return cls.adapter.validate_json(_ENCODER.encode(value))


@lru_cache(maxsize=512)
def get_adapter(annotation: Hashable) -> Any:
    """Return pydantic's adapter of a class of its own, such as HttpUrl; None for any other class."""
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None or not hasattr(annotation, "__get_pydantic_core_schema__"):
        return None
    return pydantic.TypeAdapter(annotation)


def _check_dump(value: Any, dumped: str | bytes, reader: Any) -> Raw:
    """Return what pydantic has written. Raises ValueError when it is read as something else."""
    name = type(value).__name__
    read = getattr(reader, "model_validate_json", None) or reader.validate_json
    try:
        arrived = read(dumped)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read back from its JSON: {get_error_text(error, 200)}") from None
    if difference := find_difference(value, arrived):
        raise ValueError(f"{name} would not arrive as it is: {difference}")
    return Raw(dumped)


_PLAIN = (str, bytes, bytearray, int, float, datetime, date, time, timedelta, Decimal)


def _make_plain_scalar(value: Any) -> Any:
    """Return the plain value of a subclass, whatever its own methods do. Raises when it is more than that."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return bytes(memoryview(value))
    if isinstance(value, bool):  # as the key of a mapping
        raise NotImplementedError("a bool is no key of a JSON object")
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    plain = _make_plain_time(value)
    if not plain == value:
        raise ValueError(f"{type(value).__name__} {value} is more than a {type(plain).__name__} can hold")
    return plain


def _make_plain_time(value: Any) -> Any:
    match value:
        case datetime():
            clock = (value.hour, value.minute, value.second, value.microsecond)
            return datetime(value.year, value.month, value.day, *clock, value.tzinfo, fold=value.fold)
        case date():
            return date(value.year, value.month, value.day)
        case time():
            clock = (value.hour, value.minute, value.second, value.microsecond)
            return time(*clock, value.tzinfo, fold=value.fold)
        case timedelta():
            return timedelta(value.days, value.seconds, value.microseconds)
        case _:
            return Decimal(value)


def make_plain(value: Any) -> Any:
    """Return a value with plain ones in place of subclasses of str, int, float and so on, in containers, too."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in KEPT or isinstance(value, Enum):
        return value
    if isinstance(value, _PLAIN):
        return value if kind in _PLAIN else _make_plain_scalar(value)
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {make_plain(key): make_plain(item) for key, item in pairs}
    if isinstance(value, list | set | frozenset) or kind is tuple:
        bases: tuple[Any, ...] = (list, set, frozenset, tuple)
        return next(base for base in bases if isinstance(value, base))(map(make_plain, cast("Any", value)))
    if getattr(value, "shape", None) == () and hasattr(value, "dtype"):
        return to_json(value)
    return value


_ENCODER = msgspec.json.Encoder(enc_hook=to_json)
_DECODER = msgspec.json.Decoder()
KEPT: frozenset[type[Any]] = frozenset((str, int, bool, float, bytes, type(None)))
"""Classes of values that JSON keeps, but for floats that are not finite: those are written as null."""


def encode_unchecked(value: Any) -> bytes:
    """Return JSON, perhaps of another value: `refuse_changes`, or a comparison with what arrives, must follow.

    Raises one of FAULTS.
    """
    refuse_repetition(value)
    return _ENCODER.encode(value)


def encode_json(value: Any) -> bytes:
    """Return JSON. Raises one of FAULTS for a value without a JSON form, and for what JSON would change silently."""
    encoded = encode_unchecked(value)
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in KEPT:
        if kind is float and encoded == b"null":
            raise ValueError(f"{value} has no JSON form")
        return encoded
    # `find`, as `in` takes twice as long: it tries a number first.
    if (kind is tuple or kind is list) and KEPT.issuperset(map(type, value)) and encoded.find(b"null") < 0:
        return encoded
    if not equals(_DECODER.decode(encoded), list(value) if kind is tuple else value):
        refuse_changes(value)
    return encoded


MAX_REPEATED = 2_000_000
"""Parts of a value, each time that JSON writes one; 32 characters of a text count as a part. More are refused where
they are four times what the value really holds: JSON writes a shared part again at each place that refers to it, and
forty lists, each twice in the next one, have 2^40 of them."""
_TEXTS = frozenset((str, bytes))
REPETITION = "it refers to the same parts again and again"
"""Says of a value that its text, too, may have no end: do not ask for its repr."""
_COUNTED_AT = (20_000, 200_000, MAX_REPEATED)
"""How many parts JSON writes before they are counted, at most a quarter of them distinct. So a value that holds itself
is refused after some thousand parts: the interpreter's lock is held meanwhile."""
_FLAT = 32
"""Parts of a value of one level that are not counted at all."""


def refuse_repetition(value: Any) -> None:
    """Raise ValueError when JSON would write the same parts of a value again and again, up to any size."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in KEPT:
        return
    if kind is dict or kind is list or kind is tuple:  # the usual ones cost little
        parts: Any = value.values() if kind is dict else value
        if len(parts) <= _FLAT and KEPT.issuperset(map(type, parts)):
            return
    counted = None
    for limit in _COUNTED_AT:
        if not _has_more_parts(value, limit):
            return
        if counted := _count_parts(value, at_most=limit // 4):
            break
    written, distinct = counted or _count_parts(value, at_most=math.inf) or (0, 0)
    if written > max(MAX_REPEATED, 4 * distinct):
        raise ValueError(
            f"{REPETITION}, and JSON would write {float(written):.1g} of them: return or pass each part once"
        )


def _has_more_parts(value: Any, limit: int) -> bool:
    """Return whether JSON writes more parts than the limit. It asks of none whether it was there before."""
    stack, left = [value], limit
    while stack:
        item = stack.pop()
        kind: Any = type(item)  # pyright: ignore[reportUnknownVariableType]
        parts = list(item.values()) if kind is dict else item if kind is list else _get_parts(item)
        left -= len(parts)
        kinds = set(map(type, parts))
        if not kinds.isdisjoint(_TEXTS):
            left -= sum(len(part) >> 5 for part in parts if type(part) in _TEXTS)
        if left < 0:
            return True
        if not kinds <= KEPT:
            stack += [part for part in parts if type(part) not in KEPT]
    return False


def _count_parts(value: Any, *, at_most: float) -> tuple[int, int] | None:
    """Return how many parts JSON writes of a value, and how many there are; None if there are more than `at_most`.

    Not recursive: values may be very deep.
    """
    sizes: dict[int, int] = {}  # of each part, by its identity; 0 while its own parts are counted
    kept, stack, distinct = list[Any](), [value], 0
    while stack:
        item = stack[-1]
        size = sizes.get(id(item))
        if size is None and type(item) in KEPT:
            sizes[id(item)] = size = 1 + (len(item) >> 5 if isinstance(item, str | bytes) else 0)
            distinct += size
        if size:
            stack.pop()
            continue
        parts = _get_parts(item)
        if size is None:
            sizes[id(item)] = 0
            if len(sizes) + len(parts) > at_most:
                return None
            kept += (item, parts)  # an identity is of nothing else while its object lives
            stack += [part for part in parts if id(part) not in sizes]
        else:
            stack.pop()
            sizes[id(item)] = min(10**15, 1 + sum(sizes.get(id(part), 1) for part in parts))
            distinct += 1
    return sizes[id(value)], distinct


def _get_parts(item: Any) -> Sequence[Any]:
    if isinstance(item, dict):
        return list(cast("dict[Any, Any]", item).values())
    if isinstance(item, list | tuple):
        return cast("Sequence[Any]", item)
    if isinstance(item, set | frozenset):
        return list(cast("set[Any]", item))
    return () if isinstance(item, _PLAIN) else [part for _, part in _get_fields(item)]


def equals(value: Any, other: Any) -> bool:
    """Return whether two values are equal; False when that cannot be told."""
    try:
        return bool(value == other)
    except Exception:  # too deep, or the user's code
        return False


def refuse_changes(value: Any) -> None:
    """Raise ValueError when JSON would change a part of a value silently. Not recursive: values may be very deep."""
    stack = [value]
    while stack:
        item = stack.pop()
        kind: Any = type(item)  # pyright: ignore[reportUnknownVariableType]
        if kind in KEPT and kind is not float:
            continue
        if isinstance(item, float):
            if not math.isfinite(item):
                raise ValueError(f"{item} has no JSON form")
        elif isinstance(item, _TIMES):
            refuse_zone(item)
        elif isinstance(item, dict):
            fields = cast("dict[Any, Any]", item)
            _refuse_equal_keys(fields)
            stack += fields.values()
        elif isinstance(item, _LISTS):
            stack += cast("Sequence[Any]", item)
        elif isinstance(item, Enum):
            stack.append(item.value)
        else:
            stack += [field for _, field in _get_fields(item)]


_TIMES = (datetime, time)
_LISTS = (list, tuple, set, frozenset)


def _refuse_equal_keys(fields: Mapping[Any, Any]) -> None:
    """Raise ValueError when two keys of a mapping are the same text in JSON: one entry would be lost."""
    kinds: set[type[Any]] = {str if isinstance(key, str) else type(key) for key in fields}
    for key in fields if kinds & {datetime, time} else ():
        refuse_zone(key)
    if len(kinds) < 2 and not any(issubclass(kind, Enum) for kind in kinds):
        return
    by_text: dict[str, Any] = {}
    for key in fields:
        other = by_text.setdefault(_get_key_text(key), key)
        if other is not key:
            raise ValueError(
                f"the keys {other!r} and {key!r} are the same in JSON: one of them would be lost"
            )


def _get_key_text(key: Any) -> str:
    if type(key) is str:
        return key
    texts: dict[str, None] = _DECODER.decode(_ENCODER.encode({key: None}))
    return next(iter(texts))


def refuse_zone(value: datetime | time) -> None:
    """Raise ValueError for a time whose zone JSON cannot carry: it has an offset in whole minutes, or none."""
    zone = value.tzinfo
    if value.fold:
        raise ValueError(f"{value!r} has fold=1, which JSON does not carry: pass it in UTC")
    if zone is None or zone is UTC:
        return
    if (offset := zone.utcoffset(None)) is None:
        remedy = "pass value.astimezone(UTC)" if isinstance(value, datetime) else "pass it without the zone"
        raise ValueError(
            f"{value} is in the zone {zone}, and JSON carries only an offset: {remedy}, and the zone's name if needed"
        )
    if offset % timedelta(minutes=1):
        raise ValueError(f"{value} has an offset of {offset}, and JSON carries whole minutes: pass it in UTC")


def find_difference(sent: Any, arrived: Any, *, keeps_keys: bool = False) -> str:
    """Return what arrives changed of a value, as text; '' when nothing does.

    Converted is not changed: a text that arrives as the UUID that it spells, a list that arrives as a tuple. Not
    recursive: values may be very deep.

    Args:
        keeps_keys: Whether the keys of mappings must not arrive as text when they are not.
    """
    stack: list[tuple[str, Any, Any]] = [("", sent, arrived)]
    while stack:
        where, before, after = stack.pop()
        if before is after or (type(before) is type(after) and type(before) in KEPT and before == after):
            continue
        parts = _pair_parts(where, before, after)
        if (
            keeps_keys
            and isinstance(before, Mapping)
            and isinstance(parts, list)
            and isinstance(after, Mapping)
        ):
            keys = zip(cast("Mapping[Any, Any]", before), cast("Mapping[Any, Any]", after), strict=False)
            parts += [(f"{where}, key {key!r},", key, arrived) for key, arrived in keys]
        if isinstance(parts, str):
            return f"{where or 'it'} {parts}".lstrip(".")
        if parts is None:
            if problem := _describe_change(before, after):
                return f"{where or 'it'} {problem}".lstrip(".")
        else:
            stack += parts
    return ""


_Parts = list[tuple[str, Any, Any]]


def _pair_parts(where: str, before: Any, after: Any) -> _Parts | str | None:
    """Return the parts of two values in pairs; what is wrong, as text; or None for values without parts."""
    is_mapping = _is_mapping(before)
    if is_mapping and _is_mapping(after):
        return _pair_items(where, before, after)
    is_sequence = _is_sequence(before)
    if is_sequence and _is_sequence(after):
        if len(before) != len(after):
            return f"arrives with {format_count(len(after), 'item')} of {len(before)}"
        pairs = zip(before, after, strict=True)
        return [(f"{where}[{index}]", *pair) for index, pair in enumerate(pairs)]
    fields = _get_fields(after)
    if type(before) is type(after) and fields:
        return [(f"{where}.{name}", getattr(before, name, _MISSING), value) for name, value in fields]
    if is_mapping and fields:
        names = {name for name, _ in fields} | set(getattr(after, "__struct_encode_fields__", ()))
        if lost := [key for key in before if key not in names and not hasattr(after, "model_dump_json")]:
            return f"has {lost[0]!r}, which is no field of {type(after).__name__}"
        return [(f"{where}.{name}", before[name], value) for name, value in fields if name in before]
    if fields and not is_sequence:
        return f"is a {type(before).__name__}, and arrives as {type(after).__name__}"
    return [] if fields else None


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(
        value, Mapping
    )  # the first says it for most, in a tenth of the time


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


_MISSING = object()


def _pair_items(where: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> _Parts | str:
    by_text: dict[str, Any] | None = None
    pairs: _Parts = []
    for key, value in before.items():
        arrived = after.get(key, _MISSING)
        if arrived is _MISSING:
            if by_text is None:
                by_text = {_get_key_text(key): value for key, value in after.items()}
            arrived = by_text.get(_get_key_text(key), _MISSING)
        if arrived is _MISSING:
            return f"arrives without the key {key!r}"
        pairs.append((f"{where}[{key!r}]", value, arrived))
    return pairs


def _get_fields(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of an instance of a dataclass, of pydantic, msgspec or attrs, with their values."""
    names, may_have_more = _get_field_names(cast("Hashable", type(value)))
    fields = [(name, getattr(value, name, _MISSING)) for name in names]
    if may_have_more:
        fields += (getattr(value, "__pydantic_extra__", None) or {}).items()
    return fields


@lru_cache(maxsize=512)
def _get_field_names(kind: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names of the fields of a class, and whether an instance may have others beside them."""
    for attribute in ("__struct_fields__", "__dataclass_fields__", "model_fields"):
        if hasattr(kind, attribute):
            return tuple(getattr(kind, attribute)), True
    return tuple(field.name for field in getattr(kind, "__attrs_attrs__", ())), False


def _describe_change(before: Any, after: Any) -> str:
    """Return how a value without parts arrives changed; '' when it does not."""
    if isinstance(before, _TIMES):
        try:
            refuse_zone(before)
        except ValueError as error:
            return str(error)
    if equals(before, after) or (_is_nan(before) and _is_nan(after)):
        return ""
    kind: Any = type(after)  # pyright: ignore[reportUnknownVariableType]
    if type(before) is not kind and (_is_like(before, after) or equals(_convert(before, kind), after)):
        return ""
    if type(before) is kind and getattr(kind, "__eq__", None) is object.__eq__:
        return ""  # nobody can tell
    return f"arrives as {SHORT.repr(after)}"


def _is_nan(value: Any) -> bool:
    return value.is_nan() if isinstance(value, Decimal) else isinstance(value, float) and math.isnan(value)


def _is_like(before: Any, after: Any) -> bool:
    """Return whether two values of different types are the same in JSON."""
    try:
        if isinstance(before, _LISTS) and isinstance(after, _LISTS):
            items = cast("Sequence[Any]", before), cast("Sequence[Any]", after)
            return set(map(_ENCODER.encode, items[0])) == set(map(_ENCODER.encode, items[1]))
        return equals(_DECODER.decode(_ENCODER.encode(before)), _DECODER.decode(_ENCODER.encode(after)))
    except FAULTS:
        return False


def _convert(value: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(make_plain(value), kind, dec_hook=from_json)
    except FAULTS:
        return _MISSING


class _Short(Repr):
    """A representation of at most a few hundred characters, whatever the value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlevel = 3

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            return super().repr_instance(x, level)
        except Exception:  # the user's code
            return f"<{type(x).__name__} that cannot be shown>"


SHORT = _Short()
