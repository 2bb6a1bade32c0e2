"""Find tasks that send jobs after a step with an effect: that step is done again when the sending has raised."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from celery5.migration.files.findings import CeleryUse
from celery5.migration.project.index import Function, find_task_decorator, get_dotted

_ADVICE = (
    "while Redis is down, delay in a task of a worker raises BrokerUnavailable; with any max_retries the attempt runs "
    "again when Redis is back, so what is done before this line is done twice, and a second run that returns early "
    "never sends: send first, let the second run send again, or set backlog for the worker (celery5 docs durability)"
)
_AFTER_COMMIT = {"delay_on_commit", "adelay_on_commit", "apply_async_on_commit"}
_SENDING = _AFTER_COMMIT | {"delay", "adelay", "apply_async", "send_task", "send_many", "asend_many"}
_STARTING = {"start", "astart"}
_CANVAS = {"chain", "chord", "group", "chunks", "starmap", "xmap", "xstarmap"}
_SIGNATURES = {"s", "si", "signature", "subtask"}
_WRITES = {
    f"{prefix}{name}"
    for name in (
        "save",
        "create",
        "bulk_create",
        "bulk_update",
        "get_or_create",
        "update_or_create",
        "update",
    )
    for prefix in ("", "a")
} | {"delete", "adelete", "add", "set", "remove", "clear"}
"""Methods of Django's models, queries and managers that a transaction takes back."""
_LOGS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log", "print", "getLogger"}
_READS = re.compile(
    "get|first|last|latest|earliest|all|filter|exclude|exists|count|values|values_list|"
    "select_related|only|defer|prefetch_related|select_for_update|order_by|aggregate|annotate|"
    "distinct|iterator|in_bulk|none|using|aget|afirst|alast|aexists|acount|aiterator|"
    "refresh_from_db|get_object_or_404|scalar|scalars|one|one_or_none"
)
"""Methods that read from a database, a dictionary or by HTTP."""
_VALUES = re.compile(
    "abs|all|any|bool|bytes|dict|enumerate|filter|float|frozenset|getattr|hasattr|hash|id|"
    "int|isinstance|issubclass|iter|len|list|map|max|min|next|range|repr|reversed|round|"
    "set|sorted|str|sum|tuple|type|zip|bytearray|format|join|split|strip|lstrip|rstrip|"
    "lower|upper|title|replace|startswith|endswith|encode|decode|items|keys|values|copy|"
    "append|extend|partition|rpartition|splitlines|hexdigest|now|utcnow|today|localtime|"
    "localdate|timedelta|time|monotonic|perf_counter|sleep|isoformat|strftime|strptime|date|"
    "total_seconds|dumps|loads|uuid4|uuid1|json|raise_for_status|partial|options|atomic|"
    "on_commit|super|cast|gettext|_|update_state|retry|optional|poisonous|lock|acquire|open|reverse|"
    r"(?!a?get_or_create$)(get|find|is|has|load|read|list|parse|format|fetch|select|build|compute|calculate|render|check)_\w+"
)
"""Functions and methods that return a value, or change one in memory only."""
_HARMLESS = _LOGS | _CANVAS | _SIGNATURES


