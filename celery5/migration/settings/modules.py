"""Change modules of settings: Django's, and those for Celery alone."""

import ast
import re
from dataclasses import dataclass

from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.settings.names import UPPER_NAME, normalize
from celery5.migration.settings.new_settings import rename_setting

_SETTINGS_FILE = re.compile(
    r"(^|/)(\w*settings\w*|settings/\w+|config/\w+|celery_?config\w*|\w*celeryconfig)\.py$"
)
OWN_CONFIGURATION = re.compile(r"celery_?config")
"""In the name of a module with settings of Celery alone, which need no prefix."""
INSTALLED_APP = "celery5.contrib.django"


def change_settings_module(context: FileContext) -> None:
    """Change the assignments of a module that has Celery's settings: Django's, or one for Celery alone."""
    if not _SETTINGS_FILE.search(context.file.name) and not _has_installed_apps(context.tree):
        _report_upper(context)
        return
    own = OWN_CONFIGURATION.search(context.file.name) is not None
    has_star = any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in context.tree.body
    )
    written = _find_written(context.tree)
    made = has_star or written.line > 0
    for statement in context.tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name) as target, value=ast.expr() as value):
                pass
            case ast.AugAssign(target=ast.Name(id="INSTALLED_APPS"), value=value):
                _report_installed_apps(context, value)
                continue
            case _:
                continue
        if name == "INSTALLED_APPS":
            _report_installed_apps(context, value)
            _add_installed_app(context, value)
        elif own and not name.startswith("_"):
            _change_own(context, statement, target, name, value)
        elif UPPER_NAME.fullmatch(name):
            in_place = has_star or statement.lineno < written.line
            made = _change_django(context, statement, name, value, made, in_place, written.names)
    _report_upper(context)


def _has_installed_apps(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "INSTALLED_APPS"
        for node in tree.body
    )


def _change_own(
    context: FileContext, statement: ast.stmt, target: ast.Name, name: str, value: ast.expr
) -> None:
    """Change an assignment of a module that configures Celery alone."""
    if not find_equivalent("setting", normalize(name)):
        return
    context.handled.add(id(statement))
    new = rename_setting(context, statement, name, value)
    if new is None:
        return
    if not new.name:
        context.remove_statement(statement)
    else:
        rest = f"\n{name} = {new.left}" if new.left else ""
        context.replace(statement, f"{new.name} = {new.value}{rest}")


@dataclass(frozen=True)
class _Written:
    """The assignment to `CELERY5` in a module, by an earlier run or by its authors."""

    line: int = 0  # where it is assigned; 0 for nowhere
    names: frozenset[str] = frozenset()  # the settings in it


def _find_written(tree: ast.Module) -> _Written:
    """Return the `CELERY5` of a module of settings."""
    line, names = 0, set[str]()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="CELERY5")], value=value)
                | ast.AnnAssign(target=ast.Name(id="CELERY5"), value=value)
            ):
                line = max(line, node.lineno)
                keys = value.keys if isinstance(value, ast.Dict) else []
                names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
            case ast.Subscript(
                value=ast.Name(id="CELERY5"), slice=ast.Constant(value=str(name)), ctx=ast.Store()
            ):
                names.add(name)
            case _:
                pass
    return _Written(line, frozenset(names))


def _change_django(
    context: FileContext,
    statement: ast.stmt,
    name: str,
    value: ast.expr,
    made: bool,
    is_elsewhere: bool,
    written: frozenset[str],
) -> bool:
    """Change a setting of Django's to an item of `CELERY5`. Returns whether `CELERY5` exists now.

    Args:
        made: Whether `CELERY5` exists already.
        is_elsewhere: Whether it may be in another module, or is assigned further below, where an item would be lost.
        written: The settings in it, which are not written twice.
    """
    context.handled.add(id(statement))
    found = len(context.findings)
    new = rename_setting(context, statement, name, value)
    if new is None:
        return made
    is_read_elsewhere = context.index.names[name] > 0
    if is_read_elsewhere and (not new.name or new.name in written):
        del context.findings[found:]
        return made
    if not new.name:
        context.remove_statement(statement)
        return made
    if is_elsewhere:
        del context.findings[found:]
        context.by_hand(
            statement, name, f'CELERY5["{new.name}"] = ..., behind the CELERY5 = of this or another module'
        )
        return made
    text = name if is_read_elsewhere and new.value == context.render(value) else new.value
    line = f'CELERY5["{new.name}"] = {text}' if made else f'CELERY5 = {{"{new.name}": {text}}}'
    if is_read_elsewhere:
        end = context.source.end_of(statement)
        context.source.replace(end, end, f"\n{line}")
    else:
        context.replace(statement, f"{line}\n{name} = {new.left}" if new.left else line)
    return True


def _report_installed_apps(context: FileContext, value: ast.expr) -> None:
    for node in ast.walk(value):
        match node:
            case ast.Constant(value="django_celery_beat"):
                context.by_hand(
                    node,
                    "django_celery_beat",
                    "celery5 migrate --beat FILE.json writes its rows as schedules; then leave it out",
                )
            case ast.Constant(value="django_celery_results"):
                context.note(
                    node,
                    "nothing",
                    "django_celery_results",
                    "results are in Redis for results_ttl; a Data Sink keeps them in a database",
                )
            case _:
                pass


def _add_installed_app(context: FileContext, value: ast.expr) -> None:
    """Add celery5 to `INSTALLED_APPS`, by which it finds the settings, the application and the tasks."""
    there = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    if INSTALLED_APP in there or not context.index.tasks:
        return
    if (
        not isinstance(value, ast.List | ast.Tuple)
        or not value.elts
        or isinstance(value.elts[-1], ast.Starred)
    ):
        context.by_hand(value, "INSTALLED_APPS", f'add "{INSTALLED_APP}"')
        return
    last = value.elts[-1]
    start, end = context.source.start_of(last), context.source.end_of(last)
    is_alone = not context.source.decode(context.source.line_start(start), start).strip()
    space = f"\n{context.source.indentation_at(start)}" if is_alone else " "
    context.source.replace(end, end, f',{space}"{INSTALLED_APP}"')
    context.changed(last, "INSTALLED_APPS", f'"{INSTALLED_APP}", which finds settings, application and tasks')


def _report_upper(context: FileContext) -> None:
    """Report advice for settings of Celery in places where they cannot be changed."""
    for node in ast.walk(context.tree):
        if isinstance(node, ast.ClassDef):
            _report_class(context, node)
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) or id(node) in context.handled:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            name = (
                target.id
                if isinstance(target, ast.Name)
                else target.attr
                if isinstance(target, ast.Attribute)
                else ""
            )
            if UPPER_NAME.fullmatch(name) and find_equivalent("setting", normalize(name)):
                context.report(node, "setting", normalize(name), name)


def _report_class(context: FileContext, node: ast.ClassDef) -> None:
    """Report advice for the settings of a class that `config_from_object` gets."""
    names = {
        target.id: statement
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and find_equivalent("setting", target.id)
    }
    if "broker_url" in names or "celery" in node.name.lower():
        for name, statement in names.items():
            context.report(statement, "setting", name, f"{node.name}.{name}")
