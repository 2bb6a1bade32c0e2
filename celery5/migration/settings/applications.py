"""Change the settings in calls: those of `Celery(...)`, `app.configure(...)` and of tests."""

import ast
import re

from celery5.config.settings import Settings
from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import get_dotted
from celery5.migration.settings.names import UPPER_NAME, normalize
from celery5.migration.settings.new_settings import rename_setting, report_setting

_ANY = re.compile(r".+")
_APP_NAMED = {"broker", "include", "name"}
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
    arguments.append(f"retry_policy={context.need('RetryPolicy')}(max_retries=0)")
    name = context.need("App", instead="Celery")
    context.replace(call, f"{name}({', '.join(arguments)})")
    context.changed(call, "Celery(...)", "App(...); max_retries=0 keeps Celery's default, to try once")


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
    _check_settings(context, call)


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
