"""Three colours: the same call gets the same answer, or the same refusal, from every driver."""

import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5.broker.call import Call, Script, script_call
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import (
    BadBrokerURL,
    BrokerDenied,
    BrokerReplied,
    BrokerTooOld,
    BrokerUnavailable,
    CircuitOpen,
)
from tests.redis.connections.colours import COLOURS, POOLED, Here, live, raw
from tests.redis.process.onlookers import blocked, meanwhile, until

QUICK = Timing(connect=1.0, reply=0.3, first_connect=0.3, breaker_reset=0.2)

in_every_colour = pytest.mark.parametrize("colour", COLOURS)
where_pooled = pytest.mark.parametrize("colour", POOLED)


def script(body: str) -> Script:
    """A script that no server has heard of."""
    return Script("test", body, sha1(body.encode(), usedforsecurity=False).hexdigest())


@in_every_colour
def test_answers_have_the_same_shape_whatever_the_driver(colour: str, url: str, app_name: str) -> None:
    async def story(here: Here) -> list[Any]:
        key = app_name
        return [
            await here.redis.perform(raw(*words))
            for words in (
                ("SET", f"{key}:s", b"\x00\xffbytes"),
                ("GET", f"{key}:s"),
                ("GET", f"{key}:none"),
                ("INCRBY", f"{key}:n", 7),
                ("HSET", f"{key}:h", "a", 1, "b", 2.5),
                ("HGETALL", f"{key}:h"),
                ("ZADD", f"{key}:z", 1.5, "m"),
                ("ZSCORE", f"{key}:z", "m"),
                ("SADD", f"{key}:set", "one"),
                ("SMEMBERS", f"{key}:set"),
                ("XADD", f"{key}:x", "5-1", "m", "v"),
                ("XRANGE", f"{key}:x", "-", "+"),
                ("XREAD", "STREAMS", f"{key}:x", "0"),
                ("EVAL", "return {1, false, 'x', {ok='fine'}}", 0),
            )
        ]

    key = f"{app_name}:x".encode()
    assert live(colour, url, story) == [
        b"OK",
        b"\x00\xffbytes",
        None,
        7,
        2,
        [b"a", b"1", b"b", b"2.5"],
        1,
        b"1.5",
        1,
        [b"one"],
        b"5-1",
        [[b"5-1", [b"m", b"v"]]],
        [[key, [[b"5-1", [b"m", b"v"]]]]],
        [1, None, b"x", b"fine"],
    ]


@in_every_colour
def test_the_reply_of_a_call_is_decoded(colour: str, url: str) -> None:
    async def story(here: Here) -> str:
        return await here.redis.perform(Call(("ECHO", "word"), lambda reply: str(reply.decode())))

    assert live(colour, url, story) == "word"


@in_every_colour
def test_many_calls_in_one_write_keep_their_order(colour: str, url: str) -> None:
    async def story(here: Here) -> list[bytes]:
        assert await here.redis.perform_all([]) == []
        return await here.redis.perform_all([raw("ECHO", number) for number in range(2000)])

    assert live(colour, url, story) == [b"%d" % number for number in range(2000)]


@in_every_colour
def test_a_script_the_server_does_not_know_is_sent_in_full(colour: str, url: str, app_name: str) -> None:
    ours = script(f"return redis.call('INCRBY', KEYS[1], ARGV[1]) -- {app_name}")

    def call(by: int) -> Call[Any]:
        return script_call(ours, (app_name,), (by,), lambda reply: reply)

    async def story(here: Here) -> list[Any]:
        return [await here.redis.perform(call(2)), await here.redis.perform(call(3))]

    assert live(colour, url, story) == [2, 5]


@in_every_colour
def test_among_many_calls_only_the_unknown_scripts_are_sent_again(
    colour: str, url: str, app_name: str
) -> None:
    ours = script(f"return redis.call('INCR', KEYS[1]) -- {app_name}")

    async def story(here: Here) -> list[Any]:
        unknown = script_call(ours, (app_name,), (), lambda reply: reply)
        return await here.redis.perform_all([raw("INCR", app_name), unknown, raw("INCR", app_name), unknown])

    # The plain ones ran at once, the scripts after them.
    assert live(colour, url, story) == [1, 3, 2, 4]


@in_every_colour
def test_a_refusal_is_an_error_with_its_code(colour: str, url: str, app_name: str) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("SET", app_name, "x"))
        with pytest.raises(BrokerReplied) as wrong_type:
            await here.redis.perform(raw("LPUSH", app_name, "x"))
        assert wrong_type.value.code == "WRONGTYPE"
        with pytest.raises(BrokerReplied) as unknown:
            await here.redis.perform(raw("NOSUCH", app_name))
        assert unknown.value.code == "ERR"
        assert await here.redis.perform(raw("GET", app_name)) == b"x"

    live(colour, url, story)


@in_every_colour
def test_one_refusal_among_many_calls_does_not_stop_the_others(colour: str, url: str, app_name: str) -> None:
    async def story(here: Here) -> Any:
        bad = raw("LPUSH", app_name, "x")
        with pytest.raises(BrokerReplied, match="WRONGTYPE"):
            await here.redis.perform_all([raw("SET", app_name, 1), bad, raw("INCR", app_name), bad])
        return await here.redis.perform(raw("GET", app_name))

    assert live(colour, url, story) == b"2"


