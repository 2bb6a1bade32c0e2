"""Command: what travels comes back, what is unknown survives, and no bytes at all can do harm."""

import json
import sys
from decimal import Decimal
from importlib.resources import files
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from celery5 import App, RetryPolicy
from celery5.errors import Corrupt
from celery5.protocol.job import messages as messages_module
from celery5.protocol.job.messages import (
    MAX_DEPTH,
    MAX_FAILURES,
    SIZE_MARGIN,
    VERSION,
    Command,
    Document,
    Failure,
    add_failure,
    encode,
    is_nested_deeper,
    make_next_attempt,
    read_command,
    read_document,
    read_job_id,
)
from tests.night import examples

SCHEMA: dict[str, Any] = json.loads(files("celery5.protocol").joinpath("command.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

text = st.text(st.characters(codec="utf-8"), max_size=20)
moments = st.floats(0, 4e9)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    # JSON Schema takes 1.0 for a whole number; readers of the Command do not, and the protocol's page says so.
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
failures = st.builds(
    Failure,
    type=text,
    message=text,
    args=st.lists(text, max_size=3).map(tuple),
    traceback=text,
    attempt=st.integers(1, 99),
    worker=text,
    at=moments,
)
policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 99),
    backoff=st.floats(0, 1e6),
    cap=st.floats(0, 1e6),
    jitter=st.booleans(),
)
commands = st.builds(
    Command,
    v=st.just(VERSION),
    id=text.filter(bool),
    task=text.filter(bool),
    args=st.lists(json_values, max_size=3).map(lambda value: Raw(msgspec.json.encode(value))),
    kwargs=st.dictionaries(text, json_values, max_size=3).map(lambda value: Raw(msgspec.json.encode(value))),
    sent=moments,
    attempt=st.integers(1, 99),
    expires=st.none() | moments,
    retry=st.none() | policies,
    ignore_result=st.booleans(),
    trace=text,
    failures=st.lists(failures, max_size=3).map(tuple),
)
FIELDS = st.sampled_from([name for name in Command.__struct_fields__ if name not in ("args", "kwargs")])
"""The arguments are read later, and refused as bad arguments."""
FAILURE = Failure(type="ValueError", message="no", attempt=1, worker="w", at=5.0)


@given(commands)
@settings(max_examples=examples(100), deadline=None)
def test_a_command_comes_back_as_it_was_sent(command: Command) -> None:
    assert read_command(encode(command)) == command


@given(commands)
@settings(max_examples=examples(100), deadline=None)
def test_whatever_is_sent_fits_the_published_schema(command: Command) -> None:
    VALIDATOR.validate(json.loads(encode(command)))


@given(json_values, st.dictionaries(FIELDS | text, json_values, max_size=4))
@settings(max_examples=examples(100), deadline=None)
def test_what_can_be_read_fits_the_schema_and_what_fits_can_be_read(value: Any, more: dict[str, Any]) -> None:
    for candidate in (value, more, {"v": 1, "id": "a", "task": "t", **more}):
        raw = msgspec.json.encode(candidate)
        assert readable(raw) == VALIDATOR.is_valid(candidate), raw


def readable(raw: bytes) -> bool:
    try:
        read_command(raw)
    except Corrupt:
        return False
    return True


