"""Tables at a terminal: each list command fits its width, cuts no id, and says what it leaves out."""

import io
import re
import sys
from collections.abc import Iterator

import pytest

from celery5 import every
from celery5.cli.main import cli
from tests.story.cli.commands import Serving
from tests.story.conftest import Desk

WORKER = "worker-of-the-first-shop-1"
LISTS = (
    *("alert history", "alert list", "alert rules", "audit list", "bulk list"),
    *("config show", "dlq count", "dlq groups", "dlq read", "event list", "info", "keys show"),
    *("metrics history", "metrics show", "queue list", "queue storage", "schedule list", "stream list"),
    *("task limits", "task list", "task search", "worker active", "worker health"),
    *(
        "worker list",
        "worker ping",
        "worker prefetch",
        "worker stats",
        "workflow list",
        "docs",
        "docs dead letters",
    ),
)
"""The commands that print tables, and need no Controller."""


PROSE = re.compile(r"test-each-\S+ at |suspended  |/|\S+  (ok|fail|warn|degraded)  ")
"""How lines begin that are no rows of a table: a terminal wraps them."""


class Terminal(io.StringIO):
    """What a terminal shows."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True


@pytest.fixture
def busy(desk: Desk) -> Iterator[Desk]:
    """The application with long names and texts, and a worker."""
    desk.app.queue("a-queue-with-a-rather-long-name-for-letters")
    shop = sys.modules["shop"]
    shop.hopeless.delay()
    shop.multiply.options(queue="a-queue-with-a-rather-long-name-for-letters").delay(1, 2)
    shop.stuck.delay()
    desk.app.schedule.add(shop.add.s(1, 2), every(3600), name="each-hour-for-the-books-of-the-shop")
    desk.app.limits.suspend(shop.whose, why="the bank is down, and nobody knows until when it will be down")
    with Serving("-A", "shop", "worker", "start", "--name", WORKER, cwd=desk.folder) as one:
        one.ready()
        yield desk
        desk.app.limits.resume(shop.whose)


def show(monkeypatch: pytest.MonkeyPatch, words: str, columns: int) -> str:
    """Return what a command writes to a terminal of this width."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal)
    try:
        cli.main(["-A", "shop", *words.split()], standalone_mode=False)
    finally:
        monkeypatch.undo()
    return terminal.getvalue()


def test_each_list_fits_a_terminal_of_80_100_and_160_columns(
    busy: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = next(iter(busy.app.dlq.read())).id if busy.app.dlq.count() else ""
    too_wide: list[tuple[str, int, str]] = []
    for words in LISTS:
        for columns in (80, 100, 160):
            shown = show(monkeypatch, words, columns)
            assert shown
            too_wide += [
                (words, columns, line)
                for line in shown.splitlines()
                if len(line) > columns and not PROSE.match(line)
            ]
            if words == "dlq read" and job:
                assert job in shown
            if words == "worker list":
                assert re.search(rf"^{WORKER}", shown, re.MULTILINE)
    assert too_wide == [], "\n".join(map(str, too_wide))
