"""Change the calls that name a task by a text: `send_task` and `signature`."""

import ast

from celery5.migration.calls.call_options import check_options_of, expand_arguments
from celery5.migration.project.context import FileContext


def change_named_signature(context: FileContext, call: ast.Call, name: str) -> None:
    """Change `signature("shop.add", args=(1,))`, which Celery offers as a function."""
    check_declared(context, call.args[0])
    new = expand_arguments(context, call, positional=("name", "args", "kwargs"))
    is_readable = not new.problems and not any(text.startswith(("[", "(", "{")) for text in new.arguments)
    app = context.find_app() if is_readable else ""
    if app:
        change_by_name(context, call, app, is_sent=False)
    else:
        context.report(call, "module", name)


def is_celerys(call: ast.Call) -> bool:
    """Return whether a call of `app.signature` has its arguments as Celery takes them, and not one by one."""
    named = {option.arg for option in call.keywords}
    packed = any(isinstance(argument, ast.List | ast.Tuple | ast.Dict) for argument in call.args[1:])
    return packed or bool(named & {"args", "kwargs", "immutable", "options"})


def change_by_name(context: FileContext, call: ast.Call, app: str, *, is_sent: bool) -> None:
    """Change `app.send_task("shop.add", args=(1,))`, or `app.signature(...)`."""
    new = expand_arguments(context, call, positional=("name", "args", "kwargs"))
    match call.args[0]:
        case ast.Constant(value=str(name)):
            check_options_of(context, new, context.index.find_task(name))
        case _:
            pass
    immutable = [option for option in call.keywords if option.arg == "immutable"]
    problems = [(name, advice) for name, advice in new.problems if name != "immutable"]
    for name, advice in problems:
        context.by_hand(call, name, advice)
    if problems:
        return
    if immutable:
        context.immutable.add(id(call))
    first, arguments = context.render(call.args[0]), ", ".join(new.arguments)
    if new.options:
        task = f"{app}.signature({first}).task.options({', '.join(new.options)})"
        text = f"{task}.delay({arguments})" if is_sent else f"{task}.s({arguments})"
    else:
        text = f"{app}.signature({', '.join([first, *new.arguments])}){'.delay()' if is_sent else ''}"
    if text != context.render(call):
        context.replace(call, text)
        context.changed(call, "send_task" if is_sent else "signature", text)


def check_declared(context: FileContext, name: ast.expr) -> None:
    """Report a task that is called by its name, and that no file of the project declares."""
    match name:
        case ast.Constant(value=str(text)) if text.rpartition(".")[2] not in context.index.tasks:
            if text not in context.index.task_names:
                context.by_hand(name, f'the task "{text}"', _ELSEWHERE)
        case ast.Constant():
            pass
        case _:
            context.note(name, "decide", f"the task {context.render(name)}", _NAMED_LATER)


_NAMED_LATER = (
    "its name is known only when this runs: app.signature(...) raises UnknownTask where this application does not "
    "declare it"
)
_ELSEWHERE = (
    "no file that was read declares it, and this application must: import its module, or send it to Celery's workers "
    "by @celery_task (celery5 docs beside-celery)"
)
