"""Tables of commands: what is wrapped and left out so that a table fits, and what stays whole."""

import pytest

from celery5.cli.terminal.output import format_cell, format_table
from celery5.cli.top.layout import fit_columns
from celery5.cli.top.tables import Column

JOB, WORKER = "01a2b3c4-0000-7000-8000-00000000abcd", f"{'host' * 5}:4242:89ab"


def show(monkeypatch: pytest.MonkeyPatch, columns: int, **cells: object) -> list[str]:
    """The lines of a table on a terminal of this width, 0 for none."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: columns > 0)
    return format_table([cells], empty="").splitlines()


def test_cells_are_wrapped_between_words_where_a_table_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    error = f"ValueError: {'no such row, ' * 10}; run celery5 doctor"
    head, *lines = show(monkeypatch, 80, id=JOB, count=12, error=error)
    assert max(map(len, (head, *lines))) <= 80
    assert lines[0].startswith(f"{JOB}  12     ValueError: no such row,")
    assert " ".join(line[len(JOB) + 9 :] for line in lines).split() == error.split()


def test_columns_are_left_out_by_their_importance_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"at": "2026-11-28 17:15:29Z", "state": "DEAD", "id": JOB, "retries": 0, "worker": WORKER}
    head, row, *lines = show(monkeypatch, 80, **cells, error="e" * 100, arguments="[1, 2]")
    assert head.split() == ["at", "state", "id", "error"]
    assert (JOB in row, "e" * 10 in row) == (True, True)
    assert lines[-1] == "not shown for lack of width: retries, worker, arguments; --json has all"


def test_columns_that_say_nothing_are_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {f"number {place}": place % 2 for place in range(20)}
    head, _, *more = show(monkeypatch, 100, queue="default", **columns)
    assert "number" in head
    assert "number 18" in " ".join(more)


def test_a_table_is_whole_where_a_program_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, 0, id=JOB, error="e" * 200)[1] == f"{JOB}  {'e' * 200}"


def test_a_long_text_is_shortened_between_words() -> None:
    words = [f"word{number}" for number in range(100)]
    begin, _, end = format_cell(" ".join(words)).partition("... (689 characters) ...")
    assert (begin.split()[-1] in words, end.split()[0] in words, end.split()[-1]) == (True, True, "word99")


@pytest.mark.parametrize("title", ["id", "worker", "queue", "queues", "run", "error group"])
def test_an_id_of_any_length_is_whole(monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    for columns in (0, 80):
        _, row, *_ = show(monkeypatch, columns, **{title: "q" * 300, "why": "w" * 300})
        assert row.split()[0] == "q" * 300


def test_top_cuts_ids_only_when_nothing_else_gives_way() -> None:
    columns = [Column("queue", may_shrink=True), Column("error", may_shrink=True), Column("at", 1)]
    assert fit_columns(columns, [40, 60, 8], 80) == [40, 38, 0]
    assert fit_columns(columns, [40, 60, 8], 50) == [36, 12, 0]
