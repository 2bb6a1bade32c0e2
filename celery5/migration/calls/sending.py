"""Change the calls that send jobs or make signatures: `apply_async`, `signature` and `set`."""

import ast

from celery5.hints import find_equivalent
from celery5.migration.calls.call_options import check_options_of, expand_arguments
from celery5.migration.calls.unknown_tasks import check_unknown_task
from celery5.migration.project.context import FileContext


def change_apply_async(
    context: FileContext, call: ast.Call, receiver: ast.expr, *, method: str = "delay"
) -> None:
    """Change `apply_async` to `delay`, or to `start` for a workflow."""
    kind = context.kind_of(receiver)
    if not kind:
        check_unknown_task(context, call, "apply_async", receiver)
        return
    new = expand_arguments(context, call)
    called = _find_called_task(context, receiver)
    check_options_of(context, new, context.find_task(called or receiver))
    for name, advice in new.problems:
        context.by_hand(call, name, (kind == "workflow" and find_equivalent("workflow", name)) or advice)
    if called is not None and isinstance(receiver, ast.Call):
        task = context.render(called)
        arguments = render_arguments(context, receiver)
        if not new.arguments and not new.problems:
            _write_sending(context, call, task, arguments, new.options)
        return
    if kind in ("workflow", "signature"):
        if not (new.arguments or new.options or new.problems):
            text = f"{render_operand(context, receiver)}.{'start' if kind == 'workflow' else 'delay'}()"
            context.replace(call, text)
            context.changed(call, "apply_async", text)
        elif new.arguments or new.options:
            names = ["args"] if new.arguments else []
            names += [f"{option.partition('=')[0]}=" for option in new.options]
            context.report(call, kind, "apply_async", f"apply_async({', '.join(names)})")
        return
    if kind == "task" and not new.problems:
        _write_sending(context, call, context.render(receiver), new.arguments, new.options, method=method)


def _find_called_task(context: FileContext, node: ast.expr) -> ast.expr | None:
    """Return the task of a signature, `add` of `add.s(1)`; None for another expression."""
    match node:
        case ast.Call(func=ast.Attribute(attr="s" | "si", value=task)) if context.kind_of(task) == "task":
            return task
        case _:
            return None


def render_arguments(context: FileContext, call: ast.Call) -> list[str]:
    """Return the arguments of a call, as source."""
    return [
        *(context.render(argument) for argument in call.args),
        *(context.render(option) for option in call.keywords),
    ]


def render_operand(context: FileContext, node: ast.expr) -> str:
    """Return an expression as what a method is called on, in parentheses where it needs them."""
    text = context.render(node)
    return f"({text})" if isinstance(node, ast.BinOp) else text


def _write_sending(
    context: FileContext,
    call: ast.Call,
    task: str,
    arguments: list[str],
    options: list[str],
    *,
    method: str = "delay",
) -> None:
    chosen = f".options({', '.join(options)})" if options else ""
    context.replace(call, f"{task}{chosen}.{method}({', '.join(arguments)})")
    context.changed(call, "apply_async", f"{task}{'.options(...)' if options else ''}.{method}(...)")
    if context.is_async:
        context.by_hand(call, f"{method} in async def", f"await {task}{chosen}.a{method}(...)")


def change_signature(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    """Change `task.signature(args, kwargs)` to `task.s(...)`."""
    new = expand_arguments(context, call, positional=("args", "kwargs"))
    check_options_of(context, new, context.find_task(receiver))
    is_immutable = [option for option in call.keywords if option.arg == "immutable"]
    if new.problems and (not is_immutable or len(new.problems) > 1):
        for name, advice in new.problems:
            if name != "immutable":
                context.by_hand(call, name, advice)
        return
    if is_immutable:
        context.immutable.add(id(call))
    task = context.render(receiver)
    chosen = f".options({', '.join(new.options)})" if new.options else ""
    context.replace(call, f"{task}{chosen}.s({', '.join(new.arguments)})")
    context.changed(call, "signature", f"{task}.s(...)")


def change_set(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    """Change `task.s(...).set(options)` to `task.options(...).s(...)`."""
    new = expand_arguments(context, call, positional=())
    called = _find_called_task(context, receiver)
    check_options_of(context, new, context.find_task(called or receiver))
    is_simple = called is not None and call.keywords and not (new.problems or new.arguments)
    if called is None or not isinstance(receiver, ast.Call) or not is_simple:
        for name, advice in new.problems:
            context.by_hand(call, name, advice)
        if (
            called is None
            or not new.problems
            or any(not name.startswith("queue=") for name, _ in new.problems)
        ):
            context.report(call, "signature", "set")
        return
    if id(receiver) in context.immutable:
        context.immutable.add(id(call))
    task, arguments = context.render(called), ", ".join(render_arguments(context, receiver))
    chosen = f".options({', '.join(new.options)})" if new.options else ""
    context.replace(call, f"{task}{chosen}.s({arguments})")
    context.changed(call, "set", f"{task}.options(...).s(...)")
