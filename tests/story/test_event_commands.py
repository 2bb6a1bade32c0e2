"""Event commands: events on the command line, and what is said to those who ask for what is not there.

Floor: tests. Reads: what the commands print. Writes: events.
"""

import json
from pathlib import Path

import pytest

from tests.story.commands import celery5
from tests.story.conftest import Desk

EVENT = """

@app.event(name="shop.Paid")
class Paid:
    order: int
    note: str = ""
"""


@pytest.fixture
def paid(desk: Desk) -> Desk:
    """A desk whose application has an event."""
    page = desk.folder / "shop.py"
    page.write_text(page.read_text() + EVENT)
    return desk


def test_an_event_is_sent_and_seen(paid: Desk) -> None:
    sent = json.loads(paid("event", "send", "shop.Paid", "order=7", "note=by hand", "--json"))
    assert (sent["event"], sent["version"]) == ("shop.Paid", 1)
    (state,) = json.loads(paid("event", "list", "--json"))
    assert (state["event"], state["fields"], state["subscribers"]) == ("shop.Paid", ["order", "note"], [])
    assert "nobody is subscribed" in paid("event", "show", "shop.Paid")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "shop.Payed"), "no event 'shop.Payed' is known: did you mean 'shop.Paid'?"),
        (("send", "Nothing"), "no event 'Nothing' is known: known: shop.Paid"),
        (("send", "shop.Paid", "order"), "'order' is no field: write FIELD=VALUE"),
        (("send", "shop.Paid", "order=x"), "field 'order' takes int"),
        (("send", "shop.Paid"), "order"),
        (("send", "shop.Paid", "order=1", "--version", "2"), "has no version 2 here; there is 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(paid: Desk, words: tuple[str, ...], said: str) -> None:
    ended = celery5("-A", "shop", "event", *words, cwd=Path(paid.folder))
    assert ended.code != 0
    assert said in ended.error
