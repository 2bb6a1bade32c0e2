"""Convert a task's arguments and result to JSON and back, by its annotations.

The producer refuses what a worker would refuse, naming the task, the parameter and both types. Standard
types, dataclasses, attrs and msgspec are converted by msgspec; paths and pydantic models by the hooks below.
"""

import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePath
from types import GenericAlias, UnionType
from typing import (
    Annotated,
    Any,
    Never,
    NoReturn,
    Protocol,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Raw

from celery5.errors import BadArguments, BadResult, Misconfigured
from celery5.protocol.annotations import resolve_hint
from celery5.protocol.counts import format_count
from celery5.protocol.job.annotations import (
    Check,
    adapt_annotation,
    has_mixed_keys,
    is_simple,
    make_check,
)
from celery5.protocol.job.history import CallShape, format_arguments, read_arguments
from celery5.protocol.job.json_values import (
    FAULTS,
    AdaptedType,
    encode_json,
    encode_unchecked,
    equals,
    find_difference,
    find_scalar_base,
    from_json,
    make_plain,
    refuse_changes,
    suggest_instead,
    to_json,
)
from celery5.protocol.job.messages import MAX_DEPTH, NO_ARGS, NO_KWARGS, is_nested_deeper
from celery5.protocol.job.signature_digests import digest_signature
from celery5.protocol.masking import get_error_text
from celery5.similar_names import did_you_mean

MAX_CALL_LENGTH = 120
"""Characters of a call's arguments that are shown."""


def format_call(shape: CallShape, args: msgspec.Raw, kwargs: msgspec.Raw) -> str:
    """Return the arguments of a call on one line, `order=7, token="***"`: shortened, and without passwords.

    Args:
        shape: What is known of the task.
        args: The positional arguments, a JSON array.
        kwargs: The named ones, a JSON object.
    """
    text = format_arguments(read_arguments(shape, args, kwargs))
    return text if len(text) <= MAX_CALL_LENGTH else f"{text[:MAX_CALL_LENGTH]}..."


_EMPTY = inspect.Parameter.empty
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


def _encode_call(value: Any) -> bytes:
    """Return JSON of args or kwargs. Raises ValueError when nested too deeply for the scripts."""
    return _check_depth(encode_unchecked(value))


def _check_depth(encoded: bytes) -> bytes:
    """Return JSON that scripts and clients can read. Raises ValueError when it is nested too deeply."""
    if len(encoded) > 2 * MAX_DEPTH and is_nested_deeper(encoded, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return encoded


def encode_value(value: Any, what: str = "a result") -> bytes:
    """Return JSON of a value. Raises TypeError when it cannot be encoded.

    Args:
        value: The value.
        what: What it is, for the error.
    """
    try:
        return _check_depth(encode_json(value))
    except FAULTS as error:
        raise TypeError(
            f"{what} of type {type(value).__name__} cannot be encoded: {get_error_text(error)}"
        ) from None


class ResultType:
    """The annotated type of a task's result."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._decoder = _decoder(adapt_annotation(annotation))
        self._check = make_check(annotation)

    @property
    def is_declared(self) -> bool:
        """Return whether the result is annotated with a type other than Any."""
        return self._decoder.type is not Any

    def decode(self, raw: bytes | Raw) -> Any:
        """Return the result as the annotated type. Raises BadResult when it does not fit."""
        try:
            value = self._decoder.decode(raw)
            if self._check is not None:
                self._check(value)
            return value
        except FAULTS as error:
            raise BadResult(
                f"the result is not what the task declares, {_shown(self._annotation)}: {_describe_fault(error)}"
            ) from None


_TYPES = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
"""What msgspec says of a value that is whole of another type: the message has the expected one already."""


def _describe_fault(error: BaseException) -> str:
    """Return what is wrong with a decoded value: `got str`, or the text of the error where that says more."""
    text = get_error_text(error)
    types = _TYPES.fullmatch(text)
    return f"got {types[2]}" if types else text


def _decoder(annotation: Any) -> msgspec.json.Decoder[Any]:
    if annotation in (_EMPTY, inspect.Signature.empty, *_NEVER):
        annotation = Any
    return msgspec.json.Decoder(annotation, dec_hook=from_json)


def _shown(annotation: Any) -> str:
    name = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return name or str(annotation)


class Parameters:
    """The parameters and the result of one task.

    Raises Misconfigured at declaration when an annotation has no JSON form. An annotation with a name that does not
    exist yet, such as a class further down in the module, counts as Any (`has_unresolved`): `resolve` tries again when
    the first job is made or read, and when an application is loaded. A name that does not exist then, such as an import
    for type checkers only, stays Any.

    Args:
        task: The name of the task.
        function: The function.
        redact: The parameters whose values are never shown.
        bound: The name of the function's first parameter where the worker passes it; '' where there is none.
    """

    def __init__(
        self, task: str, function: Callable[..., Any], redact: Collection[str] = (), bound: str = ""
    ) -> None:
        self._task = task
        self._function = function
        self._bound = bound
        self._signature = inspect.signature(function)
        self.has_unresolved: bool = False
        self._read_annotations()
        self.call_shape: CallShape = CallShape(self._names, self._check_redacted(redact))
        self._is_late: bool = self.has_unresolved

    def resolve(self) -> None:
        """Resolve annotations that could not be resolved before.

        Raises Misconfigured when one has no JSON form.
        """
        self._is_late = False
        if self.has_unresolved:
            self._read_annotations()

    def _read_annotations(self) -> None:
        hints, self.has_unresolved = _hints(self._function)
        self.return_annotation: Any = self._known("the result", hints.get("return", Any))
        self.result_type: ResultType = ResultType(self.return_annotation)
        self._types = {
            name: self._known(f"parameter {name!r}", hints.get(name, Any))
            for name in self._signature.parameters
        }
        self._wire_types = {name: adapt_annotation(annotation) for name, annotation in self._types.items()}
        self._decoders = {name: _decoder(annotation) for name, annotation in self._wire_types.items()}
        checks = {name: make_check(annotation) for name, annotation in self._types.items()}
        self._checks: dict[str, Check] = {name: check for name, check in checks.items() if check is not None}
        self._with_mixed_keys = frozenset(
            name for name, annotation in self._types.items() if has_mixed_keys(annotation)
        )
        # Whether arguments that arrive equal arrive unchanged.
        self._is_simple = not self._checks and all(map(is_simple, self._wire_types.values()))
        self._exact = frozenset(
            name for name, annotation in self._types.items() if _mentions_decimal(annotation)
        )
        kinds = {name: parameter.kind for name, parameter in self._signature.parameters.items()}
        self._names = tuple(name for name, kind in kinds.items() if kind in _POSITIONAL)
        self._rest = next((name for name, kind in kinds.items() if kind is _VAR_POSITIONAL), None)
        self._more = next((name for name, kind in kinds.items() if kind is _VAR_KEYWORD), None)
        self._keywords = frozenset(name for name, kind in kinds.items() if kind in _BY_NAME)
        parameters = self._signature.parameters
        self._required = sum(parameters[name].default is _EMPTY for name in self._names)
        self._plain = len(self._names) == len(parameters)
        # Where there are only positional parameters a list of them is decoded in one go.
        self._classes = tuple(self._types[name] for name in self._names)
        wire_types = tuple(self._wire_types[name] for name in self._names)
        lengths = range(self._required, len(self._names) + 1) if self._plain else ()
        self._wholes = {many: _decoder(GenericAlias(tuple, wire_types[:many])) for many in lengths}
        self._fixed = next(iter(self._wholes.values())) if len(self._wholes) == 1 else None

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the function."""
        return self._signature

    def make_digest(self) -> str:
        """Return the digest of what is taken, by which code with another signature is told apart."""
        return digest_signature(self._signature, self._types)

    @property
    def positional_names(self) -> tuple[str, ...]:
        """Return the names of the positional parameters, in order."""
        return self._names

    def _check_redacted(self, names: Collection[str]) -> frozenset[str]:
        """Return the parameters whose values are never shown. Raises Misconfigured when there is no such parameter."""
        if isinstance(names, str) or not isinstance(cast("object", names), Collection):
            raise Misconfigured(f"task {self._task}: redact is {names!r}: give a list of parameters")
        for name in names:
            if name not in self._signature.parameters and self._more is None:
                hint = did_you_mean(name, list(self._signature.parameters))
                raise Misconfigured(
                    f"task {self._task}: redact has {name!r}, which is no parameter; {hint}".rstrip("; ")
                )
        return frozenset(names)

    def get_type(self, parameter: int | str) -> Any:
        """Return the annotated type of a parameter, by position or by name; Any where there is none."""
        if isinstance(parameter, int):
            parameter = self._names[parameter] if parameter < len(self._names) else self._rest or ""
        return self._types.get(parameter, Any)

    def has_missing(self, positional: int, named: Collection[str]) -> bool:
        """Return whether a call lacks positional parameters. `positional` is how many are given by position."""
        if positional >= self._required:
            return False
        return (
            positional + sum(name in named for name in self._names[positional : self._required])
            < self._required
        )

    def describe_first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return what a call has for its first parameter, and how to leave that out, for an error."""
        advice = "leave the first one out"
        if not args or not self._names:
            return f"has all its arguments: {advice}"
        name, unfit = self._names[0], ""
        try:
            self._check(name, args[0])
        except BadArguments:
            unfit = f" ({name!r} takes {_shown(self._types[name])}, got {type(args[0]).__name__})"
        if len(args) + sum(name in kwargs for name in self._names) < len(self._names):
            advice = (
                "if the first one was left out, write partial(...) in place of s(...), or pass those with a default by "
                "keyword; else leave it out"
            )
        return f"has all its arguments{unfit}: {advice}"

    def describe_missing(self, positional: int, named: Collection[str]) -> str:
        """Return which positional parameters a call lacks, for an error."""
        names = [name for name in self._names[positional : self._required] if name not in named]
        return f"an argument for {names[0]!r}" if names else "its first argument"

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Raw, Raw]:
        """Return args and kwargs as JSON. Raises BadArguments."""
        if self._is_late:
            self.resolve()
        decoder = None if kwargs else self._wholes.get(len(args))
        if decoder is None:
            self._check_bound(args, kwargs)
        elif tuple(map(type, args)) != self._classes[: len(args)]:
            for name, value in zip(self._names, args, strict=False):
                self._check(name, value)
        try:
            raw_args = Raw(_encode_call(args)) if args else NO_ARGS
            raw_kwargs = Raw(_encode_call(kwargs)) if kwargs else NO_KWARGS
        except FAULTS as error:
            raise self._make_encoding_error(error) from None
        if decoder is not None and self._is_simple:
            try:
                if equals(decoder.decode(raw_args), args):
                    return raw_args, raw_kwargs
            except FAULTS:
                pass  # decoded one by one below, to name the wrong one
        self._read_back(args, kwargs, raw_args, raw_kwargs)
        return raw_args, raw_kwargs

    def _make_encoding_error(self, error: Exception) -> BadArguments:
        return BadArguments(f"{self._task}: an argument cannot be encoded: {get_error_text(error)}")

    def _read_back(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], raw_args: Raw, raw_kwargs: Raw
    ) -> None:
        """Decode a call as the worker will do. Raises BadArguments when it cannot be, or would arrive changed."""
        try:
            refuse_changes((*args, *kwargs.values()))
        except FAULTS as error:
            raise self._make_encoding_error(error) from None
        arrived, named = self.decode(raw_args, raw_kwargs)
        if self._is_simple and equals([list(arrived), named], [list(args), kwargs]):
            return
        names = [self._names[n] if n < len(self._names) else self._rest or "" for n in range(len(args))]
        for name, value, back in zip(names, args, arrived, strict=True):
            self._refuse_change(name, value, back)
        for name, value in kwargs.items():
            self._refuse_change(name, value, named[name])

    def _refuse_change(self, name: str, sent: Any, arrived: Any) -> None:
        if difference := find_difference(sent, arrived, keeps_keys=name in self._with_mixed_keys):
            raise BadArguments(f"{self._task}: parameter {name!r} would not arrive as it is: {difference}")

    def encode_values(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], is_later: Callable[[Any], bool]
    ) -> tuple[list[Raw | None], dict[str, Raw | None]]:
        """Return each argument as JSON, and None for those that will be known later.

        Args:
            is_later: Returns whether an argument is not known yet.

        Raises:
            BadArguments: The call does not fit the parameters, or an argument that is known does not.
        """
        if self._is_late:
            self.resolve()
        self._bind(args, kwargs)
        names = [self._names[n] if n < len(self._names) else self._rest for n in range(len(args))]
        return (
            [
                None if is_later(value) else self._encode_one(name, value)
                for name, value in zip(names, args, strict=True)
            ],
            {
                name: None
                if is_later(value)
                else self._encode_one(name if name in self._keywords else self._more, value)
                for name, value in kwargs.items()
            },
        )

    def _encode_one(self, name: str | None, value: Any) -> Raw:
        self._check(name or "", value)
        try:
            raw = Raw(_encode_call(value))
            refuse_changes(value)
        except FAULTS as error:
            raise self._make_encoding_error(error) from None
        if name is not None:
            self._refuse_change(name, value, self._decode_one(name, raw))
        return raw

    def encode_canonical(self, args: Raw, kwargs: Raw) -> bytes:
        """Return the same text for all spellings of an encoded call.

        Arguments may be by position or by name, defaults passed or left out, keys of a mapping in any order.
        """
        call = self._bind(*self.decode(args, kwargs))
        left_out = self._bind(call.args, call.kwargs)
        left_out.apply_defaults()
        try:
            return _canonical(left_out)
        except FAULTS:  # a default without a JSON form cannot be passed either
            return _canonical(call)

    def decode(self, args: Raw, kwargs: Raw) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a call's arguments, converted to the annotated types. Raises BadArguments."""
        if self._is_late:
            self.resolve()
        values = self._decode_positional(args)
        named = {} if kwargs is NO_KWARGS else self._decode_keywords(kwargs)
        if not (not named and self._plain and self._required <= len(values) <= len(self._names)):
            self._bind(values, named)
        return values, named

    def encode_by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return JSON of a decoded call's arguments, all by name, defaults included, for a box in any language.

        Raises BadArguments.
        """
        call = self._bind(args, kwargs)
        call.apply_defaults()
        arguments = dict(call.arguments)
        more: Mapping[str, Any] = arguments.pop(self._more) if self._more else {}
        if twice := sorted(more.keys() & arguments.keys()):
            raise BadArguments(
                f"{self._task}: a keyword argument has the name of the positional parameter {twice[0]!r}"
            )
        arguments |= more
        try:
            return encode_json(arguments)
        except FAULTS as error:
            raise BadArguments(
                f"{self._task}: a default cannot be encoded: {get_error_text(error)}"
            ) from None

    def _decode_positional(self, raw: Raw) -> Sequence[Any]:
        if self._fixed is not None and not self._checks:
            try:
                return cast("Sequence[Any]", self._fixed.decode(raw))
            except FAULTS:
                pass  # decode one by one below, to name the wrong one
        try:
            values = _RAW_ARGS.decode(raw)
            decoder = self._wholes.get(len(values))
        except FAULTS as error:
            raise BadArguments(f"{self._task}: args are no list: {get_error_text(error)}") from None
        if decoder is not None and not self._checks:
            try:
                return cast("Sequence[Any]", decoder.decode(raw))
            except FAULTS:
                pass
        rest = self._rest
        if rest is None and len(values) > len(self._names):
            raise BadArguments(
                f"{self._task}{self._signature}: takes {format_count(len(self._names), 'positional argument')}, "
                f"got {len(values)}"
            )
        count = len(self._names)
        return [
            self._decode_one(self._names[index] if index < count else cast("str", rest), value)
            for index, value in enumerate(values)
        ]

    def _decode_keywords(self, raw: Raw) -> dict[str, Any]:
        try:
            values = _RAW_KWARGS.decode(raw)
        except FAULTS as error:
            raise BadArguments(f"{self._task}: kwargs are no object: {get_error_text(error)}") from None
        return {
            name: self._decode_one(name if name in self._keywords else self._more, value)
            for name, value in values.items()
        }

    def _decode_one(self, name: str | None, raw: Raw) -> Any:
        """Return one decoded argument. Without a `name` there is no such parameter: binding will raise."""
        try:
            value = self._decoders[name].decode(raw) if name else None
            if name in self._checks:
                self._checks[name](value)
            return value
        except FAULTS as error:
            raise BadArguments(
                f"{self._task}: parameter {name!r} takes {_shown(self._types[name or ''])}: {_describe_fault(error)}"
            ) from None

    def _check_bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, value in self._bind(args, kwargs).arguments.items():
            if name == self._rest:
                for item in value:
                    self._check(name, item)
            elif name == self._more:
                for item in value.values():
                    self._check(name, item)
            else:
                self._check(name, value)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        if self._bound and self._bound in kwargs:
            raise BadArguments(
                f"{self._task}: {self._bound!r} is the running job, which the worker passes: use another name"
            )
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            why = self._unexpected(kwargs) or error
            raise BadArguments(f"{self._task}{self._signature}: {why}") from None

    def _unexpected(self, kwargs: Mapping[str, Any]) -> str:
        """Return which keyword argument has no parameter. `inspect` would name the missing parameter instead."""
        if self._more is not None:
            return ""
        wrong = next((name for name in kwargs if name not in self._keywords), None)
        if wrong is None:
            return ""
        suggestion = did_you_mean(wrong, [name for name in self._types if name in self._keywords])
        return f"got an unexpected keyword argument {wrong!r}" + (f"; {suggestion}" if suggestion else "")

    def _check(self, name: str, value: Any) -> None:
        expected = self._types[name]
        if expected is Any or type(value) is expected:
            return
        if name in self._exact and (inexact := _float_for_decimal(value, expected)) is not None:
            raise BadArguments(
                f"{self._task}: parameter {name!r} takes {_shown(expected)}, got {type(value).__name__} "
                f"(the float {inexact!r} is not exact: pass Decimal('{inexact!r}') or '{inexact!r}')"
            )
        wire_type = self._wire_types[name]
        try:
            try:
                msgspec.convert(value, wire_type, dec_hook=from_json)
            except FAULTS:  # it may have subclasses of str, int and so on, which are written as plain values
                msgspec.convert(make_plain(value), wire_type, dec_hook=from_json)
        except FAULTS as error:
            text = get_error_text(error)
            instead = _suggest_for_argument(value)
            why = "" if instead or _TYPES.fullmatch(text) else f" ({text})"
            raise BadArguments(
                f"{self._task}: parameter {name!r} takes {_shown(expected)}, got {type(value).__name__}"
                f"{why}{instead and f': {instead}'}"
            ) from None

    def _known(self, what: str, annotation: Any) -> Any:
        """Return an annotation, or Any for one with a name that does not exist yet.

        Raises Misconfigured when it has no JSON form.
        """
        if annotation in (*_SIMPLE, *_NEVER):
            return annotation
        try:
            wire_type = adapt_annotation(annotation)
            _decoder(wire_type)
            make_check(annotation)
            bare = _class_without_json(wire_type)
        except NameError:  # such as in a field of a dataclass
            self.has_unresolved = True
            return Any
        except (TypeError, NotImplementedError) as error:
            raise Misconfigured(
                f"task {self._task}: {what} has no JSON form: {get_error_text(error)}"
            ) from None
        if bare is not None:
            instead = suggest_instead(bare)
            raise Misconfigured(
                f"task {self._task}: {what} has no JSON form: {_shown(bare)} {_INSTEAD}{instead and f'; {instead}'}"
            )
        return annotation


def _suggest_for_argument(value: object) -> str:
    """Return as `suggest_instead`, for a value, or for the first item of a list of them."""
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
    return suggest_instead(cast("object", type(items[0] if items else cast("object", value))))


_INSTEAD = "is neither a dataclass nor another type that JSON can carry (see celery5 docs types)"
_NEVER: tuple[Any, ...] = (Never, NoReturn)
_SIMPLE: tuple[Any, ...] = (Any, int, str, float, bool, bytes, None)
_SAMPLES: tuple[Any, ...] = ({}, [], "", 0, 0.0, True, None)
"""One of each kind of value that JSON has."""
_ORDINARY = (type, ABCMeta, type(Protocol))
"""Metaclasses that decide by the class alone whether something is an instance of it."""


def _class_without_json(annotation: Any) -> type[Any] | None:
    """Return a class in an annotation that no JSON value can be converted to; None when there is none.

    `Client | None` has a JSON form, which is null: one member of a union with a JSON form is enough.
    """
    from msgspec.inspect import type_info

    return _bare_in(type_info(annotation), set())


def _bare_in(info: Any, visited: set[int]) -> type[Any] | None:
    """Return as `_class_without_json`, for msgspec's description of a type.

    `visited` has the ids of visited descriptions: a type may contain itself.
    """
    if id(info) in visited:
        return None
    visited.add(id(info))
    kind = getattr(info, "cls", None)
    if type(info).__name__ == "CustomType":
        return None if _has_json_form(kind) else kind
    if type(info).__name__ == "UnionType":
        bare = [_bare_in(part, visited) for part in info.types]
        return bare[0] if all(part is not None for part in bare) else None
    inner = [
        getattr(info, name) for name in ("item_type", "key_type", "value_type", "type") if hasattr(info, name)
    ]
    for part in (
        *inner,
        *getattr(info, "item_types", ()),
        *(field.type for field in getattr(info, "fields", ())),
    ):
        bare_part = _bare_in(part, visited)
        if bare_part is not None:
            return bare_part
    return None


def _has_json_form(kind: Any) -> bool:
    """Return whether `from_json` may make an instance of this class of a value from JSON."""
    if not isinstance(kind, type) or issubclass(kind, PurePath) or isinstance(kind, AdaptedType):
        return True
    if find_scalar_base(cast("Any", kind)) is not None:
        return True
    metaclass: type[Any] = cast("Any", kind).__class__
    is_convertible = any(
        callable(getattr(cast("Any", kind), name, None))
        for name in ("model_validate_json", "convert_from_json")
    )
    if is_convertible:
        return True
    if suggest_instead(cast("object", kind)):
        return False  # the row of a table
    if metaclass not in _ORDINARY:
        return True  # other metaclasses may decide by the value
    try:
        return any(isinstance(sample, kind) for sample in _SAMPLES)
    except TypeError:  # a protocol that is not runtime-checkable
        return False


def _mentions_decimal(annotation: Any) -> bool:
    return annotation is Decimal or any(map(_mentions_decimal, get_args(annotation)))


def _float_for_decimal(value: Any, wanted: Any) -> float | None:
    """Return the first float in `value` that stands where the annotation has Decimal, or None.

    msgspec would convert it. But `0.1 + 0.2` would be sent as `0.30000000000000004`, and Decimal is declared for exact
    numbers. Looks into unions and the standard containers, not into the fields of a class.
    """
    if wanted is Decimal:
        return value if isinstance(value, float) else None
    kind, inner = get_origin(wanted), get_args(wanted)
    if kind is None or not inner:
        return None
    if kind is Annotated:
        return _float_for_decimal(value, inner[0])
    if kind in (Union, UnionType):
        if isinstance(value, float) and float in inner:
            return None
        parts: Iterable[tuple[Any, Any]] = ((value, item) for item in inner)
    elif isinstance(value, Mapping) and len(inner) == 2:
        parts = (
            pair
            for item in cast("Mapping[Any, Any]", value).items()
            for pair in zip(item, inner, strict=True)
        )
    elif isinstance(value, list | tuple | set | frozenset):
        values = cast("Iterable[Any]", value)
        fixed = kind is tuple and Ellipsis not in inner
        parts = zip(values, inner, strict=False) if fixed else ((item, inner[0]) for item in values)
    else:
        return None
    floats = (_float_for_decimal(item, its_type) for item, its_type in parts)
    return next((item for item in floats if item is not None), None)


def _canonical(call: inspect.BoundArguments) -> bytes:
    return _CANONICAL.encode((call.args, call.kwargs))


_CANONICAL = msgspec.json.Encoder(enc_hook=to_json, order="deterministic")
_RAW_ARGS = msgspec.json.Decoder(list[Raw])
_RAW_KWARGS = msgspec.json.Decoder(dict[str, Raw])


def _hints(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Return the annotations as types, and whether there are some that cannot be resolved: those count as Any."""
    try:
        return get_type_hints(function, include_extras=True), False
    except Exception:  # an annotation is code: it may raise anything
        return {
            name: resolve_hint(annotation, function)
            for name, annotation in getattr(function, "__annotations__", {}).items()
        }, True
