"""Hash slots of a Redis Cluster: the slot of a key, the map of slots, and what follows a refusal."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery5.broker.call import Call
from celery5.broker.routing.cluster_router import join_replies
from celery5.protocol.hash_slots import (
    MAX_REDIRECTIONS,
    NextStep,
    NodeAddress,
    Redirection,
    Refusal,
    SlotMap,
    decide,
    find_keys,
    get_key_slot,
    parse_redirection,
    parse_slot_map,
    split_words,
    with_block,
)

A, B = NodeAddress("10.0.0.1", 6379), NodeAddress("10.0.0.2", 6379)


@given(st.text(alphabet="ab{}:", max_size=12))
def test_the_slot_of_a_key_is_the_one_of_redis(key: str) -> None:
    assert get_key_slot(key) == get_key_slot(key.encode()) == key_slot(key.encode())


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("PING",), ()),
        (("GET", "a"), ("a",)),
        (("SET", "a", "b", "PX", 1), ("a",)),
        (("MGET", "a", "b"), ("a", "b")),
        (("DEL", "a", "b"), ("a", "b")),
        (("EVALSHA", "sha", 2, "a", "b", "c"), ("a", "b")),
        (("XREADGROUP", "GROUP", "g", "STREAMS", "COUNT", 1, "STREAMS", "a", "b", ">", ">"), ("a", "b")),
        (("XREAD", "COUNT", 5, "BLOCK", 10, "STREAMS", "a", "0-0"), ("a",)),
        (("XGROUP", "CREATE", "a", "g", "0"), ("a",)),
        (("SCAN", 0, "MATCH", "x*"), ()),
        (("WAIT", 1, 100), ()),
    ],
)
def test_the_keys_of_a_command_are_found(words: tuple[object, ...], keys: tuple[object, ...]) -> None:
    assert tuple(find_keys(words)) == keys


def test_a_read_of_several_slots_becomes_one_for_each() -> None:
    words = ("XREADGROUP", "GROUP", "g", "w", "COUNT", 5, "STREAMS", "{a}1", "{b}1", "{a}2", ">", ">", ">")
    head = ("XREADGROUP", "GROUP", "g", "w", "COUNT", 5, "STREAMS")
    assert list(split_words(words).values()) == [
        (*head, "{a}1", "{a}2", ">", ">"),
        (*head, "{b}1", ">"),
    ]


@pytest.mark.parametrize(("block", "wait"), [(0.0, ()), (0.25, ("BLOCK", 250)), (0.0001, ("BLOCK", 1))])
def test_a_part_of_a_read_waits_for_the_given_seconds(block: float, wait: tuple[object, ...]) -> None:
    head, end = ("XREADGROUP", "GROUP", "BLOCK", "STREAMS", "COUNT", 5), ("STREAMS", "a", ">")
    assert with_block((*head, "BLOCK", 9000, *end), block) == (*head, *wait, *end)
    assert with_block((*head, *end), block) == (*head, *wait, *end)


def test_the_replies_of_several_slots_stand_in_the_order_of_the_keys() -> None:
    parts = [Call(("MGET", "a", "c"), list), Call(("MGET", "b"), list)]
    assert join_replies("MGET", ("a", "b", "c"), parts, [[b"1", None], [b"2"]]) == [b"1", b"2", None]
    assert join_replies("DEL", ("a", "b"), (), [1, 2]) == 3
    assert join_replies("XREADGROUP", ("a", "b"), (), [None, [[b"b", []]]]) == [[b"b", []]]


SLOTS = [
    [0, 99, [b"10.0.0.1", 6379, b"id"], [b"10.0.0.9", 6379, b"replica"]],
    [101, 16383, [b"", 6380, b"id"]],
]


def test_the_map_of_slots_names_the_primary_of_each() -> None:
    slots = parse_slot_map(SLOTS, asked=B)
    other = NodeAddress("10.0.0.2", 6380)
    assert [slots.find_node(slot) for slot in (0, 99, 100, 101, 16383)] == [A, A, None, other, other]
    assert slots.nodes == (A, other)
    assert slots.with_moved(5, B).find_node(5) == B
    assert slots.with_moved(5, B).find_node(6) == A
    assert SlotMap().find_node(0) is None


@pytest.mark.parametrize("host", [b"", b"?", None])
def test_a_node_without_a_host_is_on_the_host_that_was_asked(host: bytes | None) -> None:
    assert parse_slot_map([[0, 16383, [host, 6380]]], asked=B).nodes == (NodeAddress(B.host, 6380),)


@pytest.mark.parametrize("raw", [None, b"OK", [1], [[0, 1]], [[0, 1, [b"h", b"x"]]], {}])
def test_an_invalid_map_of_slots_is_an_error_or_empty(raw: object) -> None:
    with suppress(ValueError):
        assert not parse_slot_map(raw, asked=A).ranges


@pytest.mark.parametrize(
    ("text", "redirection"),
    [
        ("MOVED 3999 127.0.0.1:6381", Redirection("MOVED", 3999, NodeAddress("127.0.0.1", 6381))),
        ("ASK 3999 [::1]:6381", Redirection("ASK", 3999, NodeAddress("::1", 6381))),
        ("MOVED 3999 :6381", Redirection("MOVED", 3999, NodeAddress("", 6381))),
        ("MOVED", None),
        ("ERR unknown command", None),
    ],
)
def test_a_redirection_names_slot_and_node(text: str, redirection: Redirection | None) -> None:
    assert parse_redirection(text) == redirection


@pytest.mark.parametrize(
    ("refusal", "may_repeat", "attempt", "is_late", "step"),
    [
        ("moved", True, 1, False, "redirect"),
        ("moved", False, 1, False, "redirect"),
        ("moved", True, MAX_REDIRECTIONS, False, "raise"),
        ("ask", False, 1, False, "ask"),
        ("ask", False, MAX_REDIRECTIONS, False, "raise"),
        ("unstable", True, MAX_REDIRECTIONS, False, "refresh"),
        ("unstable", True, 1, True, "raise"),
        ("unreachable", True, 1, False, "refresh"),
        ("unreachable", False, 1, False, "raise"),
        ("unreachable", True, 1, True, "raise"),
    ],
)
def test_a_refused_call_is_redirected_repeated_or_raised(
    refusal: Refusal, may_repeat: bool, attempt: int, is_late: bool, step: NextStep
) -> None:
    assert decide(refusal, may_repeat=may_repeat, attempt=attempt, is_late=is_late) == step
