"""Change the canvas: chains, groups, chords, and signatures that take no value of the step before them."""

import ast

from celery5.migration.project.context import FileContext

_CANVAS = {"chain", "group", "chord"}


def change_canvas(context: FileContext, call: ast.Call) -> bool:
    """Change a call that composes or starts a workflow. Returns whether it is one."""
    called, name = call.func, context.celery_name(call.func)
    if name in _CANVAS:
        if isinstance(called, ast.Attribute):
            context.replace(called, context.local_name(called))
        _change_composition(context, call, name)
        return True
    if context.new_name(called) in _CANVAS:
        _check_options(context, call, context.new_name(called))
        _check_starred(context, call)
        return True
    if isinstance(called, ast.Attribute):
        if called.attr == "si" and context.kind_of(called.value) == "task":
            context.immutable.add(id(call))
            end = context.source.end_of(called)
            context.source.replace(end - 2, end, "s")
            context.changed(call, "si", "s, behind >>")
            return True
        if (
            called.attr == "delay"
            and context.kind_of(called.value) == "workflow"
            and not (call.args or call.keywords)
        ):
            end = context.source.end_of(called)
            context.source.replace(end - len("delay"), end, "start")
            context.changed(call, "delay", "start()")
            return True
        return False
    kind = context.kind_of(called)
    if kind == "workflow":
        _change_start(context, call)
    elif kind == "signature":
        context.by_hand(call, "a signature that is called", "task(...), which runs the function here")
    return kind in ("workflow", "signature")


def _change_start(context: FileContext, call: ast.Call) -> None:
    """Change `chain(...)()` to `chain(...).start()`, and `chord(header)(body)` likewise."""
    called = call.func
    is_chord = isinstance(called, ast.Call) and context.celery_name(called.func) == "chord"
    is_plain = len(call.args) == 1 and not call.keywords
    if is_chord and is_plain and isinstance(called, ast.Call) and len(called.args) == 1:
        body = call.args[0]
        text = _make_chord(context, context.local_name(called.func), called.args[0], body)
        context.replace(call, f"{text}.start()")
        context.changed(call, "chord(header)(body)", "chord(header, body).start()")
    elif call.args or call.keywords:
        context.by_hand(call, "a signature that is called", "give its arguments to s(...), and call start()")
    else:
        tail = context.source.decode(context.source.end_of(called), context.source.end_of(call))
        method = "start"
        position = context.source.end_of(called) + len(tail[: tail.rindex("(")].encode())
        context.source.replace(position, context.source.end_of(call), f".{method}()")
        context.changed(call, "a signature that is called", ".start()")


def _change_composition(context: FileContext, call: ast.Call, name: str) -> None:
    if name == "chain":
        _change_chain(context, call)
    elif name == "group":
        if call.args and all(_is_immutable(context, member) for member in call.args):
            context.immutable.add(id(call))
    elif len(call.args) == 2:
        header, body = call.args
        text = _make_chord(context, context.local_name(call.func), header, body)
        if text != context.render(call):
            context.replace(call, text)
            context.changed(call, "chord", "chord(header, body), or header >> body")
    _check_options(context, call, name)


def _check_options(context: FileContext, call: ast.Call, name: str) -> None:
    for option in call.keywords:
        if option.arg not in ("on_error", "need", None):
            context.by_hand(
                option, f"{name}({option.arg}=)", "options of the tasks in it: task.options(...).s(...)"
            )


def _change_chain(context: FileContext, call: ast.Call) -> None:
    steps = call.args
    is_step = len(steps) == 1 and context.kind_of(steps[0]) in ("signature", "workflow")
    if len(steps) == 1 and not is_step and not isinstance(steps[0], ast.Starred):
        if any(_is_immutable(context, node) for node in ast.walk(steps[0]) if isinstance(node, ast.expr)):
            context.by_hand(call, "si in a list", _NO_VALUE_ADVICE)
            context.keep_immutable(steps[0])
        text = f"{context.local_name(call.func)}(*{context.render(steps[0])})"
        context.replace(call, text)
        context.changed(call, "chain([...])", "chain(*[...])")
        return
    for step in steps[1:]:
        _complete_partial(context, step)
    starred = [step for step in steps if isinstance(step, ast.Starred)]
    if not any(_is_immutable(context, step) for step in (*steps[1:], *starred)):
        return
    if starred:
        _check_starred(context, call)
        return
    others = [
        f"{'>>' if _is_immutable(context, step) else '|'} {_wrapped(context, step)}" for step in steps[1:]
    ]
    context.replace(call, _lay_out(context, call, [_wrapped(context, steps[0]), *others]))
    context.changed(call, "chain with si", "a >> b, which passes no value")


