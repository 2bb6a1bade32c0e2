"""Which sentinel is asked next, what its answer means, and what is said when none helps."""

from contextlib import suppress
from typing import Any

import pytest
from hiredis import ReplyError

from celery5.broker.connection.handshake import parse_server_hello
from celery5.broker.connection.sentinel import AskSentinel, ConnectServer, find_primary
from celery5.broker.endpoint import Endpoint, format_node
from celery5.broker.translate import translate_error
from celery5.errors import (
    BrokerDenied,
    BrokerError,
    BrokerReadOnly,
    BrokerReplied,
    BrokerUnavailable,
    BrokerUnsupported,
)

URL = "redis+sentinel://u:hush@a:1,b:2,c:3/shop/4?sentinel_username=su&sentinel_password=still"
QUORUM = b"OK 3 usable Sentinels. Quorum and failover authorization can be reached"
NO_QUORUM = ReplyError("NOQUORUM 1 usable Sentinels. Not enough available Sentinels.")
REFUSED = ConnectionRefusedError(111, "Connection refused")


def names(host: str, port: int, quorum: object = QUORUM) -> list[Any]:
    """A sentinel that names a primary."""
    return [[host.encode(), str(port).encode()], quorum]


UNKNOWN: list[Any] = [None, ReplyError("ERR No such master with that name")]


def is_replica(where: str) -> BrokerReadOnly:
    """The error of a server that turns out to be a replica."""
    return BrokerReadOnly(f"broker {where} is a replica")


def search(script: dict[str, Any], url: str = URL) -> tuple[list[str], Any]:
    """Perform the search with the outcome that the script has for each address; return what was done, and the end.

    An outcome is a list of replies, an error of the operating system or of celery5, or what stands for a connection.
    """
    done: list[str] = []
    steps = find_primary(Endpoint.from_url(url), 5.0)
    outcome: Any = None
    try:
        step = next(steps)
        while True:
            node = format_node(step.endpoint.host, step.endpoint.port)
            masters = isinstance(step, AskSentinel) and step.commands[0][1] == "MASTERS"
            done.append(
                f"{'masters' if masters else 'ask' if isinstance(step, AskSentinel) else 'to'} {node}"
            )
            outcome = script.get(done[-1], script.get(node, REFUSED))
            if isinstance(outcome, OSError):
                outcome = translate_error(outcome, maybe_done=False, where=step.endpoint.masked_url)
            step = steps.send(outcome)
    except StopIteration as end:
        return done, end.value
    except BrokerError as error:
        return done, error


@pytest.mark.parametrize(
    ("script", "done"),
    [
        ({"a:1": names("p", 9), "p:9": "it"}, ["ask a:1", "to p:9"]),
        ({"b:2": names("p", 9), "p:9": "it"}, ["ask a:1", "ask b:2", "to p:9"]),
        (
            {"a:1": TimeoutError(), "c:3": names("::1", 9), "[::1]:9": "it"},
            ["ask a:1", "ask b:2", "ask c:3", "to [::1]:9"],
        ),
        # One that does not know the service, or refuses, or answers nonsense, is like one that is silent.
        ({"a:1": UNKNOWN, "b:2": names("p", 9), "p:9": "it"}, ["ask a:1", "ask b:2", "to p:9"]),
        (
            {"a:1": BrokerDenied("broker sentinel a:1 wants a password"), "b:2": names("p", 9), "p:9": "it"},
            ["ask a:1", "ask b:2", "to p:9"],
        ),
        ({"a:1": [b"nonsense", QUORUM], "b:2": names("p", 9), "p:9": "it"}, ["ask a:1", "ask b:2", "to p:9"]),
        (
            {"a:1": [[b"p", b"x"], QUORUM], "b:2": names("p", 9), "p:9": "it"},
            ["ask a:1", "ask b:2", "to p:9"],
        ),
        # The user of the sentinel may not ask for the quorum.
        ({"a:1": names("p", 9, ReplyError("NOPERM no")), "p:9": "it"}, ["ask a:1", "to p:9"]),
        # The old primary is down, or a replica by now: another sentinel may know the new one.
        (
            {"a:1": names("old", 8), "b:2": names("p", 9), "p:9": "it"},
            ["ask a:1", "to old:8", "ask b:2", "to p:9"],
        ),
        (
            {"a:1": names("old", 8), "old:8": is_replica("old:8"), "b:2": names("p", 9), "p:9": "it"},
            ["ask a:1", "to old:8", "ask b:2", "to p:9"],
        ),
        # One that is cut off knows only the old primary, which may be cut off with it, and still answer.
        (
            {"a:1": names("old", 8, NO_QUORUM), "old:8": "old", "b:2": names("p", 9), "p:9": "it"},
            ["ask a:1", "ask b:2", "to p:9"],
        ),
        # Where none has a quorum, it is the last one that they agreed on.
        (
            {"a:1": names("p", 9, NO_QUORUM), "c:3": names("p", 9, NO_QUORUM), "p:9": "it"},
            ["ask a:1", "ask b:2", "ask c:3", "to p:9"],
        ),
    ],
)
def test_the_first_sentinel_that_names_a_usable_primary_decides(
    script: dict[str, Any], done: list[str]
) -> None:
    assert search(script) == (done, "it")