BAD: dict[str, Any] = {
    "nothing in it": {},
    "no task": {"v": 1, "id": "a"},
    "no id": {"v": 1, "task": "t"},
    "no version": {"id": "a", "task": "t"},
    "an empty id": {"v": 1, "id": "", "task": "t"},
    "a long id": {"v": 1, "id": "a" * 201, "task": "t"},
    "an id that is a number": {"v": 1, "id": 5, "task": "t"},
    "an empty task": {"v": 1, "id": "a", "task": ""},
    "another version": {"v": 2, "id": "a", "task": "t"},
    "attempt 0": {"v": 1, "id": "a", "task": "t", "attempt": 0},
    "half an attempt": {"v": 1, "id": "a", "task": "t", "attempt": 1.5},
    "expires as text": {"v": 1, "id": "a", "task": "t", "expires": "tomorrow"},
    "retries below 0": {"v": 1, "id": "a", "task": "t", "retry": {"max_retries": -1}},
    "backoff below 0": {"v": 1, "id": "a", "task": "t", "retry": {"backoff": -1}},
    "a wait of ages": {"v": 1, "id": "a", "task": "t", "retry": {"cap": 1e300}},
    "a failure with no message": {"v": 1, "id": "a", "task": "t", "failures": [{"type": "E"}]},
    "ignore_result as a number": {"v": 1, "id": "a", "task": "t", "ignore_result": 1},
    "a list": [],
    "a number": 5,
    "null": None,
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_command_is_corrupt_and_breaks_the_schema(what: str) -> None:
    with pytest.raises(
        Corrupt, match=r"^(not a Command: .+|Command of version 2; .*upgrade the workers first)$"
    ):
        read_command(msgspec.json.encode(BAD[what]))
    assert not VALIDATOR.is_valid(BAD[what])


def test_a_call_without_arguments_takes_no_bytes_for_them() -> None:
    app = App("t", broker="redis://127.0.0.1:1/0")

    @app.task(name="t.nop")
    def nop(size: int = 1) -> None: ...

    assert set(json.loads(nop.job().message)) == {"v", "id", "task"}
    assert set(json.loads(nop.s().job().message)) == {"v", "id", "task"}
    assert read_command(nop.job().message).args == Raw(b"[]")
    assert json.loads(nop.job(2).message)["args"] == [2]
    assert "args" not in json.loads(nop.job(size=2).message)


@pytest.mark.parametrize("bad", [{"args": {}}, {"args": "abc"}, {"kwargs": []}, {"kwargs": 1}])
def test_the_schema_knows_what_arguments_look_like(bad: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid({"v": 1, "id": "a", "task": "t", **bad})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"\x80\x81",
        b'{"v":1,"id":"\xff","task":"t"}',
        b'{"v":1,"id":"\\ud800","task":"t"}',
        b'{"v":1,"id":"a","task":"t","sent":1e400}',
        b'{"v":1,"id":"a","task":"t","args":' + b"[" * 100_000,
        b'{"v":1,"id":"a","task":"t","args":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"v":1,"id":"a","task":"t","x":' + b'{"x":' * 100_000,
        b"[" * 500_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_bytes_that_are_no_command_are_corrupt_and_nothing_worse(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="not a Command: "):
        read_command(raw)
    with pytest.raises(Corrupt, match="not a document: "):
        read_document(raw)


@given(st.binary(max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_any_bytes_are_a_command_or_corrupt(raw: bytes) -> None:
    readable(raw)


def test_a_later_version_is_told_as_such_even_when_its_fields_differ() -> None:
    with pytest.raises(
        Corrupt, match="Command of version 7; this worker reads version 1: upgrade the workers first"
    ):
        read_command(b'{"v":7,"id":{"of":"another kind"}}')


@given(st.dictionaries(text, json_values, max_size=4), failures)
@settings(max_examples=examples(100), deadline=None)
def test_unknown_fields_survive_every_hop(unknown: dict[str, Any], failure: Failure) -> None:
    ours = {field.encode_name for field in msgspec.structs.fields(Command)}
    expected = {name: value for name, value in unknown.items() if name not in ours}
    raw = msgspec.json.encode({**expected, "v": 1, "id": "a", "task": "t"})
    for hop in (make_next_attempt, add_failure):
        after = msgspec.json.decode(hop(raw, failure))
        assert {name: after[name] for name in expected} == expected
        assert read_command(hop(raw, failure)).failures == (failure,)


def test_the_arguments_of_a_retry_are_those_that_were_sent_to_the_last_digit() -> None:
    args = '[12345678901234567890.123456789012345678, 1.10, 123456789012345678901234567890, "\\u00e9"]'
    raw = f'{{"v":1,"id":"a","task":"t","args":{args},"later":{{"price":0.1000000000000000055}}}}'.encode()
    after = make_next_attempt(make_next_attempt(raw, FAILURE), FAILURE)
    assert bytes(read_command(after).args).decode() == args
    assert json.loads(after, parse_float=Decimal)["later"]["price"] == Decimal("0.1000000000000000055")


def test_each_attempt_counts_and_the_last_failures_are_remembered() -> None:
    raw = encode(Command(v=1, id="a", task="t"))
    for attempt in range(1, MAX_FAILURES + 4):
        assert read_command(raw).attempt == attempt
        raw = make_next_attempt(raw, Failure(type="E", message=str(attempt), attempt=attempt))
    assert [failure.message for failure in read_command(raw).failures] == ["4", "5", "6", "7", "8"]
    command = read_command(add_failure(raw, FAILURE))
    assert command.attempt == MAX_FAILURES + 4
    assert command.failures[-1] == FAILURE


@given(
    st.builds(Document, v=st.just(1), id=text, task=text, state=text, reason=text, attempt=st.integers(1, 9))
)
@settings(max_examples=examples(50), deadline=None)
def test_a_document_comes_back_as_it_was_written(document: Document) -> None:
    assert read_document(encode(document)) == document


def test_every_command_that_a_task_makes_fits_the_schema() -> None:
    app = App("schema")

    @app.task(max_retries=2, ignore_result=True, expires=30)
    async def work(x: int, *rest: str, flag: bool = False) -> None: ...

    jobs = [work.job(1), work.job(1, "a", flag=True), work.options(backoff=0.5, jitter=False).job(x=3)]
    for job in jobs:
        command = json.loads(job.message)
        VALIDATOR.validate(command)
        assert command["id"] == job.id
        assert command["task"] == job.task == work.name


def test_the_schema_is_itself_a_schema_and_names_every_field() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    properties = SCHEMA["properties"]
    assert set(properties) == set(Command.__struct_fields__)
    assert set(properties["retry"]["properties"]) == set(RetryPolicy.__struct_fields__)
    assert set(properties["failures"]["items"]["properties"]) == set(Failure.__struct_fields__)


def depth_of(value: Any) -> int:
    """How many lists and objects of a value are inside each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


tricky = st.text(st.sampled_from('[]{}"\\nu,:x'), max_size=8)
"""Texts that look like the structure around them."""
nested_values = st.recursive(
    st.none() | tricky,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=30,
)


@given(nested_values)
@settings(max_examples=examples(500), deadline=None)
def test_the_depth_of_a_message_is_known_whatever_its_texts_look_like(value: Any) -> None:
    depth = depth_of(value)
    for raw in (msgspec.json.encode(value), json.dumps(value, indent=1).encode()):
        assert not is_nested_deeper(raw, depth)
        assert not depth or is_nested_deeper(raw, depth - 1)


@pytest.mark.parametrize(
    "hiding",
    [
        b"[" * 1000 + b'"]"' + b"]" * 1000,
        b'["]",' * 1000
        + b'"'
        + b"[" * 1000
        + b'"'
        + b"]" * 1000,  # as many brackets in texts as hide the others
        b'["]",' * 1000 + b"1" + b',"["]' * 1000,
        b'["\\"]",' * 1000 + b'"[\\\\"' + b"]" * 1000,
        b'{"]}":' * 1000 + b"1" + b"}" * 1000,
        b"[" + b"[]," * 5000 + b"[" * 1000 + b"]" * 1000 + b"]",
        (b"[" * 10 + b'"' + b"x" * 8187 + b'",') * 100 + b"1" + b"]" * 1000,
    ],
    ids=["one", "balanced", "flat", "escaped", "objects", "after many flat ones", "between long texts"],
)
def test_no_text_hides_how_deep_a_message_is(hiding: bytes) -> None:
    assert is_nested_deeper(hiding, 999)
    assert not is_nested_deeper(hiding, 1001)


def steps_of(raw: bytes) -> tuple[int, int]:
    """How many lines of Python a check of the depth runs, and how many bytes its calls of C go over at most."""
    lines, sizes = 0, [0]

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        sizes.append(sum(len(value) for value in frame.f_locals.values() if isinstance(value, bytes)))
        return trace

    sys.settrace(trace)
    try:
        assert not is_nested_deeper(raw, MAX_DEPTH)
    finally:
        sys.settrace(None)
    return lines, max(sizes)


@pytest.mark.parametrize("depth", [2, 60, 450, 899])
def test_the_work_of_the_depth_check_grows_with_the_size_alone(depth: int) -> None:
    """Not with size times depth, as one pass for each level would."""

    def message(brackets: int) -> bytes:
        return b"[" + b",".join([b"[" * depth + b'"]"' + b"]" * depth] * (brackets // 2 // depth)) + b"]"

    small, large = message(50_000), message(400_000)
    (few, some), (many, more) = steps_of(small), steps_of(large)
    assert few <= 20 + len(small) // 100  # by blocks, not by brackets or levels
    assert many <= 10 * few
    assert more <= 10 * some


def test_a_message_above_the_limit_is_refused_before_anything_of_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = b'{"v": 1, "id": "large", "task": "t", "args": ["' + b"x" * (SIZE_MARGIN + 2000) + b'"]}'
    assert read_command(raw).id == "large"
    assert read_command(raw, len(raw) - SIZE_MARGIN).id == "large"
    for name in ("_ENVELOPE", "_VERSION", "_ID", "_DOCUMENT"):
        monkeypatch.setattr(messages_module, name, None)
    with pytest.raises(Corrupt, match=r"not a Command: \d+ bytes, and message_limit is 1024 here: raise it"):
        read_command(raw, 1024)
    with pytest.raises(Corrupt, match=r"not a document: \d+ bytes, and message_limit is 1024 here"):
        read_document(raw, 1024)


@pytest.mark.parametrize("start", [b'{"v":1,"id":"a-1",', b' { "id" : "a-1", "v": 1,', b'{"v":7,"id":"a-1",'])
def test_the_id_of_a_huge_message_is_found_without_decoding_it(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = start + b'"x":"' + b"x" * SIZE_MARGIN + b'"}'
    decoded = list[int]()
    real = messages_module._ID

    class Watched:
        def decode(self, given: bytes) -> Any:
            decoded.append(len(given))
            return real.decode(given)

    monkeypatch.setattr(messages_module, "_ID", Watched())
    assert read_job_id(raw) == "a-1"
    assert read_job_id(b'{"x":"' + b"x" * SIZE_MARGIN + b'","id":"late"}') == ""
    assert max(decoded) < 1000
