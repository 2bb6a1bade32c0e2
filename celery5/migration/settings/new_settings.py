"""Say what becomes of a setting: its new name, its new value, and what is left to do by hand."""

import ast
from collections.abc import Callable
from dataclasses import dataclass

from celery5.config.settings import Settings
from celery5.hints import find_equivalent
from celery5.migration.files.edits import Located
from celery5.migration.project.context import FileContext
from celery5.migration.project.includes import read_names
from celery5.migration.project.queues import change_queue
from celery5.migration.settings.beat_entries import Entries, change_beat_schedule
from celery5.migration.settings.names import normalize


@dataclass(frozen=True)
class NewSetting:
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


def rename_setting(context: FileContext, node: Located, name: str, value: ast.expr) -> NewSetting | None:
    """Return what becomes of a setting; None if all of it is to be changed by hand."""
    setting, text = normalize(name), context.render(value)
    equivalent = find_equivalent("setting", setting)
    if setting in _VALUES and (new := _VALUES[setting](context, value)) is not None:
        context.changed(node, name, new.name)
        return new
    if setting in ("imports", "include") and _is_moved(context, value):
        context.changed(node, name, "include of the App")
        return NewSetting()
    why = _find_obstacle(setting, text)
    if why:
        context.by_hand(node, name, why)
        return None
    if setting in Settings.__struct_fields__:
        return NewSetting(setting, text)
    if equivalent.isidentifier():
        context.changed(node, name, equivalent)
        return NewSetting(equivalent, text)
    is_off = setting.startswith("task_") and "eager" in setting and text == "False"
    if equivalent.startswith("nothing") or setting == "enable_utc" or is_off:
        context.changed(node, name, f"dropped: {equivalent.removeprefix('nothing: ')}")
        return NewSetting()
    context.report(node, "setting", setting, name)
    return None


def _is_moved(context: FileContext, value: ast.expr) -> bool:
    """Return whether the modules of a setting move into `include` of the project's application."""
    names, is_whole = read_names(value)
    return is_whole and bool(names) and {*names} <= {*context.index.moved}


def report_setting(context: FileContext, node: Located, name: str, value: ast.expr) -> None:
    """Report what to do about a setting that is left as it is."""
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


def _change_schedules(context: FileContext, value: ast.expr) -> NewSetting | None:
    entries = change_beat_schedule(value, context.render)
    if entries is None or (entries.left and not entries.changed):
        return None
    inner = "".join(f"{entry}," for entry in entries.changed)
    text = f"{{{inner}\n}}" if inner else "{}"
    return NewSetting("schedules", text, _report_left(context, "beat_schedule", entries))


def _report_left(context: FileContext, setting: str, entries: Entries) -> str:
    """Report the entries to change by hand. Returns them, as source; '' for none."""
    for key, (_, advice) in entries.left.items():
        context.by_hand(key, f"{setting}[{context.render(key)}]", advice)
    return f"{{{', '.join(text for text, _ in entries.left.values())}}}" if entries.left else ""


def _change_memory(context: FileContext, value: ast.expr) -> NewSetting:
    return NewSetting("max_memory", f"{context.render(value)} * 1024")


_OF_AMQP = {"exchange", "exchange_type", "routing_key"}
"""The fields of a route, beside its queue, that are not needed."""
_ROUTE_LEFT = (
    "it stays in the old setting: queue_routes has the queue alone; a priority is an option of the task: "
    'priority="high", normal or low'
)


def _change_routes(context: FileContext, value: ast.expr) -> NewSetting | None:
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
            change_queue(context, queue)
            pairs.append(f"{context.render(key)}: {context.render(queue)}")
    entries = Entries(tuple(pairs), left)
    if left and not pairs:
        return None
    return NewSetting(
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


_VALUES: dict[str, Callable[[FileContext, ast.expr], NewSetting | None]] = {
    "beat_schedule": _change_schedules,
    "task_routes": _change_routes,
    "worker_max_memory_per_child": _change_memory,
}
"""Settings whose values change."""