@pytest.mark.parametrize(
    ("script", "done", "kind", "says"),
    [
        (
            {},
            ["ask a:1", "ask b:2", "ask c:3"],
            BrokerUnavailable,
            [
                "none of its 3 sentinels answers",
                "sentinel a:1 cannot be reached: Connection refused",
                "sentinel c:3",
            ],
        ),
        (
            {"a:1": UNKNOWN, "c:3": UNKNOWN, "masters a:1": [[[b"ip", b"h", b"name", b"shops"]]]},
            ["ask a:1", "ask b:2", "ask c:3", "masters a:1"],
            BrokerUnavailable,
            [
                "watch no service 'shop'; did you mean 'shops'? they watch: shops",
                "the broker URL must name one",
            ],
        ),
        (
            {"a:1": UNKNOWN, "masters a:1": [ReplyError("NOPERM no")]},
            ["ask a:1", "ask b:2", "ask c:3", "masters a:1"],
            BrokerUnavailable,
            ["watch no service 'shop'; the broker URL must name one"],
        ),
        # All name the same server: it is tried once.
        (
            {"a:1": names("p", 9), "b:2": names("p", 9), "c:3": names("p", 9)},
            ["ask a:1", "to p:9", "ask b:2", "ask c:3"],
            BrokerUnavailable,
            ["/shop/4 (primary p:9) cannot be reached: Connection refused"],
        ),
        (
            {"a:1": names("p", 9, NO_QUORUM)},
            ["ask a:1", "ask b:2", "ask c:3", "to p:9"],
            BrokerUnavailable,
            ["(primary p:9) cannot be reached", "sentinel a:1 promotes no replica: 1 usable Sentinels"],
        ),
        (
            {"a:1": names("p", 9), "p:9": is_replica("p:9")},
            ["ask a:1", "to p:9", "ask b:2", "ask c:3"],
            BrokerReadOnly,
            ["p:9 is a replica"],
        ),
        # A primary that refuses the login is the right one: nobody else is asked.
        (
            {"a:1": names("p", 9), "p:9": BrokerDenied("broker p:9 refuses this user")},
            ["ask a:1", "to p:9"],
            BrokerDenied,
            ["refuses this user"],
        ),
        (
            {"b:2": BrokerDenied("broker sentinel b:2 wants a password")},
            ["ask a:1", "ask b:2", "ask c:3"],
            BrokerDenied,
            ["sentinel b:2 wants a password", "sentinel_password in the URL"],
        ),
    ],
)
def test_a_primary_that_cannot_be_found_is_one_clear_line(
    script: dict[str, Any], done: list[str], kind: type[BrokerError], says: list[str]
) -> None:
    steps, error = search(script)
    assert steps == done
    assert type(error) is kind
    assert all(text in str(error) for text in says), str(error)
    assert "\n" not in str(error)
    assert "hush" not in str(error)
    assert "still" not in str(error)


def test_the_sentinels_get_their_own_login_and_the_primary_gets_that_of_the_url() -> None:
    steps = find_primary(Endpoint.from_url(URL), 5.0)
    step = next(steps)
    assert isinstance(step, AskSentinel)
    assert (step.endpoint.username, step.endpoint.password, step.endpoint.db) == ("su", "still", 0)
    step = steps.send(names("p", 9))
    assert isinstance(step, ConnectServer)
    assert (step.endpoint.username, step.endpoint.password, step.endpoint.db) == ("u", "hush", 4)
    assert step.endpoint.sentinel_password is None


@pytest.mark.parametrize("sentinels", [1, 3, 20])
def test_all_sentinels_together_take_half_of_the_time(sentinels: int) -> None:
    hosts = ",".join(f"h{at}" for at in range(sentinels))
    steps = find_primary(Endpoint.from_url(f"rediss+sentinel://{hosts}/shop"), 5.0)
    asked = [next(steps)]
    with suppress(BrokerUnavailable):
        while True:
            asked.append(steps.send(BrokerUnavailable("broker gone")))
    assert len(asked) == sentinels
    assert max(step.within for step in asked) <= 1
    assert sum(step.within for step in asked) <= 2.5
    assert {step.endpoint.kind for step in asked} == {"tls"}


def hello(**facts: str) -> list[Any]:
    """A server's answer to HELLO 2."""
    said = {"server": "redis", "version": "7.0.15", **facts}
    return [*(word.encode() for pair in said.items() for word in pair), b"id", 7]


@pytest.mark.parametrize("role", ["replica", "slave"])
def test_a_replica_is_refused_where_a_primary_must_be(role: str) -> None:
    with pytest.raises(BrokerReadOnly, match="is a replica: a failover is under way"):
        parse_server_hello([hello(role=role)], Endpoint(role="primary"))
    assert parse_server_hello([hello(role=role)], Endpoint()).client_id == 7


def test_a_sentinel_is_accepted_only_where_one_is_expected() -> None:
    assert parse_server_hello([hello(mode="sentinel")], Endpoint(role="sentinel")).client_id == 7
    with pytest.raises(BrokerUnsupported, match=r"redis\+sentinel://host:port/service"):
        parse_server_hello([hello(mode="sentinel")], Endpoint(role="primary"))
    with pytest.raises(BrokerUnavailable, match="is no Sentinel"):
        parse_server_hello([hello(mode="standalone")], Endpoint(role="sentinel"))
    with pytest.raises(BrokerReplied):
        parse_server_hello([3], Endpoint(role="sentinel"))
