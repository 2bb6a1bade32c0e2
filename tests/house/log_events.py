"""Collect the log events and the metrics that the code names, by its syntax trees."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from celery5.protocol.audit import ACTIONS
from tests.house.sources import nodes

LEVELS = ("debug", "info", "warning", "error")
VARIES = "varies"
"""The level of an event that is computed where it is logged."""
EVENT_NAME = re.compile(r"[a-z][a-z-]*:[a-z][a-z-]*\Z")
PROCESSES = ("controller", "publisher", "router", "scheduler", "worker")
MORE = "..."
"""Stands for fields that are computed where the event is logged."""
NOT_EVENTS = frozenset(
    (
        *(
            "module:function",
            "module:name",
            "module:class",
            "living:controller",
            "living:publisher",
            "module:app",
            "admin:login",  # names of pages of Django
            "admin:index",
        ),
        *ACTIONS,  # of the audit trail
    )
)
"""Texts in the code that look like the name of an event."""
COMPUTED = {
    "schedule:{}": ("added", "changed", "declared"),
}
"""What stands for `{}` in names that the code puts together."""
LEVEL_FIELD = "is_error"
"""A field of an event about a connection: where it is true, the level is error."""
HIDDEN_FIELDS = {"broker", "is_error", "is_refused", "is_return", "silence"}
"""Fields of events about connections that are not logged."""
WRAPPER_FIELDS = {
    "celery5/tasks/sections.py": ("job", "task", "attempt", "trace", "section", "error"),
    "services/controller/remote_host.py": ("host",),
    "services/publisher/message_publisher.py": ("broker", "why"),
    "bootsteps/supervised.py": ("step", "why", "hint", "traceback"),
}
"""Fields that the wrapper of a module adds to each event."""
WRAPPERS = ("_log_change", "_log_error", "_log_once", "_tell")
"""The names of such wrappers."""


@dataclass
class LoggedEvent:
    """One event as the code logs it, at all places together."""

    name: str
    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)

    def format_levels(self) -> str:
        return ", ".join(level for level in (*LEVELS, VARIES) if level in self.levels) or VARIES

    def format_fields(self) -> str:
        named = [f"`{name}`" for name in sorted(self.fields - {MORE})]
        return ", ".join([*named, *([MORE] if MORE in self.fields else [])])


ACTION_LINES = {
    name: LoggedEvent(name, {level}, set(fields))
    for name, level, fields in (
        ("process:started", "info", ("app", "process")),
        ("process:succeeded", "info", ()),
        ("process:failed", "error", ("exception", "reason")),
    )
}
"""The lines in which eliot says that the action of a process begins and ends."""


def find_sources(root: Path) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield the nodes of each module of the code, by its path.

    Operations and what shows them are left out: they log nothing, and operations have names of this form.
    """
    for folder in ("celery5", "services", "bootsteps"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("celery5/dashboard/", "celery5/operations/")):
                yield name, nodes(path)


@cache
def collect_events(root: Path) -> dict[str, LoggedEvent]:
    """Return the events that the code logs, by name."""
    events: dict[str, LoggedEvent] = {}
    for path, module in find_sources(root):
        assigned = _list_assigned(module)
        keys = {node.slice for node in module if isinstance(node, ast.Subscript)}  # of OPERATIONS
        for node in module:
            for name in _list_names(node) if node not in keys else ():
                events.setdefault(name, LoggedEvent(name))
            if isinstance(node, ast.Call):
                _add_call(events, path, node, assigned)
            elif isinstance(node, ast.Dict):
                _add_message(events, node)
                _add_connection_events(events, root, node)
            elif isinstance(node, ast.FunctionDef) and node.name == "log_job_end" and node.args.kwonlyargs:
                job = events.setdefault("job", LoggedEvent("job"))
                job.fields |= {
                    MORE if kwonlyarg.arg == "extra" else kwonlyarg.arg for kwonlyarg in node.args.kwonlyargs
                }
            elif isinstance(node, ast.FunctionDef) and node.name == "describe_action":
                events |= ACTION_LINES
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
                for name in _list_names(node.elts[0]):
                    events[name] = events.get(name) or LoggedEvent(name)
                    events[name].levels |= {level for level in _list_levels(node.elts[1]) if level != VARIES}
    return events


@cache
def collect_metrics(root: Path) -> dict[str, tuple[str, str]]:
    """Return the kind and the help of each metric that the code exposes, by name."""
    metrics: dict[str, tuple[str, str]] = {}
    for _, module in find_sources(root):
        for node in module:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if not isinstance(name, str):
                continue
            if node.func.id == "QueueGauge":
                metrics[name] = "gauge", ast.literal_eval(node.args[1])
            if node.func.id in ("make_gauge", "make_counter", "make_histogram"):
                metrics[name] = node.func.id.removeprefix("make_"), ast.literal_eval(node.args[1])
    return metrics


