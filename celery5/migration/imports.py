"""Change the imports of a file, once it is known which names of Celery's it still uses."""

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass

from celery5.hints import ONE_AT_A_TIME, find_equivalent
from celery5.migration.files.source import parse
from celery5.migration.project.context import FileContext

SAME = {
    "chain": "celery5",
    "group": "celery5",
    "chord": "celery5",
    "AsyncResult": "celery5",
    "Retry": "celery5",
    "Reject": "celery5",
    "SoftTimeLimitExceeded": "celery5",
}
"""Names that celery5 has, too, and the module that has them."""
RENAMED = {
    "Celery": ("celery5", "App"),
    "TaskRevokedError": ("celery5", "TaskRevoked"),
    "ImproperlyConfigured": ("celery5", "Misconfigured"),
    "NotRegistered": ("celery5.errors", "UnknownTask"),
    "AlreadyRegistered": ("celery5.errors", "DuplicateTask"),
    "MaxRetriesExceededError": ("celery5", "TaskFailed"),
    "TimeoutError": ("celery5", "ResultTimeout"),
    "TimeLimitExceeded": ("celery5", "TimeLimitExceeded"),
}
"""Names that are another word in celery5, wherever they are read."""


def rename(context: FileContext, node: ast.Name | ast.Attribute) -> None:
    """Change a name of Celery's that is another word in celery5."""
    name = context.celery_name(node)
    if name not in RENAMED or not isinstance(node.ctx, ast.Load):
        return
    if name == "MaxRetriesExceededError" and _is_caught_around_retry(context.tree, node):
        context.by_hand(node, name, _RETRY_RAISES_NOTHING)
        return
    if name == "MaxRetriesExceededError" and _is_raised(context.tree, node):
        context.by_hand(node, f"raise {name}", _RAISE_THE_ERROR)
        return
    module, new = RENAMED[name]
    local = context.need(new, module, instead=name)
    if local != context.render(node):
        context.replace(node, local)


_RETRY_RAISES_NOTHING = (
    "self.retry() of the last attempt raises nothing that a task can catch: put that code into on_failure= of "
    "the task, or before retry() where self.attempt is the last one. Callers of get() catch TaskFailed"
)


_RAISE_THE_ERROR = (
    "raise the error itself, or Reject(...) where it is no failure: a job without retries left is a dead letter with "
    "its error"
)


def _is_raised(tree: ast.Module, name: ast.AST) -> bool:
    """Return whether a name is the error of a `raise` statement."""
    return any(
        (node.exc.func if isinstance(node.exc, ast.Call) else node.exc) is name
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
    )


