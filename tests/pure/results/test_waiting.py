"""Waiting: who gets which document, and what is said on the connection that all share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.broker.connection.exchange import NEED_DATA, PushNotification, ReplyError, ReplyParser
from celery5.broker.timing import OUTAGE_LIMIT, Outage, Timing
from celery5.broker.waiting.result_waits import (
    READ_AT_ONCE,
    SUBSCRIBE_AT_ONCE,
    UNSUBSCRIBE_BATCH,
    ResultWait,
    ResultWaitProtocol,
    ResultWaits,
)
from celery5.errors import BrokerDenied, BrokerUnavailable


class Woken:
    """Counts how often a wait is woken."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def a_wait(
    *keys: str, enough: Callable[[Mapping[str, bytes]], bool] | None = None
) -> tuple[ResultWait, Woken]:
    woken = Woken()
    return ResultWait(keys, enough=enough, wake=woken), woken


def test_a_wait_is_woken_once_when_the_last_document_has_come() -> None:
    waiting = ResultWaits()
    wait, woken = a_wait("a", "b", "a")
    assert waiting.add(wait) == [b"a", b"b"]
    waiting.add_document(b"a", b"1")
    assert not waiting.wake_finished()
    waiting.add_document(b"b", b"2")
    assert waiting.wake_finished()
    assert not waiting.wake_finished()
    assert (wait.get_documents(None), woken.times) == ({"a": b"1", "b": b"2"}, 1)
    assert not waiting


def test_waiting_for_nothing_is_over_at_once() -> None:
    wait, _ = a_wait()
    assert wait.finished
    assert wait.get_documents(BrokerUnavailable("gone")) == {}


def test_enough_is_asked_once_for_documents_that_come_together() -> None:
    asked: list[int] = []

    def two(found: Mapping[str, bytes]) -> bool:
        asked.append(len(found))
        return len(found) >= 2

    waiting = ResultWaits()
    wait, woken = a_wait("a", "b", "c", "d", enough=two)
    waiting.add(wait)
    waiting.add_document(b"a", b"1")
    waiting.wake_finished()
    waiting.add_document(b"b", b"2")
    waiting.add_document(b"c", b"3")
    waiting.wake_finished()
    assert asked == [1, 3]
    assert (len(wait.found), woken.times) == (3, 1)
    assert waiting.remove(wait) == [b"d"]


def test_a_fault_in_enough_is_the_faulty_callers_alone() -> None:
    waiting = ResultWaits()
    faulty, _ = a_wait("a", "b", enough=lambda found: bool(1 / 0))
    sound, woken = a_wait("a")
    waiting.add(faulty)
    waiting.add(sound)
    waiting.add_document(b"a", b"1")
    waiting.wake_finished()
    assert woken.times == 1
    with pytest.raises(ZeroDivisionError):
        faulty.get_documents(None)


def test_what_is_told_twice_arrives_once() -> None:
    waiting = ResultWaits()
    wait, woken = a_wait("a")
    waiting.add(wait)
    assert waiting.add_document(b"a", b"first")
    assert not waiting.add_document(b"a", b"second")
    waiting.wake_finished()
    assert (wait.found, woken.times) == ({"a": b"first"}, 1)


def test_a_failure_reaches_everybody_once() -> None:
    waiting = ResultWaits()
    waits = [a_wait("a", "b"), a_wait("b")]
    for wait, _ in waits:
        waiting.add(wait)
    waiting.fail(BrokerDenied("no"))
    waiting.fail(BrokerDenied("again"))
    for wait, woken in waits:
        assert woken.times == 1
        with pytest.raises(BrokerDenied, match="no"):
            wait.get_documents(None)
        waiting.remove(wait)
    assert not waiting


def test_an_outage_is_to_blame_only_for_what_did_not_come() -> None:
    waiting = ResultWaits()
    wait, _ = a_wait("a")
    waiting.add(wait)
    with pytest.raises(BrokerUnavailable):
        wait.get_documents(BrokerUnavailable("gone"))
    assert wait.get_documents(None) == {}
    waiting.add_document(b"a", b"1")
    waiting.wake_finished()
    assert wait.get_documents(BrokerUnavailable("gone")) == {"a": b"1"}


def said(talk: ResultWaitProtocol) -> list[list[bytes]]:
    """The commands that are to be sent, read as a server would."""
    replies = ReplyParser()
    replies.feed(talk.data_to_send())
    commands: list[list[bytes]] = []
    while (command := replies.next()) is not NEED_DATA:
        commands.append(command)
    return commands


def message(key: bytes, document: bytes) -> PushNotification:
    return PushNotification([b"message", key, document])


