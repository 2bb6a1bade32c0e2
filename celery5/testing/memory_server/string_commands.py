"""Commands on keys of any type, and on strings with their bits."""

import time
from fnmatch import fnmatchcase
from typing import Any

from celery5.testing.memory_server.command_table import (
    SYNTAX_ERROR,
    CommandWords,
    command,
    parse_integer,
    scan_step,
)
from celery5.testing.memory_server.keyspace import Keyspace, now_ms
from celery5.testing.memory_server.replies import OK, CommandError


@command("TIME", 0)
def _get_time(keys: Keyspace, args: list[bytes]) -> Any:
    microseconds = time.time_ns() // 1000
    return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]


@command("DEL", 1)
@command("UNLINK", 1)
def _delete(keys: Keyspace, args: list[bytes]) -> Any:
    return sum(keys.delete(key) for key in args)


@command("EXISTS", 1)
def _exists(keys: Keyspace, args: list[bytes]) -> Any:
    return sum(keys.exists(key) for key in args)


@command("TYPE", 1)
def _type(keys: Keyspace, args: list[bytes]) -> Any:
    return type(OK)(keys.get_type(args[0]))


@command("PEXPIRE", 2)
def _expire_in(keys: Keyspace, args: list[bytes]) -> Any:
    return _set_end(keys, args[0], now_ms() + parse_integer(args[1]))


@command("EXPIRE", 2)
def _expire_in_seconds(keys: Keyspace, args: list[bytes]) -> Any:
    return _set_end(keys, args[0], now_ms() + 1000 * parse_integer(args[1]))


@command("PEXPIREAT", 2)
def _expire_at(keys: Keyspace, args: list[bytes]) -> Any:
    return _set_end(keys, args[0], parse_integer(args[1]))


def _set_end(keys: Keyspace, key: bytes, end: int) -> int:
    if not keys.exists(key):
        return 0
    keys.set_end(key, end)
    return 1


@command("PERSIST", 1)
def _persist(keys: Keyspace, args: list[bytes]) -> Any:
    had_end = keys.exists(args[0]) and keys.get_end(args[0]) is not None
    keys.set_end(args[0], None)
    return int(had_end)


@command("PTTL", 1)
def _get_ttl(keys: Keyspace, args: list[bytes]) -> Any:
    if not keys.exists(args[0]):
        return -2
    end = keys.get_end(args[0])
    return -1 if end is None else max(end - now_ms(), 0)


@command("TTL", 1)
def _get_ttl_seconds(keys: Keyspace, args: list[bytes]) -> Any:
    ms = _get_ttl(keys, args)
    return ms if ms < 0 else (ms + 500) // 1000


@command("KEYS", 1)
def _list_keys(keys: Keyspace, args: list[bytes]) -> Any:
    return [key for key in keys.list_keys() if _matches(key, args[0])]


@command("SCAN", 1)
def _scan(keys: Keyspace, args: list[bytes]) -> Any:
    cursor, options = parse_integer(args[0]), CommandWords(args[1:])
    pattern, count, kind = b"*", 10, b""
    while options:
        option = options.take_upper()
        if option == b"MATCH":
            pattern = options.take()
        elif option == b"COUNT":
            count = options.take_integer()
        elif option == b"TYPE":
            kind = options.take()
        else:
            raise CommandError(SYNTAX_ERROR)
    next_cursor, names = scan_step(sorted(keys.list_keys()), cursor, count)
    found = [
        name
        for name in names
        if _matches(name, pattern) and (not kind or keys.get_type(name) == kind.decode())
    ]
    return [b"%d" % next_cursor, found]


def _matches(key: bytes, pattern: bytes) -> bool:
    """Whether a key matches a glob pattern, in which a backslash takes a character as it is."""
    glob, escaped = "", False
    for character in pattern.decode("latin-1"):
        if escaped:
            glob, escaped = glob + (f"[{character}]" if character in "*?[" else character), False
        elif character == "\\":
            escaped = True
        else:
            glob += character
    return fnmatchcase(key.decode("latin-1"), glob)


@command("DBSIZE", 0)
def _count_keys(keys: Keyspace, args: list[bytes]) -> Any:
    return len(keys.list_keys())


@command("FLUSHDB", 0)
@command("FLUSHALL", 0)
def _flush(keys: Keyspace, args: list[bytes]) -> Any:
    keys.clear()
    return OK


@command("GET", 1)
def _get(keys: Keyspace, args: list[bytes]) -> Any:
    return keys.get(args[0], bytes)


@command("MGET", 1)
def _get_many(keys: Keyspace, args: list[bytes]) -> Any:
    return [keys.get(key, bytes) if keys.get_type(key) == "string" else None for key in args]


