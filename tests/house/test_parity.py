"""Parity: every test that the record of requirements names is there.

A line of the record has the columns below; the tests are pytest node ids in backticks.
"""

import ast
import re

import pytest

from tests.house.sources import HERE, tree

RECORD = HERE / "docs" / "reference" / "parity.md"
DOCS = HERE / "docs"
PROMISES = {
    *(f"F{number}" for number in range(1, 72)),
    *(f"R{number}" for number in range(1, 68)),
    *(f"C{number}" for number in range(1, 114)),
}
"""Each promise of Fennel, of Runnel and of the proposal has a row: whether it is met, done otherwise, or not met."""
COLUMNS = ["row", "met", "otherwise (decision)", "not met", "tests", "note"]


def rows(text: str | None = None) -> list[dict[str, str]]:
    """The lines of the tables, by the names of their columns."""
    lines = [line for line in (text or RECORD.read_text()).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == COLUMNS
    found = [line for line in cells if line != COLUMNS and set("".join(line)) - {"-", ":"}]
    return [dict(zip(COLUMNS, line, strict=True)) for line in found]


def exists(node: str) -> bool:
    """Whether a node id names a test that is there; its parameters, if any, are not looked at."""
    file, *names = node.split("[")[0].split("::")
    path = HERE / file
    if not path.is_file() or not names:
        return False
    at: ast.AST = tree(path)
    for wanted in names:
        inside = [child for child in ast.iter_child_nodes(at) if getattr(child, "name", "") == wanted]
        if not inside:
            return False
        at = inside[0]
    return isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef) and names[-1].startswith("test_")


def has_case(node: str) -> bool:
    """Whether the words of a node's parameters, if it has any, are in its file; those of a page are its name."""
    test, _, case = node.rstrip("]").partition("[")
    if test.endswith("::test_what_a_page_shows_is_what_happens"):
        return any(DOCS.rglob(f"{case}.md"))
    text = (HERE / test.split("::")[0]).read_text()
    return all(word.rstrip("0123456789") in text for word in case.split("-"))


def find_faults(line: dict[str, str]) -> list[str]:
    """What is wrong with a row."""
    name, tests, faults = line["row"], line["tests"], list[str]()
    nodes = re.findall(r"`([^`]+)`", tests)
    if not nodes or tests != ", ".join(f"`{node}`" for node in nodes):
        faults.append(f"{name}: its tests are no list of node ids: {tests!r}")
    faults += [f"{name}: there is no {node}" for node in nodes if not exists(node) or not has_case(node)]
    if len(set(nodes)) < len(nodes):
        faults.append(f"{name}: a test is named twice")
    if not (line["met"] or line["otherwise (decision)"] or line["not met"]):
        faults.append(f"{name}: it says neither that it is met nor that it is not")
    decisions = re.findall(r"\]\(\.\./decisions/(\d{4}-[^)]+)\)", line["otherwise (decision)"])
    if line["otherwise (decision)"] and not decisions:
        faults.append(f"{name}: it is done otherwise, and no decision says why")
    faults += [
        f"{name}: there is no {decision}"
        for decision in decisions
        if not (DOCS / "decisions" / decision).is_file()
    ]
    return faults


def test_each_promise_has_one_row_that_names_tests_that_are_there() -> None:
    lines = rows()
    assert sorted(line["row"] for line in lines) == sorted(PROMISES)
    assert [fault for line in lines for fault in find_faults(line)] == []


def change(text: str, row: str, pattern: str, replacement: str) -> str:
    """The record with something else in one row."""
    lines = text.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith(f"| {row} |")]
    changed = re.sub(pattern, replacement, lines[at], count=1)
    assert changed != lines[at]
    return "\n".join([*lines[:at], changed, *lines[at + 1 :]])


@pytest.mark.parametrize(
    ("row", "pattern", "replacement"),
    [
        ("R41", r"::test_(\w)", r"::test_x\1"),
        ("C44", r"tests/story/cli", "tests/story/clj"),
        ("F4", r"\[sending\]", "[sendnig]"),
        ("R8", r"`tests/\S+::test_\w+`", "tests/no.py::test_without_its_ticks"),
        ("C60", r"`tests/.*`", ""),
        ("C79", r"\(\.\./decisions/[^)]+\)", "(scope.md)"),
        ("F5", r"\| calling a task[^|]*\|", "| |"),
    ],
)
def test_a_row_that_proves_nothing_is_found(row: str, pattern: str, replacement: str) -> None:
    text = change(RECORD.read_text(), row, pattern, replacement)
    assert {fault.partition(":")[0] for line in rows(text) for fault in find_faults(line)} == {row}


def test_what_is_not_met_stands_at_the_end() -> None:
    before, found, end = RECORD.read_text().partition("\n## Not met\n")
    assert found
    assert [line["row"] for line in rows(before) if line["not met"]] == []
    assert [line["row"] for line in rows(end) if not line["not met"]] == []


DEPARTURES = ("0017", "0018", "0019", "0023", "0026", "0028", "0029")
"""Decisions that depart from a sentence of the proposal."""


@pytest.mark.parametrize("number", DEPARTURES)
def test_a_decision_that_departs_from_the_proposal_quotes_its_sentence(number: str) -> None:
    (page,) = (HERE / "docs" / "decisions").glob(f"{number}-*.md")
    context = page.read_text().partition("## Context")[2].partition("\n## ")[0]
    assert "proposal" in context
    assert re.search(r'"[^"]{20,}"', context), "it quotes what it departs from"


def test_pypy_stands_under_what_is_not_met() -> None:
    assert [line["row"] for line in rows() if line["not met"]] == ["C106"]
