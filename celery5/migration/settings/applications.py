"""Change the settings in calls: those of `Celery(...)`, `app.configure(...)` and of tests."""

import ast
import re

from celery5.config.settings import Settings
from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.includes import read_names
from celery5.migration.project.index import Function, find_task_decorator, get_dotted
from celery5.migration.settings.names import UPPER_NAME, normalize
from celery5.migration.settings.new_settings import rename_setting, report_setting

_ANY = re.compile(r".+")
_APP_NAMED = {"broker", "include", "name"}
_NO_APP_OPTION = re.compile(r"(?!(?:broker|include|name)$).+")
_DROPPED_APP_OPTIONS = {
    "backend",
    "strict_typing",
    "set_as_current",
    "namespace",
    "fixups",
    "changes",
}


def change_app(context: FileContext, call: ast.Call) -> None:
    """Change `Celery(...)` to `App(...)`, whose tasks are retried when they ask for it, as before."""
    arguments = [context.render(argument) for argument in call.args[:1]]
    if len(call.args) > 1:
        context.by_hand(call, "Celery(...)", "keywords of App, such as broker=")
        arguments += [context.render(argument) for argument in call.args[1:]]
    for option in call.keywords:
        if option.arg == "main":
            arguments.insert(0, context.render(option.value))
        else:
            arguments += _change_app_option(context, option)
    if not call.args and all(option.arg != "main" for option in call.keywords):
        arguments.insert(0, f'"{context.file.module[0] if context.file.module else "app"}"')
        context.changed(
            call, "Celery() without a name", "its module: a name is the scope of all keys in Redis"
        )
    arguments = _add_include(context, call, arguments)
    arguments.append(f"retry_policy={context.need('RetryPolicy')}(max_retries=0)")
    name = context.need("App", instead="Celery")
    context.replace(call, f"{name}({', '.join(arguments)})")
    context.changed(call, "Celery(...)", "App(...); max_retries=0 keeps Celery's default, to try once")


_WHY_INCLUDED = "declare tasks, and celery5 only finds modules that an application includes"


def _add_include(context: FileContext, call: ast.Call, arguments: list[str]) -> list[str]:
    """Return the arguments of the project's only application, with the modules that it has to include."""
    index = context.index
    there = next((option.value for option in call.keywords if option.arg == "include"), None)
    names, is_whole = read_names(there) if there is not None else ([], True)
    added = [name for name in (*index.moved, *index.missing) if name not in names]
    if not (added and index.has_one_app):
        return arguments
    if not is_whole:
        context.by_hand(call, "include", f"add {', '.join(added)}: they {_WHY_INCLUDED}")
        return arguments
    text = ", ".join(f'"{name}"' for name in (*names, *added))
    context.changed(call, "include", f"{', '.join(added)}, which {_WHY_INCLUDED}")
    return [*(text for text in arguments if not text.startswith("include=")), f"include=[{text}]"]


def _check_include(context: FileContext, call: ast.Call) -> None:
    """Report the modules that the project's only application does not include."""
    if context.index.missing and context.index.has_one_app:
        names = ", ".join(f'"{name}"' for name in context.index.missing)
        context.by_hand(call, "App(include=)", f"add {names} to include=[...]: they {_WHY_INCLUDED}")


def check_missing(context: FileContext) -> None:
    """Report a module of tasks that nothing includes, in a project without an application of its own."""
    name = next(
        (
            name
            for name in context.index.missing
            if tuple(name.split(".")) == context.file.module[-name.count(".") - 1 :]
        ),
        "",
    )
    if not name or context.index.apps or not context.index.is_django:
        return
    tasks = [node for node in context.tree.body if isinstance(node, Function) and find_task_decorator(node)]
    if tasks:
        app = name.rpartition(".")[0]
        context.by_hand(
            tasks[0],
            f"the module {name}",
            f"import its tasks in {app}.tasks: from {name} import {tasks[0].name}; or declare an App with "
            f'include=["{name}"] (celery5 docs django): celery5 finds the modules tasks of the installed apps alone',
        )


def _change_app_option(context: FileContext, option: ast.keyword) -> list[str]:
    name, value = option.arg, context.render(option.value)
    if name is None:
        return [f"**{value}"]
    if name in _APP_NAMED:
        is_none = isinstance(option.value, ast.Constant) and option.value.value is None
        return [] if is_none else [f"{name}={value}"]
    if name in _DROPPED_APP_OPTIONS:
        context.changed(
            option, name, "dropped: results are where the jobs are" if name == "backend" else "dropped"
        )
        return []
    if name == "task_cls":
        context.report(option, "option", "base", "Celery(task_cls=)")
        return [f"task_cls={value}"]
    new = rename_setting(context, option, name, option.value)
    return [f"{name}={value}"] if new is None else new.write(name)


def check_app(context: FileContext, call: ast.Call) -> None:
    """Report what is left to do in a call of `App`."""
    if len(call.args) > 1:
        context.by_hand(call, "Celery(...)", "keywords of App, such as broker=")
    for option in call.keywords:
        if option.arg == "task_cls":
            context.report(option, "option", "base", "Celery(task_cls=)")
    _check_include(context, call)
    _check_settings(context, call, _NO_APP_OPTION)


def check_settings_call(context: FileContext, call: ast.Call) -> None:
    """Report the settings of Celery in `app.configure(...)` and in a test's `override_settings`."""
    called = call.func
    name = get_dotted(called).rpartition(".")[2]
    if name in ("override_settings", "settings"):
        _check_settings(context, call, UPPER_NAME)
    elif name == "configure" and isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app":
        _check_settings(context, call)


def _check_settings(context: FileContext, call: ast.Call, pattern: re.Pattern[str] = _ANY) -> None:
    for option in call.keywords:
        name = option.arg or ""
        is_celerys = name not in Settings.__struct_fields__ and find_equivalent("setting", normalize(name))
        if is_celerys and pattern.fullmatch(name):
            report_setting(context, option, name, option.value)
