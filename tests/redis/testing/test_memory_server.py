"""The server in memory answers as a real one does: the same words go to both, and the replies are compared."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.connection.exchange import PushNotification, ReplyError, pack_commands
from celery5.broker.connection.socket_link import SocketLink, dial
from celery5.broker.endpoint import Endpoint
from celery5.broker.lua_commands import find_lua_commands, strip_lua_comments
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.testing.memory_server.command_table import COMMANDS
from celery5.testing.memory_server.server import MemoryServer

Words = Sequence[str | bytes | int | float]
LUA = Path(__file__).parents[3] / "celery5" / "broker" / "lua"
KEYS = ["a", "b", "c"]
MEMBERS = ["x", "y", "z", "10", "-3", "1.5", "\xff", ""]
NUMBERS = ["0", "1", "2", "-1", "5", "1e3", "-inf", "+inf", "(1", "nan", "x", "3.25", "1795802543956"]
LEX = ["-", "+", "[x", "(x", "[y", "(z", "bad"]
IDS = ["-", "+", "0", "1", "2-1", "3-0", "(2-1", "4", "5-7", "bad", "9-0"]


@pytest.fixture
def both(own_server: EmbeddedServer) -> Iterator["Both"]:
    """A real server and one in memory."""
    with MemoryServer() as memory:
        yield Both(own_server.url, memory.url)


class Both:
    """Connections to both servers, which get the same words."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls
        self.links = self.connect(2)

    def connect(self, resp: Any) -> list[SocketLink]:
        """Return new connections that speak this version of the protocol."""
        return [dial(Endpoint.from_url(url), Timing(), resp=resp, name="test") for url in self._urls]

    def ask(self, *words: Any, links: list[SocketLink] | None = None, count: int = 1) -> list[Any]:
        """Send words, and return the replies of both."""
        for link in links or self.links:
            link.send(pack_commands([words]))
        return [[link.receive() for _ in range(count)] for link in links or self.links]

    def check(self, *words: Any, links: list[SocketLink] | None = None, exactly: bool = True) -> Any:
        """Assert that both reply the same to these words, and return it."""
        real, ours = (replies[0] for replies in self.ask(*words, links=links))
        if isinstance(real, ReplyError):
            assert isinstance(ours, ReplyError), (words, str(real), ours)
            # Of errors the code counts, which our code reads. Where type and words are wrong, either will do.
            codes = {str(ours).split()[0], str(real).split()[0]}
            assert len(codes) == 1 or codes == {"ERR", "WRONGTYPE"}, (words, str(real), str(ours))
        elif exactly:
            assert ours == real, (words, real, ours)
        return ours


