"""Handshake: what is said first, and which servers are too old to go on with."""

from copy import copy
from typing import Any

import pytest
from hiredis import ReplyError

from celery5.broker.connection.handshake import ServerHello, build_hello, parse_server_hello
from celery5.broker.endpoint import Endpoint
from celery5.broker.topologies import ClusterFound, ServerFound
from celery5.errors import BrokerDenied, BrokerReplied, BrokerTooOld, BrokerUnsupported


def hello(server: str, version: str) -> list[Any]:
    """A server's answer to HELLO 2."""
    return [b"server", server.encode(), b"version", version.encode(), b"proto", 2, b"id", 7, b"modules", []]


def test_one_write_says_it_all() -> None:
    endpoint = Endpoint(username="u", password="p", db=3)
    assert build_hello(endpoint, resp=2, name="my worker\n1") == [
        ("HELLO", 2, "AUTH", "u", "p", "SETNAME", "my-worker-1"),
        ("SELECT", 3),
    ]
    assert build_hello(Endpoint(), resp=3, name="x") == [("HELLO", 3, "SETNAME", "x")]
    assert build_hello(Endpoint(password="p"), resp=2, name="x") == [
        ("HELLO", 2, "AUTH", "default", "p", "SETNAME", "x")
    ]


@pytest.mark.parametrize(
    ("server", "version"),
    [
        ("redis", "6.2.0"),
        ("redis", "7.0.15"),
        ("redis", "10.0.0"),
        ("valkey", "9.1.2"),
        ("redis", "7.2.4"),
        ("valkey", "1.0"),
    ],
)
def test_servers_from_6_2_on_and_every_valkey_are_welcome(server: str, version: str) -> None:
    assert parse_server_hello([hello(server, version)], Endpoint()) == ServerHello(server, version, 7)


def test_a_map_is_read_as_well_as_a_list() -> None:
    facts = {b"server": b"redis", b"version": b"7.0.15", b"id": 9}
    assert parse_server_hello([facts, b"OK"], Endpoint()) == ServerHello("redis", "7.0.15", 9)


@pytest.mark.parametrize("version", ["6.0.16", "6.1.9", "5.0.7"])
def test_an_older_server_is_told_to_be_upgraded(version: str) -> None:
    with pytest.raises(BrokerTooOld, match=f"server {version} is older than 6[.]2; upgrade"):
        parse_server_hello([hello("redis", version)], Endpoint())


def test_a_server_that_does_not_know_hello_is_too_old() -> None:
    with pytest.raises(BrokerTooOld, match=r"older than 6\.2"):
        parse_server_hello(
            [ReplyError("ERR unknown command `HELLO`, with args beginning with: `2`, ")], Endpoint()
        )


@pytest.mark.parametrize("shape", [list, dict])
@pytest.mark.parametrize(
    ("mode", "says"), [("cluster", "part of a Redis Cluster"), ("sentinel", "is a Sentinel")]
)
def test_a_cluster_or_a_sentinel_is_refused_whatever_follows(mode: str, says: str, shape: type) -> None:
    flat = [*hello("redis", "6.2.0"), b"mode", mode.encode()]
    reply = flat if shape is list else dict(zip(flat[::2], flat[1::2], strict=True))
    refused = ReplyError("ERR SELECT is not allowed in cluster mode")
    with pytest.raises(BrokerUnsupported, match=says):
        parse_server_hello([reply, refused], Endpoint())


@pytest.mark.parametrize(
    ("endpoint", "cluster_url"),
    [
        (Endpoint(host="10.0.0.1", port=7000, db=3), "redis+cluster://10.0.0.1:7000,"),
        (Endpoint(kind="tls", host="::1", username="u", password="p"), "rediss+cluster://u:***@[::1]:6379,"),
        (Endpoint(kind="unix", path="/run/s"), "redis+cluster://host:6379,"),
    ],
)
def test_the_refusal_of_a_cluster_names_the_url_to_write(endpoint: Endpoint, cluster_url: str) -> None:
    with pytest.raises(BrokerUnsupported) as caught:
        parse_server_hello([[*hello("redis", "6.2.0"), b"mode", b"cluster"]], endpoint)
    assert f"write {cluster_url} with more" in str(caught.value)


