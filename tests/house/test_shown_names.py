"""Every name of celery5 that a page shows can be imported as the page says, and stands in the reference."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

from celery5 import errors
from tests.house.sources import HERE
from tests.house.test_shown_commands import FENCED, PAGES

NO_NAMES = re.compile(
    r"celery5\.(?:toml|target|slice|service|shop|attempt|outcome|Task(?:Suspended|Resumed))\b"
)
"""What looks like a name of the package: files, units of systemd, attributes of spans, events."""
OLD_WAYS = {("celery5", "shared_task")}
"""What a page imports to show the error."""
PYTHON = re.compile(r"(?ms)^( *)```python[^\n]*\n(.*?)^ *```$")
LIST_OF_NAMES = r"((?:`[\w.]+(?:\([^`]*\))?`(?:, | and | or |, and |, or )?)+)"


def has(path: str) -> bool:
    """Whether there is something of this dotted name: a module, or an attribute of one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for attribute in parts[count:]:
                found = getattr(found, attribute)
        except (AttributeError, ImportError):  # hints for names of other libraries are ImportErrors
            return False
        return True
    return False


def imports_of(code: str) -> Iterator[tuple[str, str]]:
    """Each module and name of celery5 that a piece of Python imports."""
    try:
        tree = ast.parse(dedent(code))
    except SyntaxError:  # a fragment, or an await at the top
        lines = [
            line.strip()
            for line in code.splitlines()
            if re.match(r"\s*from celery5[\w.]* import [\w, ]+$", line)
        ]
        tree = ast.parse("\n".join(lines))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "celery5":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (("", name.name) for name in node.names if name.name.split(".")[0] == "celery5")


def imports_of_blocks(text: str) -> set[tuple[str, str]]:
    """Each module and name of celery5 that the Python blocks of a page import."""
    return {found for _, code in PYTHON.findall(text) for found in imports_of(code)} - OLD_WAYS


def names_in_prose(text: str) -> Iterator[str]:
    """Each dotted name of celery5 that prose shows: imported, whole, or as `a`, `b` from `celery5.c`."""
    prose = FENCED.sub("", text)
    for said in re.findall(r"`([^`]+)`", prose):
        if said.startswith(("from celery5", "import celery5")):
            yield from (f"{module}.{name}".strip(".") for module, name in imports_of(said))
        else:
            dotted = re.findall(r"(?<![\w/@.-])celery5(?:\.\w+)+(?![\w/:])", said)
            yield from (name for name in dotted if not NO_NAMES.match(name))
    for names, module in re.findall(LIST_OF_NAMES + r" (?:from|of|in) `(celery5(?:\.\w+)*)`", prose):
        yield from (f"{module}.{name}" for name in re.findall(r"`([\w.]+)", names))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(HERE).as_posix())
def test_every_name_that_a_page_shows_can_be_imported(page: Path) -> None:
    text = page.read_text()
    shown = {
        *names_in_prose(text),
        *(f"{module}.{name}".strip(".") for module, name in imports_of_blocks(text)),
    }
    assert sorted(name for name in shown if not has(name)) == []


def public_packages() -> list[str]:
    """The packages whose names are offered to applications."""
    inits = sorted((HERE / "celery5").glob("*/__init__.py"))
    offering = [init for init in inits if re.search(r"(?m)^__all__ = ", init.read_text())]
    return ["celery5.platform", *(f"celery5.{init.parent.name}" for init in offering)]


def test_the_reference_has_a_section_for_each_public_package() -> None:
    page = (HERE / "docs" / "reference" / "api.md").read_text()
    assert [package for package in public_packages() if f"\n## {package}\n" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(HERE).as_posix())
def test_every_name_that_a_page_imports_is_in_the_reference(page: Path) -> None:
    reference = (HERE / "docs" / "reference" / "api.md").read_text()
    listed = set(re.findall(r"(?m)^::: (\S+)$", reference)) | {
        f"celery5.errors.{name}" for name in vars(errors)
    }
    again = re.findall(r"`(\w+)`", re.findall(r"(?m)^Also offered here.*$", reference)[0])
    listed |= {f"celery5.{name}" for name in [*again, *vars(errors)]}
    shown = {
        f"{module}.{name}".strip(".")
        for module, name in imports_of_blocks(page.read_text())
        if not f"{module}.{name}".strip(".").startswith("celery5.examples")
    }
    assert sorted(shown - listed - PACKAGES) == []


PACKAGES = {*public_packages(), "celery5.errors", "celery5.testing.pytest"}
"""What is imported whole."""
