"""Commands on sorted sets."""

import random
from typing import Any

from celery5.testing.memory_server.command_table import (
    NOT_FLOAT,
    SYNTAX_ERROR,
    CommandWords,
    command,
    parse_float,
    parse_integer,
    slice_range,
)
from celery5.testing.memory_server.keyspace import Keyspace
from celery5.testing.memory_server.replies import CommandError, Pairs
from celery5.testing.memory_server.sorted_set import SortedSet

Members = list[tuple[float, bytes]]
NO_MEMBERS = SortedSet()
BAD_BOUND = "ERR min or max is not a float"


def _get(keys: Keyspace, key: bytes) -> SortedSet:
    found = keys.get(key, SortedSet)
    return NO_MEMBERS if found is None else found


@command("ZADD", 3)
def _zadd(keys: Keyspace, args: list[bytes]) -> Any:
    options, flags = CommandWords(args[1:]), set[bytes]()
    while flag := options.skip(b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR"):
        flags.add(flag)
    words = options.rest()
    if not words or len(words) % 2:
        raise CommandError(SYNTAX_ERROR)
    pairs = [(parse_float(words[n], NOT_FLOAT), words[n + 1]) for n in range(0, len(words), 2)]
    members = keys.get_or_create(args[0], SortedSet)
    added = changed = 0
    score: float | None = None
    for number, member in pairs:
        old = members.scores.get(member)
        score = number + (old or 0.0) if b"INCR" in flags else number
        if _is_kept(flags, old, score):
            score = None
            continue
        added += old is None
        changed += old is None or old != score
        members.set(member, score)
    keys.delete_if_empty(args[0])
    if b"INCR" in flags:
        return score
    return changed if b"CH" in flags else added


def _is_kept(flags: set[bytes], old: float | None, score: float) -> bool:
    """Whether the flags forbid to set a score."""
    if old is None:
        return b"XX" in flags
    return b"NX" in flags or (b"GT" in flags and score <= old) or (b"LT" in flags and score >= old)


@command("ZINCRBY", 3)
def _zincrby(keys: Keyspace, args: list[bytes]) -> Any:
    return _zadd(keys, [args[0], b"INCR", *args[1:]])


@command("ZREM", 2)
def _zrem(keys: Keyspace, args: list[bytes]) -> Any:
    count = sum(_get(keys, args[0]).remove(member) for member in args[1:])
    keys.delete_if_empty(args[0])
    return count


@command("ZCARD", 1)
def _zcard(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get(keys, args[0]))


@command("ZSCORE", 2)
def _zscore(keys: Keyspace, args: list[bytes]) -> Any:
    return _get(keys, args[0]).scores.get(args[1])


@command("ZRANK", 2)
def _zrank(keys: Keyspace, args: list[bytes]) -> Any:
    members = _get(keys, args[0])
    return members.rank(args[1]) if args[1] in members.scores else None


@command("ZCOUNT", 3)
def _zcount(keys: Keyspace, args: list[bytes]) -> Any:
    first, end = _find_span(_get(keys, args[0]), args[1], args[2])
    return end - first


@command("ZRANGE", 3)
def _zrange(keys: Keyspace, args: list[bytes]) -> Any:
    members, options = _get(keys, args[0]), CommandWords(args[3:])
    by, reverse, with_scores, limit = b"", False, False, (0, -1)
    while options:
        option = options.take_upper()
        if option in {b"BYSCORE", b"BYLEX"}:
            by = option
        elif option == b"REV":
            reverse = True
        elif option == b"WITHSCORES":
            with_scores = True
        elif option == b"LIMIT":
            limit = options.take_integer(), options.take_integer()
        else:
            raise CommandError(SYNTAX_ERROR)
    low, high = (args[2], args[1]) if reverse and by else (args[1], args[2])
    if by:
        first, end = (_find_span if by == b"BYSCORE" else _find_lex_span)(members, low, high)
        found = members.order[first:end]
    else:
        found = members.order
    if reverse:
        found = found[::-1]
    if not by:
        first, end = slice_range(len(found), parse_integer(low), parse_integer(high))
        found = found[first:end]
    return _reply(_limit(found, limit), with_scores=with_scores)


@command("ZREVRANGE", 3)
def _zrevrange(keys: Keyspace, args: list[bytes]) -> Any:
    return _zrange(keys, [*args, b"REV"])


@command("ZRANGEBYSCORE", 3)
def _zrangebyscore(keys: Keyspace, args: list[bytes]) -> Any:
    return _zrange(keys, [*args, b"BYSCORE"])


@command("ZREVRANGEBYSCORE", 3)
def _zrevrangebyscore(keys: Keyspace, args: list[bytes]) -> Any:
    return _zrange(keys, [*args, b"BYSCORE", b"REV"])


@command("ZRANGEBYLEX", 3)
def _zrangebylex(keys: Keyspace, args: list[bytes]) -> Any:
    return _zrange(keys, [*args, b"BYLEX"])


@command("ZLEXCOUNT", 3)
def _zlexcount(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_zrangebylex(keys, args))


@command("ZREMRANGEBYSCORE", 3)
def _zremrangebyscore(keys: Keyspace, args: list[bytes]) -> Any:
    first, end = _find_span(_get(keys, args[0]), args[1], args[2])
    return _remove(keys, args[0], first, end)


@command("ZREMRANGEBYRANK", 3)
def _zremrangebyrank(keys: Keyspace, args: list[bytes]) -> Any:
    size = len(_get(keys, args[0]))
    return _remove(keys, args[0], *slice_range(size, parse_integer(args[1]), parse_integer(args[2])))


def _remove(keys: Keyspace, key: bytes, first: int, end: int) -> int:
    members = _get(keys, key)
    found = members.order[first:end]
    for _, member in found:
        members.remove(member)
    keys.delete_if_empty(key)
    return len(found)


@command("ZPOPMIN", 1)
def _zpopmin(keys: Keyspace, args: list[bytes]) -> Any:
    count = parse_integer(args[1]) if len(args) > 1 else 1
    members = _get(keys, args[0])
    found = members.order[:count]
    for _, member in found:
        members.remove(member)
    keys.delete_if_empty(args[0])
    return _reply(found, with_scores=True)


@command("ZRANDMEMBER", 1)
def _zrandmember(keys: Keyspace, args: list[bytes]) -> Any:
    names = list(_get(keys, args[0]).scores)
    if len(args) == 1:
        return random.choice(names) if names else None
    count = parse_integer(args[1])
    if count < 0:
        return random.choices(names, k=-count) if names else []
    return random.sample(names, min(count, len(names)))


def _reply(found: Members, *, with_scores: bool) -> Any:
    if with_scores:
        return Pairs((member, score) for score, member in found)
    return [member for _, member in found]


def _limit(found: Members, limit: tuple[int, int]) -> Members:
    skip, count = limit
    return found[skip:] if count < 0 else found[skip : skip + count]


def _find_span(members: SortedSet, low: bytes, high: bytes) -> tuple[int, int]:
    """Return the positions of the scores between two bounds, as ZRANGEBYSCORE writes them."""
    return members.span(
        parse_float(low.removeprefix(b"("), BAD_BOUND),
        parse_float(high.removeprefix(b"("), BAD_BOUND),
        after=low.startswith(b"("),
        before=high.startswith(b"("),
    )


def _find_lex_span(members: SortedSet, low: bytes, high: bytes) -> tuple[int, int]:
    """Return the positions of the members between two bounds, as ZRANGEBYLEX writes them. All have one score."""
    _check_lex(low)
    _check_lex(high)
    names = [member for _, member in members.order]
    first = sum(not _is_behind(name, low) for name in names)
    end = sum(_is_before(name, high) for name in names)
    return first, max(first, end)


def _is_behind(name: bytes, bound: bytes) -> bool:
    return bound == b"-" or (bound != b"+" and (name > bound[1:] if bound[:1] == b"(" else name >= bound[1:]))


def _is_before(name: bytes, bound: bytes) -> bool:
    return bound == b"+" or (bound != b"-" and (name < bound[1:] if bound[:1] == b"(" else name <= bound[1:]))


def _check_lex(bound: bytes) -> None:
    if bound not in {b"-", b"+"} and bound[:1] not in {b"(", b"["}:
        raise CommandError("ERR min or max not valid string range item")
