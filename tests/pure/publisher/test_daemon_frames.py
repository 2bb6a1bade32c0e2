"""Parcels: frames come whole however they are cut, bad ones are refused, and addresses mean what they say."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.broker.colour import run_blocking
from celery5.errors import Corrupt, MessageTooLarge, Misconfigured
from celery5.protocol.job.job import Job
from celery5.protocol.publisher import frames as parcels_module
from celery5.protocol.publisher.address import (
    DaemonAddress,
    parse_connections,
    parse_daemon_address,
)
from celery5.protocol.publisher.frames import (
    BYTES_PER_TRIP,
    MAX_MESSAGES,
    MESSAGES_PER_FRAME,
    ClientHello,
    FrameReader,
    FrameTooLarge,
    GroupReply,
    JobMessage,
    PublishReply,
    PublishRequest,
    decode_client_message,
    decode_daemon_message,
    decode_job_message,
    encode_frame,
    encode_job_message,
    find_fault,
    get_due_time,
    make_job,
    make_job_message,
    split_into_frames,
)
from celery5.sending.publisher_client import PublisherClient

PARCEL = JobMessage("id", "default", b"{}")
WORDS = [
    ClientHello("shop"),
    PublishRequest(((PARCEL, JobMessage("other", "{events}", b"\x00\xff", "+500", "h")), (PARCEL,))),
    PublishRequest(()),
]


@given(st.lists(st.sampled_from(WORDS), max_size=5), st.lists(st.integers(1, 20)))
def test_frames_come_whole_and_in_order_however_they_are_cut(
    words: list[ClientHello | PublishRequest], cuts: list[int]
) -> None:
    sent, frames, found = b"".join(encode_frame(word) for word in words), FrameReader(10_000), list[object]()
    while sent:
        size = cuts.pop() if cuts else len(sent)
        frames.feed(sent[:size])
        sent = sent[size:]
        while (body := frames.next_frame()) is not None:
            found.append(decode_client_message(body))
    assert found == words
    assert len(frames) == 0


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    frames = FrameReader(100)
    frames.feed((101).to_bytes(4))
    with pytest.raises(FrameTooLarge, match="101 bytes: at most 100"):
        frames.next_frame()


@given(st.binary(max_size=60))
def test_whatever_comes_is_a_word_or_corrupt(body: bytes) -> None:
    for read in (decode_client_message, decode_daemon_message):
        with suppress(Corrupt):
            read(body)


def test_an_answer_is_no_word_of_a_client() -> None:
    with pytest.raises(Corrupt):
        decode_client_message(encode_frame(PublishReply((GroupReply(),)))[4:])
    assert decode_daemon_message(
        encode_frame(PublishReply((GroupReply("full", "why"),)))[4:]
    ) == PublishReply((GroupReply("full", "why"),))


def array(size: int) -> bytes:
    """The head of a list in MessagePack."""
    return b"\xdd" + size.to_bytes(4)


TINY = b"\x93\xa0\xa0\xc4\x00"
"""The smallest parcel there is, in MessagePack."""
BOMBS = {
    "empty groups": array(5_000_000) + b"\x90" * 5_000_000,
    "groups of one": array(600_000) + (b"\x91" + TINY) * 600_000,
    "a group of too many": array(1) + array(1_000_000) + TINY * 1_000_000,
    "many groups of many": array(20) + (array(MAX_MESSAGES) + TINY * MAX_MESSAGES) * 20,
    "a group that says to have more": array(1) + array(4_000_000_000) + TINY * 100_000,
    "groups that are none": array(2) + b"\xc4\x01x" + b"\xda\xff\xff" + b"x" * 65_535,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_frame_of_too_many_is_refused_before_any_message_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels_module, "_GROUP_DECODER", None)
    monkeypatch.setattr(parcels_module, "_CLIENT_DECODER", None)
    with pytest.raises(Corrupt, match="not a message of a client"):
        decode_client_message(b"\x92\xa4hand" + BOMBS[name])


def test_a_group_has_a_message_and_a_frame_has_as_many_as_a_client_sends() -> None:
    for groups in (b"\x91\x90", b"\x92\x91" + TINY + b"\x90"):
        with pytest.raises(Corrupt, match="a group without a message"):
            decode_client_message(b"\x92\xa4hand" + groups)
    one = PublishRequest(((PARCEL,) * MAX_MESSAGES,))
    many = PublishRequest(((PARCEL,),) * MESSAGES_PER_FRAME)
    for word in (one, many):
        assert decode_client_message(encode_frame(word)[4:]) == word


def test_a_call_with_more_jobs_than_a_daemon_takes_is_refused_by_its_sender() -> None:
    client = PublisherClient(address=DaemonAddress(path="/nowhere"), app="shop")
    with pytest.raises(MessageTooLarge, match=r"50,001 jobs in one call: .* send them in several calls"):
        run_blocking(client.publish([Job("id", "task", "mail", b"message", "")] * (MAX_MESSAGES + 1)))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (JobMessage("", "default", b""), "invalid id"),
        (JobMessage("x" * 201, "default", b""), "invalid id"),
        (JobMessage("x", "two words", b""), "invalid queue"),
        (JobMessage("x", "{other}", b""), "invalid queue"),
        (JobMessage("x", "q", b"", "soon"), "invalid time"),
        (JobMessage("x", "q", b"", "+-5"), "invalid time"),
        (JobMessage("x", "q", b"", "", "z"), "invalid lane"),
        (JobMessage("x", "q", b"12345"), "over the daemon's limit"),
    ],
)
def test_what_redis_could_never_take_is_refused_at_the_door(wrong: JobMessage, why: str) -> None:
    found = find_fault(wrong, 4)
    assert found is not None
    assert why in found.why
    assert find_fault(PARCEL, 4) is None


def test_a_job_is_the_same_when_it_comes_out_again() -> None:
    more: dict[str, Any] = {"lane": "h", "waiting_list": "a list", "expires": "1800000000000"}
    sent = Job("id", "task", "mail", b"message", "1700000000000", **more)
    out = decode_job_message(encode_job_message(make_job_message(sent)))
    assert make_job(out, sent.at) == Job("id", "", "mail", b"message", "1700000000000", **more)
    lost = {"task", "ignore_result", "lock", "unique_for", "app"}  # of which publishing makes nothing
    lost.add("sent")  # the message has it
    lost.add("shards")  # of a template: a job has chosen its shard
    lost.add("replicas")  # a job that waits for replicas does not go by the daemon
    assert set(Job.__struct_fields__) - lost == set(JobMessage.__struct_fields__)
    with pytest.raises(Corrupt):
        decode_job_message(b"x")
    assert get_due_time(JobMessage("id", "q", b"", "+1500"), 1000) == 2500
    assert get_due_time(JobMessage("id", "q", b"", "1500"), 1000) is None


def test_groups_go_as_many_at_a_time_as_fit_and_are_never_parted() -> None:
    groups = [(PARCEL,) * 200] * 4
    assert list(split_into_frames(groups)) == [[0, 1], [2, 3]]
    assert list(split_into_frames([(PARCEL,) * (MESSAGES_PER_FRAME + 1), (PARCEL,)])) == [[0], [1]]
    large = (JobMessage("x", "q", b"x" * (BYTES_PER_TRIP + 1)),)
    assert list(split_into_frames([(PARCEL,), large, (PARCEL,)])) == [[0], [1], [2]]
    assert list(split_into_frames([])) == []


def test_addresses() -> None:
    assert parse_daemon_address("unix:///run/p.sock") == DaemonAddress(path="/run/p.sock")
    assert parse_daemon_address("unix://") == DaemonAddress()
    assert parse_daemon_address("tls://box:70?ca=c.pem&certificate=m.pem&key=m.key") == DaemonAddress(
        host="box", port=70, tls=True, ca="c.pem", certificate="m.pem", key="m.key"
    )
    assert str(parse_daemon_address("tcp://[::1]:70")) == "tcp://[::1]:70"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("http://x", "unix:///path"),
        ("/run/p.sock", "unix:///path"),
        ("unix://run/p.sock", "an absolute path"),
        (f"unix:///{'x' * 200}", "107 bytes"),
        ("tls://box", "HOST:PORT"),
        ("tls://box:99999", "HOST:PORT"),
        ("tls://box:1?password=x", "an option 'password'"),
        ("tcp://10.0.0.1:70", "goes by tls"),
    ],
)
def test_addresses_that_are_none_are_refused_with_what_would_be_one(said: str, why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        parse_daemon_address(said)


def test_how_many_connections() -> None:
    assert parse_connections("1") == parse_connections(1) == (1, 1)
    assert parse_connections("1..4") == parse_connections([1, 4]) == (1, 4)
    for wrong in ("", "4..1", "0", "1..4..5", "many", [1, 400], "1..x"):
        with pytest.raises(Misconfigured, match=r"1\.\.4"):
            parse_connections(wrong)