def test_waiter_subscribes_and_reads_a_key_in_one_write() -> None:
    talk = ResultWaitProtocol()
    wait, woken = a_wait("a")
    talk.add(wait)
    assert said(talk) == [[b"SUBSCRIBE", b"a"], [b"MGET", b"a"]]
    talk.receive([PushNotification([b"subscribe", b"a", 1]), [None]])
    assert said(talk) == []
    talk.receive([message(b"a", b"1")])
    assert woken.times == 1
    talk.remove(wait)
    assert said(talk) == []
    assert not talk.has_waits
    talk.add(a_wait("b")[0])
    assert said(talk) == [[b"UNSUBSCRIBE", b"a"], [b"SUBSCRIBE", b"b"], [b"MGET", b"b"]]


def test_worker_that_gives_up_leaves_at_once() -> None:
    talk = ResultWaitProtocol()
    had, never = a_wait("a"), a_wait("b", "c")
    for wait, _ in (had, never):
        talk.add(wait)
        said(talk)
    talk.receive([message(b"a", b"1"), message(b"b", b"1")])
    talk.remove(had[0])
    assert said(talk) == []
    talk.remove(never[0])
    assert said(talk) == [[b"UNSUBSCRIBE", b"a", b"b", b"c"]]
    talk.add(a_wait("d")[0])
    assert said(talk) == [[b"SUBSCRIBE", b"d"]]  # one question at a time: nothing was answered yet


def test_those_on_whose_channels_all_was_said_are_few() -> None:
    talk = ResultWaitProtocol()
    for number in range(UNSUBSCRIBE_BATCH):
        wait, _ = a_wait(f"k{number}")
        talk.add(wait)
        said(talk)
        talk.receive([[None]])
        talk.receive([message(f"k{number}".encode(), b"1")])
        talk.remove(wait)
        assert said(talk) == []
    many = [f"m{number}" for number in range(UNSUBSCRIBE_BATCH)]
    wait, _ = a_wait(*many)
    talk.add(wait)
    said(talk)
    talk.receive([[b"1"] * UNSUBSCRIBE_BATCH])
    talk.remove(wait)
    assert said(talk) == [[b"UNSUBSCRIBE", *[key.encode() for key in many]]]


def test_the_second_who_waits_for_a_key_costs_nothing() -> None:
    talk = ResultWaitProtocol()
    first, second = a_wait("a"), a_wait("a")
    talk.add(first[0])
    said(talk)
    talk.add(second[0])
    assert said(talk) == []
    talk.remove(first[0])
    assert said(talk) == []
    talk.receive([[b"document"]])
    assert second[0].found == {"a": b"document"}
    talk.remove(second[0])
    talk.add(a_wait("b")[0])
    assert said(talk)[0] == [b"UNSUBSCRIBE", b"a"]


def test_key_that_is_wanted_again_at_once_stays_subscribed() -> None:
    talk = ResultWaitProtocol()
    first, again = a_wait("a", "b"), a_wait("a")
    talk.add(first[0])
    said(talk)
    talk.remove(first[0])
    talk.add(again[0])
    assert said(talk) == [[b"UNSUBSCRIBE", b"b"]]
    talk.receive([[None, None]])
    assert said(talk) == [[b"MGET", b"a"]]


def test_announcement_before_a_new_wait_for_a_key_does_not_count() -> None:
    talk = ResultWaitProtocol()
    first, again = a_wait("a"), a_wait("a")
    talk.add(first[0])
    said(talk)
    talk.receive([message(b"a", b"failed"), [None]])
    talk.remove(first[0])
    talk.add(again[0])
    assert said(talk) == [[b"MGET", b"a"]]
    talk.receive([message(b"a", b"failed again")])  # between the two waits
    assert again[0].found == {}
    talk.receive([[None], message(b"a", b"done")])
    assert again[0].found == {"a": b"done"}


def test_many_keys_are_subscribed_in_chunks_and_read_a_few_at_a_time() -> None:
    talk = ResultWaitProtocol()
    keys = [f"k{number}" for number in range(2 * SUBSCRIBE_AT_ONCE + 1)]
    talk.add(a_wait(*keys)[0])
    commands = said(talk)
    assert [len(command) - 1 for command in commands] == [
        SUBSCRIBE_AT_ONCE,
        SUBSCRIBE_AT_ONCE,
        1,
        READ_AT_ONCE,
    ]
    read = commands[-1][1:]
    while talk.is_reply_due:
        talk.receive([[None] * len(read)])
        read = next((command[1:] for command in said(talk)), [])
        keys_read = len(read)
        assert keys_read <= READ_AT_ONCE


def test_keys_that_arrived_while_the_wait_goes_on_are_unsubscribed_by_the_thousand() -> None:
    talk = ResultWaitProtocol()
    keys = [f"k{number}" for number in range(SUBSCRIBE_AT_ONCE + 5)]
    talk.add(a_wait(*keys)[0])
    said(talk)
    talk.receive([message(key.encode(), b"1") for key in keys[: SUBSCRIBE_AT_ONCE - 1]])
    assert not any(command[0] == b"UNSUBSCRIBE" for command in said(talk))
    talk.receive([message(keys[SUBSCRIBE_AT_ONCE].encode(), b"1")])
    assert (
        sum(len(command) - 1 for command in said(talk) if command[0] == b"UNSUBSCRIBE") == SUBSCRIBE_AT_ONCE
    )


