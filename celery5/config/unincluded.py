"""Find the modules of a project that declare tasks without an application, and that no application includes."""

import ast
import os
import re
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import cast

from celery5.config.include import is_included

MAX_READ = 5000
"""The most files that are read."""
_MARK = re.compile(rb"^\s*@(?:celery5\.)?task\b", re.MULTILINE)
_TESTS = re.compile(r"(^|\.)(tests?(\..*|\w*)|\w+_tests?|conftest)$")


def find_unincluded(include: Sequence[str], declared: Container[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the tasks that no worker would have, by module: they have `@task`, and no application includes the module.

    Reads files of the project's loaded packages, and imports none. Test modules are left out.

    Args:
        include: The modules and patterns that applications include, and the modules of the applications.
        declared: The tasks that applications have, each by its module and its name in it.
    """
    found: dict[str, list[str]] = {}
    for module, path in islice(_iterate_modules(), MAX_READ):
        if not is_included(include, module):
            tasks = [name for name in _find_free_tasks(path) if (module, name) not in declared]
            if tasks:
                found[module] = tasks
    return found


def advise_including(module: str, task: str, own_module: str) -> str:
    """Return what to write so that an application has a task which names none.

    Args:
        module: The module that declares the task.
        task: The name of the function.
        own_module: The module of the application; '' if none is known, `celery5...` for one that nobody declared.
    """
    if own_module.partition(".")[0] == "celery5":
        place = f"{module.partition('.')[0]}.tasks"
        return (
            f"import it in {place}, as in `from {module} import {task}`; or declare an App with "
            f'include=["{module}"] (celery5 docs django)'
        )
    where = f" in module {own_module!r}" if own_module else ""
    return f'add "{module}" to include=[...] of the App{where}'


def _iterate_modules() -> Iterator[tuple[str, Path]]:
    """Yield the modules of loaded packages that belong to the project: they are not installed."""
    installed = _list_installed()
    seen: set[str] = set()
    for name, package in sorted(sys.modules.items()):
        if "." in name or name in ("celery5", "__main__"):
            continue
        for folder in cast("list[str]", list(getattr(package, "__path__", None) or ())):
            real = os.path.realpath(folder)
            if real not in seen and not real.startswith(installed):
                seen.add(real)
                yield from _iterate_files(name, Path(folder))


def _iterate_files(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier() and name != "migrations")
        words = [package, *Path(parent).relative_to(folder).parts]
        for file in sorted(files):
            stem = file.removesuffix(".py")
            if not (file.endswith(".py") and stem.isidentifier()):
                continue
            module = ".".join(words if stem == "__init__" else [*words, stem])
            if not _TESTS.search(module):
                yield module, Path(parent, file)


def _list_installed() -> tuple[str, ...]:
    """Return the folders of the standard library, of installed packages, and of celery5 itself."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


def parse_file(file: Path, is_wanted: Callable[[bytes], bool]) -> ast.Module | None:
    """Return the syntax tree of a file of Python; None if its text is not wanted, or cannot be read."""
    try:
        source = file.read_bytes()
        if not is_wanted(source):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _find_free_tasks(file: Path) -> list[str]:
    """Return the functions in a file that are tasks of celery5 and name no application."""
    tree = parse_file(file, lambda source: b"celery5" in source and _MARK.search(source) is not None)
    if tree is None:
        return []
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "celery5"
        for alias in node.names
        if alias.name == "task"
    }
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(_is_free(decorator, names) for decorator in node.decorator_list)
    ]


def _is_free(decorator: ast.expr, names: set[str]) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    match called:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(attr="task", value=ast.Name(id="celery5")):
            return True
        case _:
            return False