def _list_assigned(module: tuple[ast.AST, ...]) -> dict[str, list[str]]:
    """Return the names of events that local variables of a module hold."""
    assigned: dict[str, list[str]] = {}
    for node in module:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
        for value in values:
            target = node.targets[0]
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for variable, assigned_value in pairs:
                if isinstance(variable, ast.Name):
                    assigned.setdefault(variable.id, []).extend(_list_names(assigned_value))
    return assigned


def _add_call(
    events: dict[str, LoggedEvent], path: str, call: ast.Call, assigned: dict[str, list[str]]
) -> None:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function == "OutageLog":
        interrupted = next(
            (_list_levels(keyword.value) for keyword in call.keywords if keyword.arg == "level"), {"warning"}
        )
        # At debug where the log has the outage of the broker already.
        levels = ({*interrupted, "debug"}, {"info", "debug"})
        for argument, level, extra in zip(call.args[1:], levels, ("why", "after"), strict=False):
            for name in _list_names(argument):
                events.setdefault(name, LoggedEvent(name)).levels.update(level)
                unlogged = {"level", "logs_repeats"} | ({"hint"} if extra == "after" else set())
                events[name].fields |= {extra, *_list_fields(call)} - unlogged
        return
    if function == "last_try":
        for name in _list_names(call.args[1]):
            events.setdefault(name, LoggedEvent(name)).levels.add("debug")
            events[name].fields |= {"why", *_list_fields(call)}
        return
    if not call.args or isinstance(call.args[0], ast.Starred) or function[:1].isupper():
        return  # a class, such as `ProcessEvents`, logs nothing by itself
    added = WRAPPER_FIELDS.get(path, ()) if function in WRAPPERS else ()
    names = (
        assigned.get(call.args[0].id, [])
        if isinstance(call.args[0], ast.Name) and function in ("event", *WRAPPERS)
        else _list_names(call.args[0], deep=True)
    )
    for name in names:
        one = events.setdefault(name, LoggedEvent(name))
        one.levels |= _list_levels(call.args[1]) if len(call.args) > 1 else {"info"}
        one.fields |= {*added, *_list_fields(call)}


def _add_message(events: dict[str, LoggedEvent], message: ast.Dict) -> None:
    """Add a message that is written as a dictionary, not by `event`."""
    pairs = {
        str(key.value) if isinstance(key, ast.Constant) else MORE: value
        for key, value in zip(message.keys, message.values, strict=True)
    }
    if "message_type" in pairs:
        for name in _list_names(pairs.pop("message_type")):
            one = events.setdefault(name, LoggedEvent(name))
            one.levels |= _list_levels(pairs.pop("level")) if "level" in pairs else set()
            one.fields |= set(pairs)


def _add_connection_events(events: dict[str, LoggedEvent], root: Path, table: ast.Dict) -> None:
    """Add the fields of the events in a table from the class of an event to its name and level."""
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Name) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
            for name in _list_names(value.elts[0]):
                one = events.setdefault(name, LoggedEvent(name))
                fields = _list_class_fields(root / "celery5/broker/connection/link.py", key.id)
                one.fields |= fields - HIDDEN_FIELDS
                one.levels |= {"debug", "error"} if LEVEL_FIELD in fields else {"debug"}


def _list_class_fields(path: Path, name: str) -> set[str]:
    return {
        str(field.target.id)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _list_fields(call: ast.Call) -> set[str]:
    return {keyword.arg or MORE for keyword in call.keywords}


def _list_names(node: ast.AST, *, deep: bool = False) -> list[str]:
    """Return the names of events that an expression stands for."""
    if deep and isinstance(node, ast.IfExp):
        return [*_list_names(node.body), *_list_names(node.orelse)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        own = node.value.startswith("celery5:")
        name = node.value.removeprefix("celery5:")
        found = EVENT_NAME.match(name) or (own and name in ("job", "log"))
        return [name] if found and name not in NOT_EVENTS else []
    if (
        deep
        and isinstance(node, ast.Attribute)
        and node.attr in ("started", "stopped", "reload_started", "restarted")
    ):
        return [f"{kind}:{node.attr.replace('_', '-')}" for kind in PROCESSES]  # a field of `ProcessEvents`
    if isinstance(node, ast.JoinedStr):
        pattern = "".join(
            str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values
        )
        return [pattern.format(part) for part in COMPUTED.get(pattern, ())]
    return []


def _list_levels(node: ast.AST) -> set[str]:
    if isinstance(node, ast.IfExp):
        return _list_levels(node.body) | _list_levels(node.orelse)
    if isinstance(node, ast.Constant) and node.value in LEVELS:
        return {str(node.value)}
    return {VARIES}
