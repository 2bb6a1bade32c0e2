"""Masking: no password is shown, whatever else is."""

import time
from typing import Any

import pytest
from msgspec import Raw

from celery5.config.settings import format_value as said
from celery5.protocol.job.arguments import MAX_CALL_LENGTH, format_call
from celery5.protocol.job.history import MAX_DECODED, NO_SHAPE, CallShape
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, mask_lines, mask_passwords, mask_shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://u:pa:ss@w0rd@host:1/2", "redis://u:***@host:1/2"),
        ("redis://me:se@cr/et:hush@host/0", "redis://me:***@host/0"),
        ("redis://me:two words@host", "redis://me:***@host"),
        ("unix:///run/user@1000/r.sock", "unix:///run/user@1000/r.sock"),
        ("rediss://:hush@host", "rediss://:***@host"),
        ("unix:///run/r.sock?password=hush&db=1", "unix:///run/r.sock?password=***&db=1"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ({"mails": "redis://a:hush@b"}, {"mails": "redis://a:***@b"}),
        (
            {"s": {"kwargs": {"api_key": "hush", "db_password": "hush", "n": 2}}},
            {"s": {"kwargs": {"api_key": "***", "db_password": "***", "n": 2}}},
        ),
        (["redis://a:hush@b", 3], ["redis://a:***@b", 3]),
        (None, None),
    ],
)
def test_no_password_is_ever_shown(value: Any, shown: Any) -> None:
    assert mask_passwords(value) == shown


@pytest.mark.parametrize(
    "value",
    [
        "redis://me/hu:sh@host",
        "redis://hush@host",
        "://hush:hush@",
        "redis://a:hush@b, redis://c:hush@d",
        "unix:///run/r.sock?db=1&password=hush'hush",
        b"redis://:hush@host",
        {"mails": "redis://hu/sh@b"},
    ],
)
def test_possible_passwords_are_hidden_in_what_is_no_url(value: object) -> None:
    assert "hu" not in said(value)
    assert "sh" not in said(value)


@pytest.mark.parametrize(
    "text",
    [
        "refused: password=hush",
        "sign_in('bob', password='hush hush')",
        '{"token": "hush", "n": 2}',
        "{'api_key': 'hush'}",
        "Authorization: Bearer hush",
        "DB_PASSWORD = hush",
        "client_secret: hush",
        "GET https://bob:hush@example.org/?token=hush&n=2",
    ],
)
def test_what_a_text_assigns_to_the_name_of_a_secret_is_masked(text: str) -> None:
    for shown in (mask_lines(f"first line\n{text}\nlast line"), mask_shown(["x", text])[1]):
        assert "hush" not in shown
        assert "***" in shown
    assert mask_lines(f"first line\n{text}\nlast line").count("\n") == 2


@pytest.mark.parametrize("text", ["if token == other:", "the token expired", "12 tokens left", "no password"])
def test_a_text_that_assigns_nothing_stays(text: str) -> None:
    assert mask_lines(text) == text


def test_what_is_nested_too_deeply_is_not_shown() -> None:
    value: Any = "hush"
    for _ in range(5000):
        value = [value]
    assert "hush" not in mask_shown(value)


@pytest.mark.parametrize("doubtful", [False, True])
@pytest.mark.parametrize(
    "text", ["//a:" * 50_000, "@" + "//a:" * 50_000, "pass" * 50_000, "//" * 100_000 + "@"]
)
def test_a_long_text_takes_no_longer_for_each_of_its_characters(text: str, doubtful: bool) -> None:
    began = time.process_time()
    mask_lines(text)
    mask_passwords(text, maybe_url=doubtful)
    assert time.process_time() - began < 1  # it was minutes; now it is milliseconds


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (b"[]", b"{}", ""),
        (b'[7,"hush"]', b"{}", 'order=7, token="***"'),
        (b"[7]", b'{"card":{"api_key":"hush","n":1}}', 'order=7, card={"api_key":"***","n":1}'),
        (b'[7,"",3,"redis://a:hush@b"]', b"{}", 'order=7, token="", 3, "redis://a:***@b"'),
        (b'["\\u001b[31m"]', b"{}", 'order="\\u001b[31m"'),
        (b"[7", b"{}", "(unreadable)"),
        (b"{}", b"{}", "(unreadable)"),
        (b"[" * 899 + b"]" * 899, b"{}", None),
    ],
)
def test_the_arguments_of_a_call_are_shown_on_a_line_without_passwords(
    args: bytes, kwargs: bytes, text: str | None
) -> None:
    shown = format_call(CallShape(("order", "token")), Raw(args), Raw(kwargs))
    assert text is None or shown == text
    assert "hush" not in shown
    assert len(shown) <= MAX_CALL_LENGTH + 3


def test_long_arguments_are_shortened_and_very_long_ones_not_even_read() -> None:
    long = format_call(NO_SHAPE, Raw(b'["' + b"x" * 1000 + b'"]'), Raw(b"{}"))
    assert long == '"' + "x" * (MAX_CALL_LENGTH - 1) + "..."
    assert format_call(NO_SHAPE, Raw(b"[" + b"1," * MAX_DECODED + b"1]"), Raw(b"{}")).endswith(" bytes)")


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_errors_are_described_on_one_line() -> None:
    assert describe_error(ValueError("several\n  lines\tof text")) == "ValueError: several lines of text"
    assert describe_error(ValueError("a" * 600), MAX_ERROR_LENGTH) == "ValueError: " + "a" * 500
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(_Unprintable()) == "_Unprintable: <no text>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "broker redis://:***@localhost:1/0 is full (OOM ..., on @user_script:10.)",
            "broker redis://:***@localhost:1/0 is full (OOM ..., on @user_script:10.)",
        ),
        (
            "redis://a:***@one/0, then redis://b:pa@ss@two/0 is away",
            "redis://a:***@one/0, then redis://b:***@two/0 is away",
        ),
        ("redis://:***@one, redis://:***@two", "redis://:***@one, redis://:***@two"),
    ],
)
def test_what_is_masked_already_stays_as_it_is(text: str, shown: str) -> None:
    assert mask_passwords(text) == mask_lines(text) == shown
