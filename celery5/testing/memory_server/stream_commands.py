"""Commands on streams and their groups of consumers."""

from itertools import takewhile
from typing import Any

from celery5.testing.memory_server.command_table import SYNTAX_ERROR, CommandWords, command, parse_integer
from celery5.testing.memory_server.keyspace import Keyspace, now_ms
from celery5.testing.memory_server.replies import OK, CommandError, StreamEntries
from celery5.testing.memory_server.stream import EntryId, PendingEntry, StreamGroup, StreamLog

BAD_ID = "ERR Invalid stream ID specified as stream command argument"
TOO_SMALL_ID = "ERR The ID specified in XADD is equal or smaller than the target stream top item"
MAX_PART = 2**64 - 1
FIRST: EntryId = (0, 0)
LAST: EntryId = (MAX_PART, MAX_PART)


def parse_id(word: bytes, number: int = 0) -> EntryId:
    """Return an id, with this `number` where it has none. Raises CommandError."""
    ms, dash, rest = word.partition(b"-")
    if not ms.isdigit() or (dash and not rest.isdigit()):
        raise CommandError(BAD_ID)
    entry_id = int(ms), int(rest) if dash else number
    if max(entry_id) > MAX_PART:
        raise CommandError(BAD_ID)
    return entry_id


def format_id(entry_id: EntryId) -> bytes:
    """Return an id as Redis writes it."""
    return b"%d-%d" % entry_id


def _next(entry_id: EntryId) -> EntryId:
    ms, number = entry_id
    return (ms, number + 1) if number < MAX_PART else (ms + 1, 0)


def _previous(entry_id: EntryId) -> EntryId:
    ms, number = entry_id
    return (ms, number - 1) if number else (ms - 1, MAX_PART)


def _parse_first(word: bytes) -> EntryId:
    if word in {b"-", b"+"}:
        return FIRST if word == b"-" else LAST
    return _next(parse_id(word[1:])) if word.startswith(b"(") else parse_id(word)


def _parse_last(word: bytes) -> EntryId:
    if word in {b"-", b"+"}:
        return FIRST if word == b"-" else LAST
    if word.startswith(b"("):
        return _previous(parse_id(word[1:], MAX_PART))
    return parse_id(word, MAX_PART)


def _entry(stream: StreamLog, entry_id: EntryId) -> list[Any]:
    return [format_id(entry_id), stream.fields.get(entry_id)]


def _get(keys: Keyspace, key: bytes) -> StreamLog:
    found = keys.get(key, StreamLog)
    return StreamLog() if found is None else found


@command("XADD", 4)
def _xadd(keys: Keyspace, args: list[bytes]) -> Any:
    options, trim, creates = CommandWords(args[1:]), None, True
    while option := options.skip(b"MAXLEN", b"MINID", b"NOMKSTREAM"):
        if option == b"NOMKSTREAM":
            creates = False
        else:
            trim = _Trim(option, options)
    word, fields = options.take(), options.rest()
    if not fields or len(fields) % 2:
        raise CommandError("ERR wrong number of arguments for 'xadd' command")
    if not creates and keys.get(args[0], StreamLog) is None:
        return None
    entry_id = _make_id(word, _get(keys, args[0]))
    stream = keys.get_or_create(args[0], StreamLog)
    stream.add(entry_id, fields)
    if keys.added is not None:
        keys.added.add((args[0], entry_id))
    if trim:
        trim.apply(stream)
    return format_id(entry_id)


def _make_id(word: bytes, stream: StreamLog) -> EntryId:
    if word == b"*":
        return max((now_ms(), 0), _next(stream.last_id))
    if word.endswith(b"-*"):
        ms = parse_id(word[:-2])[0]
        if ms < stream.last_id[0]:
            raise CommandError(TOO_SMALL_ID)
        return (ms, stream.last_id[1] + 1) if ms == stream.last_id[0] else (ms, 0)
    entry_id = parse_id(word)
    if entry_id == FIRST:
        raise CommandError("ERR The ID specified in XADD must be greater than 0-0")
    if entry_id <= stream.last_id:
        raise CommandError(TOO_SMALL_ID)
    return entry_id


