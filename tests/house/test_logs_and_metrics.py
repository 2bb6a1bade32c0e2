"""The tables of log events and metrics in the docs have exactly what the code logs and exposes."""

import re
from pathlib import Path

import pytest

from tests.house.log_events import collect_events, collect_metrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/logs-and-metrics.md"
NAMED_EVENT = re.compile(r"celery5:([a-z][a-z-]*:[a-z][a-z-]+)")


def rows(heading: str) -> list[tuple[str, ...]]:
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def test_the_docs_list_each_log_event_with_its_levels_and_fields() -> None:
    expected = {
        (f"`{event.name}`", event.format_levels(), event.format_fields())
        for event in collect_events(ROOT).values()
    }
    listed = [row[:3] for row in rows("Log events")]
    assert sorted(listed) == sorted(expected)


def test_each_log_event_in_the_docs_has_a_meaning() -> None:
    assert [row for row in rows("Log events") if len(row) != 4 or not row[3]] == []


def test_the_docs_name_only_log_events_that_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in NAMED_EVENT.findall(page.read_text())}
    assert sorted(named - set(collect_events(ROOT))) == []


def test_the_docs_list_each_metric_with_its_kind_and_help() -> None:
    expected = [(f"`{name}`", *about) for name, about in collect_metrics(ROOT).items()]
    assert sorted(rows("Metrics")) == sorted(expected)


@pytest.mark.parametrize(
    ("code", "levels", "fields"),
    [
        ('log.event("a:failed", why=1)', "info", "`why`"),
        ('log.event("a:failed", "debug" if x else "error", b=1, **c)', "debug, error", "`b`, ..."),
        ('name = "a:failed" if x else "b:failed"\nlog.event(name, level)', "varies", ""),
    ],
)
def test_events_are_found_in_the_code(tmp_path: Path, code: str, levels: str, fields: str) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/one.py").write_text(code)
    one = collect_events(tmp_path)["a:failed"]
    assert (one.format_levels(), one.format_fields()) == (levels, fields)
