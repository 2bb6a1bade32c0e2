"""Read a project, and say file by file what becomes of it."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from celery5.migration.calls.argument_types import check_argument_types
from celery5.migration.calls.attributes import check_attribute
from celery5.migration.calls.canvas import change_operator
from celery5.migration.calls.dispatch import change_call
from celery5.migration.calls.methods import check_blocking, check_handlers
from celery5.migration.calls.project_tests import check_fixtures, check_replaced, check_stand_in
from celery5.migration.calls.signals import check_signal, mark_signals
from celery5.migration.command_lines import find_command_lines, find_commands_in_code, find_requirements
from celery5.migration.differences import find_differences
from celery5.migration.files.edits import Edit, EditableSource, make_diff
from celery5.migration.files.findings import CeleryUse, Decisions, FileReport, ProjectReport
from celery5.migration.files.source import SourceFile, find_fault, is_whole, read_project
from celery5.migration.imports import change_imports, rename
from celery5.migration.project.context import FileContext
from celery5.migration.project.includes import add_includes
from celery5.migration.project.index import Function, ProjectIndex, make_index
from celery5.migration.project.queues import change_queue_option
from celery5.migration.settings.applications import (
    change_app,
    check_app,
    check_missing,
    check_settings_call,
)
from celery5.migration.settings.broker_urls import change_urls, is_url_name
from celery5.migration.settings.conf import change_conf_statement, leave_beat_schedule, mark_conf
from celery5.migration.settings.modules import OWN_CONFIGURATION, change_settings_module
from celery5.migration.tasks.decorators import change_decorator, check_made_task, is_task_decorator
from celery5.migration.tasks.running_job import change_bound
from celery5.migration.tasks.task_class import check_class

_MARKS = (
    "celery",
    "CELERY",
    "BROKER_URL",
    "apply_async",
    ".delay",
    ".si(",
    "send_task",
    "AsyncResult",
    "kombu",
    ".conf.",
    ".conf[",
    ".control.",
)
"""A file without any of these has nothing of Celery's."""


_REQUIREMENTS = re.compile(r"requirements|(pyproject\.toml|Pipfile|setup\.cfg|environment\.ya?ml)$")


_INSTALLING = re.compile(
    r"\b(?:pip3?|uv|poetry|pipenv|conda)\b[^\n]*\b(?:install|add)\b[^\n]*[\s\"']celery\b"
)
"""A command that installs Celery."""


@dataclass(frozen=True)
class Migration:
    """A project as it was read, and what becomes of it."""

    root: Path
    files: tuple[SourceFile, ...]
    report: ProjectReport


def migrate_project(source: Path) -> Migration:
    """Return what is to be changed in a project. Nothing is imported or written. Raises Misconfigured."""
    project = read_project(source)
    index = add_includes(make_index(project.files), project.files)
    reports: list[FileReport] = []
    differences = find_differences(project.files, index)
    unreadable = dict(project.unreadable)
    for file in project.files:
        try:
            report = migrate_file(file, index, differences.get(file.name, ()))
        except (RecursionError, MemoryError):
            unreadable[file.name] = "it is nested too deeply"
            continue
        if report.findings or report.diff:
            reports.append(report)
    notes: list[str] = []
    if index.tasks and not index.apps:
        notes.append(
            "no Celery(...) was found: give the App retry_policy=RetryPolicy(max_retries=0), as Celery tries a job once"
        )
    texts = {report.path: report.text for report in reports if report.text}
    importing = [
        file.name
        for file in project.files
        if file.tree is not None and _imports_celery(file, texts.get(file.name))
    ]
    whole = ProjectReport(tuple(reports), unreadable, notes, importing)
    return Migration(source if source.is_dir() else source.parent, project.files, whole)


def _imports_celery(file: SourceFile, text: str | None) -> bool:
    """Return whether a file of Python imports Celery, with its changes where it has some."""
    if "celery" not in (file.text if text is None else text):
        return False
    tree = file.tree if text is None else ast.parse(text)
    decisions = Decisions(file.text if text is None else text)
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(name), level=0):
                names = [name]
            case _:
                continue
        is_celerys = any(name.partition(".")[0] == "celery" for name in names)
        if is_celerys and not decisions.settle(CeleryUse(node.lineno, "decide", "import", "")):
            return True
    return False


