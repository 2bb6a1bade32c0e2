"""Audit entries: what is stored of an action, what is read of it, and which actions there are."""

import re
from pathlib import Path
from typing import Any

import pytest

from celery5.protocol.audit import (
    ACTIONS,
    AuditEntry,
    encode_entry,
    is_action,
    is_of_action,
    parse_entry,
)

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "audit.md").read_text()


def test_the_guide_lists_every_action() -> None:
    assert dict(re.findall(r"^\| `(\w+:\w+)` \| (.+) \|$", PAGE, re.MULTILINE)) == ACTIONS


def stored(entry: AuditEntry) -> AuditEntry:
    """The entry as it is read again."""
    words = encode_entry(entry)
    return parse_entry("1700000000000-3", dict(zip(words[::2], words[1::2], strict=True)))


def test_an_entry_is_read_as_it_was_written_without_what_selects_nothing() -> None:
    selection: dict[str, Any] = {
        "errors": ("ValueError",),
        "limit": 0,
        "ids": frozenset(),
        "force": False,
        "why": "",
    }
    entry = AuditEntry(id="", who="a@b", source="cli", action="dlq:purge", filter=selection, count=0, job="j")
    found = stored(entry)
    assert (found.who, found.source, found.action, found.count, found.job) == (
        "a@b",
        "cli",
        "dlq:purge",
        0,
        "j",
    )
    assert found.filter == {"errors": ["ValueError"], "limit": 0}
    assert (found.at, found.outcome) == (1_700_000_000.0, "done")


def test_what_is_long_is_shortened() -> None:
    long = "x" * 5000
    found = stored(
        AuditEntry(id="", who=long, source="cli", action="a", target=long, filter={"f": long}, outcome=long)
    )
    assert (len(found.who), len(found.target), len(found.outcome)) == (200, 500, 500)
    assert len(found.filter["shortened"]) == 2000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dlq:replay", True),
        ("worker:anything", True),
        ("worker:", False),
        ("worker", False),
        ("dlq:read", False),
    ],
)
def test_only_known_actions_are_actions(name: str, expected: bool) -> None:
    assert is_action(name) is expected


def test_a_noun_stands_for_all_of_its_actions() -> None:
    assert is_of_action("dlq:replay", "dlq")
    assert not is_of_action("dlq:replay", "dl")
    assert not is_of_action("dlq:replay", "dlq:purge")
