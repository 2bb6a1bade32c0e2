"""Tables of commands: which columns are cut so that a table fits, and which never are."""

import pytest

from celery5.cli.terminal.output import format_table
from celery5.cli.top.layout import fit_columns
from celery5.cli.top.tables import Column

JOB, WORKER = "01a2b3c4-0000-7000-8000-00000000abcd", f"{'host' * 5}:4242:89ab"


def show(monkeypatch: pytest.MonkeyPatch, columns: int, **cells: object) -> list[str]:
    """The lines of a table on a terminal of this width, 0 for none."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: columns > 0)
    return format_table([cells], empty="").splitlines()


def test_columns_of_ids_stay_whole_where_a_table_is_cut_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = f"ValueError: {'no such row, ' * 10}; run celery5 doctor"
    head, row = show(monkeypatch, 80, id=JOB, count=12, error=error)
    assert (len(head) <= 80, len(row)) == (True, 80)
    assert row == f"{JOB}  12     ValueError: no such ...lery5 doctor"


def test_the_widest_columns_give_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, row = show(monkeypatch, 110, id=JOB, error="e" * 100, arguments="a" * 30)
    assert len(row) == 110
    assert row.endswith("  " + "a" * 30)


def test_a_table_is_whole_where_a_program_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, 0, id=JOB, error="e" * 200)[1] == f"{JOB}  {'e' * 200}"


def test_a_table_that_cannot_fit_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    _, row = show(monkeypatch, 80, id=JOB, worker=WORKER, error="e" * 100)
    assert row.split() == [JOB, WORKER, "e" * 100]


@pytest.mark.parametrize("title", ["id", "worker", "queue", "queues", "run", "error group"])
def test_an_id_of_any_length_is_whole(monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    for columns in (0, 80):
        _, row = show(monkeypatch, columns, **{title: "q" * 300, "why": "w" * 300})
        assert row.split()[0] == "q" * 300
        assert "(300 characters)" in row


def test_top_cuts_ids_only_when_nothing_else_gives_way() -> None:
    columns = [Column("queue", may_shrink=True), Column("error", may_shrink=True), Column("at", 1)]
    assert fit_columns(columns, [40, 60, 8], 80) == [40, 38, 0]
    assert fit_columns(columns, [40, 60, 8], 50) == [36, 12, 0]
