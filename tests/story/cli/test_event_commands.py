"""Event commands: events on the command line, and what is said to those who ask for what is not there."""

import json
import re
from pathlib import Path

import pytest

from tests.story.cli.commands import Serving, celery5, until
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
    words = ("-A", "shop", "event", "send", "shop.Paid", "order=7", "note=by hand", "--json")
    sent = json.loads(celery5(*words, cwd=paid.folder).out)
    assert (sent["event"], sent["version"]) == ("shop.Paid", 1)
    (state,) = json.loads(celery5("-A", "shop", "event", "list", "--json", cwd=paid.folder).out)["events"]
    assert (state["event"], state["fields"], state["subscribers"]) == ("shop.Paid", ["order", "note"], [])
    assert "nobody is subscribed" in paid("event", "show", "shop.Paid")
    (entry,) = paid.app.audit.list()
    assert (entry.action, entry.source, entry.target, entry.count) == ("event:send", "cli", "shop.Paid", 1)
    assert entry.filter == {"event": sent["id"], "version": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "shop.Payed"), "no event 'shop.Payed' is known: did you mean 'shop.Paid'?"),
        (("send", "Nothing"), "no event 'Nothing' is known; those that are: shop.Paid"),
        (("send", "shop.Paid", "order"), "'order' is not a parameter: write name=value"),
        (("send", "shop.Paid", "order=x"), "field 'order' takes int"),
        (("send", "shop.Paid"), "order: int, note: str = ''"),
        (
            ("send", "shop.Paid", "order=1", "noet=x"),
            "no field 'noet': did you mean 'note'? its fields: order, note",
        ),
        (("send", "shop.Paid", "order=1", "colour=x"), "no field 'colour'; its fields: order, note"),
        (("send", "shop.Paid", "order=1", "--version", "2"), "has no version 2 here; there is 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(paid: Desk, words: tuple[str, ...], said: str) -> None:
    ended = celery5("-A", "shop", "event", *words, cwd=Path(paid.folder))
    assert ended.code != 0
    assert said in ended.error


def test_sender_is_warned_without_a_router_and_events_are_counted(paid: Desk) -> None:
    silence = f"no Router of {paid.app.name} is running: events wait"
    for n in range(3):
        ended = celery5("-A", "shop", "event", "send", "shop.Paid", f"order={n}", cwd=paid.folder)
        assert (ended.code, ended.error) == (0, silence)
    seen = celery5("-A", "shop", "event", "list", cwd=paid.folder)
    assert (seen.code, seen.error, "for a Router: 3 wait" in seen.out) == (0, silence, True)
    told = json.loads(celery5("-A", "shop", "event", "list", "--json", cwd=paid.folder).out)
    assert (told["waiting"], told["held"], told["routers"]) == (3, 0, [])
    assert re.search(r"(?m)^events +3 wait\nrouters +none is alive$", paid("info"))
    overview = json.loads(paid("info", "--json"))
    assert (overview["events"]["waiting"], overview["routers"], overview["schedulers"]) == (3, [], [])


def test_routers_and_schedulers_are_named_where_workers_are(paid: Desk) -> None:
    with (
        Serving("-A", "shop", "router", "start", "--name", "route1", cwd=paid.folder) as router,
        Serving("-A", "shop", "scheduler", "start", "--name", "s1", cwd=paid.folder) as scheduler,
    ):
        until(lambda: router.logged("router:started") and scheduler.logged("scheduler:started"))
        paid("event", "send", "shop.Paid", "order=1")
        seen = paid("info")
        assert re.search(r"(?m)^routers +route1:", seen)
        assert re.search(r"(?m)^schedulers +s1:", seen)
        missed = celery5("-A", "shop", "worker", "ping", "--to", "zzz", "--timeout", 0.05, cwd=paid.folder)
        assert "those that do: none; Routers: route1; Schedulers: s1" in missed.error
        missed = celery5("-A", "shop", "worker", "ping", "--to", "route9", "--timeout", 0.05, cwd=paid.folder)
        assert "no worker 'route9' lives: did you mean 'route1'?" in missed.error
        health = celery5("-A", "shop", "health", cwd=paid.folder)
        assert health.code == 1
        assert re.search(
            r"no worker of \S+ is alive; others are: routers: route1:\S+; schedulers: s1:", health.out
        )


def test_events_of_another_application_are_listed_and_shown_where_they_are_declared(desk: Desk) -> None:
    page = desk.folder / "shop.py"
    page.write_text(page.read_text() + EVENT.replace('"shop.Paid"', '"other.Paid", of="other"'))
    assert re.search(r"(?m)^other.Paid +other +1 +0 +0 +0$", desk("event", "list"))
    (state,) = json.loads(desk("event", "list", "--json"))["events"]
    assert (state["event"], state["of"], state["fields"]) == ("other.Paid", "other", ["order", "note"])
    assert "fields: order, note" in desk("event", "show", "other.Paid")


LISTENING = """
@Paid.subscribe
@app.task
def note(order: int) -> None: ...
"""


def test_a_subscription_is_taken_back_and_allowed_again(paid: Desk) -> None:
    page = paid.folder / "shop.py"
    page.write_text(page.read_text() + LISTENING)
    words = ("event", "unsubscribe", "shop.Paid", "shop.note", "--yes")
    before = celery5("-A", "shop", *words, cwd=paid.folder)
    assert (before.code, before.error) == (
        1,
        "Error: shop.note is not subscribed to shop.Paid; those that are: none",
    )
    with Serving("-A", "shop", "worker", "start", cwd=paid.folder) as worker:
        worker.ready()
        until(lambda: "shop.note" in paid("event", "show", "shop.Paid"))
        for wrong, meant in (
            (("shop.Pad", "shop.note"), "no event 'shop.Pad' is known: did you mean 'shop.Paid'?"),
            (("shop.Paid", "shop.noet"), f"did you mean 'shop.note' of {paid.app.name}?"),
        ):
            typo = celery5("-A", "shop", "event", "unsubscribe", *wrong, "--yes", cwd=paid.folder)
            assert (typo.code, typo.out) == (1, "")
            assert meant in typo.error
        assert paid(*words) == "shop.note gets no more shop.Paid\n"
        shown = paid("event", "show", "shop.Paid")
        assert "nobody is subscribed" in shown
        assert f"withdrawn: shop.note of {paid.app.name}\n" in shown
        (state,) = json.loads(paid("event", "show", "shop.Paid", "--json"))
        assert state["taken_back"] == [{"app": paid.app.name, "task": "shop.note"}]
        allowed = paid("event", "resubscribe", "shop.Paid", "shop.note")
        assert allowed == "shop.note gets shop.Paid as soon as a worker declares it\n"
        again = celery5("-A", "shop", "event", "resubscribe", "shop.Paid", "shop.note", cwd=paid.folder)
        assert (again.code, again.error) == (
            1,
            "Error: no subscription of shop.note to shop.Paid was withdrawn",
        )