@in_every_colour
def test_a_wrong_password_is_told_as_such(colour: str, url: str, app_name: str) -> None:
    endpoint = Endpoint.from_url(url, username=app_name, password="wrong-secret")

    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    with pytest.raises(BrokerDenied) as denied:
        live(colour, endpoint, story)
    assert "wrong-secret" not in str(denied.value)
    trace = traceback.format_exception(denied.value)
    assert "During handling" not in "".join(trace)


@in_every_colour
def test_a_user_with_a_password_works_in_the_database_of_the_url(
    colour: str, url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    words = ("on", ">pass/w@rd:", f"~{app_name}*", "&*", "+@all", "-set")
    redis_client.execute_command("ACL", "SETUSER", app_name, *words)  # type: ignore[no-untyped-call]
    endpoint = Endpoint.from_url(url, username=app_name, password="pass/w@rd:", db=4)

    async def story(here: Here) -> Any:
        with pytest.raises(BrokerDenied):
            await here.redis.perform(raw("SET", f"{app_name}:k", 1))
        return await here.redis.perform_all([raw("ACL", "WHOAMI"), raw("CLIENT", "INFO")])

    try:
        who, about = live(colour, endpoint, story)
    finally:
        redis_client.execute_command("ACL", "DELUSER", app_name)  # type: ignore[no-untyped-call]
    assert who == app_name.encode()
    assert b"db=4" in about


@in_every_colour
def test_a_broker_that_is_not_there_is_unavailable_and_nothing_was_done(colour: str) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    with pytest.raises(BrokerUnavailable) as gone:
        live(colour, "unix:///nonexistent/none.sock", story, timing=QUICK)
    assert not gone.value.maybe_done


@where_pooled
def test_after_three_failures_the_circuit_opens_and_later_lets_a_probe_through(
    colour: str, own_server: EmbeddedServer
) -> None:
    async def story(here: Here) -> None:
        assert await here.redis.perform(raw("PING")) == b"PONG"
        own_server.kill()
        await here.sleep(0.05)
        for _ in range(3):
            with pytest.raises(BrokerUnavailable):
                await here.redis.perform(raw("PING"))
        with pytest.raises(CircuitOpen):
            await here.redis.perform(raw("PING"))
        own_server.revive()
        await here.sleep(0.5)
        assert await here.redis.perform(raw("PING")) == b"PONG"

    live(colour, own_server.url, story, timing=Timing(connect=1.0, reply=1.0, breaker_reset=0.5))


@in_every_colour
def test_a_late_answer_leaves_open_whether_the_command_ran(colour: str, own_server: EmbeddedServer) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("CLIENT", "PAUSE", 1500, "ALL"))
        with pytest.raises(BrokerUnavailable) as late:
            await here.redis.perform(raw("SET", "k", 1))
        assert late.value.maybe_done

    live(colour, own_server.url, story, timing=QUICK)


@where_pooled
def test_a_call_may_block_for_as_long_as_it_says(colour: str, url: str, app_name: str) -> None:
    async def story(here: Here) -> Any:
        return await here.redis.perform(raw("BLPOP", app_name, 0.5, blocks=0.5))

    assert live(colour, url, story, timing=QUICK) is None


@where_pooled
def test_an_idle_connection_that_died_is_replaced_before_anything_is_sent(
    colour: str, own_server: EmbeddedServer
) -> None:
    async def story(here: Here) -> Any:
        await here.redis.perform(raw("SET", "k", 1))
        with redis.Redis.from_url(own_server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        await here.sleep(0.05)
        return await here.redis.perform(raw("INCR", "k"))

    assert live(colour, own_server.url, story) == 2


@where_pooled
@pytest.mark.parametrize("repeatable", [True, False])
def test_a_command_cut_off_is_sent_again_only_if_it_says_that_it_may_be(
    colour: str, repeatable: bool, own_server: EmbeddedServer
) -> None:
    with redis.Redis.from_url(own_server.url) as client:

        def cut_and_push() -> None:
            until(lambda: blocked(client))
            first = blocked(client)[0]["id"]
            client.client_kill_filter(_id=first)
            if repeatable:
                until(lambda: [client_info for client_info in blocked(client) if client_info["id"] != first])
            client.lpush("list", "item")

        async def story(here: Here) -> Any:
            return await here.redis.perform(raw("BLPOP", "list", 5, blocks=5, repeatable=repeatable))

        with meanwhile(cut_and_push):
            if repeatable:
                assert live(colour, own_server.url, story) == [b"list", b"item"]
            else:
                with pytest.raises(BrokerUnavailable) as cut:
                    live(colour, own_server.url, story)
                assert cut.value.maybe_done


@contextmanager
def an_old_server(hello: bytes) -> Iterator[str]:
    """Something that gives this answer to whatever it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def answer() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.settimeout(5)
                accepted.recv(1000)
                accepted.sendall(hello)
                accepted.recv(1000)

        with meanwhile(answer):
            yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


@in_every_colour
@pytest.mark.parametrize(
    "hello",
    [
        b"-ERR unknown command `HELLO`, with args beginning with: \r\n",
        b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.0.16\r\n$2\r\nid\r\n:3\r\n",
    ],
    ids=["5", "6.0"],
)
def test_a_server_that_is_too_old_is_refused(colour: str, hello: bytes) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    with an_old_server(hello) as url, pytest.raises(BrokerTooOld, match=r"6\.2"):
        live(colour, url, story)


@where_pooled
def test_certificate_files_that_cannot_be_read_are_a_fault_of_the_url(colour: str, tmp_path: Path) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    with pytest.raises(BadBrokerURL, match="ssl_ca_certs"):
        live(colour, f"rediss://127.0.0.1:1/0?ssl_ca_certs={tmp_path}/none.pem", story)
