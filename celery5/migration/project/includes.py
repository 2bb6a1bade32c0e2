"""Find the modules with tasks that no application of celery5 would import. With Celery any import is enough."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence

from celery5.config.include import is_included
from celery5.migration.files.source import SourceFile
from celery5.migration.project.index import (
    TEST_FILE,
    Function,
    ProjectIndex,
    find_task_decorator,
    get_dotted,
)

_SETTINGS = {"imports", "include", "celery_imports", "celery_include"}
"""The settings, in small letters, that name modules to import."""
_DISCOVERING = {"autodiscover", "autodiscover_tasks"}


def add_includes(index: ProjectIndex, files: Sequence[SourceFile]) -> ProjectIndex:
    """Return the index of a project, with the modules that its application must include."""
    included: set[str] = set()
    moved: list[str] = []
    is_sure = True
    for file in files:
        for node in ast.walk(file.tree) if file.tree is not None else ():
            names, finds_all = _read_include(node, is_django=index.is_django)
            included |= {*names}
            is_sure &= finds_all
        moved += _find_moved(file) if index.has_one_app else ()
    installed = _find_installed_apps(files)
    root = _find_root(files)
    own = {".".join(_strip(module, root)) for modules in index.apps.values() for module in modules}
    missing = [
        name
        for name in _find_task_modules(files, root, is_django=index.is_django)
        if name not in own and not is_included(included, name)
        if not (index.is_django and _is_found_by_django(name, installed, index, root))
    ]
    return dataclasses.replace(
        index, missing=tuple(missing) if is_sure else (), moved=tuple(dict.fromkeys(moved))
    )


def _read_include(node: ast.AST, *, is_django: bool) -> tuple[list[str], bool]:
    """Return the modules that a statement or an argument includes, and whether all of them are known."""
    match node:
        case (
            ast.keyword(arg=str(name), value=value)
            | ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value)
        ) if name.lower() in _SETTINGS:
            return read_names(value)
        case ast.Dict(keys=keys, values=values):
            found = [
                read_names(value)
                for key, value in zip(keys, values, strict=True)
                if isinstance(key, ast.Constant) and str(key.value).lower() in _SETTINGS
            ]
            return [name for names, _ in found for name in names], all(is_sure for _, is_sure in found)
        case ast.Call(func=ast.Attribute(attr="extend_include"), args=[value]):
            return read_names(value)
        case ast.Call(func=ast.Attribute(attr=method)) if method in _DISCOVERING:
            return _read_discovery(node, is_django=is_django)
        case _:
            return [], True


def _find_moved(file: SourceFile) -> Iterator[str]:
    """Yield the modules of the setting `imports`, which move into the argument `include` of the application.

    It is set in a module of settings, by `conf.imports = [...]` or by `conf.update(imports=[...])`.
    """
    if file.tree is None or TEST_FILE.search(file.name):
        return
    for node in ast.walk(file.tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name) | ast.Attribute(attr=name, value=ast.Attribute(attr="conf"))],
                value=value,
            ) if name.lower() in _SETTINGS and (
                node in file.tree.body or isinstance(node.targets[0], ast.Attribute)
            ):
                pass
            case ast.keyword(arg="imports", value=value):
                pass
            case _:
                continue
        names, is_whole = read_names(value)
        yield from names if is_whole else ()


def _read_discovery(call: ast.Call, *, is_django: bool) -> tuple[list[str], bool]:
    options = {option.arg: option.value for option in call.keywords}
    packages = call.args[0] if call.args else options.get("packages")
    module = options.get("related_name", options.get("module", ast.Constant("tasks")))
    if packages is None or not isinstance(packages, ast.List | ast.Tuple):
        return [], is_django
    names, is_sure = read_names(packages)
    last = str(module.value) if isinstance(module, ast.Constant) else "*"
    return [part for name in names for part in (name, f"{name}.**.{last}")], is_sure


def read_names(value: ast.expr) -> tuple[list[str], bool]:
    """Return the texts in a list, and whether it has only texts."""
    values = value.elts if isinstance(value, ast.List | ast.Tuple | ast.Set) else [value]
    names = [item.value for item in values if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return [name for name in names if name], len(names) == len(values)


def _find_task_modules(
    files: Sequence[SourceFile], root: tuple[str, ...], *, is_django: bool
) -> Iterator[str]:
    """Yield the modules with tasks that name no application; in a Django project, all modules with tasks."""
    for file in files:
        if file.tree is None or TEST_FILE.search(file.name) or not file.module:
            continue
        decorators = (find_task_decorator(node) for node in ast.walk(file.tree) if isinstance(node, Function))
        if any(found is not None and (is_django or _is_free(found)) for found in decorators):
            yield ".".join(_strip(file.module, root))


def _is_free(decorator: ast.expr) -> bool:
    """Return whether a decorator names no application: `@shared_task`, `@task`."""
    called = get_dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return "." not in called or called.partition(".")[0] in ("celery", "celery5")


def _find_installed_apps(files: Sequence[SourceFile]) -> set[str]:
    """Return the packages that the settings of Django name in `INSTALLED_APPS`, `LOCAL_APPS` and the like."""
    found: set[str] = set()
    for file in files:
        for node in ast.walk(file.tree) if file.tree is not None else ():
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                ) if name.endswith("APPS"):
                    texts = [item.value for item in ast.walk(value) if isinstance(item, ast.Constant)]
                    found |= {text.partition(".apps.")[0] for text in texts if isinstance(text, str)}
                case _:
                    pass
    return found


def _is_found_by_django(name: str, installed: set[str], index: ProjectIndex, root: tuple[str, ...]) -> bool:
    """Return whether a module is in `tasks` of an installed app, where celery5 finds it by itself."""
    package, separator, _ = f"{name}.".partition(".tasks.")
    return bool(separator) and (package in installed or (*root, *package.split("."), "apps") in index.modules)


def _find_root(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the folder at which module names begin, below the one that was read: that of `manage.py`, or `src`."""
    managed = [file for file in files if file.path.name == "manage.py"]
    if managed:
        return managed[0].module[:-1] if not managed[0].package else ()
    return ("src",) if any(file.module[:1] == ("src",) for file in files) else ()


def _strip(module: tuple[str, ...], root: tuple[str, ...]) -> tuple[str, ...]:
    return module[len(root) :] if root and module[: len(root)] == root else module
