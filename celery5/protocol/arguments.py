"""Arguments: a task's parameters and result, from Python to JSON and back, as the annotations say.

Floor: protocol. Reads: nothing. Writes: nothing.

Whatever a worker would refuse, the producer refuses first, naming the task, the parameter and both types. Standard
types, dataclasses, attrs and msgspec are msgspec's; paths and pydantic models are the hooks below.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from types import GenericAlias
from typing import Any, cast, get_type_hints

import msgspec
from msgspec import Raw

from celery5.errors import BadArguments, Misconfigured

_EMPTY = inspect.Parameter.empty
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _to_json(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    dump = getattr(value, "model_dump", None)  # pydantic, when the application uses it
    if callable(dump):
        return dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _from_json(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    validate = getattr(kind, "model_validate", None)
    if callable(validate):
        return validate(value)
    raise NotImplementedError(f"{kind.__name__} has no JSON form")


_ENCODER = msgspec.json.Encoder(enc_hook=_to_json)


def encode_value(value: Any) -> bytes:
    """JSON of a task's result. Raises TypeError when there is none."""
    try:
        return _ENCODER.encode(value)
    except (NotImplementedError, TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"a result of type {type(value).__name__} cannot be encoded: {error}") from None


class ResultType:
    """What a task returns, as its annotation says."""

    def __init__(self, annotation: Any) -> None:
        self._decoder = _decoder(annotation)

    def decode(self, raw: bytes | Raw) -> Any:
        """The result as the task's annotation describes it."""
        return self._decoder.decode(raw)


def _decoder(annotation: Any) -> msgspec.json.Decoder[Any]:
    if annotation in (_EMPTY, inspect.Signature.empty):
        annotation = Any
    return msgspec.json.Decoder(annotation, dec_hook=_from_json)


class Parameters:
    """The parameters of one task.

    Raises Misconfigured at declaration when an annotation has no JSON form at all.
    """

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        self._task = task
        self._signature = inspect.signature(function)
        hints = _hints(function)
        self.returns = hints.get("return", Any)
        self._types = {name: hints.get(name, Any) for name in self._signature.parameters}
        self._check_declaration()
        listed = [each for each in self._signature.parameters.values() if each.kind in _POSITIONAL]
        self._names = tuple(each.name for each in listed)
        self._required = sum(each.default is _EMPTY for each in listed)
        self._plain = len(listed) == len(self._signature.parameters)
        self._positional = lru_cache(maxsize=None)(self._positional_decoder)
        self._keyword = lru_cache(maxsize=None)(self._keyword_decoder)

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Raw, Raw]:
        """Both halves of a call as JSON. Raises BadArguments."""
        simple = not kwargs and self._plain and self._required <= len(args) <= len(self._names)
        if simple:
            for name, value in zip(self._names, args, strict=False):
                self._check(name, value)
        else:
            self._check_bound(args, kwargs)
        try:
            raw_args = Raw(_ENCODER.encode(args))
            raw_kwargs = Raw(_ENCODER.encode(kwargs)) if kwargs else _NO_KWARGS
            self.decode(raw_args, raw_kwargs)  # what the worker will do with them
        except BadArguments:
            raise
        except (NotImplementedError, TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"{self._task}: an argument cannot be encoded: {error}") from None
        return raw_args, raw_kwargs

    def decode(self, args: Raw, kwargs: Raw) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A call's arguments, converted to the annotated types. Raises BadArguments."""
        try:
            values = self._decode_positional(args)
            named = self._decode_keywords(kwargs) if len(bytes(kwargs)) > 2 else {}
        except (msgspec.DecodeError, NotImplementedError, TypeError, ValueError) as error:
            raise BadArguments(f"{self._task}: {error}") from None
        if not (not named and self._plain and self._required <= len(values) <= len(self._names)):
            self._bind(values, named)
        return values, named

    def _decode_positional(self, raw: Raw) -> Sequence[Any]:
        count = len(self._names)
        if self._plain and self._required == count:
            return cast("Sequence[Any]", self._positional(count).decode(raw))
        length = len(msgspec.json.decode(raw, type=list[Raw]))
        return cast("Sequence[Any]", self._positional(length).decode(raw))

    def _decode_keywords(self, raw: Raw) -> dict[str, Any]:
        return {name: self._keyword(name).decode(each) for name, each in _RAW_KWARGS.decode(raw).items()}

    def _positional_decoder(self, count: int) -> msgspec.json.Decoder[Any]:
        rest = next((n for n, p in self._signature.parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        kinds = [self._types[name] for name in self._names[:count]]
        kinds += [self._types[rest] if rest else Any] * (count - len(kinds))
        return _decoder(GenericAlias(tuple, tuple(kinds)))

    def _keyword_decoder(self, name: str) -> msgspec.json.Decoder[Any]:
        rest = next((n for n, p in self._signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
        return _decoder(self._types.get(name, self._types[rest] if rest else Any))

    def _check_bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, value in self._bind(args, kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                for each in value:
                    self._check(name, each)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                for each in value.values():
                    self._check(name, each)
            else:
                self._check(name, value)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"{self._task}{self._signature}: {error}") from None

    def _check(self, name: str, value: Any) -> None:
        wanted = self._types[name]
        if wanted is Any or type(value) is wanted:
            return
        try:
            msgspec.convert(value, wanted, dec_hook=_from_json)
        except (msgspec.ValidationError, NotImplementedError, TypeError, ValueError) as error:
            shown = getattr(wanted, "__name__", None) if isinstance(wanted, type) else None
            raise BadArguments(
                f"{self._task}: parameter {name!r} takes {shown or wanted}, got {type(value).__name__} ({error})"
            ) from None

    def _check_declaration(self) -> None:
        for name, annotation in self._types.items():
            try:
                _decoder(annotation)
            except TypeError as error:
                raise Misconfigured(
                    f"task {self._task}: parameter {name!r} has no JSON form: {error}"
                ) from None


_NO_KWARGS = Raw(b"{}")
_RAW_KWARGS = msgspec.json.Decoder(dict[str, Raw])


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as types. One that cannot be resolved, such as an import for type checkers only, counts as Any."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        found = getattr(function, "__annotations__", {})
        return {name: each for name, each in found.items() if not isinstance(each, str)}
