"""Find code that runs with celery5 as it is, but does something else than with Celery: people have to decide."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from celery5.migration.calls.argument_types import find_unannotated
from celery5.migration.files.findings import CeleryUse
from celery5.migration.files.source import SourceFile
from celery5.migration.job_ids import find_uuid_ids
from celery5.migration.leftovers import find_leftovers
from celery5.migration.project.index import ProjectIndex, find_task_decorator, get_dotted
from celery5.migration.settings.names import normalize
from celery5.migration.tasks.effects_before_sending import find_effects_before_sending

_SENDING = ("delay", "adelay", "delay_on_commit", "apply_async", "apply_async_on_commit", "send_task")
_TIME_LIMITS = {"time_limit", "soft_time_limit", "task_time_limit", "task_soft_time_limit"}
_PER_CHILD = {"worker_max_tasks_per_child", "worker_max_memory_per_child", "max_jobs", "max_memory"}
_MARKS = ("celery", "app", "delay", "apply_async", "task", "time_limit", "max_", "backlog")
"""A file without any of these words has no such code."""
_APPS = {"App", "Celery"}
_TAKING_SETTINGS = {"App", "Celery", "configure", "update"}
_BACKLOG = (
    "delay does not raise while Redis is down, where Celery's does: the process keeps the job in memory, and loses it "
    "if it ends; {} raises. In a task of a worker delay raises, and the attempt runs again later, unless backlog is "
    "set (celery5 docs durability)"
)
_KEEPING = re.compile(r"(?i)backlog[\"'\]]*\s*[:=]\s*[\"']?(?!0\b)\w")
"""A setting `backlog` by which the tasks of a worker keep what they cannot send."""
_LIMITS = (
    "time limits of def tasks raise in the thread of the job, between two steps of Python: time.sleep or a query is "
    "not interrupted, while Celery interrupts or kills its process; boxed=True runs the job in a process that is "
    "killed (celery5 docs cancellation)"
)
_CHILDREN = (
    "max_jobs and max_memory count for a whole worker process, where Celery's count for each of its children: multiply "
    "the jobs by the concurrency, such as 4 of -c 4; the memory is that of all jobs together (celery5 docs workers)"
)


def find_differences(files: Sequence[SourceFile], index: ProjectIndex) -> Mapping[str, Sequence[CeleryUse]]:
    """Return what people have to decide in a project with tasks, by file name."""
    found: dict[str, list[CeleryUse]] = defaultdict(list)
    if not index.tasks:
        return found
    has_backlog = keeps_unsent = False
    effects: list[tuple[str, CeleryUse]] = []
    places: list[_Place] = []
    for file in files:
        has_backlog |= "CELERY5_BACKLOG" in file.text
        keeps_unsent |= "CELERY5_BACKLOG" in file.text and bool(_KEEPING.search(file.text))
        if file.tree is None or not any(mark in file.text.lower() for mark in _MARKS):
            continue
        for name, node in _iterate_settings(file.tree):
            setting = normalize(name)
            has_backlog |= setting == "backlog"
            keeps_unsent |= setting == "backlog" and bool(_KEEPING.search(file.text))
            if setting in _TIME_LIMITS:
                found[file.name].append(CeleryUse(node.lineno, "decide", "time limit", _LIMITS))
            elif setting in _PER_CHILD:
                found[file.name].append(CeleryUse(node.lineno, "decide", "limit of a child", _CHILDREN))
        found[file.name] += _find_limited_defs(file.tree)
        found[file.name] += find_unannotated(file, file.tree, index)
        places += _find_places(file, file.tree)
        effects += ((file.name, use) for use in find_effects_before_sending(file.tree))
    for name, use in (*find_uuid_ids(files), *find_leftovers(files), *(() if keeps_unsent else effects)):
        found[name].append(use)
    if places and not has_backlog and any(index.names[name] for name in _SENDING):
        place = min(places, key=lambda place: place.rank)
        advice = _BACKLOG.format('CELERY5["backlog"] = 0' if index.is_django else "App(..., backlog=0)")
        found[place.file].append(CeleryUse(place.line, "decide", "the backlog", advice))
    return found


@dataclass(frozen=True)
class _Place:
    """A line at which a finding about the whole project may be listed."""

    rank: int  # 0 is the best place
    file: str
    line: int


def _find_places(file: SourceFile, tree: ast.Module) -> Iterator[_Place]:
    """Yield the lines of a file that declare an application, set `CELERY5`, or send a job."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=called) if get_dotted(called).rpartition(".")[2] in _APPS:
                yield _Place(0, file.name, node.lineno)
            case ast.Assign(targets=[ast.Name(id="CELERY5"), *_]):
                yield _Place(1, file.name, node.lineno)
            case ast.Attribute(attr=name) if name in _SENDING:
                yield _Place(2, file.name, node.lineno)
            case _:
                pass


def _iterate_settings(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of settings, with their places: variables, `conf`, and arguments of an application."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            yield from ((target.id, target) for target in statement.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="CELERY5"), *_], value=ast.Dict() as settings):
                yield from _iterate_keys(settings)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(name))) as target, *_]):
                yield name, target
            case ast.Assign(
                targets=[ast.Attribute(attr=name, value=ast.Attribute(attr="conf")) as target, *_]
            ):
                yield name, target
            case ast.Call() if get_dotted(node.func).rpartition(".")[2] in _TAKING_SETTINGS:
                yield from ((option.arg, option.value) for option in node.keywords if option.arg)
                for argument in node.args:
                    yield from _iterate_keys(argument)
            case _:
                pass


def _iterate_keys(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    for key in node.keys if isinstance(node, ast.Dict) else ():
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, key


def _find_limited_defs(tree: ast.Module) -> Iterator[CeleryUse]:
    """Yield the time limits of `def` tasks that run in the worker's own process."""
    for node in ast.walk(tree):
        decorator = find_task_decorator(node) if isinstance(node, ast.FunctionDef) else None
        options = {option.arg: option for option in getattr(decorator, "keywords", ())}
        limits = [options[name] for name in sorted(_TIME_LIMITS & {*options})]
        if limits and "boxed" not in options:
            yield CeleryUse(limits[0].lineno, "decide", "time limit", _LIMITS)
