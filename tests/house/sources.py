"""Sources: the house's own files, for the tests that read them."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HERE = Path(__file__).parents[2]
LINKED_FOLDERS = ("services", "bootsteps", "examples")
"""The rooms that are real folders at the top and links inside `celery5/`."""
PACKAGE = ("celery5", *LINKED_FOLDERS)
EVERYWHERE = (*PACKAGE, "tests", "benchmarks")
SKIPPED = {"__pycache__", "node_modules"}


@cache
def files(*folders: str, suffix: str = ".py") -> tuple[Path, ...]:
    """Every file of that suffix in the folders, each once: a link inside `celery5/` is not followed."""
    found: list[Path] = []
    for folder in folders:
        for path in sorted((HERE / folder).rglob(f"*{suffix}")):
            inside = path.relative_to(HERE).parts
            hidden = any(part in SKIPPED or part.startswith(".") for part in inside)
            linked = inside[0] == "celery5" and inside[1] in LINKED_FOLDERS
            if not hidden and not linked:
                found.append(path)
    return tuple(found)


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    parsed = ast.parse(path.read_text(), filename=str(path))
    # The trees stay until the session ends: millions of objects, through which every full collection would go.
    gc.freeze()
    return parsed


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree: walking takes as long as parsing, and a dozen tests look at all of them."""
    return tuple(ast.walk(tree(path)))


def name(path: Path) -> str:
    """A file's path inside the checkout."""
    return path.relative_to(HERE).as_posix()


def module(path: Path) -> str:
    """The one name under which a file of the package is imported."""
    parts = path.relative_to(HERE).with_suffix("").parts
    full = parts if parts[0] == "celery5" else ("celery5", *parts)
    return ".".join(full).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name ('' for a whole module) of every import in a file, at any depth."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, node.module, alias.name


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file, at any depth."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