class _Trim:
    """How far a stream is to be trimmed."""

    def __init__(self, strategy: bytes, options: CommandWords) -> None:
        self._by_length = strategy == b"MAXLEN"
        self._by_nodes = options.skip(b"=", b"~") == b"~"
        word = options.take()
        self._most = parse_integer(word) if self._by_length else 0
        self._first = FIRST if self._by_length else parse_id(word)
        self._limit = 0
        if options.skip(b"LIMIT"):
            if not self._by_nodes:
                raise CommandError("ERR syntax error, LIMIT cannot be used without the special ~ option")
            self._limit = options.take_integer()

    def apply(self, stream: StreamLog) -> int:
        surplus = len(stream) - self._most if self._by_length else stream.count_before(self._first)
        if self._limit:
            surplus = min(surplus, self._limit)
        return stream.trim(max(surplus, 0), by_nodes=self._by_nodes)


@command("XTRIM", 3)
def _xtrim(keys: Keyspace, args: list[bytes]) -> Any:
    options = CommandWords(args[1:])
    strategy = options.take_upper()
    if strategy not in {b"MAXLEN", b"MINID"}:
        raise CommandError(SYNTAX_ERROR)
    return _Trim(strategy, options).apply(_get(keys, args[0]))


@command("XLEN", 1)
def _xlen(keys: Keyspace, args: list[bytes]) -> Any:
    return len(_get(keys, args[0]))


@command("XDEL", 2)
def _xdel(keys: Keyspace, args: list[bytes]) -> Any:
    stream = keys.get(args[0], StreamLog)
    if stream is None:
        return 0
    ids = [parse_id(word) for word in args[1:]]
    return sum(stream.delete(entry_id) for entry_id in ids)


@command("XRANGE", 3)
def _xrange(keys: Keyspace, args: list[bytes]) -> Any:
    return _range(keys, args[0], args[1], args[2], args[3:], step=1)


@command("XREVRANGE", 3)
def _xrevrange(keys: Keyspace, args: list[bytes]) -> Any:
    return _range(keys, args[0], args[2], args[1], args[3:], step=-1)


def _range(keys: Keyspace, key: bytes, low: bytes, high: bytes, rest: list[bytes], *, step: int) -> Any:
    stream, options, count = _get(keys, key), CommandWords(rest), None
    first, last = _parse_first(low), _parse_last(high)
    while options:
        if options.take_upper() != b"COUNT":
            raise CommandError(SYNTAX_ERROR)
        count = max(options.take_integer(), 0)
    return [_entry(stream, entry_id) for entry_id in stream.list_ids(first, last)[::step][:count]]


def _require(keys: Keyspace, key: bytes) -> StreamLog:
    stream = keys.get(key, StreamLog)
    if stream is None:
        raise CommandError("ERR no such key")
    return stream


def _find_group(
    keys: Keyspace, key: bytes, name: bytes, *, command_name: str = ""
) -> tuple[StreamLog, StreamGroup]:
    stream = keys.get(key, StreamLog)
    group = stream.groups.get(name) if stream is not None else None
    if stream is None or group is None:
        texts = key.decode(errors="replace"), name.decode(errors="replace")
        if command_name == "XGROUP":
            raise CommandError("NOGROUP No such consumer group '{1}' for key name '{0}'".format(*texts))
        ending = " in XREADGROUP with GROUP option" if command_name == "XREADGROUP" else ""
        raise CommandError("NOGROUP No such key '{}' or consumer group '{}'{}".format(*texts, ending))
    return stream, group


@command("XGROUP", 2)
def _xgroup(keys: Keyspace, args: list[bytes]) -> Any:
    subcommand, key, name = args[0].upper(), args[1], args[2]
    if subcommand == b"CREATE":
        return _create_group(keys, key, name, args)
    if keys.get(key, StreamLog) is None:
        raise CommandError(
            "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the "
            "MKSTREAM option to create an empty stream automatically."
        )
    if subcommand == b"DESTROY":
        return int(_require(keys, key).groups.pop(name, None) is not None)
    stream, group = _find_group(keys, key, name, command_name="XGROUP")
    if subcommand == b"SETID":
        group.last_id = stream.last_id if args[3] == b"$" else parse_id(args[3])
        return OK
    if subcommand == b"CREATECONSUMER":
        is_new = args[3] not in group.consumers
        group.see(args[3], now_ms())
        return int(is_new)
    if subcommand == b"DELCONSUMER":
        group.consumers.pop(args[3], None)
        held = [entry_id for entry_id, entry in group.pending.items() if entry.consumer == args[3]]
        for entry_id in held:
            del group.pending[entry_id]
        return len(held)
    raise CommandError(SYNTAX_ERROR)