def test_on_a_new_connection_everything_still_missing_is_subscribed_and_read() -> None:
    talk = ResultWaitProtocol()
    talk.add(a_wait("a", "b", "c")[0])
    said(talk)
    talk.receive([message(b"b", b"1")])
    talk.reset()
    assert said(talk) == [[b"SUBSCRIBE", b"a", b"c"], [b"MGET", b"a", b"c"]]


def test_the_safety_net_reads_what_is_missing_and_subscribes_nothing() -> None:
    talk = ResultWaitProtocol()
    talk.add(a_wait("a", "b")[0])
    said(talk)
    talk.receive([[b"1", None]])
    talk.recheck()
    assert said(talk) == [[b"MGET", b"b"]]


def test_a_refusal_ends_the_talk() -> None:
    talk = ResultWaitProtocol()
    talk.add(a_wait("a")[0])
    said(talk)
    with pytest.raises(hiredis.ReplyError, match="NOPERM"):
        talk.receive([ReplyError("NOPERM no")])


class Server:
    """As much of a server as a talk needs: it does what it is told, and is cut off now and then."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        self.subscribed: set[bytes] = set()
        self.outbox: list[Any] = []

    def take(self, commands: Sequence[Sequence[bytes]]) -> None:
        for name, *keys in commands:
            if name == b"SUBSCRIBE":
                self.subscribed.update(keys)
                self.outbox += [PushNotification([b"subscribe", key, 1]) for key in keys]
            elif name == b"UNSUBSCRIBE":
                self.subscribed.difference_update(keys)
                self.outbox += [PushNotification([b"unsubscribe", key, 0]) for key in keys]
            else:
                self.outbox.append([self.documents.get(key) for key in keys])

    def settle(self, key: bytes) -> None:
        self.documents[key] = b"of " + key
        if key in self.subscribed:
            self.outbox.append(message(key, self.documents[key]))


class World:
    """A server, a talk with it, and those who wait; each step by its name."""

    def __init__(self) -> None:
        self.server = Server()
        self.talk = ResultWaitProtocol()
        self.waits: list[tuple[ResultWait, list[str]]] = []

    def say(self) -> None:
        self.server.take(said(self.talk))

    def join(self, number: int) -> None:
        keys = [f"k{at % 8}" for at in range(number, number + 3)]
        self.waits.append((a_wait(*keys)[0], keys))
        self.talk.add(self.waits[-1][0])
        self.say()

    def leave(self, number: int) -> None:
        if self.waits:
            self.talk.remove(self.waits.pop(number % len(self.waits))[0])
            self.say()

    def settle(self, number: int) -> None:
        self.server.settle(f"k{number}".encode())

    def hear(self, number: int) -> None:
        frames, self.server.outbox = self.server.outbox[:number], self.server.outbox[number:]
        self.talk.receive(frames)
        self.say()

    def cut(self, _number: int) -> None:
        self.server.subscribed, self.server.outbox = set(), []
        self.talk.reset()
        self.say()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([World.join, World.leave, World.settle, World.hear, World.cut]), st.integers(0, 7)
        ),
        max_size=60,
    )
)
def test_waiters_get_all_results_in_any_order_of_events(
    steps: list[tuple[Callable[[World, int], None], int]],
) -> None:
    world = World()
    for step, number in steps:
        step(world, number)
        awaited = {key.encode() for _, keys in world.waits for key in keys}
        assert world.server.subscribed <= awaited | world.server.documents.keys()
    for number in range(8):
        world.settle(number)
    while world.server.outbox:
        world.hear(100)
    for wait, keys in world.waits:
        assert wait.get_documents(None) == {key: b"of " + key.encode() for key in keys}
        world.talk.remove(wait)
    world.say()
    assert not world.talk.has_waits
    world.talk.add(a_wait("another")[0])
    world.say()
    assert world.server.subscribed == {b"another"}


def test_an_outage_is_suffered_for_half_a_minute_and_a_refusal_not_at_all() -> None:
    outage = Outage(Timing())
    assert not outage.record_failure(BrokerUnavailable("gone"), now=100.0)
    assert not outage.record_failure(BrokerUnavailable("gone"), now=100.0 + OUTAGE_LIMIT - 0.1)
    assert outage.record_failure(BrokerUnavailable("gone"), now=100.0 + OUTAGE_LIMIT)
    outage.reset()
    assert outage.error is None
    assert not outage.record_failure(BrokerUnavailable("gone"), now=500.0)
    assert outage.record_failure(BrokerDenied("no"), now=500.0)


def test_the_pauses_of_an_outage_stay_under_their_cap() -> None:
    outage = Outage(Timing(backoff_start=0.05, backoff_cap=1.0))
    for attempt in range(100):
        outage.record_failure(BrokerUnavailable("gone"), now=float(attempt))
        assert 0.0 <= outage.next_pause() <= 1.0