def _lay_out(context: FileContext, call: ast.Call, parts: list[str]) -> str:
    """Return the parts of a chain in parentheses: on one line, or on a line each where the call has several."""
    if call.lineno == call.end_lineno:
        return f"({' '.join(parts)})"
    indentation = context.source.indentation_at(context.source.start_of(call))
    lines = "".join(f"{indentation}    {part}\n" for part in parts)
    return f"(\n{lines}{indentation})"


_NO_VALUE_ADVICE = "a.s(1) >> b.s(2): a step that takes no value comes after >>"


def _check_starred(context: FileContext, call: ast.Call) -> None:
    """Report a list in which some steps take no value: `chain(*[a.s(1), b.si(2)])`."""
    starred = [step for step in call.args if isinstance(step, ast.Starred)]
    inner = (node for step in starred for node in ast.walk(step) if isinstance(node, ast.expr))
    if starred and any(_is_immutable(context, node) for node in (*inner, *call.args)):
        context.by_hand(call, "si in a list", _NO_VALUE_ADVICE)
        for step in call.args:
            context.keep_immutable(step)


def _wrapped(context: FileContext, node: ast.expr) -> str:
    text = context.render(node)
    return f"({text})" if isinstance(node, ast.BinOp | ast.IfExp | ast.BoolOp | ast.Compare) else text


def _make_chord(context: FileContext, name: str, header: ast.expr, body: ast.expr) -> str:
    """Return a chord. A body that takes no value stands behind `>>`."""
    if not _is_immutable(context, body):
        _complete_partial(context, body)
        return f"{name}({context.render(header)}, {context.render(body)})"
    is_group = isinstance(header, ast.Call) and context.celery_name(header.func) == "group"
    members = context.render(header) if is_group else f"{context.need('group')}({context.render(header)})"
    return f"({members} >> {_wrapped(context, body)})"


def change_operator(context: FileContext, node: ast.BinOp) -> None:
    """Change `a | b` where `b` takes no value to `a >> b`."""
    if context.kind_of(node) != "workflow" or not isinstance(node.op, ast.BitOr):
        return
    if not _is_immutable(context, node.right):
        _complete_partial(context, node.right)
        return
    start, end = context.source.end_of(node.left), context.source.start_of(node.right)
    between = context.source.decode(start, end)
    if between.count("|") == 1 and "#" not in between:
        context.source.replace(start, end, between.replace("|", ">>"))
        context.changed(node, "| with si", ">>, which passes no value")
    else:
        context.by_hand(node, "| with si", "a >> b, which passes no value")


def _is_immutable(context: FileContext, node: ast.expr) -> bool:
    """Return whether a step takes no value of the one before it."""
    match node:
        case ast.List(elts=members) | ast.Tuple(elts=members):
            return bool(members) and all(_is_immutable(context, member) for member in members)
        case ast.ListComp(elt=member) | ast.GeneratorExp(elt=member) | ast.Starred(value=member):
            return _is_immutable(context, member)
        case ast.BinOp(left=left, op=ast.BitOr()):
            return _is_immutable(context, left)
        case ast.Name(id=name):
            return name in context.immutable_names
        case _:
            return id(node) in context.immutable


def _complete_partial(context: FileContext, step: ast.expr) -> None:
    """Change `b.s()` to `b.partial()` where all parameters of `b` have values already."""
    if isinstance(step, ast.BinOp):
        return
    if not (isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute) and step.func.attr == "s"):
        return
    task = context.find_task(step.func.value)
    if task is None or any(isinstance(argument, ast.Starred) for argument in step.args):
        return
    named = {option.arg for option in step.keywords}
    missing = [parameter for parameter in task.required if parameter not in named][len(step.args) :]
    if missing:
        return
    end = context.source.end_of(step.func)
    context.source.replace(end - 1, end, "partial")
    context.changed(step, "s", f"partial: all parameters of {task.name} have values")
