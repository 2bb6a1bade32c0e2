"""Report what replaces the receivers of signals."""

import ast

from celery5.migration.project.context import FileContext
from celery5.migration.project.index import Function, get_dotted


def check_connection(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    """Report the replacement of `task_success.connect(note_success)`; decorators are reported elsewhere."""
    if id(call) not in context.decorators and context.origin_of(receiver).startswith("celery.signals"):
        signal = get_dotted(receiver).rpartition(".")[2]
        of = context.render(call.args[0]) if call.args else "..."
        context.report(call, "signal", signal, f"{signal}.connect({of})")


def mark_signals(context: FileContext, function: Function) -> None:
    """Mark the signals of the application, `@app.on_after_configure.connect`, which are reported with the function."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and called.attr.startswith("connect"):
            context.handled.add(id(called.value))


def check_signal(context: FileContext, decorator: ast.expr, node: Function) -> None:
    """Report the replacement of a receiver of a signal."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not (isinstance(called, ast.Attribute) and called.attr.startswith("connect")):
        return
    origin = context.origin_of(called.value)
    signal = get_dotted(called.value).rpartition(".")[2]
    if origin.startswith("celery.signals"):
        context.report(decorator, "signal", signal, f"@{signal}.connect of {node.name}")
    elif signal in ("on_after_configure", "on_after_finalize"):
        context.report(decorator, "app", signal, f"@{signal}.connect of {node.name}")
