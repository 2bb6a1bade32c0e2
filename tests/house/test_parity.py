"""Parity: every test that the record of requirements names is there.

A line of the record is `| row | what | tests | note |`; the tests are pytest node ids in backticks.
"""

import ast
import re

import pytest

from tests.house.sources import HERE, tree

RECORD = HERE / "docs" / "reference" / "parity.md"
DONE = {
    *(f"F{number}" for number in range(1, 72)),
    *(
        f"C{number}"
        for number in (
            18,
            19,
            *range(21, 27),
            29,
            44,
            47,
            59,
            *range(73, 84),
            85,
            86,
            107,
            109,
            110,
            111,
            113,
        )
    ),
}
"""Rows that work, each of which must stay: all of Fennel, and what the proposal says of failing jobs and commands."""


def rows() -> list[list[str]]:
    """The lines of the table, without its head."""
    lines = [line for line in RECORD.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == ["row", "what", "tests", "note"]
    return [line for line in cells[2:] if line != cells[0] and set("".join(line)) - {"-", ":"}]


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


def test_there_is_a_record_and_no_row_is_in_it_twice() -> None:
    names = [line[0] for line in rows()]
    assert names
    assert [each for each in names if not re.fullmatch(r"[FRC]\d+[a-z]?", each)] == []
    assert sorted(names) == sorted(set(names))


def test_no_row_that_works_has_left_the_record() -> None:
    assert sorted(DONE - {line[0] for line in rows()}) == []


def test_every_row_names_a_test() -> None:
    assert [line[0] for line in rows() if not re.search(r"`[^`]+::test_[^`]+`", line[2])] == []


def test_every_test_that_the_record_names_is_there() -> None:
    named = [(line[0], node) for line in rows() for node in re.findall(r"`([^`]+)`", line[2])]
    assert [(row, node) for row, node in named if not exists(node)] == []


DEPARTURES = ("0017", "0018", "0019", "0023", "0026", "0028", "0029")
"""Decisions that depart from a sentence of the proposal."""


@pytest.mark.parametrize("number", DEPARTURES)
def test_a_decision_that_departs_from_the_proposal_quotes_its_sentence(number: str) -> None:
    (page,) = (HERE / "docs" / "decisions").glob(f"{number}-*.md")
    context = page.read_text().partition("## Context")[2].partition("\n## ")[0]
    assert "proposal" in context
    assert re.search(r'"[^"]{20,}"', context), "it quotes what it departs from"


def test_pypy_stands_under_what_is_not_met() -> None:
    met, found, not_met = RECORD.read_text().partition("\n## Not met\n")
    assert found
    assert "| C106 |" in not_met
    assert "| C106 |" not in met
