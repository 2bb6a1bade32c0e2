"""System checks of Django: mistakes in what a project declares and sets, and what is left of Celery in it."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks

from celery5.config.include import explain_load_error
from celery5.config.unincluded import parse_file
from celery5.contrib.django.application import IS_CHECKED, find_task_specs, get_app
from celery5.contrib.django.project_settings import get_project_package, read_project_settings
from celery5.errors import CeleryError

_BRIDGE = "celery5.contrib.celery"
_MARK = re.compile(rb"\bcelery\b")
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
_USUAL = ("signals", "apps", "celery")
"""Modules of an app that often use Celery, besides its tasks. They are checked even if nothing has imported them."""
_CORRECT_TASKS = (
    'Correct that line. Until then "ignored_apps" in CELERY5 leaves an app out, and SILENCED_SYSTEM_CHECKS = '
    '["celery5.E002"] lets other commands run.'
)
_PREFIX = "CELERY_"
_EAGER = ("CELERY_TASK_ALWAYS_EAGER", "CELERY_ALWAYS_EAGER")


def check_application(**_options: Any) -> list[checks.CheckMessage]:
    """Return an error for what a worker or Scheduler would refuse at its start, and warnings of probable mistakes.

    It imports the tasks of the project, and asks no broker. `celery5 config check` finds the same. Tasks that cannot
    be imported are an error, as they are where Celery imports them; a project that is being moved can silence it.
    """
    # They load Trio, which a web process does not need.
    from celery5.app import list_unincluded
    from celery5.config.configuration import check_usable, list_warnings
    from celery5.processes import foreground

    app = get_app()
    try:
        app.load()
    except CeleryError as error:
        return [
            checks.Error(
                f"a worker would not start: {explain_load_error(error)}",
                hint=_CORRECT_TASKS,
                id="celery5.E002",
            )
        ]
    unincluded = [checks.Warning(text, id="celery5.W005") for text in list_unincluded()]
    # The wiring of boot steps asks for the address of the broker, also before the tests of a project.
    is_checked = IS_CHECKED.set(True)
    try:
        check_usable(app.settings, app.name, app.settings.broker)
        foreground.check(app)
    except CeleryError as error:
        return [checks.Error(str(error), id="celery5.E001"), *unincluded]
    finally:
        IS_CHECKED.reset(is_checked)
    found = list_warnings(app.settings, app.configuration, list(app.tasks), os.environ)
    return [*(checks.Warning(text, id="celery5.W004") for text in found), *unincluded]


def check_leftovers_of_celery(**_options: Any) -> list[checks.CheckMessage]:
    """Return a warning for each module that imports from Celery, and for Celery's settings: celery5 ignores both.

    Checks the task modules of the project, and the modules of its apps that are loaded or have a usual name. Reads the
    files and imports none. A project that has loaded the bridge keeps Celery on purpose, and gets no warning.
    """
    if any(name == _BRIDGE or name.startswith(f"{_BRIDGE}.") for name in sys.modules):
        return []
    ignored = read_project_settings().get("ignored_apps", ())
    specs = [*find_task_specs(ignored).values(), *_find_others(ignored)]
    found = {file: _find_imports(file) for spec in specs for file in _find_files(spec)}
    names = [name for name in dir(settings) if name.startswith(_PREFIX)]
    eager = [_warn_of_eager_mode(name) for name in names if name in _EAGER]
    others = [name for name in names if name not in _EAGER]
    return [
        *(_warn(file, lines) for file, lines in found.items() if lines),
        *eager,
        *([_warn_of_settings(others)] if others else []),
    ]


def _find_others(ignored_apps: Any) -> Iterator[ModuleSpec]:
    """Yield the specs of the modules of the project's apps, and of its own package, that may use Celery."""
    ignored = [ignored_apps] if isinstance(ignored_apps, str) else list(ignored_apps)
    installed = [config.name for config in apps.get_app_configs() if not _is_installed(config.path)]
    packages = {*installed, get_project_package()} - {*ignored, ""}
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is not None and any(name.startswith(f"{package}.") for package in packages):
            yield ModuleSpec(name, None, origin=spec.origin)  # without the other files of a package
    for package in sorted(packages):
        for name in _USUAL:
            spec = find_spec(f"{package}.{name}") if hasattr(sys.modules.get(package), "__path__") else None
            if spec is not None:
                yield spec


def _is_installed(path: str) -> bool:
    return bool(_INSTALLED & {*Path(path).parts})


def _warn_of_eager_mode(name: str) -> checks.CheckMessage:
    return checks.Warning(
        f"{name} in Django's settings has no effect: jobs are sent, also in tests",
        hint="Leave it out. In tests: with in_memory(get_app()) as jobs: ... jobs.run() (celery5 docs django, Tests).",
        id="celery5.W002",
    )


def _warn_of_settings(names: list[str]) -> checks.CheckMessage:
    return checks.Warning(
        f"Celery's settings have no effect here: {', '.join(names)}",
        hint="celery5 migrate with the file of the settings shows what takes their place in CELERY5; then remove them.",
        id="celery5.W003",
    )


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
            yield from (path for path in sorted(Path(folder).rglob("*.py")) if not _is_installed(str(path)))
    elif spec.origin and spec.origin.endswith(".py") and not _is_installed(spec.origin):
        yield Path(spec.origin)


def _find_imports(file: Path) -> list[int]:
    """Return the lines that import from Celery; none for a file that cannot be read."""
    tree = parse_file(file, lambda source: _MARK.search(source) is not None)
    if tree is None:
        return []
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return sorted({node.lineno for node in statements if _is_celerys(node)})


def _is_celerys(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] == "celery"
    return any(name.name.partition(".")[0] == "celery" for name in node.names)