@command("SET", 2)
def _set(keys: Keyspace, args: list[bytes]) -> Any:
    key, value, options = args[0], args[1], CommandWords(args[2:])
    end, keep_ttl, returns_old, condition = None, False, False, b""
    while options:
        option = options.take_upper()
        if option in {b"PX", b"EX"}:
            duration = options.take_integer() * (1 if option == b"PX" else 1000)
            if duration <= 0:
                raise CommandError("ERR invalid expire time in 'set' command")
            end = now_ms() + duration
        elif option == b"PXAT":
            end = options.take_integer()
        elif option in {b"NX", b"XX"}:
            condition = option
        elif option == b"KEEPTTL":
            keep_ttl = True
        elif option == b"GET":
            returns_old = True
        else:
            raise CommandError(SYNTAX_ERROR)
    old = keys.get(key, bytes) if returns_old else None
    if condition and keys.exists(key) is (condition == b"NX"):
        return old
    keys.put(key, value, keep_ttl=keep_ttl)
    if end is not None:
        keys.set_end(key, end)
    return old if returns_old else OK


@command("STRLEN", 1)
def _measure(keys: Keyspace, args: list[bytes]) -> Any:
    return len(keys.get(args[0], bytes) or b"")


@command("GETBIT", 2)
def _get_bit(keys: Keyspace, args: list[bytes]) -> Any:
    return _read_bits(keys.get(args[0], bytes) or b"", _parse_offset(args[1]), 1)


@command("SETBIT", 3)
def _set_bit(keys: Keyspace, args: list[bytes]) -> Any:
    offset = _parse_offset(args[1])
    if args[2] not in {b"0", b"1"}:
        raise CommandError("ERR bit is not an integer or out of range")
    return _write_bits(keys, args[0], offset, 1, int(args[2]))


@command("BITPOS", 2)
def _find_bit(keys: Keyspace, args: list[bytes]) -> Any:
    value, bit = keys.get(args[0], bytes), args[1]
    if bit not in {b"0", b"1"}:
        raise CommandError("ERR The bit argument must be 1 or 0.")
    if not value:
        return -1 if bit == b"1" or value is not None else 0
    digits = bin(int.from_bytes(b"\x01" + value, "big"))[3:].encode()
    found = digits.find(bit)
    return len(digits) if found < 0 and bit == b"0" else found


@command("BITOP", 3)
def _combine_bits(keys: Keyspace, args: list[bytes]) -> Any:
    if args[0].upper() != b"OR":
        raise CommandError(SYNTAX_ERROR)
    values = [keys.get(key, bytes) or b"" for key in args[2:]]
    size = max(map(len, values))
    result = 0
    for value in values:
        result |= int.from_bytes(value.ljust(size, b"\0"), "big")
    if size:
        keys.put(args[1], result.to_bytes(size, "big"))
    else:
        keys.delete(args[1])
    return size


@command("BITFIELD", 1)
def _bitfield(keys: Keyspace, args: list[bytes]) -> Any:
    key, options, replies = args[0], CommandWords(args[1:]), list[Any]()
    while options:
        operation, kind, offset = options.take_upper(), options.take(), options.take()
        if kind[:1] != b"u" or operation not in {b"GET", b"SET"}:
            raise CommandError(SYNTAX_ERROR)
        width = parse_integer(kind[1:])
        at = _parse_offset(offset[1:]) * width if offset.startswith(b"#") else _parse_offset(offset)
        if operation == b"GET":
            replies.append(_read_bits(keys.get(key, bytes) or b"", at, width))
        else:
            replies.append(_write_bits(keys, key, at, width, options.take_integer()))
    return replies


def _parse_offset(word: bytes) -> int:
    try:
        offset = parse_integer(word)
    except CommandError:
        offset = -1
    if not 0 <= offset < 2**32:
        raise CommandError("ERR bit offset is not an integer or out of range")
    return offset


def _read_bits(value: bytes, offset: int, width: int) -> int:
    end = offset + width
    piece = value[offset // 8 : (end + 7) // 8].ljust((end + 7) // 8 - offset // 8, b"\0")
    return int.from_bytes(piece, "big") >> (-end % 8) & ((1 << width) - 1)


def _write_bits(keys: Keyspace, key: bytes, offset: int, width: int, number: int) -> int:
    """Set bits of a string and return what they were."""
    value = keys.get(key, bytes) or b""
    old = _read_bits(value, offset, width)
    end = offset + width
    first, last = offset // 8, (end + 7) // 8
    value = value.ljust(last, b"\0")
    mask = ((1 << width) - 1) << (-end % 8)
    piece = int.from_bytes(value[first:last], "big") & ~mask | (number << (-end % 8)) & mask
    keys.put(key, value[:first] + piece.to_bytes(last - first, "big") + value[last:], keep_ttl=True)
    return old
