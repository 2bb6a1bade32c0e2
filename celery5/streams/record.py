"""Records: classes whose instances are sent to streams."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

import msgspec

from celery5.errors import BadRecord, Misconfigured

RecordT = TypeVar("RecordT", bound="Record")
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

NATIVE_TYPES = (int, float, bool, str, bytes)
"""The types of the fields of a primitive record."""


def _check_version(name: str, version: object) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= 65_535:
        raise Misconfigured(f"record {name}: version is {version!r}: give 1 to 65535")
    return version


def _check_native(record: Any) -> None:
    """Raise Misconfigured when a field has no native form."""
    hints = get_type_hints(
        record, vars(sys.modules.get(record.__module__)) if record.__module__ in sys.modules else None
    )
    for field in msgspec.structs.fields(record):
        if hints.get(field.name) not in NATIVE_TYPES:
            raise Misconfigured(
                f"record {record.__name__} is primitive, and its field {field.name!r} is no int, float, bool, str or "
                "bytes: change it, or leave out primitive=True"
            )


if TYPE_CHECKING:

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    class _Fields:
        __struct_fields__: ClassVar[tuple[str, ...]]

        def __init_subclass__(cls, *, primitive: bool = False, version: int = 1) -> None: ...

else:

    class _RecordMeta(msgspec.StructMeta):
        """Takes the keywords of a record's class."""

        def __new__(
            mcls,
            name: str,
            bases: Any,
            namespace: Any,
            *,
            primitive: Any = None,
            version: Any = 1,
            **options: Any,
        ) -> Any:
            options.setdefault("kw_only", True)
            record = super().__new__(mcls, name, bases, namespace, **options)
            record._is_primitive = (
                getattr(record, "_is_primitive", False) if primitive is None else bool(primitive)
            )
            record._version = _check_version(name, version)
            record._upcasters = {}
            if record._is_primitive:
                _check_native(record)
            return record

    # An unknown field is an error of msgspec, for which `decode_leniently` looks again: the usual case costs nothing.
    class _Fields(
        msgspec.Struct,
        metaclass=_RecordMeta,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        dict=True,
    ):
        pass


class Record(_Fields):
    """The base of records. A subclass lists its fields by annotations; an instance is immutable.

    A record that was read with fields that its class does not have keeps them: they are sent again with it, and with
    what `replace` makes of it.

    Class keywords:
        primitive: Whether its fields are stored as native fields of Redis: only int, float, bool, str and bytes.
        version: The version of its fields. Raise it with each change that older code cannot read, and declare an
            `upcast` from each earlier version.
    """

    _is_primitive: ClassVar[bool]
    _version: ClassVar[int]
    _upcasters: ClassVar[dict[int, Upcaster]]
    # Of an instance, if it has any: no attribute of an instance is needed for the usual case.
    _unknown_fields: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def upcast(cls, from_version: int) -> Callable[[Upcaster], Upcaster]:
        """Declare, as a decorator, what turns the fields of a version into those of the next one.

        Args:
            from_version: The version that the function takes, as a mapping by name.

        Raises:
            Misconfigured: There is no such earlier version, or it has an upcaster already.
        """
        if isinstance(from_version, bool) or not 1 <= from_version < cls._version:
            raise Misconfigured(
                f"record {cls.__name__} has version {cls._version}: "
                f"nothing is to be upcast from version {from_version!r}"
            )
        if from_version in cls._upcasters:
            raise Misconfigured(f"record {cls.__name__} has two upcasters from version {from_version}")

        def declare(function: Upcaster) -> Upcaster:
            cls._upcasters[from_version] = function
            return function

        return declare

    def replace(self, **changes: Any) -> Self:
        """Return the same record with other values of some fields. Raises TypeError for a field that it has not."""
        struct: Any = self
        changed: Self = msgspec.structs.replace(struct, **changes)
        return keep_unknown_fields(changed, get_unknown_fields(self))


def get_record_version(kind: Any) -> int:
    """Return the version of a class of records: 1 for any other class."""
    return int(getattr(kind, "_version", 1)) if is_record(kind) else 1


def is_record(kind: Any) -> bool:
    """Return whether a class is a subclass of `Record`."""
    return isinstance(kind, type) and issubclass(kind, Record)


def is_primitive(kind: Any) -> bool:
    """Return whether the fields of a class are stored as native ones."""
    return is_record(kind) and bool(kind._is_primitive)


def upcast_fields(kind: Any, fields: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the fields of the current version. Raises BadRecord."""
    current = get_record_version(kind)
    name = getattr(kind, "__name__", "value")
    if version > current:
        raise BadRecord(
            f"a {name} of version {version}: this code knows up to version {current}; deploy newer code first"
        )
    while version < current:
        upcaster = kind._upcasters.get(version)
        if upcaster is None:
            raise BadRecord(
                f"a {name} of version {version}, and nothing turns it into version {version + 1}: "
                f"declare @{name}.upcast(from_version={version})"
            )
        fields = upcaster(fields)
        version += 1
    return fields


def get_unknown_fields(record: Any) -> Mapping[str, Any]:
    """Return the fields that a record was read with and its class does not have."""
    found: Mapping[str, Any] = getattr(record, "_unknown_fields", _NONE)
    return found


_NONE: Mapping[str, Any] = {}


def keep_unknown_fields(record: RecordT, fields: Mapping[str, Any]) -> RecordT:
    """Have a record keep fields that its class does not have, and return it."""
    if fields:
        struct: Any = record
        msgspec.structs.force_setattr(struct, "_unknown_fields", fields)
    return record
