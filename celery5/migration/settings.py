"""Change what configures an application: its call, `app.conf`, modules of settings, and the settings of Django."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass

from celery5.config.settings import Settings
from celery5.hints import find_equivalent
from celery5.migration.calls import render_app
from celery5.migration.context import FileContext
from celery5.migration.edits import Located
from celery5.migration.index import get_dotted
from celery5.migration.schedules import Entries, change_beat_schedule

OLD_NAMES = {
    "broker_url": "broker_url",
    "always_eager": "task_always_eager",
    "eager_propagates_exceptions": "task_eager_propagates",
    "eager_propagates": "task_eager_propagates",
    "task_result_expires": "result_expires",
    "default_queue": "task_default_queue",
    "queues": "task_queues",
    "routes": "task_routes",
    "ignore_result": "task_ignore_result",
    "acks_late": "task_acks_late",
    "annotations": "task_annotations",
    "track_started": "task_track_started",
    "create_missing_queues": "task_create_missing_queues",
    "send_task_sent_event": "task_send_sent_event",
    "send_events": "worker_send_task_events",
    "default_routing_key": "task_default_routing_key",
    "default_exchange": "task_default_exchange",
    "default_exchange_type": "task_default_exchange_type",
    "redirect_stdouts": "worker_redirect_stdouts",
    "store_errors_even_if_ignored": "task_store_errors_even_if_ignored",
    "max_cached_results": "result_cache_max",
    "celeryd_task_time_limit": "task_time_limit",
    "celeryd_task_soft_time_limit": "task_soft_time_limit",
    "celeryd_hijack_root_logger": "worker_hijack_root_logger",
    "celerybeat_schedule": "beat_schedule",
    "celerybeat_scheduler": "beat_scheduler",
}
"""Names of Celery 3, without `CELERY_` and in lower case, and what Celery 5 calls them."""
_UPPER = re.compile(r"(CELERY|CELERYD|CELERYBEAT|BROKER)_[A-Z0-9_]+")
_ANY = re.compile(r".+")
_SETTINGS_FILE = re.compile(
    r"(^|/)(\w*settings\w*|settings/\w+|config/\w+|celery_?config\w*|\w*celeryconfig)\.py$"
)
_APP_NAMED = {"broker", "include", "name"}
_DROPPED_APP_OPTIONS = {
    "backend",
    "strict_typing",
    "set_as_current",
    "namespace",
    "fixups",
    "changes",
}
EAGER = {"task_always_eager", "task_eager_propagates", "task_store_eager_result"}
"""The settings of eager mode, which no code may lose unseen."""
INSTALLED_APP = "celery5.contrib.django"
_LOUD = "celery5 refuses an unknown setting, with what to write instead"


def normalize(name: str) -> str:
    """Return what Celery 5 calls a setting of any age: `CELERYD_CONCURRENCY` is `worker_concurrency`."""
    lower = name.lower()
    short = lower.removeprefix("celery_")
    if find_equivalent("setting", short) or short in Settings.__struct_fields__:
        return OLD_NAMES.get(short, short)
    if short in OLD_NAMES:
        return OLD_NAMES[short]
    for old, new in (("celeryd_", "worker_"), ("celerybeat_", "beat_")):
        if lower.startswith(old):
            return new + lower.removeprefix(old)
    return short


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
    new = _rename(context, option, name, option.value)
    return [f"{name}={value}"] if new is None else new.write(name)


@dataclass(frozen=True)
class _NewSetting:
    """What becomes of a setting."""

    name: str = ""  # '' if it is dropped
    value: str = ""
    left: str = (
        ""  # the value that the old setting keeps: entries that are to be changed by hand; '' for none
    )

    def write(self, old: str) -> list[str]:
        """Return the arguments of a call in place of the old setting."""
        arguments = [f"{self.name}={self.value}"] if self.name else []
        return [*arguments, f"{old}={self.left}"] if self.left else arguments


def _rename(context: FileContext, node: Located, name: str, value: ast.expr) -> _NewSetting | None:
    """Return what becomes of a setting; None if all of it is to be changed by hand."""
    setting, text = normalize(name), context.render(value)
    equivalent = find_equivalent("setting", setting)
    if setting in _VALUES and (new := _VALUES[setting](context, value)) is not None:
        context.changed(node, name, new.name)
        return new
    why = _find_obstacle(setting, text)
    if why:
        context.by_hand(node, name, why)
        return None
    if setting in Settings.__struct_fields__:
        return _NewSetting(setting, text)
    if equivalent.isidentifier():
        context.changed(node, name, equivalent)
        return _NewSetting(equivalent, text)
    is_off = setting.startswith("task_") and "eager" in setting and text == "False"
    if equivalent.startswith("nothing") or setting == "enable_utc" or is_off:
        context.changed(node, name, f"dropped: {equivalent.removeprefix('nothing: ')}")
        return _NewSetting()
    context.report(node, "setting", setting, name)
    return None


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
        _check_settings(context, call, _UPPER)
    elif name == "configure" and isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app":
        _check_settings(context, call)


def _check_settings(context: FileContext, call: ast.Call, pattern: re.Pattern[str] = _ANY) -> None:
    for option in call.keywords:
        name = option.arg or ""
        is_celerys = name not in Settings.__struct_fields__ and find_equivalent("setting", normalize(name))
        if is_celerys and pattern.fullmatch(name):
            _report_setting(context, option, name, option.value)


def _report_setting(context: FileContext, node: Located, name: str, value: ast.expr) -> None:
    setting = normalize(name)
    why = _find_obstacle(setting, context.render(value))
    if why:
        context.by_hand(node, name, why)
    else:
        context.report(node, "setting", setting, name)


def _find_obstacle(setting: str, text: str) -> str:
    """Return what is to be done about a setting whose value has no counterpart; '' for most."""
    if setting == "beat_schedule":
        return "the setting schedules, or schedule= of the tasks: cron, every, calendar, at"
    if setting in ("task_serializer", "result_serializer", "accept_content") and "pickle" in text:
        return "arguments and results are JSON: annotate the parameters, pass ids in place of objects"
    if setting == "task_routes" and "{" not in text.partition(":")[0]:
        return (
            'queue_routes={"media.mail.*": "mail"} for names and patterns; where a function chose, the sender does: '
            "options(queue=...)"
        )
    if setting == "beat_scheduler" and "django" in text.lower():
        return "celery5 migrate --beat FILE.json writes the rows of django-celery-beat as schedules"
    return ""


def _change_schedules(context: FileContext, value: ast.expr) -> _NewSetting | None:
    entries = change_beat_schedule(value, context.render)
    if entries is None or (entries.left and not entries.changed):
        return None
    inner = "".join(f"{entry}," for entry in entries.changed)
    text = f"{{{inner}\n}}" if inner else "{}"
    return _NewSetting("schedules", text, _report_left(context, "beat_schedule", entries))


def _report_left(context: FileContext, setting: str, entries: Entries) -> str:
    """Report the entries to change by hand. Returns them, as source; '' for none."""
    for key, (_, advice) in entries.left.items():
        context.by_hand(key, f"{setting}[{context.render(key)}]", advice)
    return f"{{{', '.join(text for text, _ in entries.left.values())}}}" if entries.left else ""


def _change_memory(context: FileContext, value: ast.expr) -> _NewSetting:
    return _NewSetting("max_memory", f"{context.render(value)} * 1024")


_OF_AMQP = {"exchange", "exchange_type", "routing_key"}
"""The fields of a route, beside its queue, that are not needed."""
_ROUTE_LEFT = (
    "it stays in the old setting: queue_routes has the queue alone; a priority is an option of the task: "
    'priority="high", normal or low'
)


def _change_routes(context: FileContext, value: ast.expr) -> _NewSetting | None:
    """Return `queue_routes` for the routes of `task_routes` that name a queue and nothing else."""
    routes = _list_routes(value)
    if routes is None:
        return None
    pairs: list[str] = []
    left: dict[ast.expr, tuple[str, str]] = {}
    for key, route in routes:
        queue = _find_queue(route)
        if queue is None or not isinstance(key, ast.Constant):
            left[key] = f"{context.render(key)}: {context.render(route)}", _ROUTE_LEFT
        else:
            pairs.append(f"{context.render(key)}: {context.render(queue)}")
    entries = Entries(tuple(pairs), left)
    if left and not pairs:
        return None
    return _NewSetting(
        "queue_routes", f"{{{', '.join(pairs)}}}", _report_left(context, "task_routes", entries)
    )


def _list_routes(value: ast.expr) -> list[tuple[ast.expr, ast.expr]] | None:
    """Return the patterns of `task_routes` with their routes, in order; None where they cannot be read."""
    found: list[tuple[ast.expr, ast.expr]] = []
    match value:
        case ast.Dict():
            for key, route in zip(value.keys, value.values, strict=True):
                if key is None:
                    return None
                found.append((key, route))
        case ast.List(elts=members) | ast.Tuple(elts=members):
            for member in members:
                match member:
                    case ast.Tuple(elts=[key, ast.Dict() | ast.Constant() as route]):
                        found.append((key, route))
                    case _:
                        inner = _list_routes(member)
                        if inner is None:
                            return None
                        found += inner
        case _:
            return None
    return found


def _find_queue(route: ast.expr) -> ast.expr | None:
    """Return the queue of a route without other needed fields; None for other routes."""
    match route:
        case ast.Constant(value=str()):
            return route
        case ast.Dict():
            fields = {
                key.value if isinstance(key, ast.Constant) else None: field
                for key, field in zip(route.keys, route.values, strict=True)
            }
            return fields.get("queue") if set(fields) <= {"queue", *_OF_AMQP} else None
        case _:
            return None


_VALUES: dict[str, Callable[[FileContext, ast.expr], _NewSetting | None]] = {
    "beat_schedule": _change_schedules,
    "task_routes": _change_routes,
    "worker_max_memory_per_child": _change_memory,
}
"""Settings whose values change."""


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
        new = _rename(context, value, name, value)
        if new is None:
            arguments.append(f"{name}={context.render(value)}")
        elif new.name in ("include", "imports"):
            arguments.append(f"{name}={new.value}")
        else:
            arguments += new.write(name)
    if left and len(left) == len(pairs):
        return True
    lines = [f"{render_app(context, app)}.configure({', '.join(arguments)})"] if arguments else []
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
        context.replace(statement, f'{render_app(context, app)}.use_config("{text.partition(":")[0]}")')
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
        app_name = render_app(context, app)
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


def change_settings_module(context: FileContext) -> None:
    """Change the assignments of a module that has Celery's settings: Django's, or one for Celery alone."""
    if not _SETTINGS_FILE.search(context.file.name) and not _has_installed_apps(context.tree):
        _report_upper(context)
        return
    own = re.search(r"celery_?config", context.file.name) is not None
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
        elif _UPPER.fullmatch(name):
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
    new = _rename(context, statement, name, value)
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
    new = _rename(context, statement, name, value)
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
            if _UPPER.fullmatch(name) and find_equivalent("setting", normalize(name)):
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
