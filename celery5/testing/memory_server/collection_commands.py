"""Commands on hashes, sets and lists."""

from typing import Any

from celery5.testing.memory_server.command_table import (
    SYNTAX_ERROR,
    CommandWords,
    command,
    parse_integer,
    scan_step,
    slice_range,
)
from celery5.testing.memory_server.keyspace import Keyspace
from celery5.testing.memory_server.replies import OK, CommandError, flatten

Hash = dict[bytes, bytes]
HASH: type[Hash] = dict
SET: type[set[bytes]] = set
LIST: type[list[bytes]] = list
NO_HASH: Hash = {}


def _get_hash(keys: Keyspace, key: bytes) -> Hash:
    found: Hash | None = keys.get(key, HASH)
    return NO_HASH if found is None else found


def _get_set(keys: Keyspace, key: bytes) -> set[bytes]:
    return keys.get(key, SET) or set()


def _get_list(keys: Keyspace, key: bytes) -> list[bytes]:
    return keys.get(key, LIST) or []


@command("HSET", 3)
def _hset(keys: Keyspace, args: list[bytes]) -> Any:
    if len(args) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'hset' command")
    fields: Hash = keys.get_or_create(args[0], HASH)
    before = len(fields)
    fields.update(zip(args[1::2], args[2::2], strict=True))
    return len(fields) - before


@command("HSETNX", 3)
def _hsetnx(keys: Keyspace, args: list[bytes]) -> Any:
    if args[1] in _get_hash(keys, args[0]):
        return 0
    return _hset(keys, args)


@command("HGET", 2)
def _hget(keys: Keyspace, args: list[bytes]) -> Any:
    return _get_hash(keys, args[0]).get(args[1])


@command("HMGET", 2)
def _hmget(keys: Keyspace, args: list[bytes]) -> Any:
    fields = _get_hash(keys, args[0])
    return [fields.get(name) for name in args[1:]]


@command("HGETALL", 1)
def _hgetall(keys: Keyspace, args: list[bytes]) -> Any:
    return dict(_get_hash(keys, args[0]))


@command("HKEYS", 1)
def _hkeys(keys: Keyspace, args: list[bytes]) -> Any:
    return list(_get_hash(keys, args[0]))


@command("HVALS", 1)
def _hvals(keys: Keyspace, args: list[bytes]) -> Any:
    return list(_get_hash(keys, args[0]).values())


@command("HLEN", 1)
def _hlen(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get_hash(keys, args[0]))


@command("HEXISTS", 2)
def _hexists(keys: Keyspace, args: list[bytes]) -> Any:
    return int(args[1] in _get_hash(keys, args[0]))


@command("HSTRLEN", 2)
def _hstrlen(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get_hash(keys, args[0]).get(args[1], b""))


@command("HDEL", 2)
def _hdel(keys: Keyspace, args: list[bytes]) -> Any:
    fields = keys.get(args[0], HASH)
    if fields is None:
        return 0
    count = sum(fields.pop(name, None) is not None for name in args[1:])
    keys.delete_if_empty(args[0])
    return count


@command("HINCRBY", 3)
def _hincrby(keys: Keyspace, args: list[bytes]) -> Any:
    step = parse_integer(args[2])
    old = _get_hash(keys, args[0]).get(args[1], b"0")
    try:
        number = parse_integer(old) + step
    except CommandError:
        raise CommandError("ERR hash value is not an integer") from None
    keys.get_or_create(args[0], HASH)[args[1]] = b"%d" % number
    return number


@command("HSCAN", 2)
def _hscan(keys: Keyspace, args: list[bytes]) -> Any:
    options, count = CommandWords(args[2:]), 10
    while options:
        if options.take_upper() != b"COUNT":
            raise CommandError(SYNTAX_ERROR)
        count = options.take_integer()
    fields = sorted(_get_hash(keys, args[0]).items())
    if len(fields) <= 512:  # Redis keeps small hashes in one piece, which it returns at once
        count = 512
    next_cursor, pairs = scan_step(fields, parse_integer(args[1]), count)
    return [b"%d" % next_cursor, flatten(pairs)]


@command("SADD", 2)
def _sadd(keys: Keyspace, args: list[bytes]) -> Any:
    members: set[bytes] = keys.get_or_create(args[0], SET)
    before = len(members)
    members.update(args[1:])
    return len(members) - before


@command("SREM", 2)
def _srem(keys: Keyspace, args: list[bytes]) -> Any:
    members: set[bytes] | None = keys.get(args[0], SET)
    if members is None:
        return 0
    before = len(members)
    members.difference_update(args[1:])
    count = before - len(members)
    keys.delete_if_empty(args[0])
    return count


@command("SMEMBERS", 1)
def _smembers(keys: Keyspace, args: list[bytes]) -> Any:
    return set(_get_set(keys, args[0]))


@command("SISMEMBER", 2)
def _sismember(keys: Keyspace, args: list[bytes]) -> Any:
    return int(args[1] in _get_set(keys, args[0]))


@command("SCARD", 1)
def _scard(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get_set(keys, args[0]))


@command("RPUSH", 2)
def _rpush(keys: Keyspace, args: list[bytes]) -> Any:
    items: list[bytes] = keys.get_or_create(args[0], LIST)
    items.extend(args[1:])
    return len(items)


@command("LPUSH", 2)
def _lpush(keys: Keyspace, args: list[bytes]) -> Any:
    items: list[bytes] = keys.get_or_create(args[0], LIST)
    items[:0] = args[:0:-1]
    return len(items)


@command("LPOP", 1)
def _lpop(keys: Keyspace, args: list[bytes]) -> Any:
    return _pop(keys, args, 0)


@command("RPOP", 1)
def _rpop(keys: Keyspace, args: list[bytes]) -> Any:
    return _pop(keys, args, -1)


def _pop(keys: Keyspace, args: list[bytes], end: int) -> Any:
    items: list[bytes] | None = keys.get(args[0], LIST)
    if items is None:
        return None
    if len(args) == 1:
        popped: Any = items.pop(end)
    else:
        popped = [items.pop(end) for _ in range(min(parse_integer(args[1]), len(items)))]
    keys.delete_if_empty(args[0])
    return popped


@command("LLEN", 1)
def _llen(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get_list(keys, args[0]))


@command("LINDEX", 2)
def _lindex(keys: Keyspace, args: list[bytes]) -> Any:
    items, at = _get_list(keys, args[0]), parse_integer(args[1])
    return items[at] if -len(items) <= at < len(items) else None


@command("LRANGE", 3)
def _lrange(keys: Keyspace, args: list[bytes]) -> Any:
    items = _get_list(keys, args[0])
    first, end = slice_range(len(items), parse_integer(args[1]), parse_integer(args[2]))
    return items[first:end]


@command("LTRIM", 3)
def _ltrim(keys: Keyspace, args: list[bytes]) -> Any:
    items: list[bytes] | None = keys.get(args[0], LIST)
    if items is not None:
        first, end = slice_range(len(items), parse_integer(args[1]), parse_integer(args[2]))
        items[:] = items[first:end]
        keys.delete_if_empty(args[0])
    return OK


@command("LREM", 3)
def _lrem(keys: Keyspace, args: list[bytes]) -> Any:
    items: list[bytes] | None = keys.get(args[0], LIST)
    if items is None:
        return 0
    count = parse_integer(args[1])
    places = [at for at, item in enumerate(items) if item == args[2]]
    places = places[:count] if count > 0 else places[count:] if count < 0 else places
    for at in reversed(places):
        del items[at]
    keys.delete_if_empty(args[0])
    return len(places)