@pytest.mark.parametrize("mode", [b"standalone", b"", None, 3])
def test_a_server_of_any_other_mode_is_taken(mode: object) -> None:
    reply = [*hello("redis", "7.0.0"), b"mode", mode]
    assert parse_server_hello([reply], Endpoint()) == ServerHello("redis", "7.0.0", 7)


def test_a_refusal_of_any_of_the_commands_counts() -> None:
    with pytest.raises(BrokerDenied):
        parse_server_hello([ReplyError("WRONGPASS invalid username-password pair")], Endpoint())
    with pytest.raises(BrokerReplied, match="out of range"):
        parse_server_hello([hello("redis", "7.0.0"), ReplyError("ERR DB index is out of range")], Endpoint())


@pytest.mark.parametrize("answer", [b"OK", None, 3, [], {}, [b"server"], hello("redis", "7.0")[:4]])
def test_nonsense_is_no_greeting(answer: object) -> None:
    with pytest.raises(BrokerReplied, match="no sensible answer"):
        parse_server_hello([answer], Endpoint())


@pytest.mark.parametrize(
    ("url", "is_found"),
    [
        ("redis://u:p@10.0.0.1:7000", True),
        ("rediss://10.0.0.1?ssl_ca_certs=/ca.pem", True),
        ("redis://10.0.0.1/3", False),
        ("unix:///run/s", False),
    ],
)
def test_a_cluster_is_found_where_the_url_may_lead_to_one(url: str, is_found: bool) -> None:
    with pytest.raises(BrokerUnsupported, match="is part of a Redis Cluster") as caught:
        parse_server_hello([[*hello("redis", "6.2.0"), b"mode", b"cluster"]], Endpoint.from_url(url))
    assert isinstance(caught.value, ClusterFound) == is_found


def test_a_cluster_that_was_found_is_named_by_the_url_that_led_to_it() -> None:
    server = Endpoint.from_url("rediss://u:p@10.0.0.1:7000?ssl_ca_certs=/ca.pem")
    cluster = server.as_cluster()
    assert (cluster.topology, cluster.nodes) == ("cluster", (("10.0.0.1", 7000),))
    assert cluster.masked_url == server.masked_url == "rediss://u:***@10.0.0.1:7000/0"
    node = cluster.at_node("10.0.0.2", 7001)
    assert node.masked_url == "rediss://u:***@10.0.0.1:7000/0 (node 10.0.0.2:7001)"
    assert (node.password, node.ssl_ca_certs, node.role) == ("p", "/ca.pem", "node")
    assert cluster.masked_cluster_url == "rediss+cluster://u:***@10.0.0.1:7000"


def test_an_error_that_is_copied_for_several_callers_names_its_endpoint() -> None:
    found = ClusterFound("part of a Redis Cluster", Endpoint(port=7000))
    found.mark_maybe_done()
    copied = copy(found)
    assert (str(copied), copied.endpoint, copied.maybe_done) == (str(found), found.endpoint, True)


def test_only_the_server_that_the_url_names_takes_the_place_of_a_cluster() -> None:
    """Another node that has left the cluster does not."""
    cluster = Endpoint.from_url("redis://127.0.0.1:7000").as_cluster()
    single = [[*hello("redis", "7.0.15"), b"mode", b"standalone"]]
    with pytest.raises(ServerFound):
        parse_server_hello(single, cluster.at_node("127.0.0.1", 7000))
    with pytest.raises(BrokerUnsupported) as caught:
        parse_server_hello(single, cluster.at_node("127.0.0.1", 7001))
    assert not isinstance(caught.value, ServerFound)