class RandomWords:
    """Makes random commands: most fit the type of the value at their key, some do not."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)

    def key(self) -> str:
        return self.choose.choice(KEYS)

    def kept(self, kind: str) -> str:
        return f"{kind}{self.choose.randint(1, 2)}" if self.choose.random() < 0.95 else self.key()

    def some(self, pool: list[str], least: int = 1, most: int = 3) -> list[str]:
        return [self.choose.choice(pool) for _ in range(self.choose.randint(least, most))]

    def number(self) -> str:
        return self.choose.choice(NUMBERS)

    def index(self) -> int:
        return self.choose.randint(-4, 5)

    def member(self) -> str:
        return self.choose.choice(MEMBERS)

    def flags(self, *names: str) -> list[str]:
        return [name for name in names if self.choose.random() < 0.25]

    def count(self) -> list[str]:
        return ["COUNT", "2"] if self.choose.random() < 0.3 else []

    def limit(self) -> list[Any]:
        limit = ["LIMIT", self.choose.randint(0, 2), self.choose.randint(-1, 3)]
        return limit if self.choose.random() < 0.3 else []

    def pairs(self, first: list[str], second: list[str]) -> list[str]:
        count = self.choose.randint(1, 3)
        return [self.choose.choice(pool) for _ in range(count) for pool in (first, second)]

    def entry(self) -> str:
        return self.choose.choice(IDS)

    def trim(self) -> list[Any]:
        ways: list[Any] = [
            ["MAXLEN", self.choose.randint(0, 3)],
            ["MINID", self.choose.choice(["1", "2-1", "3"])],
        ]
        return self.choose.choice(ways) if self.choose.random() < 0.3 else []

    def list_commands(self) -> list[Callable[[], Words]]:
        """Return what makes a command of each kind."""
        return [*self._strings(), *self._collections(), *self._sorted_sets(), *self._streams()]

    def _strings(self) -> list[Callable[[], Words]]:
        choose, key, kept, member, flags = self.choose, self.key, self.kept, self.member, self.flags
        return [
            lambda: ("SET", kept("s"), member(), *flags("NX", "XX", "GET", "KEEPTTL")[:1]),
            lambda: ("GET", kept("s")),
            lambda: ("MGET", kept("s"), key(), kept("h")),
            lambda: ("STRLEN", kept("s")),
            lambda: ("SETBIT", kept("s"), choose.randint(-1, 40), choose.randint(0, 2)),
            lambda: ("GETBIT", kept("s"), choose.randint(0, 40)),
            lambda: ("BITPOS", kept("s"), choose.randint(0, 1)),
            lambda: ("BITOP", "OR", kept("s"), kept("s"), kept("s")),
            lambda: ("BITFIELD", kept("s"), "SET", "u1", f"#{choose.randint(0, 20)}", choose.randint(0, 1),
                     "GET", choose.choice(["u8", "u3"]), choose.randint(0, 20)),
            lambda: ("DEL", key(), kept("l"), kept("x")) if choose.random() < 0.1 else ("EXISTS", key(), kept("h")),
            lambda: ("TYPE", choose.choice([key(), kept("z"), kept("x")])),
            lambda: ("PERSIST", kept("s")),
            lambda: ("PTTL", kept("h")),
        ]  # fmt: skip

    def _collections(self) -> list[Callable[[], Words]]:
        choose, kept, some, number, index, member, pairs = (
            self.choose,
            self.kept,
            self.some,
            self.number,
            self.index,
            self.member,
            self.pairs,
        )
        return [
            lambda: ("HSET", kept("h"), *pairs(MEMBERS, MEMBERS)),
            lambda: ("HSETNX", kept("h"), member(), member()),
            lambda: (choose.choice(["HGET", "HEXISTS", "HSTRLEN"]), kept("h"), member()),
            lambda: ("HMGET", kept("h"), *some(MEMBERS)),
            lambda: (choose.choice(["HLEN", "SCARD", "LLEN", "ZCARD", "XLEN"]), kept(choose.choice("hslzx"))),
            lambda: ("HDEL", kept("h"), *some(MEMBERS)),
            lambda: ("HINCRBY", kept("h"), member(), number()),
            lambda: (choose.choice(["SADD", "SREM"]), kept("t"), *some(MEMBERS)),
            lambda: ("RPUSH", kept("l"), *some(MEMBERS)),
            lambda: ("LPUSH", kept("l"), *some(MEMBERS)),
            lambda: (choose.choice(["LPOP", "RPOP"]), kept("l"), *some(["1", "2"], 0, 1)),
            lambda: ("LINDEX", kept("l"), index()),
            lambda: (choose.choice(["LRANGE", "LTRIM"]), kept("l"), index(), index()),
            lambda: ("LREM", kept("l"), choose.randint(-2, 2), member()),
        ]  # fmt: skip

    def _sorted_sets(self) -> list[Callable[[], Words]]:
        choose, kept, some, number, index, member, flags, limit, pairs = (
            self.choose,
            self.kept,
            self.some,
            self.number,
            self.index,
            self.member,
            self.flags,
            self.limit,
            self.pairs,
        )
        return [
            lambda: ("ZADD", kept("z"), *flags("CH", "GT"), *pairs(NUMBERS, MEMBERS)),
            lambda: ("ZADD", kept("z"), *flags("NX"), *pairs(NUMBERS[:6], MEMBERS)),
            lambda: ("ZREM", kept("z"), *some(MEMBERS)),
            lambda: (choose.choice(["ZSCORE", "ZRANK"]), kept("z"), member()),
            lambda: ("ZCOUNT", kept("z"), number(), number()),
            lambda: (choose.choice(["ZRANGE", "ZREVRANGE"]), kept("z"), index(), index(), *flags("WITHSCORES")),
            lambda: ("ZRANGE", kept("z"), number(), number(), "BYSCORE", *flags("REV", "WITHSCORES"), *limit()),
            lambda: ("ZRANGEBYSCORE", kept("z"), number(), number(), *flags("WITHSCORES"), *limit()),
            lambda: ("ZREVRANGEBYSCORE", kept("z"), number(), number(), *limit()),
            lambda: ("ZADD", "lex", 0, member(), 0, member()),
            lambda: ("ZRANGEBYLEX", "lex", choose.choice(LEX), choose.choice(LEX), *limit()),
            lambda: ("ZLEXCOUNT", "lex", choose.choice(LEX), choose.choice(LEX)),
            lambda: ("ZREMRANGEBYSCORE", kept("z"), number(), number()),
            lambda: ("ZREMRANGEBYRANK", kept("z"), index(), index()),
            lambda: ("ZPOPMIN", kept("z"), *([2] if choose.random() < 0.3 else [])),
        ]  # fmt: skip

    def _streams(self) -> list[Callable[[], Words]]:
        choose, kept, member, flags, count, entry, trim = (
            self.choose,
            self.kept,
            self.member,
            self.flags,
            self.count,
            self.entry,
            self.trim,
        )
        return [
            lambda: ("XADD", kept("x"), *flags("NOMKSTREAM"), *trim(),
                     f"{choose.randint(1, 9)}-{choose.choice('*0123')}",
                     member(), member()),
            lambda: ("XADD", kept("x"), f"{choose.randint(10, 10**9)}-{choose.choice('*0')}", "f", "v"),
            lambda: ("XDEL", kept("x"), entry()),
            lambda: ("XTRIM", kept("x"), *(trim() or ["MAXLEN", "3"])),
            lambda: (choose.choice(["XRANGE", "XREVRANGE"]), kept("x"), entry(), entry(), *count()),
            lambda: ("XGROUP", "CREATE", kept("x"), choose.choice("gh"), choose.choice("0$3"), *flags("MKSTREAM")),
            lambda: ("XGROUP", "DESTROY", kept("x"), "h"),
            lambda: ("XGROUP", choose.choice(["CREATECONSUMER", "DELCONSUMER"]), kept("x"), "h", "me"),
            lambda: ("XREADGROUP", "GROUP", choose.choice("gh"), choose.choice(["me", "you"]),
                     *count(), "STREAMS", "x1", "x2", choose.choice(["0", ">", ">"]), ">"),
            lambda: ("XREAD", "COUNT", choose.randint(1, 3), "STREAMS", "x1", "x2", "0", choose.choice(["2", "3-0"])),
            lambda: ("XACK", kept("x"), choose.choice("gh"), entry(), entry()),
            lambda: ("XPENDING", kept("x"), choose.choice("gh")),
            lambda: ("XINFO", "CONSUMERS", kept("x"), choose.choice("gh"), "no words")[:4],
        ]  # fmt: skip


_TIMED = {"XINFO", "PTTL"}
"""Commands whose replies tell how much time has passed."""


@pytest.mark.parametrize("seed", range(4))
def test_random_commands_have_the_replies_of_a_real_server(both: Both, seed: int) -> None:
    random_words = RandomWords(seed)
    makers = random_words.list_commands()
    for _ in range(1500):
        words = random_words.choose.choice(makers)()
        reply = both.check(*words, exactly=words[0] not in _TIMED)
        if words[0] == "XREADGROUP" and not isinstance(reply, ReplyError):
            _check_pending(both)
    for name in ("h1", "h2"):
        both.check("HGETALL", name)
    for name in ("t1", "t2"):
        real, ours = both.ask("SMEMBERS", name)
        assert sorted(ours[0]) == sorted(real[0])
    assert sorted(both.ask("KEYS", "*")[0][0]) == sorted(both.ask("KEYS", "*")[1][0])


def _check_pending(both: Both) -> None:
    """Compare what consumers hold, apart from how long they have."""
    for key in ("x1", "x2"):
        real, ours = (replies[0] for replies in both.ask("XPENDING", key, "g", "-", "+", 100))
        if not isinstance(real, ReplyError):
            assert [(*held[:2], held[3]) for held in ours] == [(*held[:2], held[3]) for held in real]


SCRIPTS = [
    "return {1, 2.9, 'x', true, false, nil, 4}",
    "return {ok = 'fine'}",
    "return redis.error_reply('MY own')",
    "return redis.call('SET', KEYS[1], 1)",
    "return redis.call('GET', 'nothing')",
    "return type(redis.call('GET', 'nothing'))",
    "return {redis.call('ZADD', 'z', 1, 'a', 2.5, 'b'), redis.call('ZRANGE', 'z', 0, -1, 'WITHSCORES')}",
    "return redis.call('ZSCORE', 'z', 'b')",
    "redis.call('HSET', 'h', 'f', 1.5, 'g', 10) return redis.call('HGETALL', 'h')",
    "redis.call('XADD', 's', '1-1', 'a', 'b') redis.pcall('XGROUP', 'CREATE', 's', 'g', '0') "
    "return redis.call('XREADGROUP', 'GROUP', 'g', 'me', 'STREAMS', 's', '>')[1][2][1][2][1]",
    "return redis.call('XREAD', 'STREAMS', 's', '0')",
    "return redis.call('LLEN', 'h')",
    "return redis.pcall('LLEN', 'h').err",
    "return tostring((pcall(redis.call, 'LLEN', 'h')))",
    "return redis.call('NOSUCH', 'h')",
    "return redis.call('SET', 'k', {})",
    "x = 1",
    "return unknown",
    "error('mine')",
    "return 1 +",
    "return tostring(0.1 + 0.2) .. ' ' .. tostring(1e15) .. ' ' .. 2^53",
    "redis.call('SET', 'n', 1e15) redis.call('SET', 'm', 0.1) redis.call('SET', 'o', 2^53) "
    "return redis.call('MGET', 'n', 'm', 'o')",
    "return cjson.encode({1, 2.5, 'a/b', true, {x = 'q\"\\\\'}})",
    "return cjson.encode({}) .. cjson.encode({[1] = 1, [3] = 3}) .. cjson.encode('\\1\\127\\n')",
    "return cjson.encode({n = cjson.null})",
    "return cjson.encode(1795802543956) .. ' ' .. cjson.encode(0.1) .. ' ' .. cjson.encode(12345678901234567)",
    'local t = cjson.decode(\'{"a": [1, null, "\\u00e9\\/"], "b": {}, "c": 1.5e3}\') '
    "return {t.a[1], tostring(t.a[2] == cjson.null), t.a[3], type(t.b), t.c}",
    "return tostring((pcall(cjson.decode, '{')))",
    "return cmsgpack.pack({1, -1, 127, 128, 255, 256, 65535, 65536, 2^31, 2^32, 2^53, -32, -33, -128, -129, -2^40})",
    "return cmsgpack.pack({0.5, 0.1, 1e300, 'x', string.rep('y', 40), string.rep('z', 300), true, false})",
    "return cmsgpack.pack({}) .. cmsgpack.pack({a = 1}) .. cmsgpack.pack('a', 2)",
    "local long = {} for n = 1, 20 do long[n] = n end return cmsgpack.pack(long)",
    "local a, b = cmsgpack.unpack(cmsgpack.pack('a', {1, {x = -5.5}, false})) "
    "return {a, b[1], tostring(b[2].x), tostring(b[3])}",
    "return tostring((pcall(cmsgpack.unpack, '\\220')))",
    "return redis.call('TIME')[3]",
    "return {KEYS[1], ARGV[1], #KEYS, #ARGV}",
    "return redis.sha1hex(ARGV[1]) .. redis.sha1hex(5) .. redis.sha1hex(0.5)",
]


def test_scripts_get_and_return_what_they_do_on_a_real_server(both: Both) -> None:
    for text in SCRIPTS:
        both.check("EVAL", text, 1, "key", "argument")


def test_it_knows_all_commands_of_the_scripts() -> None:
    known = {name.decode().lower() for name in COMMANDS} | {"publish"}
    used = {
        name.partition("|")[0]
        for file in LUA.rglob("*.lua")
        if file.stem != "probe_permissions"  # it tries each command with words that fit none
        for name in find_lua_commands(strip_lua_comments(file.read_text()))
    }
    assert used - known == set()


def test_it_knows_all_functions_of_the_scripts(both: Both) -> None:
    text = "".join(strip_lua_comments(file.read_text()) for file in LUA.rglob("*.lua"))
    used = sorted(set(re.findall(r"\b((?:redis|cjson|cmsgpack|bit|struct)\.\w+)", text)))
    assert "redis.sha1hex" in used
    for name in used:
        assert both.check("EVAL", f"return {name} ~= nil", 0) == 1, name


def test_scripts_are_known_by_their_hashes(both: Both) -> None:
    name = both.check("SCRIPT", "LOAD", "return ARGV[1]")
    assert both.check("EVALSHA", name, 0, "x") == b"x"
    both.check("EVALSHA", "f" * 40, 0)
    both.check("SCRIPT", "FLUSH")
    both.check("EVALSHA", name, 0, "x")


def test_values_have_the_forms_of_resp_3(both: Both) -> None:
    links = both.connect(3)
    for words in (
        ("HSET", "h", "f", "v"), ("HGETALL", "h"), ("SADD", "t", "m"), ("SMEMBERS", "t"), ("ZADD", "z", 1.5, "m"),
        ("ZRANGE", "z", 0, -1, "WITHSCORES"), ("ZSCORE", "z", "m"), ("GET", "nothing"), ("XADD", "s", "1-0", "f", "v"),
        ("XREAD", "STREAMS", "s", "0"), ("XREAD", "STREAMS", "s", "9"),
        ("EVAL", "return redis.call('HGETALL', 'h')", 0),
    ):  # fmt: skip
        both.check(*words, links=links)


def test_a_read_that_waits_gets_what_comes_and_ends_in_time(both: Both) -> None:
    both.check("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
    waiting = both.connect(2)
    words = ("XREADGROUP", "GROUP", "g", "me", "BLOCK", 20_000, "STREAMS", "s", ">")
    for link in waiting:
        link.send(pack_commands([words]))
    assert not any(link.wait(0.02) for link in waiting)
    both.check("XADD", "s", "1-0", "f", "v")
    real, ours = (link.receive() for link in waiting)
    assert ours == real
    assert both.check("XREADGROUP", "GROUP", "g", "me", "BLOCK", 10, "STREAMS", "s", ">") is None
    ids = [replies[0] for replies in both.ask("CLIENT", "ID", links=waiting)]
    for link in waiting:
        link.send(pack_commands([words]))
    assert not any(link.wait(0.02) for link in waiting)
    for link, number in zip(both.links, ids, strict=True):
        link.send(pack_commands([("CLIENT", "UNBLOCK", number)]))
        assert link.receive() == 1
    assert [link.receive() for link in waiting] == [None, None]


def test_what_is_published_is_pushed_to_subscribers(both: Both) -> None:
    listening = both.connect(3)
    for link in listening:
        link.send(pack_commands([("SUBSCRIBE", "c", "d"), ("PING",)]))
    assert listening[0].receive() == listening[1].receive()
    assert both.check("PUBLISH", "c", "hello") == 1
    assert both.check("EVAL", "return redis.call('PUBLISH', 'd', 'hello')", 0) == 1
    frames: list[list[Any]] = []
    for link in listening:
        received: list[Any] = []
        while len(received) < 2:
            assert link.wait(5)
            received += [
                list(frame)
                for frame in link.drain()
                if type(frame) is PushNotification and frame[0] == b"message"
            ]
        frames.append(received)
    assert frames[0] == frames[1]


def test_commands_between_multi_and_exec_run_together(both: Both) -> None:
    for words in (("MULTI",), ("SET", "a", 1), ("LLEN", "a"), ("EXEC",), ("EXEC",), ("GET", "a")):
        both.check(*words, exactly=words != ("EXEC",))


def test_keys_end_with_their_time_to_live(both: Both) -> None:
    for words in (
        ("SET", "a", 1, "PX", 60_000), ("SET", "b", 1, "PX", 1), ("HSET", "h", "f", "v"), ("PEXPIRE", "h", 1),
        ("SET", "a", 2, "KEEPTTL"), ("PEXPIREAT", "a", 1), ("EXISTS", "a"), ("SET", "c", 1, "PX", 0),
    ):  # fmt: skip
        both.check(*words)
    while both.ask("EXISTS", "b", "h")[0] != [0]:
        pass
    both.check("EXISTS", "b", "h")
    both.check("KEYS", "*")
    assert both.check("DBSIZE") == 0
    assert both.check("SCAN", 0, "MATCH", "a*", "COUNT", 10) == [b"0", []]


def test_a_held_server_gives_groups_nothing_new_until_it_is_released() -> None:
    with MemoryServer() as server:
        link = dial(Endpoint.from_url(server.url), Timing(), resp=2, name="test")
        reader = dial(Endpoint.from_url(server.url), Timing(), resp=2, name="test")
        link.send(
            pack_commands([("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM"), ("XADD", "s", "1-0", "f", "v")])
        )
        assert [link.receive(), link.receive()][1] == b"1-0"
        server.hold()
        words = ("XREADGROUP", "GROUP", "g", "me", "BLOCK", 20_000, "STREAMS", "s", ">")
        reader.send(pack_commands([words]))
        assert not reader.wait(0.02)
        server.release()
        assert reader.receive() == [[b"s", [[b"1-0", [b"f", b"v"]]]]]


def test_a_script_reads_what_it_adds_from_a_held_server_but_nothing_else() -> None:
    script = """
        local id = redis.call('XADD', KEYS[1], '*', 'f', ARGV[1])
        local read = redis.call('XREADGROUP', 'GROUP', 'g', 'me', 'STREAMS', KEYS[1], '>')
        return {id, read and read[1][2] or {}}
    """
    with MemoryServer() as server:
        link = dial(Endpoint.from_url(server.url), Timing(), resp=2, name="test")

        def ask(*words: str) -> Any:
            link.send(pack_commands([words]))
            return link.receive()

        ask("XGROUP", "CREATE", "s", "g", "0", "MKSTREAM")
        server.hold()
        entry_id, read = ask("EVAL", script, "1", "s", "own")
        assert read == [[entry_id, [b"f", b"own"]]]
        ask("XADD", "s", "*", "f", "waits")
        assert ask("EVAL", script, "1", "s", "behind it")[1] == []
        server.release()
        (_, entries), *_ = ask("XREADGROUP", "GROUP", "g", "me", "STREAMS", "s", ">")
        assert [fields[1] for _, fields in entries] == [b"waits", b"behind it"]


def test_it_knows_the_commands_of_connections_and_refuses_others(both: Both) -> None:
    assert set(MemoryServer.COMMANDS) > {b"HELLO", b"EVALSHA", b"CLIENT", b"INFO"}
    both.check("NOSUCH")
    both.check("GET")
    both.check("EVALSHA")
