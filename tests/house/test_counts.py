"""Counts with their nouns are written by `format_count`, which writes `1 job`, not `1 jobs`."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.sources import files, name, nodes

NOUNS = (
    "attempts|brokers|connections|events|failures|groups|items|jobs|keys|letters|lines|members|messages|nodes|outputs|"
    "owners|partitions|queues|records|replicas|results|rows|sentinels|settings|streams|successes|tasks|times|windows|"
    "workers"
)
PHRASE = re.compile(rf" (?:(?:dead|more|new|further|live|other|parked) )*(?:{NOUNS})\b")
BOUNDS = {"_limit", "limit", "kind", "_kind", "max_messages"}
"""Names of values that are no number, or a bound that is never 1."""
IN_TEMPLATE = re.compile(rf"\|(?:number|length) \}}\}}{PHRASE.pattern}")


def is_count(value: ast.FormattedValue) -> bool:
    """Return whether a value before a noun may be a count."""
    match value.value:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return not word.isupper() and word not in BOUNDS and value.conversion == -1
        case ast.Constant() | ast.Subscript(value=ast.Name(id="SMALLEST")):
            return False
        case _:
            return value.conversion == -1


def find_faults(tree: Iterator[ast.AST] | tuple[ast.AST, ...]) -> list[int]:
    """Return the lines of f-strings that have a count with a fixed plural, or choose the plural themselves."""
    found: list[int] = []
    for node in tree:
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue):
                    continue
                is_plural = isinstance(text, ast.Constant) and PHRASE.match(str(text.value))
                if is_plural and is_count(value):
                    found.append(value.lineno)
            found += [value.lineno for value in node.values if chooses_plural(value)]
    return found


def chooses_plural(value: ast.expr) -> bool:
    """Return whether a part of an f-string is like `'' if count == 1 else 's'`."""
    match value:
        case ast.FormattedValue(
            value=ast.IfExp(
                test=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=1)]),
                body=ast.Constant(value=str(one)),
                orelse=ast.Constant(value=str(many)),
            )
        ):
            return many.endswith("s") and many != one
        case _:
            return False


def test_code_writes_counts_with_nouns_by_format_count() -> None:
    faults = [
        f"{name(path)}:{line}"
        for path in files("celery5", "services", "bootsteps")
        if name(path) != "celery5/protocol/counts.py"
        for line in find_faults(nodes(path))
    ]
    assert faults == [], "use format_count of celery5.protocol.counts"


def test_templates_write_counts_with_nouns_by_the_filter_count() -> None:
    templates = files("celery5/dashboard/templates", suffix=".html")
    assert templates
    faults = [
        f"{path.name}: {found[0]}" for path in templates for found in IN_TEMPLATE.finditer(path.read_text())
    ]
    assert faults == [], "use the filter count"


@pytest.mark.parametrize(
    "code", ['f"{n} jobs"', 'f"{len(jobs):,} more dead letters"', """f"{n} job{'' if n == 1 else 's'}" """]
)
def test_count_with_a_fixed_plural_is_found(code: str) -> None:
    assert find_faults(ast.walk(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code", ['f"{MOST} jobs"', 'f"all {kind} tasks"', "f\"{format_count(n, 'job')}\"", 'f"{n} waits"']
)
def test_text_that_is_no_count_with_a_noun_is_not_found(code: str) -> None:
    assert find_faults(ast.walk(ast.parse(code))) == []
