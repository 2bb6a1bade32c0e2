"""Commands that the output shows begin as the user called celery5: they can be copied."""

from collections.abc import Iterator
from typing import Any

import pytest

import celery5.cli.main as command_line
from celery5.cli.terminal.output import (
    INVOCATION,
    Invocation,
    as_called,
    format_cell,
    format_table,
    to_one_line,
)

DJANGO: dict[str, Any] = {"program": "manage.py celery5", "shown_program": "python manage.py celery5"}
ADDED: dict[str, Any] = {**DJANGO, "has_application": True}
CALLS: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {}, "celery5"),
    (["-A", "shop"], {}, "celery5 -A shop"),
    (["-A", "my shop"], {}, "celery5 -A 'my shop'"),
    (["--app-name", "shop"], {}, "celery5 --app-name shop"),
    (["-A", "shop.celery:app"], ADDED, "python manage.py celery5"),
    (["-A", "orders"], DJANGO, "python manage.py celery5 -A orders"),
]
TEXTS = {
    "{} alert list says since when": "celery5 alert list says since when",
    "start one with {} worker start; {} docs doctor": "start one with celery5 worker start; celery5 docs doctor",
    "`{} queue storage` shows it": "`celery5 queue storage` shows it",
    "what celery5 checks of celery5-worker@.service": "what celery5 checks of celery5-worker@.service",
    "/usr/bin/celery5 worker start": "/usr/bin/celery5 worker start",
    "celery5 -A APP worker start": "celery5 -A APP worker start",
}
"""What a text becomes, with `{}` for how the user called it, and the text."""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave how celery5 was called as it was, and let this process go on: beside other threads `main` would end it."""
    monkeypatch.setattr("threading.active_count", lambda: 1)
    token = INVOCATION.set(Invocation())
    yield
    INVOCATION.reset(token)


@pytest.mark.parametrize(("flags", "options", "begin"), CALLS)
def test_shown_commands_begin_as_the_user_began(
    flags: list[str], options: dict[str, Any], begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main([*flags, "completion", "bash"], **options)
    for shown, text in TEXTS.items():
        assert as_called(text) == shown.replace("{}", begin)
    program = begin.partition(" -")[0]
    assert as_called("write celery5 -A module[:app] COMMAND") == f"write {program} -A module[:app] COMMAND"


def test_an_error_shows_its_command_as_the_user_called_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["-A", "no.such", "docs", "nosuchpage"], **ADDED)
    assert "python manage.py celery5 docs alone lists all" in capsys.readouterr().err


def test_what_processes_say_shows_commands_as_the_user_called_them() -> None:
    INVOCATION.set(Invocation("python manage.py celery5", list_commands=lambda: ("queue",)))
    why = "Redis is full: `celery5 queue storage` shows what fills it"
    shown = why.replace("celery5 queue", "python manage.py celery5 queue")
    assert (to_one_line(why), format_cell(why)) == (shown, shown)
    assert to_one_line(shown) == shown
    assert format_table([{"queue": "default", "why": why}], empty="").endswith(shown)