def migrate_file(file: SourceFile, index: ProjectIndex, differences: Sequence[CeleryUse] = ()) -> FileReport:
    """Return the changes and the findings of a file, with `differences`, what is to be decided in it."""
    report = _migrate_file(file, index, differences)
    decisions = Decisions(file.text)
    findings = tuple(finding for finding in report.findings if not decisions.settle(finding))
    return msgspec.structs.replace(report, findings=findings)


def _migrate_file(file: SourceFile, index: ProjectIndex, differences: Sequence[CeleryUse]) -> FileReport:
    if file.tree is None:
        requirements = find_requirements(file.text, index) if _may_require(file) else ()
        return FileReport(file.name, (*find_command_lines(file, index), *requirements, *differences))
    is_likely = file.module in index.task_modules or OWN_CONFIGURATION.search(file.name) is not None
    has_mark = (is_likely or any(mark in file.text for mark in _MARKS)) and (
        index.tasks or "celery" in f"{file.name} {file.text}".lower()
    )
    if not has_mark and not (index.tasks and "INSTALLED_APPS" in file.text):
        return FileReport(file.name, tuple(differences))
    context = _change_file(file, file.tree, index, ())
    if not is_whole(context.source.result):
        blocking = _find_blocking(context)
        context = _change_file(file, file.tree, index, blocking) if blocking else context
    if file.path.name == "setup.py":
        context.findings.extend(find_requirements(file.text, index))
    context.findings.extend((*differences, *find_commands_in_code(file.tree, index)))
    return _finish(context)


def _may_require(file: SourceFile) -> bool:
    """Return whether a file that is not Python says which packages a project needs, or installs some."""
    return _REQUIREMENTS.search(file.name) is not None or _INSTALLING.search(file.text) is not None


def _change_file(
    file: SourceFile, tree: ast.Module, index: ProjectIndex, kept: Sequence[tuple[ast.stmt, str]]
) -> FileContext:
    """Return a file with its changes, but for those in the statements that are kept, each with the reason."""
    context = FileContext(file, tree, index)
    _Rewriter(context).visit(tree)
    change_settings_module(context)
    check_missing(context)
    for statement, reason in kept:
        context.keep_statement(statement, reason)
    change_imports(context)
    return context


def _find_blocking(context: FileContext) -> list[tuple[ast.stmt, str]]:
    """Return the statements whose changes, beside those of the statements before them, are no valid Python, and why."""
    source = context.source
    changed: dict[int, tuple[ast.stmt, list[Edit]]] = {}
    statements = [node for node in ast.walk(context.tree) if isinstance(node, ast.stmt)]
    for edit in source.edits:
        around = [
            node
            for node in statements
            if source.whole_start_of(node) <= edit.start and edit.end <= source.end_of(node)
        ]
        if around:  # the last one is the innermost
            changed.setdefault(id(around[-1]), (around[-1], []))[1].append(edit)
    found: list[tuple[ast.stmt, str]] = []
    good: list[Edit] = []
    for statement, edits in changed.values():
        tried = EditableSource(source.text)
        tried.edits = [*good, *edits]
        fault = find_fault(tried.result)
        if fault:
            found.append((statement, fault))
        else:
            good = tried.edits
    return found


def _finish(context: FileContext) -> FileReport:
    """Return the report of a file. Changes that would break its syntax are made by hand, all of them."""
    file = context.file
    result = context.source.result or ("\n" if context.file.text else "")  # '' would mean unchanged
    findings = tuple(context.findings)
    if result == file.text:
        return FileReport(file.name, findings)
    obstacle = _find_obstacle(file, result)
    if obstacle:
        by_hand = (
            msgspec.structs.replace(finding, kind="by hand") if finding.kind == "change" else finding
            for finding in findings
        )
        left = CeleryUse(1, "by hand", "the whole file", f"it is left as it is: {obstacle}")
        return FileReport(file.name, (left, *by_hand))
    moved = tuple(
        msgspec.structs.replace(finding, line_after=context.source.new_line(finding.line))
        for finding in findings
    )
    return FileReport(file.name, moved, make_diff(file.name, file.text, result), result)


