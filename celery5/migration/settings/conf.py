"""Change the statements about `app.conf`, `config_from_object` and `autodiscover_tasks`."""

import ast

from celery5.migration.project.context import FileContext
from celery5.migration.settings.beat_entries import change_beat_schedule
from celery5.migration.settings.names import EAGER, normalize
from celery5.migration.settings.new_settings import rename_setting

_LOUD = "celery5 refuses an unknown setting, with what to write instead"


def mark_conf(context: FileContext, statement: ast.stmt) -> None:
    """Mark the `app.conf` of a statement that `change_conf_statement` changes, which is reported elsewhere."""
    match statement:
        case (
            ast.Expr(
                value=ast.Call(func=ast.Attribute(attr="update", value=ast.Attribute(attr="conf") as conf))
            )
            | ast.Assign(targets=[ast.Attribute(value=ast.Attribute(attr="conf") as conf)])
            | ast.Assign(
                targets=[
                    ast.Subscript(value=ast.Attribute(attr="conf") as conf, slice=ast.Constant(value=str()))
                ]
            )
        ):
            context.handled.add(id(conf))
        case _:
            pass


def change_conf_statement(context: FileContext, statement: ast.stmt) -> bool:
    """Change a statement about `app.conf`, `config_from_object` or `autodiscover_tasks`. Returns whether it is one."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(attr="update", value=ast.Attribute(attr="conf", value=app))
            ) as call
        ):
            return context.kind_of(app) == "app" and _change_update(context, statement, call, app)
        case ast.Assign(
            targets=[ast.Attribute(attr=name, value=ast.Attribute(attr="conf", value=app))], value=value
        ):
            return context.kind_of(app) == "app" and _write_settings(context, statement, app, [(name, value)])
        case ast.Assign(
            targets=[
                ast.Subscript(
                    value=ast.Attribute(attr="conf", value=app), slice=ast.Constant(value=str(name))
                )
            ],
            value=value,
        ):
            return context.kind_of(app) == "app" and _write_settings(context, statement, app, [(name, value)])
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(
                    attr="update",
                    value=ast.Attribute(
                        attr="beat_schedule" as name, value=ast.Attribute(attr="conf", value=app)
                    ),
                ),
                args=[value],
            )
        ):
            return context.kind_of(app) == "app" and _write_settings(context, statement, app, [(name, value)])
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="config_from_object", value=app)) as call):
            return context.kind_of(app) == "app" and _change_config_object(context, statement, call, app)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="autodiscover_tasks", value=app)) as call):
            return context.kind_of(app) == "app" and _change_discovery(context, statement, call, app)
        case _:
            return False


def leave_beat_schedule(context: FileContext, statement: ast.stmt) -> bool:
    """Report entries added to `app.conf.beat_schedule`, and leave them unchanged. Returns whether it did.

    A single `beat_schedule.update({...})` of a file is changed as `beat_schedule = {...}` is: where there are several,
    each `app.configure(schedules=...)` would replace the one before.
    """
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(attr="beat_schedule", value=ast.Attribute(attr="conf") as conf)
                )
            )
        ):
            pass
        case ast.Assign(
            targets=[
                ast.Subscript(
                    value=ast.Attribute(attr="beat_schedule", value=ast.Attribute(attr="conf") as conf)
                )
            ]
        ):
            pass
        case _:
            return False
    if context.kind_of(conf.value) != "app":
        return False
    context.handled.add(id(conf))
    if _find_added(context, statement) is not None:
        return False
    context.by_hand(
        statement,
        "beat_schedule",
        f'{context.render(conf.value)}.configure(schedules={{name: {{"task": ..., "cron": "0 3 * * *"}}}}), once with '
        'all entries, "every" for seconds; or schedule= of the tasks',
    )
    return True


def _find_added(context: FileContext, statement: ast.stmt) -> ast.Dict | None:
    """Return what `beat_schedule.update({...})` adds, if the file has no other entries and these can be changed."""
    match statement:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr="update"), args=[ast.Dict() as value], keywords=[])
        ):
            places = sum(
                isinstance(node, ast.Attribute) and node.attr == "beat_schedule"
                for node in ast.walk(context.tree)
            )
            entries = change_beat_schedule(value, context.render)
            is_changed = places == 1 and entries is not None and (entries.changed or not entries.left)
            return value if is_changed else None
        case _:
            return None


def _change_update(context: FileContext, statement: ast.stmt, call: ast.Call, app: ast.expr) -> bool:
    pairs: list[tuple[str, ast.expr]] = []
    for argument in call.args:
        if not isinstance(argument, ast.Dict) or not all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in argument.keys
        ):
            context.by_hand(statement, "conf.update", f"app.configure(...): {_LOUD}")
            return True
        pairs += [(key.value, value) for key, value in zip(argument.keys, argument.values, strict=True)]  # type: ignore[union-attr]
    if any(option.arg is None for option in call.keywords):
        context.by_hand(statement, "conf.update", f"app.configure(...): {_LOUD}")
        return True
    pairs += [(option.arg, option.value) for option in call.keywords if option.arg]
    return _write_settings(context, statement, app, pairs)


def _write_settings(
    context: FileContext, statement: ast.stmt, app: ast.expr, pairs: list[tuple[str, ast.expr]]
) -> bool:
    """Write `app.configure(...)` in place of a statement; what is to be changed by hand stays in it, and is refused.

    Eager mode stays as it is, `app.conf.task_always_eager = True`: an application that has it is meant for tests.
    """
    arguments: list[str] = []
    left: list[str] = []
    for name, value in pairs:
        if normalize(name) in EAGER:
            context.report(value, "setting", normalize(name), name)
            left.append(f"{context.render(app)}.conf.{name} = {context.render(value)}")
            continue
        new = rename_setting(context, value, name, value)
        if new is None:
            arguments.append(f"{name}={context.render(value)}")
        elif new.name in ("include", "imports"):
            arguments.append(f"{name}={new.value}")
        else:
            arguments += new.write(name)
    if left and len(left) == len(pairs):
        return True
    lines = [f"{context.render_app(app)}.configure({', '.join(arguments)})"] if arguments else []
    if lines or left:
        indentation = context.source.indentation_at(context.source.start_of(statement))
        context.replace(statement, f"\n{indentation}".join([*lines, *left]))
    else:
        context.remove_statement(statement)
    if lines:
        context.changed(statement, "conf", "configure(...)")
    return True


def _change_config_object(context: FileContext, statement: ast.stmt, call: ast.Call, app: ast.expr) -> bool:
    argument = call.args[0] if call.args else None
    text = argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""
    if text.startswith("django.conf") or (
        argument is not None and context.origin_of(argument) == "django.conf.settings"
    ):
        context.remove_statement(statement)
        context.changed(
            statement, "config_from_object", "dropped: CELERY5 of Django's settings is read by itself"
        )
    elif text and not any(option.arg == "namespace" for option in call.keywords):
        context.replace(statement, f'{context.render_app(app)}.use_config("{text.partition(":")[0]}")')
        context.changed(
            statement, "config_from_object", "use_config(...): a module with the settings of celery5"
        )
    else:
        context.report(statement, "app", "config_from_object")
    return True


def _change_discovery(context: FileContext, statement: ast.stmt, call: ast.Call, app: ast.expr) -> bool:
    given = {option.arg: option.value for option in call.keywords}
    packages = call.args[0] if call.args else given.get("packages")
    if isinstance(packages, ast.List | ast.Tuple) and packages.elts:
        app_name = context.render_app(app)
        modules = [element for element in packages.elts if _is_module(context, element)]
        others = [context.render(element) for element in packages.elts if element not in modules]
        lines: list[str] = []
        if modules:
            names = ", ".join(context.render(element) for element in modules)
            lines.append(f"{app_name}.extend_include([{names}])")
        if others:
            listed = f"[{', '.join(others)}]" if modules else context.render(packages)
            module = f", module={context.render(given['related_name'])}" if "related_name" in given else ""
            lines.append(f"{app_name}.autodiscover({listed}{module})")
        indentation = context.source.indentation_at(context.source.start_of(statement))
        context.replace(statement, f"\n{indentation}".join(lines))
        advice = "extend_include([...]): these are modules" if modules else "autodiscover([...])"
        context.changed(statement, "autodiscover_tasks", advice)
    elif context.index.is_django:
        context.remove_statement(statement)
        context.changed(
            statement, "autodiscover_tasks", "dropped: the tasks of INSTALLED_APPS are found by themselves"
        )
    else:
        context.report(statement, "app", "autodiscover_tasks")
    return True


def _is_module(context: FileContext, element: ast.expr) -> bool:
    """Return whether the name to discover is a module of the project, which Celery itself imports."""
    return (
        isinstance(element, ast.Constant)
        and isinstance(element.value, str)
        and context.index.has_module(element.value)
    )
