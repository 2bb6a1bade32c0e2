"""Warn, as a system check of Django, of imports of Celery that are left in the task modules of the project."""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from django.core import checks

from celery5.contrib.django.application import find_task_specs
from celery5.contrib.django.project_settings import read_project_settings

_BRIDGE = "celery5.contrib.celery"
_MARK = re.compile(rb"\bcelery\b")
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages that are not the project's own."""


def check_imports_of_celery(**_options: Any) -> list[checks.CheckMessage]:
    """Return a warning for each task module that imports from Celery, whose tasks do not run on celery5.

    The files are read, not imported. A project that has loaded the bridge keeps Celery on purpose, and gets no warning.
    """
    if any(name == _BRIDGE or name.startswith(f"{_BRIDGE}.") for name in sys.modules):
        return []
    specs = find_task_specs(read_project_settings().get("ignored_apps", ()))
    found = {file: _find_imports(file) for spec in specs.values() for file in _find_files(spec)}
    return [_warn(file, lines) for file, lines in found.items() if lines]


def _warn(file: Path, lines: list[int]) -> checks.CheckMessage:
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return checks.Warning(
        f"{shown} imports from Celery (line {', '.join(map(str, lines))}): what it declares does not run here",
        hint=f"celery5 migrate {shown} shows what to write instead. To keep Celery beside celery5, use CeleryBridge "
        "(celery5 docs beside-celery), or SILENCED_SYSTEM_CHECKS.",
        id="celery5.W001",
    )


def _find_files(spec: ModuleSpec) -> Iterator[Path]:
    """Yield the files of a module, or of a package; none where it is installed and not the project's own."""
    if spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            yield from (path for path in sorted(Path(folder).rglob("*.py")) if not _INSTALLED & {*path.parts})
    elif spec.origin and spec.origin.endswith(".py") and not _INSTALLED & {*Path(spec.origin).parts}:
        yield Path(spec.origin)


def _find_imports(file: Path) -> list[int]:
    """Return the lines that import from Celery; none for a file that cannot be read."""
    try:
        source = file.read_bytes()
        if not _MARK.search(source):
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return sorted({node.lineno for node in statements if _is_celerys(node)})


def _is_celerys(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] == "celery"
    return any(name.name.partition(".")[0] == "celery" for name in node.names)