def find_effects_before_sending(tree: ast.Module) -> Iterator[CeleryUse]:
    """Yield the tasks of a file that send a job after a step that may have an effect, each with the line of sending."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and find_task_decorator(node) is not None:
            line = _TaskBody(node).find_line()
            if line:
                yield CeleryUse(line, "decide", f"sending after an effect in {node.name}", _ADVICE)


class _TaskBody:
    """The steps of a task in the order in which they run, and whether one of them had an effect so far."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._has_acted: bool = False  # an effect that stays when the attempt ends with an error
        self._has_written: bool = False  # a write in the open transaction, which an error takes back
        self._depth = 0  # of open transactions
        self._lines: list[int] = []  # where a job is sent after an effect
        self._on_commit: list[int] = []  # where a job is sent when the open transaction is committed
        self._senders = set(_find_senders(function))

    def find_line(self) -> int:
        """Return the first line at which a job is sent after an effect; 0 for none."""
        is_atomic = any(_is_atomic(decorator) for decorator in self._function.decorator_list)
        self._read_block(self._function.body, is_atomic=is_atomic)
        return min(self._lines, default=0)

    def _read_block(self, statements: Sequence[ast.stmt], *, is_atomic: bool = False) -> None:
        self._depth += is_atomic
        for statement in statements:
            self._read(statement)
        self._depth -= is_atomic
        if is_atomic and not self._depth:
            self._has_acted |= self._has_written
            self._has_written = False
            self._lines += self._on_commit if self._has_acted else []
            self._on_commit = []

    def _read(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass  # what a function inside of the task does is read where it is named
            case ast.If(test=test, body=body, orelse=orelse):
                self._read_calls(test)
                self._read_branches([body, orelse])
            case ast.Match(subject=subject, cases=cases):
                self._read_calls(subject)
                self._read_branches([[], *(case.body for case in cases)])
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self._read_block(body)
                self._read_branches([orelse, *(handler.body for handler in handlers)])
                self._read_block(final)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._read_calls(item.context_expr)
                self._read_block(body, is_atomic=any(_is_atomic(item.context_expr) for item in items))
            case (
                ast.For(iter=head, body=body, orelse=orelse)
                | ast.AsyncFor(iter=head, body=body, orelse=orelse)
            ):
                self._read_calls(head)
                self._read_block([*body, *orelse])
            case ast.While(test=head, body=body, orelse=orelse):
                self._read_calls(head)
                self._read_block([*body, *orelse])
            case _:
                self._read_calls(statement)

    def _read_branches(self, branches: Iterable[Sequence[ast.stmt]]) -> None:
        """Read branches of which one runs; what is done in one that ends the task is not before what follows."""
        before = self._has_acted, self._has_written
        acted, written = before
        for branch in branches:
            self._has_acted, self._has_written = before
            self._read_block(branch)
            if not (branch and isinstance(branch[-1], ast.Return | ast.Raise)):
                acted, written = acted or self._has_acted, written or self._has_written
        self._has_acted, self._has_written = acted, written

    def _read_calls(self, node: ast.AST, *, is_on_commit: bool = False) -> None:
        """Read what is called in a statement, arguments before the call."""
        if isinstance(node, ast.Call):
            name = _name_of(node.func)
            is_sending = self._is_sending(node.func)
            is_on_commit |= name == "on_commit" or name in _AFTER_COMMIT
            for child in ast.iter_child_nodes(node):
                if not (child is node.func and is_sending):
                    self._read_calls(child, is_on_commit=is_on_commit)
            if is_sending:
                self._send(node.func, is_on_commit=is_on_commit)
            elif name in _WRITES and self._depth:
                self._has_written = True
            elif not self._is_harmless(node.func, name):
                self._has_acted = True
            return
        for child in ast.iter_child_nodes(node):
            self._read_calls(child, is_on_commit=is_on_commit)
        if isinstance(node, ast.Attribute | ast.Name) and self._is_sending(node, is_called=False):
            self._send(node, is_on_commit=is_on_commit)

    def _is_sending(self, node: ast.expr, *, is_called: bool = True) -> bool:
        match node:
            case ast.Attribute(attr=name) if name in _SENDING:
                return True
            case ast.Attribute(attr=name, value=value) if name in _STARTING:
                return self._is_workflow(value)
            case ast.Name(id=name) if name in self._senders and isinstance(node.ctx, ast.Load):
                return True
            case _:
                return is_called and self._is_workflow(node)

    def _is_harmless(self, node: ast.expr, name: str) -> bool:
        """Return whether a call only reads, logs, or makes a value, as a class does, which has a capital."""
        last = name.rpartition(".")[2]
        if last == "set" and isinstance(node, ast.Attribute):  # of a cache, or the options of a signature
            return self._is_workflow(node.value)
        return bool(
            last in _HARMLESS or last[:1].isupper() or _READS.fullmatch(last) or _VALUES.fullmatch(last)
        )

    def _is_workflow(self, node: ast.expr) -> bool:
        """Return whether an expression is a signature, or a workflow: calling it, or its `start`, sends."""
        match node:
            case ast.Name(id=name):
                return any(
                    isinstance(assigned, ast.Assign)
                    and any(isinstance(target, ast.Name) and target.id == name for target in assigned.targets)
                    and not isinstance(assigned.value, ast.Name)
                    and self._is_workflow(assigned.value)
                    for assigned in ast.walk(self._function)
                )
            case ast.BinOp(left=left, op=ast.BitOr() | ast.RShift(), right=right):
                return self._is_workflow(left) or self._is_workflow(right)
            case ast.Call(func=called):
                return _name_of(called) in _CANVAS | _SIGNATURES
            case _:
                return False

    def _send(self, node: ast.expr, *, is_on_commit: bool) -> None:
        line = node.end_lineno or node.lineno
        if self._has_acted:
            self._lines.append(line)
        elif is_on_commit and self._depth:
            self._on_commit.append(line)
        self._has_acted |= not (is_on_commit and self._depth)  # a job that is sent is an effect, too


def _find_senders(function: Function) -> Iterator[str]:
    """Yield the functions inside of a task that send a job, as those for `on_commit` do."""
    for node in ast.walk(function):
        if isinstance(node, Function) and node is not function:
            names = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            if names & _SENDING:
                yield node.name


def _is_atomic(node: ast.expr) -> bool:
    """Return whether a context manager or decorator is Django's `transaction.atomic`."""
    return _name_of(node.func if isinstance(node, ast.Call) else node) == "atomic"


def _name_of(node: ast.expr) -> str:
    """Return the last name of what is called: `save` of `order.save`, also of `find(7).save`."""
    return node.attr if isinstance(node, ast.Attribute) else get_dotted(node)
