"""Keep the state of the file that is read: its imports, its variables, its changes and findings."""

import ast
from collections import defaultdict
from typing import Literal, cast

import msgspec

from celery5.hints import NameKind, find_equivalent
from celery5.migration.files.edits import EditableSource, Located
from celery5.migration.files.findings import CeleryUse, FindingKind
from celery5.migration.files.source import SourceFile
from celery5.migration.project.index import (
    APP_NAMES,
    KnownTask,
    ProjectIndex,
    get_dotted,
    imports_celery5,
    iterate_bound_names,
)

ValueKind = Literal["task", "signature", "workflow", "result", "app", "control", "inspect", "celery", ""]
"""What an expression is, as far as the syntax shows it; '' when it does not."""
_CANVAS = {"chain", "group", "chord", "xmap", "xstarmap", "chunks"}
_SIGNATURES = {"s", "si", "signature", "subtask"}
_MAKING_SIGNATURES = {("partial", "task"), ("set", "signature"), ("clone", "signature")}
_SAME_AGAIN = {"on_error", "link_error", "set", "clone", "replace"}
"""Methods of a signature or a workflow that return one."""


class FileContext:
    """One file, what its names mean, and what becomes of it."""

    def __init__(self, file: SourceFile, tree: ast.Module, index: ProjectIndex) -> None:
        self.file = file
        self.tree = tree
        self.index = index
        self.source = EditableSource(file.text)
        self.findings: list[CeleryUse] = []
        self.origins: dict[str, str] = {}  # the dotted names that local names were imported from
        self.needed: dict[str, set[str]] = defaultdict(set)  # names to import, by module, `new as local`
        self.scopes: list[dict[str, ValueKind]] = [{}]
        self.handled: set[int] = set()  # ids of nodes that are done
        self.immutable: set[int] = set()  # ids of signatures that take no value of the step before them
        self.immutable_names: set[str] = set()  # of variables that hold such signatures
        self.decorators = {
            id(decorator)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for decorator in node.decorator_list
        }
        self.is_async = False
        self.is_written = imports_celery5(tree)  # changed by an earlier run, or written so
        self._bound = set(iterate_bound_names(tree))
        self._blocks: dict[int, list[ast.stmt]] = {}
        self._removed: set[int] = set()
        self._read_blocks()
        self._read_imports()

    def _read_imports(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    local = name.asname or name.name.partition(".")[0]
                    self.origins[local] = name.name if name.asname else local
            elif isinstance(node, ast.ImportFrom):
                prefix = "." * node.level + (node.module or "")
                for name in node.names:
                    joint = "" if prefix.endswith(".") or not prefix else "."
                    self.origins[name.asname or name.name] = f"{prefix}{joint}{name.name}"

    # What names mean

    def origin_of(self, node: ast.AST) -> str:
        """Return the dotted name that an expression was imported as; '' if it is none, or a local name."""
        dotted = get_dotted(node)
        first, _, rest = dotted.partition(".")
        origin = self.origins.get(first, "")
        return f"{origin}.{rest}" if origin and rest else origin

    def celery_name(self, node: ast.AST) -> str:
        """Return the name of Celery's that an expression is, `shared_task`; '' for all else."""
        origin = self.origin_of(node)
        package, _, rest = origin.partition(".")
        is_of_app = rest.startswith("current_app.")
        return rest.rpartition(".")[2] if package == "celery" and rest and not is_of_app else ""

    def new_name(self, node: ast.AST) -> str:
        """Return the name in celery5 that an expression refers to, such as `task`; '' for others."""
        origin = self.origin_of(node)
        package, _, rest = origin.partition(".")
        return rest.rpartition(".")[2] if package == "celery5" else ""

    def find_task(self, node: ast.AST) -> KnownTask | None:
        """Return the task of the project that an expression refers to, also with options: `add.options(queue="q")`."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "options"
        ):
            node = node.func.value
        dotted = get_dotted(node)
        if not dotted:
            return None
        origin = self.origin_of(node)
        if origin:
            return self.index.find_task(origin)
        if "." in dotted:
            return None
        here = (task for task in self.index.tasks.get(dotted, ()) if task.module == self.file.module)
        return next(here, None) or self.index.find_exported(self.file.module, dotted)

    def kind_of(self, node: ast.AST) -> ValueKind:
        """Return what an expression is."""
        match node:
            case ast.Call():
                return self._kind_of_call(node)
            case ast.Subscript(value=ast.Attribute(attr="tasks", value=app)) if self.kind_of(app) == "app":
                return "task"
            case ast.Attribute(attr="task", value=value) if self.kind_of(value) == "signature":
                return "task"
            case ast.BinOp(left=left, op=ast.BitOr() | ast.RShift(), right=right):
                kinds = {self.kind_of(left), self.kind_of(right)}
                return "workflow" if kinds & {"signature", "workflow"} else ""
            case ast.Name(id=name):
                for scope in reversed(self.scopes):
                    if name in scope:
                        return scope[name]
            case _:
                pass
        return self._kind_of_name(node)

    def _kind_of_name(self, node: ast.AST) -> ValueKind:
        dotted, origin = get_dotted(node), self.origin_of(node)
        if not dotted:
            return ""
        if dotted.endswith(".control") and origin.endswith("current_app.control"):
            return "control"
        if origin.partition(".")[0] == "celery":
            return "app" if origin.endswith("current_app") else "celery"
        if self.index.is_app(origin) if origin else dotted in self.index.apps and "." not in dotted:
            return "app"
        if not origin and dotted in APP_NAMES and dotted not in self._bound:
            return "app"
        if dotted.endswith(".control") and self.kind_of(node.value) == "app":  # type: ignore[attr-defined]
            return "control"
        if self.find_task(node) is not None:
            return "task"
        is_imported = bool(origin) and ("." in origin.lstrip(".") or origin.startswith("."))
        last = origin.rpartition(".")[2]
        return "task" if is_imported and last.islower() and last not in APP_NAMES else ""

    def _kind_of_call(self, call: ast.Call) -> ValueKind:
        called = call.func
        name = self.celery_name(called) or self.new_name(called)
        if name:
            kinds: dict[str, ValueKind] = {
                "Celery": "app",
                "App": "app",
                "AsyncResult": "result",
                "Inspect": "inspect",
            }
            return (
                "workflow" if name in _CANVAS else kinds.get(name, "signature" if name in _SIGNATURES else "")
            )
        if not isinstance(called, ast.Attribute):
            inner = self.kind_of(called) if isinstance(called, ast.Call) else ""
            return "result" if inner in ("workflow", "signature") else ""
        of = self.kind_of(called.value)
        if called.attr in _SIGNATURES or (called.attr, of) in _MAKING_SIGNATURES:
            return "signature"
        if called.attr in ("map", "starmap", "chunks") and of == "task":
            return "workflow"
        if called.attr in _SAME_AGAIN and of in ("signature", "workflow"):
            return of
        if (called.attr, of) == ("inspect", "control"):
            return "inspect"
        if (called.attr, of) == ("options", "task"):
            return "task"
        if (called.attr, of) == ("result", "app"):
            return "result"
        if called.attr in ("delay", "apply_async", "AsyncResult", "send_task", "start") and of:
            return "result"
        return "signature" if called.attr == "signature" and of == "app" else ""

    def is_sure_task(self, node: ast.AST) -> bool:
        """Return whether an expression is a task of the project, and not only a name that was imported."""
        match node:
            case ast.Call(func=ast.Attribute(attr="options", value=task)):
                return self.is_sure_task(task)
            case ast.Attribute(attr="task", value=value) if self.kind_of(value) == "signature":
                return True
            case ast.Name(id=name) if self.origin_of(node) == "" and any(
                name in scope for scope in self.scopes
            ):
                return self.kind_of(node) == "task"
            case ast.Subscript():
                return self.kind_of(node) == "task"
            case _:
                return self.find_task(node) is not None

    def is_task_like(self, node: ast.AST) -> bool:
        """Return whether an expression is a task, or a name that was imported and is probably one."""
        return self.kind_of(node) == "task"

    # What becomes of it

    def note(self, node: Located, kind: FindingKind, name: str, advice: str) -> None:
        """Report a finding at the line of a node."""
        self.findings.append(CeleryUse(node.lineno, kind, name, advice))

    def changed(self, node: Located, name: str, advice: str) -> None:
        """Report a change."""
        self.note(node, "change", name, advice)

    def by_hand(self, node: Located, name: str, advice: str) -> None:
        """Report advice for a change by hand."""
        self.note(node, "by hand", name, advice)

    def report(
        self, node: Located, thing: NameKind, name: str, shown: str = "", *, default: str = ""
    ) -> None:
        """Report the tables' advice for a name of Celery's: its replacement, or that it has no counterpart."""
        advice = find_equivalent(thing, name) or default
        if not advice:
            advice = "see celery5 docs from-celery"
        if advice.startswith("nothing"):
            self.note(node, "nothing", shown or name, advice.removeprefix("nothing").lstrip(":; ") or "none")
        else:
            self.by_hand(node, shown or name, f"write {advice}" if advice.isidentifier() else advice)

    def need(self, name: str, module: str = "celery5", *, instead: str = "") -> str:
        """Have a name imported, and return what it is called in this file.

        Args:
            instead: The local name that it replaces; it is kept where the new one means something else here.
        """
        local = name
        if name in self._bound:
            local = instead if instead and instead not in self._bound else f"celery5_{name}".lower()
        self.needed[module].add(name if local == name else f"{name} as {local}")
        return local

    def find_app(self) -> str:
        """Return the name of the project's application in this file, which may get imported; '' if that is unclear."""
        here = [name for name, kind in self.scopes[0].items() if kind == "app"]
        imported = [local for local, origin in self.origins.items() if self.index.knows_app(origin)]
        imported += [local for local, origin in self.origins.items() if self._is_app_elsewhere(origin)]
        if here or imported:
            return (here or imported)[0]
        known = [(name, module) for name, modules in self.index.apps.items() for module in modules]
        if len(known) != 1 or not known[0][1]:
            return ""
        name, module = known[0]
        return self.need(name, ".".join(module))

    def render_app(self, receiver: ast.expr) -> str:
        """Return how an application is written: `current_app` is that of the project."""
        return (self.find_app() if self.celery_name(receiver) else "") or self.render(receiver)

    def _is_app_elsewhere(self, origin: str) -> bool:
        """Return whether a name was imported from a module that was not read, and is probably an application."""
        is_of_project = origin.partition(".")[0] not in ("celery", "celery5") and "." in origin.lstrip(".")
        return is_of_project and self.index.is_app(origin)

    def local_name(self, node: ast.expr) -> str:
        """Return how a name that celery5 has, too, is written: an import is moved, `celery.chain` is `chain`."""
        if isinstance(node, ast.Name):
            return self.render(node)
        return self.need(self.celery_name(node), instead=self.celery_name(node))

    def render(self, node: Located) -> str:
        """Return the source of a node with the changes inside of it."""
        return self.source.render_node(node)

    def replace(self, node: Located, text: str) -> None:
        """Change a node."""
        self.source.replace_node(node, text)

    def keep_immutable(self, node: ast.AST) -> None:
        """Leave `si` inside of a node, where `s` would take a value: it is refused until it is changed by hand."""
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == "si"
            ):
                end = self.source.end_of(inner.func)
                self.source.replace(end - 2, end, "si")
                made = CeleryUse(inner.lineno, "change", "si", "s, behind >>")
                self.findings = [finding for finding in self.findings if finding != made]

    def keep_statement(self, statement: ast.stmt, reason: str) -> None:
        """Leave a statement as it is: its changes would not be valid Python. They become changes by hand."""
        start, end = self.source.whole_start_of(statement), self.source.end_of(statement)
        self.source.edits = [
            edit for edit in self.source.edits if not (start <= edit.start and edit.end <= end)
        ]
        first = self.source.line_of(start)
        last = statement.end_lineno or statement.lineno
        self.findings = [
            msgspec.structs.replace(finding, kind="by hand")
            if finding.kind == "change" and first <= finding.line <= last
            else finding
            for finding in self.findings
        ]
        self.by_hand(
            statement,
            "the whole statement",
            f"it is left as it is, since its changes together would not be valid Python ({reason}): make those named "
            "here",
        )

    def remove_statement(self, node: ast.stmt) -> None:
        """Remove a statement with its lines; where its block would be empty, `pass` stays."""
        self._removed.add(id(node))
        start, end = self.source.start_of(node), self.source.end_of(node)
        block = self._blocks.get(id(node))
        if block and all(id(other) in self._removed for other in block):
            self.source.replace(start, end, "pass")
            return
        self.source.remove_lines(start, end)

    def _read_blocks(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module):
                continue
            for name in ("body", "orelse", "finalbody"):
                block: object = getattr(node, name, None)
                if isinstance(block, list):
                    statements = cast("list[ast.stmt]", block)
                    self._blocks.update((id(statement), statements) for statement in statements)
