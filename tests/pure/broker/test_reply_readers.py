"""Reply readers: what each call makes of replies that no version of celery5 has written.

The calls are found in the modules of celery5.broker.calls, by their annotations, so a new one is tried
without being listed.
"""

import importlib
import inspect
import pkgutil
import random
import types
import typing
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import celery5.broker.calls
from celery5.broker.call import Call
from celery5.broker.connection.exchange import exchange_all, exchange_one
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerError, UnreadableReply
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.limits import AdmissionRule, LimitOverride, Rate, Suspension
from tests.pure.broker.test_calls import DEPTH

SHOP = Keys("shop")
MAIL = SHOP.for_queue("mail")
SEEDS = 100
HOT = {
    "jobs.read_jobs",
    "jobs.read_by_lane",
    "jobs.read_pending",
    "limits.admit_waiting",
    "limits.settle_limited",
    "limits.admit",
}
"""Read for each job: what is in an entry is looked at by whoever uses it, not by the reader."""


def _made(kind: Any, depth: int = 0) -> Any:
    """Return some value of a type, for an argument."""
    origin, args = get_origin(kind), get_args(kind)
    known: dict[Any, Any] = {
        Keys: SHOP,
        QueueKeys: MAIL,
        str: "word",
        bytes: b"1-0",
        int: 1,
        float: 1.0,
        bool: True,
        AdmissionRule: AdmissionRule("t", 1),
        LimitOverride: LimitOverride(limit=1),
        Rate: Rate("5/s"),
        Suspension: Suspension(why="w"),
        Delivery: types.SimpleNamespace(entry=b"1-0"),
    }
    if kind in known:
        return known[kind]
    if origin in (Union, types.UnionType):
        return _made(args[0], depth)
    if origin is Literal:
        return args[0]
    if origin is Call:
        return Call(("EVALSHA", "sha", 1, MAIL.stream), int)
    if origin is tuple:
        return tuple(_made(arg, depth + 1) for arg in args if arg is not ...)
    if origin in (list, Sequence, Collection, collections_iterable):
        return [_made(args[0], depth + 1)]
    if origin in (dict, Mapping):
        return {_made(args[0]): _made(args[1])}
    if kind is type(None):
        return None
    hints = get_type_hints(kind)
    needed = [name for name in hints if name not in _defaults(kind)]
    return kind(**{name: _made(hints[name], depth + 1) for name in needed})


collections_iterable = get_origin(typing.Iterable[int])


def _defaults(kind: Any) -> Collection[str]:
    if issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return {field.name for field in fields if not field.required}
    return getattr(kind, "_field_defaults", {})


def _found() -> Iterator[tuple[str, Any, Call[Any]]]:
    """Yield each call with its name and the type of what it gives."""
    for module in pkgutil.iter_modules(celery5.broker.calls.__path__):
        of = importlib.import_module(f"celery5.broker.calls.{module.name}")
        for name, thing in inspect.getmembers(of):  # which loads it if it loads late
            if isinstance(thing, Call):
                yield f"{module.name}.{name}", Any, thing
            # A private one is what others make their calls of.
            if not inspect.isfunction(thing) or thing.__module__ != of.__name__ or name.startswith("_"):
                continue
            if "Call[" not in str(thing.__annotations__.get("return")):
                continue
            hints = get_type_hints(thing)
            given = hints.pop("return")
            inner = given if get_origin(given) is Call else next(iter(get_args(given)), None)
            if get_origin(inner) is not Call:
                continue
            required = {
                parameter.name: hints[parameter.name]
                for parameter in inspect.signature(thing).parameters.values()
            }
            made = thing(**{key_name: _made(kind) for key_name, kind in required.items()})
            calls = [made] if isinstance(made, Call) else list(made)
            of_each = get_args(given) if get_origin(given) is tuple else [inner] * len(calls)
            for kind, call in zip(of_each, calls, strict=True):
                yield f"{module.name}.{name}", get_args(kind)[0], call


CALLS = list(_found())


def _reply(chance: random.Random, depth: int = 0) -> Any:
    """Return any value that a connection may give."""
    simple: list[Any] = [
        None, 0, 1, -1, 2**62, -(2**62), b"", b"\xff\xfe", b"nan", b"inf", b"-", b"1e999", b"9" * 5000, b"{}", b"[",
        b'{"v":', b"text", b"1-0", b"\xed\xa0\x80", True, 1.5, float("nan"), float("inf"), "text", b"X\xff",
    ]  # fmt: skip
    if depth > 3 or chance.random() < 0.35:
        return chance.choice(simple)
    many = [_reply(chance, depth + 1) for _ in range(chance.randrange(8))]
    if chance.random() < 0.15:
        return {
            item_key: value
            for item_key, value in zip(many[::2], many[1::2], strict=False)
            if _hashable(item_key)
        }
    return many


def _hashable(thing: Any) -> bool:
    return not isinstance(thing, list | dict)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is what its annotation says, all the way down."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in (Any, object) or isinstance(kind, TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if origin in (list, tuple, set, Sequence):
        return isinstance(value, origin) and all(_fits(item, args[0]) for item in value)
    if origin in (dict, Mapping, Counter):
        return isinstance(value, origin) and all(
            _fits(key, args[0]) and _fits(item, args[-1] if origin is not Counter else int)
            for key, item in value.items()
        )
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float)
    if not isinstance(value, kind):
        return False
    if isinstance(value, msgspec.Struct):
        return all(_fits(getattr(value, name), hint) for name, hint in get_type_hints(type(value)).items())
    return True


def test_calls_are_found_in_every_module_that_makes_some() -> None:
    modules = {name.partition(".")[0] for name, _, _ in CALLS}
    assert len(CALLS) > 80
    assert {"jobs", "cluster", "scaling", "events", "dead_letters", "limits", "commands"} <= modules


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CALLS}))
def test_call_returns_its_type_or_raises_one_error_for_any_reply(name: str) -> None:
    for _, kind, call in [candidate for candidate in CALLS if candidate[0] == name]:
        chance = random.Random(name)
        for raw in [None, [], [[]], b"\xff", *[_reply(chance) for _ in range(SEEDS)]]:
            value, error = _outcome(call, raw)
            if error is None:
                assert name in HOT or _fits(value, kind), (raw, value)
            else:
                assert error.code == "UNREADABLE"
                assert "\n" not in str(error)
                assert not isinstance(error.__cause__, NameError)


def _outcome(call: Call[Any], raw: Any) -> tuple[Any, UnreadableReply | None]:
    """Return what the call gives for a reply, or the error; any other error is the test's failure."""
    steps = exchange_one(call, reply_within=1, where="redis://there")
    next(steps)
    try:
        steps.send([raw])
    except StopIteration as end:
        return end.value, None
    except UnreadableReply as error:
        return None, error
    raise AssertionError("it sends again")


def test_unreadable_reply_among_several_is_the_same_error() -> None:
    _name, _, call = next(candidate for candidate in CALLS if candidate[0] == "queues.get_queue_depth")
    steps = exchange_all([call, call], reply_within=1, where="redis://there")
    next(steps)
    with pytest.raises(UnreadableReply, match="the reply to measure about celery5:"):
        steps.send([DEPTH, b"\xff"])
    assert issubclass(UnreadableReply, BrokerError)