def _is_caught_around_retry(tree: ast.Module, name: ast.AST) -> bool:
    """Return whether a name stands in an `except` clause of a block that calls `retry`, as a task does."""
    return any(
        any(inner is name for handler in node.handlers if handler.type for inner in ast.walk(handler.type))
        and any(
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr == "retry"
            for statement in node.body
            for inner in ast.walk(statement)
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
    )


def change_imports(context: FileContext) -> None:
    """Change the imports of Celery's names. What is left stays, and is reported."""
    try:
        used = _find_used(parse(context.source.result))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the changes are given up: see `rewrite`
    _change_companions(context, used)
    statements = [node for node in ast.walk(context.tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    theirs = [node for node in statements if _is_celerys(node)]
    top = [node for node in theirs if node in context.tree.body]
    moved: dict[int, list[str]] = {}
    for node in theirs:
        moved[id(node)] = _change_statement(context, node, used)
    plain, new = _write_needed(context)
    place = top[0] if top else None
    for node in top[1:]:  # what comes from celery5 now stands together
        new += [line for line in moved[id(node)] if line.startswith("from celery5")]
        moved[id(node)] = [line for line in moved[id(node)] if not line.startswith("from celery5")]
    beside = _find_place(context, plain) if plain else None
    if beside is None and plain:
        new = [*_separate(context, plain, place, bool(new or (place and moved[id(place)]))), *new]
    for node in theirs:
        lines = [*(new if node is place else []), *moved[id(node)]]
        _replace_statement(context, node, _merge(lines))
    if new and place is None:
        _insert(context, new)
    if beside is not None:
        context.source.replace(beside.offset, beside.offset, beside.text)


def _is_celerys(node: ast.ImportFrom | ast.Import) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] == "celery"
    return any(name.name.partition(".")[0] == "celery" for name in node.names)


def _find_used(tree: ast.Module) -> set[str]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _change_statement(context: FileContext, node: ast.ImportFrom | ast.Import, used: set[str]) -> list[str]:
    """Return the statements that stand in the place of one, without those for new names."""
    lines: dict[str, list[str]] = defaultdict(list)
    was_used = _find_used(context.tree)
    replaced = {name.rpartition(" ")[2] for names in context.needed.values() for name in names}
    for alias in node.names:
        local = alias.asname or alias.name.partition(".")[0]
        written = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        if isinstance(node, ast.Import):
            if not (alias.name.startswith("celery") and local not in used and local in was_used):
                lines[""].append(written)
                if alias.name.partition(".")[0] == "celery" and local in used:
                    context.by_hand(
                        node,
                        f"import {alias.name}",
                        "celery5, name by name: what is left of it is listed here",
                    )
            continue
        module = node.module or ""
        if (local in was_used and local not in used) or local in replaced:
            continue
        if alias.name in RENAMED and local not in was_used:  # for those who import it from here
            target, new = RENAMED[alias.name]
            lines[target].append(f"{new} as {local}")
            context.changed(node, f"import of {alias.name}", f"{new} as {local}")
        elif alias.name in SAME:
            lines[SAME[alias.name]].append(written)
            context.changed(node, alias.name, f"from {SAME[alias.name]}")
        else:
            lines[module].append(written)
            _report_left(context, node, module, alias)
    return [
        f"from {module} import {', '.join(names)}" if module else f"import {', '.join(names)}"
        for module, names in lines.items()
    ]


def _report_left(context: FileContext, node: ast.ImportFrom, module: str, alias: ast.alias) -> None:
    name = alias.name
    is_used = (alias.asname or name) in _find_used(context.tree)
    if is_used and (module == "celery.signals" or name in RENAMED or _has_class_of(context, name)):
        return  # its receivers, its `except` clause, or its class are reported
    if module == "celery.signals":
        context.by_hand(node, f"import of {name}", "leave it out: this file does not use it")
        return
    if find_equivalent("module", name):
        context.report(node, "module", name, f"import of {name}")
        return
    part = module.split(".")[1] if "." in module else ""
    default = _OTHER_MODULES.get(part, "see celery5 docs from-celery")
    context.report(node, "module", part, f"import of {name}", default=default)


_OTHER_MODULES = {
    "app": "celery5 itself: App and task",
    "events": "the log, which has a line for each job, and app.find(id)",
}
"""Modules of Celery's whose names are packages of celery5 with something else."""


def _has_class_of(context: FileContext, name: str) -> bool:
    return any(finding.name.startswith("class ") for finding in context.findings) and name == "Task"


_COMPANIONS = {
    **dict.fromkeys(("celery_once", "celery_singleton"), ONE_AT_A_TIME),
    "redbeat": "the setting schedules, and app.schedule while all runs: schedules are in Redis",
    "celery_progress": "progress(done, total, note) in the task, and result.watch() (celery5 docs results)",
    "kombu": "leave it out: any name is a queue, JSON is all that is sent, and celery5 does not bring kombu",
    "billiard": "leave it out: there are no pools, and celery5 does not bring billiard",
    "django_celery_beat": "the setting schedules: celery5 migrate --beat FILE.json writes the rows; at run time "
    "celery5 schedule, and app.schedule",
    "django_celery_results": "app.find(id) and app.result(id); a Data Sink keeps results in a database",
}
"""Packages that come with Celery, with advice for a file that imports from them."""


def _change_companions(context: FileContext, used: set[str]) -> None:
    """Remove the imports that only changed code needed, such as those for `task_queues`, and name the others."""
    was_used = _find_used(context.tree)
    for node in ast.walk(context.tree):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        package = (module or "").partition(".")[0]
        if package not in _COMPANIONS or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        names = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if names <= was_used - used:
            context.remove_statement(node)
            context.changed(node, f"import of {package}", "dropped: nothing needs it any more")
        else:
            shown = ", ".join(alias.name for alias in node.names)
            context.by_hand(node, f"import of {shown} from {package}", _COMPANIONS[package])


@dataclass(frozen=True)
class _Insertion:
    """A text, and the offset at which it is written."""

    offset: int
    text: str


def _find_place(context: FileContext, plain: list[str]) -> _Insertion | None:
    """Return where modules of the standard library are imported, by the order of isort.

    None where the first import of the file is one of Celery's, or where there is none.
    """
    source = context.source
    imports = [node for node in context.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if _root_of(node) != "__future__"]
    library = [node for node in imports if _root_of(node) in sys.stdlib_module_names]
    before = [
        node for node in library if isinstance(node, ast.Import) and f"import {node.names[0].name}" < plain[0]
    ]
    text = "".join(f"{line}\n" for line in plain)
    if before:
        _, end = source.line_span(source.start_of(before[-1]), source.end_of(before[-1]))
        is_alone = source.line_start(end) == end
        return _Insertion(end, text if is_alone else "".join(f"\n{line}" for line in plain))
    if library:
        return _Insertion(source.start_of(library[0]), text)
    if imports and not _is_celerys(imports[0]):
        return _Insertion(source.start_of(imports[0]), f"{text}\n")
    return None


def _root_of(node: ast.Import | ast.ImportFrom) -> str:
    """Return the package that a statement imports from; '' for a relative import."""
    if isinstance(node, ast.Import):
        return node.names[0].name.partition(".")[0]
    return "" if node.level else (node.module or "").partition(".")[0]


def _separate(context: FileContext, plain: list[str], place: ast.stmt | None, has_others: bool) -> list[str]:
    """Return imports of the standard library, with the empty line between them and other packages."""
    following = [node for node in context.tree.body if place is not None and node.lineno == place.lineno + 1]
    is_followed = any(isinstance(node, ast.Import | ast.ImportFrom) for node in following)
    return [*plain, *([""] if has_others or is_followed else [])]


def _write_needed(context: FileContext) -> tuple[list[str], list[str]]:
    """Return the imports of new names that are used: whole modules, and names. Some stood in what was changed."""
    used = {node.id for node in ast.walk(parse(context.source.result)) if isinstance(node, ast.Name)}
    imported = {
        name.name
        for node in context.tree.body
        if isinstance(node, ast.Import)
        for name in node.names
        if name.asname is None
    }
    plain = [
        f"import {module}"
        for module, names in context.needed.items()
        if not names and module in used - imported
    ]
    lines: list[str] = []
    for module, names in sorted(context.needed.items()):
        wanted = sorted(name for name in names if name.rpartition(" ")[2] in used)
        if wanted:
            lines.append(f"from {module} import {', '.join(wanted)}")
    return plain, lines


def _merge(lines: list[str]) -> list[str]:
    """Return statements without two that import from the same module."""
    merged: dict[str, list[str]] = {}
    for line in lines:
        head, separator, names = line.partition(" import ")
        key = head if separator else line
        known = merged.setdefault(key, [])
        known += [name for name in names.split(", ") if name and name not in known]
    return [f"{key} import {', '.join(sorted(names))}" if names else key for key, names in merged.items()]


def _replace_statement(context: FileContext, node: ast.ImportFrom | ast.Import, lines: list[str]) -> None:
    start, end = context.source.start_of(node), context.source.end_of(node)
    if not lines:
        context.remove_statement(node)
        return
    text = f"\n{context.source.indentation_at(start)}".join(lines)
    flat = context.source.decode(start, end)
    if _is_same_import(flat, text):
        return
    context.source.replace(start, end, text)


def _is_same_import(before: str, after: str) -> bool:
    try:
        return ast.dump(parse(before)) == ast.dump(parse(after))
    except (SyntaxError, ValueError):
        return False


def _insert(context: FileContext, lines: list[str]) -> None:
    """Insert imports before the first one of the module, or behind its docstring."""
    body = context.tree.body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    later = [
        node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    text = "\n".join(lines)
    if later:
        start = context.source.start_of(later[0])
        context.source.replace(start, start, f"{text}\n")
    elif imports:
        end = context.source.end_of(imports[-1])
        context.source.replace(end, end, f"\n\n{text}")
    elif body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        end = context.source.end_of(body[0])
        context.source.replace(end, end, f"\n\n{text}")
    elif body:
        start = min(
            context.source.start_of(node) for node in (body[0], *getattr(body[0], "decorator_list", ()))
        )
        start = context.source.line_start(start)
        context.source.replace(start, start, f"{text}\n\n")
