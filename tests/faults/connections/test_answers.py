"""Answers: the server answers with an error instead. Each kind has its own error and its own consequence."""

import pytest

from celery5.broker.call import Call, Script, script_call
from celery5.broker.connection.link import BreakerOpened, LinkEvent
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerLoading,
    BrokerReadOnly,
    BrokerReplied,
    BrokerTooOld,
    BrokerUnavailable,
)
from tests.faults.conftest import BRISK, OpenLink
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, incr, raw, until

ADD = Script("add", "return redis.call('INCRBY', KEYS[1], ARGV[1])", "0" * 40)


REFUSED_HANDSHAKES = {
    "WRONGPASS invalid username-password pair or user is disabled.": BrokerDenied,
    "NOAUTH HELLO must be called with the client already authenticated": BrokerDenied,
    "NOPERM this user has no permissions to run the 'hello' command": BrokerDenied,
    "ERR unknown command 'HELLO'": BrokerTooOld,
    "ERR something else": BrokerReplied,
}
"""What a server may answer to HELLO, and the error of a connection that was never up."""


def add(key: str, number: int) -> Call[int]:
    """A script call that no server knows by its hash, so that it always has to be sent in full."""
    return script_call(ADD, (key,), (number,), int)


async def test_a_loading_server_keeps_its_connection_and_the_command_did_not_run(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.answer("INCR", "LOADING Redis is loading the dataset in memory")
    with pytest.raises(BrokerLoading, match="still loading") as caught:
        await link.perform(incr(app_name))
    assert not caught.value.maybe_done
    assert await link.perform(incr(app_name)) == 1
    assert link.connected
    assert link.statistics().connects == 1


async def test_a_read_only_replica_is_left_for_a_new_connection(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.answer("INCR", "READONLY You can't write against a read only replica.")
    with pytest.raises(BrokerReadOnly, match="must name the master") as caught:
        await link.perform(incr(app_name))
    assert not caught.value.maybe_done
    await until(lambda: link.statistics().connects == 2 and link.connected)
    assert await link.perform(incr(app_name)) == 1


async def test_an_unknown_script_is_sent_once_more_in_full(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.answer("EVALSHA", "NOSCRIPT No matching script. Please use EVAL.")
    assert await link.perform(add(app_name, 2)) == 2
    assert (proxy.seen[b"EVALSHA"], proxy.seen[b"EVAL"]) == (1, 1)


async def test_a_server_that_really_does_not_know_the_script_gets_it_in_full(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    assert await link.perform_all([add(app_name, 1), add(app_name, 1), raw("GET", app_name)]) == [1, 2, None]
    assert await link.perform(get(app_name)) == b"2"
    assert (proxy.seen[b"EVALSHA"], proxy.seen[b"EVAL"]) == (2, 2)


async def test_a_script_that_is_unknown_even_in_full_is_not_tried_for_ever(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.answer("EVALSHA", "NOSCRIPT No matching script.")
    proxy.answer("EVAL", "NOSCRIPT No matching script.")
    with pytest.raises(BrokerReplied) as caught:
        await link.perform(add(app_name, 1))
    assert caught.value.code == "NOSCRIPT"
    assert proxy.seen[b"EVAL"] == 1


async def test_a_script_in_full_whose_reply_is_cut_off_may_have_run(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    proxy.cut_reply("EVAL", after=0)
    with pytest.raises(BrokerUnavailable) as caught:
        await link.perform(add(app_name, 5))
    assert caught.value.maybe_done
    assert await link.perform(get(app_name)) == b"5"


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ("NOAUTH Authentication required.", BrokerDenied, "wants a password"),
        (
            "NOPERM this user has no permissions to run the 'incr' command",
            BrokerDenied,
            "extend the user's ACL",
        ),
        ("WRONGPASS invalid username-password pair", BrokerDenied, "refuses this user or password"),
        ("BUSY Redis is busy running a script.", BrokerUnavailable, "busy"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", BrokerUnavailable, "try again"),
        ("CLUSTERDOWN The cluster is down", BrokerUnavailable, "cluster is down"),
        ("MASTERDOWN Link with MASTER is down", BrokerUnavailable, "lost its master"),
        ("NOGROUP No such key", BrokerReplied, "NOGROUP"),
        ("OOM command not allowed when used memory > 'maxmemory'.", BrokerReplied, "OOM"),
        ("ERR unknown command", BrokerReplied, "unknown command"),
    ],
)
async def test_each_error_answer_has_its_error_and_never_runs_the_command(
    proxy: FaultyProxy,
    open_link: OpenLink,
    app_name: str,
    answer: str,
    error: type[BrokerError],
    says: str,
) -> None:
    link = await open_link()
    proxy.answer("INCR", answer)
    with pytest.raises(error, match=says) as caught:
        await link.perform(incr(app_name))
    assert not getattr(caught.value, "maybe_done", False)
    assert str(caught.value).count("\n") == 0
    assert await link.perform(incr(app_name)) == 1
    assert link.statistics().connects == 1


async def test_one_error_among_several_calls_is_raised_when_all_have_run(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str
) -> None:
    link = await open_link()
    with pytest.raises(BrokerReplied) as caught:
        await link.perform_all([incr(app_name), raw("LPOP", app_name), incr(app_name)])
    assert caught.value.code == "WRONGTYPE"
    assert await link.perform(get(app_name)) == b"2"


@pytest.mark.parametrize(("answer", "error"), REFUSED_HANDSHAKES.items())
async def test_first_handshake_that_is_refused_ends_the_connection(
    proxy: FaultyProxy, answer: str, error: type[BrokerError]
) -> None:
    proxy.answer("HELLO", answer)
    with pytest.raises(error):
        await TrioRedis(endpoint=Endpoint.from_url(proxy.url), timing=BRISK).run()
    assert proxy.connections == 1


@pytest.mark.parametrize("answer", REFUSED_HANDSHAKES)
async def test_handshake_refused_after_the_first_is_tried_again_as_in_an_outage(
    proxy: FaultyProxy, open_link: OpenLink, app_name: str, answer: str
) -> None:
    events = list[LinkEvent]()
    link = await open_link(watch=events.append)
    assert await link.perform(incr(app_name)) == 1
    for _ in range(10):  # more than open the breaker
        proxy.answer("HELLO", answer)
    proxy.cut_all()
    await until(lambda: not proxy.rules and link.connected)
    assert await link.perform(incr(app_name)) == 2
    opened = next(event for event in events if isinstance(event, BreakerOpened))
    assert "was cut off" not in opened.reason


async def test_a_server_that_is_loading_at_first_is_waited_for(
    proxy: FaultyProxy, open_link: OpenLink
) -> None:
    proxy.answer("HELLO", "LOADING Redis is loading the dataset in memory")
    link = await open_link()
    assert link.connected
    assert proxy.connections == 2
