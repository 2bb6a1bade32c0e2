"""Find the primary through sentinels: which one is asked next, what its answer means, and to which server to connect.

Each new connection asks anew, in the order of the URL, and the first sentinel that answers decides. The server that it
names must say in the handshake that it is a primary, as the guidelines for Sentinel clients demand: HELLO tells the
role, so that needs no ROLE command and no permission for one. If that server refuses, the other sentinels are asked for
another one. A sentinel that is cut off from the rest knows only the old primary, which may still be reachable: so one
without a quorum decides only where none has it. Nothing is remembered between two connections. The link's supervisor,
its backoff and its circuit breaker try again.

Source: https://redis.io/docs/latest/develop/reference/sentinel-clients/
"""

import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import msgspec

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError
from celery5.broker.endpoint import Endpoint, format_node
from celery5.broker.translate import translate_reply
from celery5.errors import BrokerDenied, BrokerError, BrokerReadOnly, BrokerReplied, BrokerUnavailable
from celery5.protocol.counts import format_count
from celery5.similar_names import did_you_mean

SENTINEL_LIMIT: Final = 1.0
"""Seconds that one sentinel may take. All of them together take at most half of the time of an attempt."""

T = TypeVar("T")


class AskSentinel(msgspec.Struct, frozen=True):
    """Connect to a sentinel and send these commands. The outcome is the list of replies, or a BrokerError."""

    endpoint: Endpoint
    commands: tuple[tuple[Word, ...], ...]
    within: float


class ConnectServer(msgspec.Struct, frozen=True):
    """Connect to a server and shake hands. The outcome is the connection, or a BrokerError."""

    endpoint: Endpoint
    within: float


Step = AskSentinel | ConnectServer


async def open_connection(
    endpoint: Endpoint,
    within: float,
    *,
    ask: Callable[[AskSentinel], Awaitable[list[Any]]],
    connect: Callable[[ConnectServer], Awaitable[T]],
) -> T:
    """Connect to the server of an endpoint, in any colour.

    Args:
        endpoint: The broker.
        within: Seconds that the attempt may take.
        ask: Performs an AskSentinel. Raises BrokerError.
        connect: Performs a ConnectServer. Raises BrokerError.
    """
    if endpoint.topology == "server":
        return await connect(ConnectServer(endpoint, within))
    if endpoint.topology == "cluster":
        return await _connect_to_any(endpoint, within, connect)
    search = find_primary(endpoint, within)
    step, outcome = next(search), cast("Any", None)
    try:
        while True:
            try:
                outcome = await (ask(step) if isinstance(step, AskSentinel) else connect(step))
            except BrokerError as error:
                outcome = error
            step = search.send(outcome)
    except StopIteration as end:
        connection: T = end.value
        return connection


async def _connect_to_any(
    endpoint: Endpoint, within: float, connect: Callable[[ConnectServer], Awaitable[T]]
) -> T:
    """Connect to any node of a cluster that the URL names, for what all of them do: passing messages on."""
    failure: BrokerUnavailable | None = None
    for host, port in random.sample(endpoint.nodes, len(endpoint.nodes)):
        try:
            return await connect(ConnectServer(endpoint.at_node(host, port), within / len(endpoint.nodes)))
        except BrokerUnavailable as error:
            failure = error
    raise failure or BrokerUnavailable(f"broker {endpoint.masked_url} names no node")


def find_primary(endpoint: Endpoint, within: float) -> Generator[Step, Any, Any]:
    """Yield each step to perform, and receive its outcome. Returns the connection to the primary.

    Raises:
        BrokerUnavailable: No sentinel answers, none knows the service, or the primary that they name cannot be used.
        BrokerDenied: The primary, or every sentinel that can be reached, refuses the login.
    """
    limit = min(SENTINEL_LIMIT, within / 2 / len(endpoint.nodes))
    failures: list[BrokerError] = []
    refused: dict[tuple[str, int], BrokerError] = {}
    without_quorum: list[tuple[PrimaryAnswer, Endpoint]] = []
    unknowing: Endpoint | None = None
    for node in endpoint.nodes:
        sentinel = _make_sentinel(endpoint, node)
        outcome = yield AskSentinel(sentinel, _ask_primary(endpoint.service), limit)
        answer = outcome if isinstance(outcome, BrokerError) else read_primary(outcome, sentinel)
        if isinstance(answer, BrokerError):
            failures.append(answer)
            continue
        if answer.node is None:
            unknowing = unknowing or sentinel
            continue
        if answer.no_quorum:
            without_quorum.append((answer, sentinel))
            continue
        connection = yield from _try_primary(endpoint, within, answer, sentinel, refused)
        if connection is not None:
            return connection
    for answer, sentinel in without_quorum:
        connection = yield from _try_primary(endpoint, within, answer, sentinel, refused)
        if connection is not None:
            return connection
    if refused:
        raise next(reversed(refused.values()))
    if unknowing is not None:
        outcome = yield AskSentinel(unknowing, (("SENTINEL", "MASTERS"),), limit)
        raise _make_unknown(endpoint, [] if isinstance(outcome, BrokerError) else read_services(outcome))
    raise _make_unanswered(endpoint, failures)


def _try_primary(
    endpoint: Endpoint,
    within: float,
    answer: "PrimaryAnswer",
    sentinel: Endpoint,
    refused: dict[tuple[str, int], BrokerError],
) -> Generator[Step, Any, Any]:
    """Yield the step that connects to the primary of an answer, unless that has refused before.

    Returns the connection, or None if the server cannot be used: the reason is in `refused` then.
    """
    assert answer.node is not None
    if answer.node in refused:
        return None
    outcome = yield ConnectServer(_make_primary(endpoint, answer.node), within / 2)
    if isinstance(outcome, BrokerUnavailable):
        refused[answer.node] = _explain_refusal(outcome, answer, sentinel)
        return None
    if isinstance(outcome, BrokerError):
        raise outcome
    return outcome


