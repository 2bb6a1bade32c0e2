"""The page on the core: what it names is there, and a reader gets through it in one sitting."""

import ast
import re

from tests.house.sources import HERE

PAGE = HERE / "docs" / "internals" / "core.md"
ONE_SITTING = 2200
"""Lines that the page may name in all."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def rows() -> dict[str, list[str]]:
    """Return what the page names to read of each file; nothing for all of it."""
    found = re.findall(r"(?m)^\| `(celery5/[^`]+)` \| ([^|]*) \|", PAGE.read_text())
    return {
        path: [] if what.startswith("all") else re.findall(r"`([^`]+)`", what.split(": ")[0])
        for path, what in found
    }


def line_counts(path: str) -> dict[str, int]:
    """Return the lines of each function, class and method of a module, by its name."""
    counts: dict[str, int] = {}
    for node in ast.parse((HERE / path).read_text()).body:
        if isinstance(node, FUNCTIONS):
            counts[node.name] = lines(node)
        elif isinstance(node, ast.ClassDef):
            counts[node.name] = lines(node)
            methods = [method for method in node.body if isinstance(method, FUNCTIONS)]
            counts.update({f"{node.name}.{method.name}": lines(method) for method in methods})
    return counts


def lines(node: ast.stmt) -> int:
    """Return how many lines a definition has."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_the_core_is_where_its_page_says_and_read_in_one_sitting() -> None:
    total = 0
    for path, names in rows().items():
        counts = line_counts(path) if names else {}
        assert [name for name in names if name not in counts] == [], path
        total += sum(counts[name] for name in names) if names else len((HERE / path).read_text().splitlines())
    assert 1500 < total <= ONE_SITTING, total
