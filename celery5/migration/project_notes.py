"""Say what changes for a whole project, wherever its code is: one note for each fact."""

import ast
from collections.abc import Iterator, Sequence

from celery5.migration.files.source import SourceFile
from celery5.migration.project.index import ProjectIndex, find_task_decorator, get_dotted
from celery5.migration.settings.names import normalize

_SENDING = ("delay", "adelay", "delay_on_commit", "apply_async", "apply_async_on_commit")
_TIME_LIMITS = {"time_limit", "soft_time_limit", "task_time_limit", "task_soft_time_limit"}
_PER_CHILD = {"worker_max_tasks_per_child", "worker_max_memory_per_child", "max_jobs", "max_memory"}
_MARKS = ("backlog", "time_limit", "max_")
"""A file without any of these has none of the settings and options that a note is about."""
_TAKING_SETTINGS = {"App", "Celery", "configure", "update"}
_BACKLOG = (
    "delay does not raise while Redis is down, where Celery's does: the process keeps the job in memory, and loses it "
    "if it ends; {} raises (celery5 docs durability)"
)
_LIMITS = (
    "time limits of def tasks raise in the thread of the job, between two steps of Python: time.sleep or a query keeps "
    "its slot until it returns, while Celery interrupts or kills its process; boxed=True has a process that is killed "
    "(celery5 docs cancellation)"
)
_CHILDREN = (
    "max_jobs and max_memory count for a whole worker process, where Celery's count for each of its children: multiply "
    "the jobs by the concurrency, such as 4 of -c 4; the memory is that of all jobs together (celery5 docs workers)"
)


def describe_project(files: Sequence[SourceFile], index: ProjectIndex) -> list[str]:
    """Return what is different on celery5 for a project with tasks."""
    if not index.tasks:
        return []
    marked = [file for file in files if any(mark in file.text.lower() for mark in _MARKS)]
    trees = [file.tree for file in marked if file.tree is not None]
    settings = {normalize(name) for tree in trees for name in _iterate_settings(tree)}
    notes: list[str] = []
    has_backlog = "backlog" in settings or any("CELERY5_BACKLOG" in file.text for file in marked)
    if any(index.names[name] for name in _SENDING) and not has_backlog:
        notes.append(_BACKLOG.format('CELERY5["backlog"] = 0' if index.is_django else "App(..., backlog=0)"))
    if settings & _TIME_LIMITS or any(_has_limited_def(tree) for tree in trees):
        notes.append(_LIMITS)
    if settings & _PER_CHILD or any("--max-tasks-per-child" in file.text for file in marked):
        notes.append(_CHILDREN)
    return notes


def _iterate_settings(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module may set: of variables, of `conf`, and of arguments of an application."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="CELERY5"), *_], value=ast.Dict() as given):
                yield from _iterate_keys(given)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(name))), *_]):
                yield name
            case ast.Assign(targets=[ast.Attribute(attr=name, value=ast.Attribute(attr="conf")), *_]):
                yield name
            case ast.Call() if get_dotted(node.func).rpartition(".")[2] in _TAKING_SETTINGS:
                yield from (option.arg for option in node.keywords if option.arg)
                for argument in node.args:
                    yield from _iterate_keys(argument)
            case _:
                pass


def _iterate_keys(node: ast.expr) -> Iterator[str]:
    for key in node.keys if isinstance(node, ast.Dict) else ():
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _has_limited_def(tree: ast.Module) -> bool:
    """Return whether a module has a `def` task with a time limit in the worker's own process."""
    for node in ast.walk(tree):
        decorator = find_task_decorator(node) if isinstance(node, ast.FunctionDef) else None
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        options = {option.arg for option in keywords}
        if options & _TIME_LIMITS and "boxed" not in options:
            return True
    return False