def _create_group(keys: Keyspace, key: bytes, name: bytes, args: list[bytes]) -> Any:
    creates = b"MKSTREAM" in [word.upper() for word in args[4:]]
    last_id = _get(keys, key).last_id if args[3] == b"$" else parse_id(args[3])
    if not creates and keys.get(key, StreamLog) is None:
        return _xgroup(keys, [b"DESTROY", key, name])  # its error
    stream = keys.get_or_create(key, StreamLog)
    if name in stream.groups:
        raise CommandError("BUSYGROUP Consumer Group name already exists")
    stream.groups[name] = StreamGroup(last_id, 0 if last_id == FIRST else None)
    return OK


class StreamRead:
    """An XREAD or XREADGROUP.

    Attributes:
        block: For how many ms it waits for an entry, 0 for ever; None: it does not wait.
    """

    def __init__(self, keys: Keyspace, args: list[bytes], *, by_group: bool) -> None:
        options = CommandWords(args)
        self.block: int | None = None
        self._group = self._consumer = b""
        self._count: int | None = None
        self._no_ack = False
        if by_group:
            if options.take_upper() != b"GROUP":
                raise CommandError(SYNTAX_ERROR)
            self._group, self._consumer = options.take(), options.take()
        while (option := options.take_upper()) != b"STREAMS":
            if option == b"COUNT":
                self._count = options.take_integer() or None
            elif option == b"BLOCK":
                self.block = options.take_integer()
            elif option == b"NOACK" and by_group:
                self._no_ack = True
            else:
                raise CommandError(SYNTAX_ERROR)
        words = options.rest()
        half = len(words) // 2
        if len(words) % 2 or not words:
            raise CommandError(
                f"ERR Unbalanced '{'xreadgroup' if by_group else 'xread'}' list of streams: "
                "for each stream key an ID or '$' must be specified."
            )
        self._from = [
            (key, self._parse_position(keys, key, word))
            for key, word in zip(words[:half], words[half:], strict=True)
        ]

    def _parse_position(self, keys: Keyspace, key: bytes, word: bytes) -> EntryId | None:
        if self._group:
            return None if word == b">" else parse_id(word)
        return _get(keys, key).last_id if word == b"$" else parse_id(word)

    def read(self, keys: Keyspace) -> StreamEntries | None:
        """Return the entries by streams; None if there are none."""
        found = StreamEntries()
        if self._group:  # all are looked up before anything is given
            for key, _ in self._from:
                _find_group(keys, key, self._group, command_name="XREADGROUP")
        for key, position in self._from:
            entries = (
                self._read_for_group(keys, key, position) if self._group else self._read(keys, key, position)
            )
            if entries or (self._group and position is not None):
                found[key] = entries
        return found or None

    def _read(self, keys: Keyspace, key: bytes, position: EntryId | None) -> list[Any]:
        stream = _get(keys, key)
        ids = stream.list_ids(_next(position or FIRST), LAST)
        return [_entry(stream, entry_id) for entry_id in ids[: self._count]]

    def _read_for_group(self, keys: Keyspace, key: bytes, position: EntryId | None) -> list[Any]:
        stream, group = _find_group(keys, key, self._group, command_name="XREADGROUP")
        now = now_ms()
        consumer = group.see(self._consumer, now)
        if position is not None:
            held = group.list_pending(_next(position), LAST, self._consumer)[: self._count]
            for _, entry in held:
                entry.delivered, entry.count = now, entry.count + 1
            return [_entry(stream, entry_id) for entry_id, _ in held]
        ids = stream.list_ids(_next(group.last_id), LAST)[: self._count]
        if keys.is_held:  # a script that has added an entry for this consumer relies on reading it
            added = keys.added or ()
            ids = list(takewhile(lambda entry_id: (key, entry_id) in added, ids))
        for entry_id in ids:
            group.last_id = entry_id
            if group.entries_read is not None:
                group.entries_read += 1
            if not self._no_ack:
                group.pending[entry_id] = PendingEntry(self._consumer, now, 1)
        if ids:
            consumer.active = now
        return [_entry(stream, entry_id) for entry_id in ids]


@command("XREADGROUP", 6)
def _xreadgroup(keys: Keyspace, args: list[bytes]) -> Any:
    return StreamRead(keys, args, by_group=True).read(keys)


@command("XREAD", 3)
def _xread(keys: Keyspace, args: list[bytes]) -> Any:
    return StreamRead(keys, args, by_group=False).read(keys)


