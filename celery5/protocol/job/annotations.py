"""Read what annotations say beyond msgspec: pydantic's types, and the constraints of annotated_types and pydantic."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, NewType, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

from celery5.protocol.job.json_values import (
    FAULTS,
    KEPT,
    AdaptedType,
    find_difference,
    from_json,
    get_adapter,
)
from celery5.protocol.masking import get_error_text

Check = Callable[[Any], None]
"""Raises ValueError for a value that breaks a constraint."""


def adapt_annotation(annotation: Any) -> Any:
    """Return an annotation that msgspec takes, with an `AdaptedType` in place of what only pydantic can decode.

    Those are unions with a model, and classes of pydantic that are no models, such as HttpUrl.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = adapt_annotation(args[0])
        if isinstance(inner, AdaptedType):
            return _make_adapted(annotation, inner.classes)
        return annotation if inner is args[0] else Annotated[(inner, *args[1:])]
    if origin in (Union, UnionType):
        classes = [arg for arg in map(_strip, args) if _is_pydantic(arg)]
        if classes and len([arg for arg in args if arg is not type(None)]) > 1:
            return _make_adapted(annotation, tuple(classes))
        return _rebuild(args, lambda parts: cast("Any", Union)[tuple(parts)], annotation)
    if not args or origin is None:
        is_own = _is_pydantic(annotation) and not hasattr(annotation, "model_validate_json")
        return _make_adapted(annotation, (annotation,)) if is_own else annotation
    if origin in _CONTAINERS or getattr(origin, "__module__", "") == "collections.abc":
        return _rebuild(args, lambda parts: GenericAlias(origin, tuple(parts)), annotation)
    return annotation


_CONTAINERS = (list, set, frozenset, tuple, dict)


def _rebuild(args: tuple[Any, ...], make: Callable[[list[Any]], Any], annotation: Any) -> Any:
    """Return an annotation with adapted arguments; itself when none changes."""
    adapted: list[Any] = [
        arg if arg is Ellipsis or type(arg) is list else adapt_annotation(arg) for arg in args
    ]
    unchanged = all(new is old for new, old in zip(adapted, args, strict=True))
    return annotation if unchanged else make(adapted)


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_pydantic(kind: Any) -> bool:
    """Return whether only pydantic can decode a class."""
    if not isinstance(kind, type) or any(hasattr(kind, name) for name in _OF_MSGSPEC):
        return False
    return hasattr(kind, "model_validate_json") or hasattr(kind, "__get_pydantic_core_schema__")


_OF_MSGSPEC = (
    "__struct_fields__",
    "__dataclass_fields__",
    "__attrs_attrs__",
    "__members__",
    "convert_from_json",
)
"""What classes have that msgspec, or the application itself, decodes."""


def _make_adapted(annotation: Any, classes: tuple[type[Any], ...]) -> Any:
    """Return the class that stands for an annotation; itself when pydantic cannot decode it either."""
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None:
        return annotation
    try:
        adapter = get_adapter(annotation) or pydantic.TypeAdapter(annotation)
    except Exception:  # a part of it that pydantic does not know: msgspec says what is wrong
        return annotation
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return AdaptedType(name or str(annotation), (), {"adapter": adapter, "classes": classes})


def make_check(annotation: Any, pending: Mapping[Any, Check] | None = None) -> Check | None:
    """Return what checks the constraints in an annotation that msgspec does not check; None when there are none.

    Those are the ones of annotated_types and pydantic, at any depth, in fields of dataclasses and the like, too.

    Args:
        pending: The checks of the classes that this annotation is a part of: a class may contain itself.
    """
    pending = pending or {}
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, NewType):
        return make_check(annotation.__supertype__, pending)
    if origin is Annotated:
        return _all_of([make_check(args[0], pending), _check_metadata(args[0], args[1:])])
    if origin in (Union, UnionType):
        return _make_union_check(args, pending)
    if origin is tuple and Ellipsis not in args:
        return _make_tuple_check([make_check(arg, pending) for arg in args])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _make_mapping_check([make_check(arg, pending) for arg in args])
    if isinstance(origin, type) and issubclass(origin, Iterable) and args:
        return _make_items_check(make_check(args[0], pending))
    if isinstance(annotation, type):
        return pending.get(annotation) or _make_fields_check(annotation, pending)
    return None


def _all_of(checks: list[Check | None]) -> Check | None:
    present = [check for check in checks if check is not None]
    if len(present) < 2:
        return present[0] if present else None

    def check_all(value: Any) -> None:
        for check in present:
            check(value)

    return check_all


def _make_union_check(args: tuple[Any, ...], pending: Mapping[Any, Check]) -> Check | None:
    checks = [(arg, make_check(arg, pending)) for arg in args]
    if not any(check for _, check in checks):
        return None

    def check_one(value: Any) -> None:
        """Check that the value fits one member of the union."""
        problem: ValueError | None = None
        for arg, check in checks:
            if not _fits(value, arg):
                continue
            try:
                if check is not None:
                    check(value)
                return
            except ValueError as error:
                problem = error
        if problem is not None:
            raise problem

    return check_one


def _fits(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, adapt_annotation(annotation), dec_hook=from_json)
    except FAULTS:
        return False
    return True


def _make_tuple_check(checks: list[Check | None]) -> Check | None:
    if not any(checks):
        return None

    def check_parts(value: Any) -> None:
        for part, check in zip(value, checks, strict=False):
            if check is not None:
                check(part)

    return check_parts


