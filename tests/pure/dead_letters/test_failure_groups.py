"""Groups of dead jobs: which messages are the same, and what a group tells."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.protocol.job.dead_letters import DeadJob, make_dead_job, parse_filter
from celery5.protocol.job.error_text import MAX_LENGTH, is_group_id, normalise_message
from celery5.protocol.job.failure_groups import MAX_GROUPS, SAMPLES, DeadJobGrouping
from celery5.protocol.job.messages import Command, Document, Failure, encode

UUID = "123e4567-e89b-12d3-a456-426614174000"
TRICKY = "a1'\"` /.@:-#<>*\\bZ_,+x0f%(\nµé"


@pytest.mark.parametrize(
    ("message", "normalised"),
    [
        ("", ""),
        ("the bank is closed", "the bank is closed"),
        ("no such order 7", "no such order #"),
        ("-5 of +3 jobs", "-# of +# jobs"),
        ("1,234,567 rows", "# rows"),
        ("took 1.5ms of 30s, 99% done", "took #ms of #s, #% done"),
        ("10:11:12 and 9:30", "# and #"),
        ("node3.example, shard12a", "node#.example, shard#a"),
        ("can't open file '/a/b'", "can't open file '*'"),
        ("said 'don't' and \"it's\"", "said '*' and \"*\""),
        ("{'a': 1, 'b': 'x'}", "{'*': #, '*': '*'}"),
        ("an empty '' stays", "an empty '' stays"),
        ("/var/log/x1.log: denied", "/*: denied"),
        ("./run and ~/x", "./run and ~/x"),
        ("and/or", "and/or"),
        ("C:\\tmp\\x.txt missing", "C:\\* missing"),
        ("GET https://x.example/y?q=1, then 500", "GET <url>, then #"),
        ("redis://10.0.0.1:6379/0 refused", "<url> refused"),
        ("mail to anna.b+c@shop.example failed", "mail to *@* failed"),
        ("connect 10.1.2.3:6379 refused", "connect <ip> refused"),
        ("connect fe80::1ff:fe23:4567:890a refused", "connect <ip> refused"),
        ("2026-11-24T14:00:01.123Z", "<date>"),
        ("from 2026-11-24 to 2026-12-01 10:00", "from <date> to <date>"),
        (f"id {UUID} gone", "id # gone"),
        ("commit 9fceb02d0ae598e9 is unknown", "commit # is unknown"),
        ("<Order object at 0x7f3a9c001234>", "<Order object at #>"),
        ("charge ch_8fK2q9Lz77 declined", "charge ch_# declined"),
        ("two\n lines\tof  text ", "two lines of text"),
        ("cannot parse '" + "x1 " * MAX_LENGTH, "cannot parse '*'"),
    ],
)
def test_what_differs_from_failure_to_failure_becomes_a_placeholder(message: str, normalised: str) -> None:
    assert normalise_message(message) == normalised


HEX = "0123456789abcdef"
IDS = (
    st.text(HEX, min_size=8, max_size=40).filter(lambda text: any(char.isdigit() for char in text))
    | st.text("0123456789", min_size=1, max_size=40)
    | st.uuids().map(str)
    | st.uuids().map(lambda match: match.hex.upper())
)
"""Ids in several notations; of hexadecimal ones, some begin with digits, and some have nothing else."""


MESSAGES = ("CRM answered 502, request {}", "no order {}: gone", "id={}", "cus_{} failed", "({})")


@given(IDS, IDS, st.sampled_from(MESSAGES))
def test_ids_in_any_notation_are_one_cause(one: str, other: str, message: str) -> None:
    if "_" in message:  # a word has no dash
        one, other = one.replace("-", ""), other.replace("-", "")
    assert normalise_message(message.format(one)) == normalise_message(message.format(other))


@given(st.text(st.sampled_from(TRICKY), max_size=30) | st.text())
def test_what_is_normalised_stays_as_it_is_and_never_grows(message: str) -> None:
    normalised = normalise_message(message)
    assert normalise_message(normalised) == normalised
    assert len(normalised) <= min(len(message), MAX_LENGTH)
    assert not any(digit in normalised for digit in "0123456789")


@given(st.text(st.sampled_from(TRICKY), min_size=1, max_size=6))
def test_the_time_of_a_message_is_bounded_whatever_its_length(part: str) -> None:
    began = time.process_time()
    normalise_message(part * (1_000_000 // len(part)))
    assert time.process_time() - began < 0.1  # 2 ms, and room for a slow machine


def dead(
    number: int, message: str = "no such order 7", *, task: str = "shop.t", queue: str = "default"
) -> DeadJob:
    """A dead job that has died in that second."""
    failure = Failure(type="ValueError", message=message, traceback=f"Traceback {number}")
    return make_dead_job(
        queue,
        f"{1000 * number}-0",
        encode(Command(v=1, id=f"j{number}", task=task)),
        encode(Document(v=1, id=f"j{number}", task=task, state="DEAD", reason="exhausted", failure=failure)),
    )


def test_a_group_tells_how_many_when_where_and_of_which_kind() -> None:
    grouping = DeadJobGrouping()
    for number in range(50, 0, -1):
        grouping.add(dead(number, f"no such order {number}", queue="slow" if number > 40 else "default"))
    grouping.add(dead(60, "the bank is closed"))
    found = grouping.finish(looked_at=80, total=80, last=None)
    first, second = found.groups
    assert (first.task, first.type, first.pattern, first.count) == (
        *("shop.t", "ValueError", "no such order #"),
        50,
    )
    assert (first.first_died, first.last_died, first.queues) == (1, 50, ("default", "slow"))
    assert (first.message, first.traceback) == ("no such order 50", "Traceback 50")
    assert first.ids == tuple(f"j{number}" for number in range(50, 50 - SAMPLES, -1))
    assert (second.count, second.reasons) == (1, ("exhausted",))
    assert (found.looked_at, found.matched, found.ungrouped, found.next) == (80, 51, 0, "")


def test_groups_are_bounded_and_further_ones_are_counted() -> None:
    grouping = DeadJobGrouping()
    for number in range(MAX_GROUPS + 7):
        grouping.add(dead(number, task=f"t{number}"))
    found = grouping.finish(looked_at=MAX_GROUPS + 7, total=0, last=dead(9))
    assert (len(found.groups), found.ungrouped, found.next) == (MAX_GROUPS, 7, "default:9000-0")


def test_the_id_of_a_group_is_stable_and_selects_its_jobs() -> None:
    job = dead(1)
    assert job.group == dead(2, "no such order 8").group == "f52de1ad1ef0"
    assert is_group_id(job.group)
    others = {dead(1, "no such file").group, dead(1, task="shop.u").group}
    assert len(others | {job.group}) == 3
    assert job in parse_filter({"group": [job.group, "0" * 12]})
    assert job not in parse_filter({"group": "0" * 12})
    with pytest.raises(Misconfigured, match="group is 'g1': give the id of a group, 12 hexadecimal digits"):
        parse_filter({"group": "g1"})