def may_be_elsewhere(error: BrokerError, endpoint: Endpoint) -> bool:
    """Return whether the primary may be another server by now, since this one is a replica, or has too few replicas: it
    may be cut off from the sentinels, too.
    """
    if isinstance(error, BrokerReadOnly):
        return True
    return endpoint.topology == "sentinel" and isinstance(error, BrokerReplied) and error.code == "NOREPLICAS"


async def ask_primary(
    endpoint: Endpoint, ask: Callable[[AskSentinel], Awaitable[list[Any]]]
) -> tuple[str, int] | None:
    """Return the primary that the first sentinel with a quorum names; None if none answers."""
    for question in list_questions(endpoint):
        with suppress(BrokerError):
            answer = read_primary(await ask(question), question.endpoint)
            if isinstance(answer, PrimaryAnswer) and answer.node is not None and not answer.no_quorum:
                return answer.node
    return None


def list_questions(endpoint: Endpoint) -> list[AskSentinel]:
    """Return what to ask each sentinel; `read_primary` reads the replies."""
    commands = _ask_primary(endpoint.service)
    return [AskSentinel(_make_sentinel(endpoint, node), commands, SENTINEL_LIMIT) for node in endpoint.nodes]


class PrimaryAnswer(msgspec.Struct, frozen=True):
    """What a sentinel has answered: where the primary is, None if it does not know the service, and, where it is
    sure that it could promote no replica, why."""

    node: tuple[str, int] | None
    no_quorum: str = ""


def _ask_primary(service: str) -> tuple[tuple[Word, ...], ...]:
    return (("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), ("SENTINEL", "CKQUORUM", service))


def read_primary(replies: Sequence[Any], sentinel: Endpoint) -> PrimaryAnswer | BrokerError:
    """Return the answer in a sentinel's replies, or the error if they have none.

    Args:
        replies: Those to GET-MASTER-ADDR-BY-NAME and CKQUORUM. An error of the second one counts only if it says that
            there is no quorum: the user of the sentinel may not be allowed to ask.
        sentinel: The sentinel, for people.
    """
    address, quorum = replies
    no_quorum = str(quorum) if type(quorum) is ReplyError and str(quorum).startswith("NOQUORUM") else ""
    if type(address) is ReplyError:
        return translate_reply(str(address), where=sentinel.masked_url)
    if address is None:
        return PrimaryAnswer(None)
    try:
        host, port = address
        return PrimaryAnswer((host.decode(), int(port)), no_quorum.partition(" ")[2])
    except (TypeError, ValueError, AttributeError):
        return BrokerUnavailable(
            f"broker {sentinel.masked_url} answered with an invalid address of the primary"
        )


def read_services(replies: Sequence[Any]) -> list[str]:
    """Return the names of the services in a reply to SENTINEL MASTERS; none if it cannot be read."""
    (masters,) = replies
    try:
        return sorted(master[master.index(b"name") + 1].decode() for master in masters)
    except (TypeError, ValueError, AttributeError, IndexError):
        return []


def _make_sentinel(endpoint: Endpoint, node: tuple[str, int]) -> Endpoint:
    host, port = node
    return replace(
        _make_single(endpoint),
        host=host,
        port=port,
        db=0,
        username=endpoint.sentinel_username,
        password=endpoint.sentinel_password,
        role="sentinel",
    )


def _make_primary(endpoint: Endpoint, node: tuple[str, int]) -> Endpoint:
    host, port = node
    return replace(
        _make_single(endpoint), host=host, port=port, role="primary", found_through=endpoint.masked_url
    )


def _make_single(endpoint: Endpoint) -> Endpoint:
    return replace(
        endpoint, topology="server", nodes=(), service="", sentinel_username=None, sentinel_password=None
    )


def _explain_refusal(error: BrokerUnavailable, answer: PrimaryAnswer, sentinel: Endpoint) -> BrokerError:
    """Return the error for an unusable primary. It says why no failover will follow, if that is known."""
    if not answer.no_quorum:
        return error
    return BrokerUnavailable(
        f"{error}; {sentinel.masked_url} promotes no replica: {answer.no_quorum.rstrip('.')}; start more sentinels"
    )


def _make_unknown(endpoint: Endpoint, services: Sequence[str]) -> BrokerUnavailable:
    similar = did_you_mean(endpoint.service, services)
    known = f"; {similar} they watch: {', '.join(services)}".replace(";  ", "; ") if services else ""
    return BrokerUnavailable(
        f"broker {endpoint.masked_url}: its sentinels watch no service {endpoint.service!r}{known}; "
        "the broker URL must name one of them"
    )


def _make_unanswered(endpoint: Endpoint, failures: Sequence[BrokerError]) -> BrokerError:
    denied = next((error for error in failures if isinstance(error, BrokerDenied)), None)
    if denied is not None:
        return BrokerDenied(
            f"{denied}; sentinels have a login of their own: sentinel_username and sentinel_password in the URL"
        )
    reasons = "; ".join(dict.fromkeys(str(error).removeprefix("broker ") for error in failures))
    nodes = [format_node(*node) for node in endpoint.nodes]
    which = (
        f"none of its {format_count(len(nodes), 'sentinel')} answers"
        if len(nodes) > 1
        else "its sentinel does not answer"
    )
    return BrokerUnavailable(f"broker {endpoint.masked_url}: {which} ({reasons})")