def _make_mapping_check(checks: list[Check | None]) -> Check | None:
    if len(checks) != 2 or not any(checks):
        return None
    check_parts = cast("Check", _make_tuple_check(checks))

    def check_items(value: Any) -> None:
        for item in value.items():
            check_parts(item)

    return check_items


def _make_items_check(check: Check | None) -> Check | None:
    if check is None:
        return None

    def check_items(value: Any) -> None:
        for item in value:
            check(item)

    return check_items


def _make_fields_check(kind: type[Any], pending: Mapping[Any, Check]) -> Check | None:
    """Return what checks the fields of a dataclass and the like. Pydantic checks its models itself."""
    is_typed_dict = hasattr(kind, "__required_keys__")
    if not is_typed_dict and not any(hasattr(kind, name) for name in _WITH_FIELDS):
        return None
    found: list[tuple[str, Check]] = []

    def check_fields(value: Any) -> None:
        for name, check in found:
            field = value.get(name, _ABSENT) if is_typed_dict else getattr(value, name, _ABSENT)
            if field is not _ABSENT:
                try:
                    check(field)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    inner = {**pending, kind: check_fields}
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception:  # an annotation is code: it may raise anything
        return None
    for name, annotation in hints.items():
        if (check := make_check(annotation, inner)) is not None:
            found.append((name, check))
    return check_fields if any(check not in inner.values() for _, check in found) else None


_WITH_FIELDS = ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__", "_fields")
_ABSENT: Any = object()


def _check_metadata(inner: Any, metadata: tuple[Any, ...]) -> Check | None:
    """Return what checks the metadata of one annotation."""
    items = list(_flatten(metadata))
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is not None and any(type(item).__module__.partition(".")[0] == "pydantic" for item in items):
        foreign = [item for item in metadata if not isinstance(item, msgspec.Meta)]
        for base in (inner, Any):  # Any, where pydantic does not know the class
            with suppress(Exception):
                return _make_pydantic_check(pydantic.TypeAdapter(Annotated[(base, *foreign)]))
    return _all_of([_make_constraint(item) for item in items])


def _flatten(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        if type(item).__module__.startswith("pydantic.fields") and hasattr(item, "metadata"):
            yield item
            yield from _flatten(item.metadata)
        elif getattr(item, "__is_annotated_types_grouped_metadata__", False):
            yield from _flatten(item)
        else:
            yield item


def _make_pydantic_check(adapter: Any) -> Check:
    def check(value: Any) -> None:
        try:
            validated = adapter.validate_python(value)
        except ValueError as error:
            errors: Any = getattr(error, "errors", list)
            texts: list[str] = [detail["msg"] for detail in errors()]
            raise ValueError("; ".join(texts) or get_error_text(error, 200)) from None
        if difference := find_difference(value, validated):
            raise ValueError(f"its annotation would change it: {difference}")

    return check


_COMPARISONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("more than", lambda value, bound: value > bound),
    "ge": ("at least", lambda value, bound: value >= bound),
    "lt": ("less than", lambda value, bound: value < bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "multiple_of": ("a multiple of", lambda value, bound: value % bound == 0),
    "min_length": ("at least of length", lambda value, bound: len(value) >= bound),
    "max_length": ("at most of length", lambda value, bound: len(value) <= bound),
}


def _make_constraint(item: Any) -> Check | None:
    """Return what checks one constraint of annotated_types; None for other metadata, which says nothing here."""
    if type(item).__module__.partition(".")[0] != "annotated_types":
        return None
    predicate = getattr(item, "func", None)
    bounds = [
        (text, holds, getattr(item, name))
        for name, (text, holds) in _COMPARISONS.items()
        if getattr(item, name, None) is not None
    ]

    def check(value: Any) -> None:
        for text, holds, bound in bounds:
            if not holds(value, bound):
                raise ValueError(f"it must be {text} {bound!r}")
        if callable(predicate) and bool(predicate(value)) is (type(item).__name__ == "Not"):
            raise ValueError(f"it does not fulfil {item!r}"[:200])
        if hasattr(item, "tz"):
            _check_zone(value, item.tz)

    return check


def _check_zone(value: Any, zone: Any) -> None:
    """Check a time against `annotated_types.Timezone`: None is naive, ... any zone, else that zone."""
    if (value.tzinfo is None) is not (zone is None):
        raise ValueError("it must have no time zone" if zone is None else "it must have a time zone")


_SIMPLE_TYPES = KEPT | {Any, Decimal, UUID, date, timedelta, list, dict, tuple, set, frozenset}


def is_simple(annotation: Any) -> bool:
    """Return whether values of a type are the same when they are equal.

    Not so are those with fields, which `==` may leave out, and times, which may be equal in different zones.
    """
    origin = get_origin(annotation)
    if origin is None:
        is_enum = isinstance(annotation, type) and issubclass(annotation, Enum | PurePath)
        return annotation in (None, Ellipsis) or is_enum or annotation in _SIMPLE_TYPES
    if origin is Literal:
        return True
    args = get_args(annotation)
    if origin is Annotated:
        return is_simple(args[0])
    return (origin in (Union, UnionType) or origin in _SIMPLE_TYPES) and all(map(is_simple, args))


def has_mixed_keys(annotation: Any) -> bool:
    """Return whether an annotation has a mapping whose keys may be text or something else: JSON has only text."""
    args = get_args(annotation)
    is_mixed = len(args) == 2 and get_origin(args[0]) in (Union, UnionType)
    return is_mixed or any(map(has_mixed_keys, args))