def _find_obstacle(file: SourceFile, text: str) -> str:
    """Return why the changes of a file cannot be written; '' if nothing speaks against it."""
    try:
        file.encode(text)
    except UnicodeError:
        return f"its encoding, {file.encoding}, has no character for a change"
    if is_whole(text):
        return ""
    fault = find_fault(text)
    return (
        f"with all changes it would not be valid Python ({fault})"
        if fault
        else "with all changes it would not be valid Python"
    )


class _Rewriter(ast.NodeVisitor):
    """Visits all of a module, the inner parts of an expression before the outer ones."""

    def __init__(self, context: FileContext) -> None:
        self.context = context

    def visit_Call(self, node: ast.Call) -> None:
        self.context.handled.add(id(node.func))
        self.generic_visit(node)
        change_queue_option(self.context, node)
        check_argument_types(self.context, node)
        if self.context.celery_name(node.func) == "Celery":
            change_app(self.context, node)
        elif self.context.new_name(node.func) == "App":
            check_app(self.context, node)
        else:
            change_call(self.context, node)
            check_blocking(self.context, node)
            check_settings_call(self.context, node)
            check_stand_in(self.context, node)

    def visit_Try(self, node: ast.Try) -> None:
        self.generic_visit(node)
        check_handlers(self.context, node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.generic_visit(node)
        if node.arg and is_url_name(ast.Constant(node.arg)):
            change_urls(self.context, node.value)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.generic_visit(node)
        for key, value in zip(node.keys, node.values, strict=True):
            if is_url_name(key):
                change_urls(self.context, value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        change_operator(self.context, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Invert) and self.context.kind_of(node.operand) in (
            "signature",
            "workflow",
        ):
            self.context.by_hand(
                node, "~ of a signature", "task.delay(...).get(), or start().get() of a workflow"
            )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        rename(self.context, node)
        check_attribute(self.context, node)

    def visit_Name(self, node: ast.Name) -> None:
        rename(self.context, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if leave_beat_schedule(self.context, node):
            return
        mark_conf(self.context, node)
        self.generic_visit(node)
        if any(is_url_name(target) for target in node.targets):
            change_urls(self.context, node.value)
        if change_conf_statement(self.context, node):
            return
        check_replaced(self.context, node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.context.scopes[-1][target.id] = self.context.kind_of(node.value)
                is_immutable = id(node.value) in self.context.immutable
                (self.context.immutable_names.add if is_immutable else self.context.immutable_names.discard)(
                    target.id
                )

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        match node.target:
            case ast.Name(id=name) as target if self.context.kind_of(target) in ("signature", "workflow"):
                self.context.scopes[-1][name] = "workflow"
            case _:
                pass

    def visit_Expr(self, node: ast.Expr) -> None:
        if leave_beat_schedule(self.context, node):
            return
        mark_conf(self.context, node)
        self.generic_visit(node)
        change_conf_statement(self.context, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        check_class(self.context, node)
        self._visit_scope(node, is_async=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node, is_async=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node, is_async=True)

    def _visit_function(self, node: Function, *, is_async: bool) -> None:
        decorator = is_task_decorator(self.context, node)
        change_bound(self.context, node, decorator)
        mark_signals(self.context, node)
        self._visit_scope(node, is_async=is_async)
        check_fixtures(self.context, node)
        if decorator is not None:
            change_decorator(self.context, node, decorator)
        else:
            check_made_task(self.context, node)
        for other in node.decorator_list:
            check_signal(self.context, other, node)

    def _visit_scope(self, node: Function | ast.ClassDef, *, is_async: bool) -> None:
        before, self.context.is_async = self.context.is_async, is_async
        self.context.scopes.append({})
        self.generic_visit(node)
        self.context.scopes.pop()
        self.context.is_async = before