@command("XACK", 3)
def _xack(keys: Keyspace, args: list[bytes]) -> Any:
    stream = keys.get(args[0], StreamLog)
    group = stream.groups.get(args[1]) if stream is not None else None
    if group is None:
        return 0
    ids = [parse_id(word) for word in args[2:]]
    return sum(group.pending.pop(entry_id, None) is not None for entry_id in ids)


@command("XPENDING", 2)
def _xpending(keys: Keyspace, args: list[bytes]) -> Any:
    _, group = _find_group(keys, args[0], args[1])
    if len(args) == 2:
        return _summarize(group)
    options, idle = CommandWords(args[2:]), 0
    if options.skip(b"IDLE"):
        idle = options.take_integer()
    first, last, count = _parse_first(options.take()), _parse_last(options.take()), options.take_integer()
    consumer = options.take() if options else None
    now = now_ms()
    return [
        [format_id(entry_id), entry.consumer, now - entry.delivered, entry.count]
        for entry_id, entry in group.list_pending(first, last, consumer)
        if now - entry.delivered >= idle
    ][: max(count, 0)]


def _summarize(group: StreamGroup) -> Any:
    if not group.pending:
        return [0, None, None, None]
    counts: dict[bytes, int] = {}
    for entry in group.pending.values():
        counts[entry.consumer] = counts.get(entry.consumer, 0) + 1
    ends = format_id(min(group.pending)), format_id(max(group.pending))
    return [len(group.pending), *ends, [[name, b"%d" % count] for name, count in sorted(counts.items())]]


@command("XAUTOCLAIM", 5)
def _xautoclaim(keys: Keyspace, args: list[bytes]) -> Any:
    stream, group = _find_group(keys, args[0], args[1])
    consumer, idle_from, now = args[2], parse_integer(args[3]), now_ms()
    first, options, count, only_ids = _parse_first(args[4]), CommandWords(args[5:]), 100, False
    while options:
        option = options.take_upper()
        if option == b"COUNT":
            count = options.take_integer()
        elif option == b"JUSTID":
            only_ids = True
        else:
            raise CommandError(SYNTAX_ERROR)
    group.see(consumer, now)
    claimed, gone, following = list[Any](), list[bytes](), FIRST
    for entry_id, entry in group.list_pending(first, LAST):
        if count == len(claimed):
            following = entry_id
            break
        if now - entry.delivered < idle_from:
            continue
        if entry_id not in stream.fields:
            del group.pending[entry_id]
            gone.append(format_id(entry_id))
            continue
        entry.consumer, entry.delivered = consumer, now
        entry.count += not only_ids
        claimed.append(format_id(entry_id) if only_ids else _entry(stream, entry_id))
    return [format_id(following), claimed, gone]


@command("XINFO", 2)
def _xinfo(keys: Keyspace, args: list[bytes]) -> Any:
    subcommand, stream = args[0].upper(), _require(keys, args[1])
    if subcommand == b"STREAM":
        return _describe(stream)
    if subcommand == b"GROUPS":
        return [_describe_group(stream, name, group) for name, group in sorted(stream.groups.items())]
    if subcommand != b"CONSUMERS":
        raise CommandError(SYNTAX_ERROR)
    _, group = _find_group(keys, args[1], args[2], command_name="XGROUP")
    now = now_ms()
    return [
        {
            b"name": name,
            b"pending": sum(entry.consumer == name for entry in group.pending.values()),
            b"idle": now - consumer.seen,
            b"inactive": now - consumer.active if consumer.active >= 0 else -1,
        }
        for name, consumer in sorted(group.consumers.items())
    ]


def _describe(stream: StreamLog) -> Any:
    first = stream.ids[0] if stream.ids else FIRST
    return {
        b"length": len(stream),
        b"radix-tree-keys": 1,
        b"radix-tree-nodes": 2,
        b"last-generated-id": format_id(stream.last_id),
        b"max-deleted-entry-id": format_id(stream.max_deleted),
        b"entries-added": stream.entries_added,
        b"recorded-first-entry-id": format_id(first),
        b"groups": len(stream.groups),
        b"first-entry": _entry(stream, first) if stream.ids else None,
        b"last-entry": _entry(stream, stream.ids[-1]) if stream.ids else None,
    }


def _describe_group(stream: StreamLog, name: bytes, group: StreamGroup) -> Any:
    return {
        b"name": name,
        b"consumers": len(group.consumers),
        b"pending": len(group.pending),
        b"last-delivered-id": format_id(group.last_id),
        b"entries-read": group.entries_read,
        b"lag": len(stream.list_ids(_next(group.last_id), LAST)),
    }
