"""The table of mutations fits the parity table and the code: each row that claims something can be broken by one."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.house.sources import HERE
from tests.house.test_parity import exists, rows
from tests.mutants.__main__ import ProjectCopy, Verdict
from tests.mutants.table import Mutation, Table, mutate, read_table

MOST_TODO = 0
"""The most rows without a mutation. Lower it with each one that is written; it never rises."""


@cache
def read_tests() -> dict[str, list[str]]:
    """The tests that each row of the parity table names."""
    return {line["row"]: re.findall(r"`([^`]+)`", line["tests"]) for line in rows()}


def find_faults(mutation: Mutation) -> list[str]:
    """What is wrong with a mutation, without running anything."""
    faults: list[str] = []
    if not mutation.rows or not mutation.tests:
        faults.append(f"{mutation.title}: it breaks no row, or has no test")
    path = HERE / mutation.file
    try:
        changed = mutate(path.read_text(), mutation)
        if path.suffix == ".py":
            ast.parse(changed)
    except (OSError, ValueError, SyntaxError) as error:
        faults.append(str(error))
    for row in mutation.rows:
        named = read_tests()[row]
        faults += [f"{row} does not name {test}" for test in mutation.tests if test not in named]
    return faults + [f"there is no {test}" for test in mutation.tests if not exists(test)]


@pytest.fixture(scope="module")
def table() -> Table:
    """The table of mutations."""
    return read_table()


def test_each_mutation_fits_its_file_once_and_names_tests_of_its_rows(table: Table) -> None:
    assert [fault for mutation in table.mutation for fault in find_faults(mutation)] == []


def test_each_row_has_a_mutation_or_a_reason_or_is_still_to_do(table: Table) -> None:
    broken = {row for mutation in table.mutation for row in mutation.rows}
    counts = Counter([*broken, *table.without, *table.todo])
    assert [row for row, count in counts.items() if count > 1] == []
    assert sorted(counts) == sorted(line["row"] for line in rows())
    assert all(len(reason) > 20 for reason in table.without.values())


def test_rows_without_a_mutation_only_become_fewer(table: Table) -> None:
    assert len(table.todo) == MOST_TODO, "a row was added to todo, or MOST_TODO is to be lowered"


def test_no_mutation_stands_twice(table: Table) -> None:
    changes = Counter(
        (mutation.file, mutation.find, mutation.replace, mutation.tests) for mutation in table.mutation
    )
    assert [change for change, count in changes.items() if count > 1] == []


SOUND = Mutation(
    rows=("F3",),
    file="celery5/protocol/job/retry_policy.py",
    find="return attempt <= self.max_retries",
    replace="return attempt < self.max_retries",
    tests=(
        "tests/pure/job/test_verdict.py::test_a_job_that_always_fails_runs_once_and_then_max_retries_times",
    ),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"find": "no such text anywhere"},
        {"find": "e"},
        {"replace": SOUND.find},
        {"replace": "return attempt <"},
        {"file": "celery5/no_such_file.py"},
        {"rows": []},
        {"tests": []},
        {"tests": ["tests/pure/job/test_verdict.py::test_that_nobody_wrote"]},
        {"tests": read_tests()["F16"]},
    ],
)
def test_a_mutation_that_proves_nothing_is_found(changes: dict[str, object]) -> None:
    assert find_faults(SOUND) == []
    assert find_faults(msgspec.convert({**msgspec.to_builtins(SOUND), **changes}, Mutation))


@pytest.mark.parametrize(
    ("replace", "test", "expected"),
    [
        ("3 * number", "test_four", Verdict.KILLED),
        ("number + 2", "test_four", Verdict.SURVIVED),
        ("2 *", "test_four", Verdict.BROKEN),
        ("3 * number", "test_of_nobody", Verdict.BROKEN),
        ("3 * number", "test_with_fixture", Verdict.BROKEN),
    ],
)
def test_a_mutation_is_judged_by_whether_its_tests_fail(
    tmp_path: Path, replace: str, test: str, expected: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    source, code = tmp_path / "source", "def double(number):\n    return 2 * number\n"
    source.mkdir()
    (source / "doubling.py").write_text(code)
    (source / "test_doubling.py").write_text(
        "import pytest\nfrom doubling import double\n\ndef test_four():\n    assert double(2) == 4\n\n"
        "@pytest.fixture\ndef four():\n    assert double(2) == 4\n\ndef test_with_fixture(four):\n    pass\n"
    )
    copy = ProjectCopy(tmp_path / "copy", source)
    mutation = Mutation(("F1",), "doubling.py", "2 * number", replace, (f"test_doubling.py::{test}",))
    assert copy.judge(mutation)[0] is expected
    assert [(folder / "doubling.py").read_text() for folder in (source, copy.folder)] == [code, code]
