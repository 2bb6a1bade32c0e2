"""Change the calls that send jobs, wait for results, and command workers."""

import ast
import keyword
from collections.abc import Callable
from dataclasses import dataclass, field

from celery5.hints import find_equivalent
from celery5.migration.attributes import answer_name
from celery5.migration.canvas import change_canvas
from celery5.migration.context import FileContext
from celery5.migration.index import KnownTask, get_dotted
from celery5.migration.project_tests import is_test_module
from celery5.migration.schedules import parse_crontab_call
from celery5.migration.unknown_tasks import check_unknown_task

_KEPT = {
    "countdown",
    "eta",
    "expires",
    "queue",
    "ignore_result",
    "time_limit",
    "soft_time_limit",
    "max_retries",
}
"""Options of a call that mean the same."""
_RESULT_SAME = {"get", "id", "revoke", "forget"}


@dataclass
class NewCall:
    """What becomes of the arguments of `apply_async`."""

    arguments: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # what is to be changed by hand, and how


def change_call(context: FileContext, call: ast.Call) -> None:
    """Change a call, after those inside of it."""
    name = context.celery_name(call.func)
    if name == "connect" and isinstance(call.func, ast.Attribute):
        _check_connection(context, call, call.func.value)
    elif name or context.new_name(call.func) in _ERRORS:
        _change_function(context, call, name or context.new_name(call.func))
    elif not change_canvas(context, call) and isinstance(call.func, ast.Attribute):
        _change_method(context, call, call.func.attr, call.func.value)


def _change_method(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change a call of a method, by the names of the method and of its object."""
    kind = context.kind_of(receiver)
    if method in _BY_METHOD:
        _BY_METHOD[method](context, call, receiver)
    elif method in ("on_error", "link_error", "link") and _is_linked(context, call, kind):
        context.report(call, "workflow" if kind == "workflow" else "signature", method)
        for value in call.args:
            context.keep_immutable(value)
    elif method == "apply_async_on_commit" and kind == "task":
        _change_apply_async(context, call, receiver, method="delay_on_commit")
    elif method in ("signature", "subtask") and context.find_task(receiver) is not None:
        _change_signature(context, call, receiver)
    elif method == "set" and kind == "signature":
        _change_set(context, call, receiver)
    elif method == "delay" and kind == "signature" and (call.args or call.keywords):
        context.by_hand(
            call, "delay(...) of a signature", "give all arguments to task.delay(...): delay() takes none"
        )
    elif not check_unknown_task(context, call, method, receiver) and kind in _BY_KIND:
        _BY_KIND[kind](context, call, method, receiver)


def _check_periodic_task(context: FileContext, call: ast.Call, _receiver: ast.expr) -> None:
    if len(call.args) < 2:
        context.report(call, "app", "add_periodic_task")
        return
    when, what = context.render(call.args[0]), context.render(call.args[1])
    named = {option.arg: option for option in call.keywords}
    options = ", ".join(context.render(option) for name, option in named.items() if name != "name")
    match call.args[1]:
        case ast.Call(func=ast.Attribute(attr="s" | "si", value=task)) as signature if options:
            arguments = ", ".join(_arguments_of(context, signature))
            what = f"{context.render(task)}.options({options}).s({arguments})"
        case _ if options:
            what = f"{what} with options({options}) of its task"
        case _:
            pass
    name = f", {context.render(named['name'])}" if "name" in named else ""
    context.by_hand(call, "add_periodic_task", f"app.schedule({what}, {when}{name}) in the module")


_MADE_IN_A_FUNCTION = (
    "the options that it passes on, **options too, have celery5's names; what Celery's current_task did, current_job() "
    "does"
)


def _check_connection(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    """Report the replacement of `task_success.connect(note_success)`; decorators are reported elsewhere."""
    if id(call) not in context.decorators and context.origin_of(receiver).startswith("celery.signals"):
        signal = get_dotted(receiver).rpartition(".")[2]
        of = context.render(call.args[0]) if call.args else "..."
        context.report(call, "signal", signal, f"{signal}.connect({of})")


def _is_linked(context: FileContext, call: ast.Call, kind: str) -> bool:
    """Return whether `link` or `on_error` is called on a signature, or with one."""
    return kind in ("signature", "workflow") or (
        len(call.args) == 1 and context.kind_of(call.args[0]) == "signature"
    )


def _change_function(context: FileContext, call: ast.Call, name: str) -> None:
    """Change a call of a function of Celery's."""
    if name == "shared_task" and id(call) not in context.decorators:
        context.by_hand(
            call, "shared_task(...) in a function", f"task(...) of celery5: {_MADE_IN_A_FUNCTION}"
        )
    elif name in _FUNCTIONS and len(call.args) >= _FUNCTIONS[name][0]:
        _FUNCTIONS[name][1](context, call, name)
    elif name != "Celery":
        change_canvas(context, call)


def _change_logger(context: FileContext, call: ast.Call, name: str) -> None:
    if context.origins.get("logging", "logging") == "logging":
        context.needed["logging"] = set()
        context.replace(call.func, "logging.getLogger")
        context.changed(call, name, "logging.getLogger")


def _change_handle(context: FileContext, call: ast.Call, name: str) -> None:
    named = [option.value for option in call.keywords if option.arg == "app"]
    app = context.render(named[0]) if named else context.find_app()
    if app:
        text = f"{app}.result({context.render(call.args[0])})"
        context.replace(call, text)
        context.changed(call, name, text)
    else:
        context.report(call, "app", name)


def _change_crontab(context: FileContext, call: ast.Call, name: str) -> None:
    line = parse_crontab_call(call)
    if line:
        context.replace(call, f'{context.need("cron")}("{line}")')
        context.changed(call, name, f'cron("{line}")')
    else:
        context.by_hand(call, name, 'cron("0 3 * * *"): a line of a crontab')


def _change_reject(context: FileContext, call: ast.Call, name: str) -> None:
    """Drop `requeue=False` of `Reject`, which celery5's does not have, and report another one."""
    given = {option.arg: option for option in call.keywords}
    requeue = given.get("requeue")
    value = requeue.value if requeue is not None else call.args[1] if len(call.args) > 1 else None
    if isinstance(value, ast.Constant) and not value.value:
        reasons = [*call.args[:1], *(option.value for word, option in given.items() if word == "reason")]
        shown = ", ".join(context.render(reason) for reason in reasons)
        context.replace(call, f"{context.render(call.func)}({shown})")
        context.changed(call, "requeue", "dropped: a job that is rejected is not sent again")
    elif value is not None:
        context.by_hand(call, f"{name}(requeue=)", "raise Retry(countdown=5), which sends the job again")


def _check_retry(context: FileContext, call: ast.Call, name: str) -> None:
    given = {option.arg for option in call.keywords}
    if len(call.args) > 1 or given - {"message", "countdown", "max_retries"}:
        context.by_hand(
            call, f"{name}(...)", "raise Retry(countdown=5), or self.retry(exc=error, countdown=5)"
        )


def _change_ignore(context: FileContext, call: ast.Call, name: str) -> None:
    context.replace(call, f'{context.need("Reject")}("ignored")')
    context.changed(call, name, 'Reject("ignored")')


def _change_named_signature(context: FileContext, call: ast.Call, name: str) -> None:
    _check_declared(context, call.args[0])
    new = expand_arguments(context, call, positional=("name", "args", "kwargs"))
    is_readable = not new.problems and not any(text.startswith(("[", "(", "{")) for text in new.arguments)
    app = context.find_app() if is_readable else ""
    if app:
        _change_by_name(context, call, app, is_sent=False)
    else:
        context.report(call, "module", name)


_ERRORS = ("Reject", "Retry")
"""Errors that celery5 has, too, with other arguments."""
_FUNCTIONS: dict[str, tuple[int, Callable[[FileContext, ast.Call, str], None]]] = {
    "get_task_logger": (1, _change_logger),
    "AsyncResult": (1, _change_handle),
    "crontab": (0, _change_crontab),
    "Ignore": (0, _change_ignore),
    "Reject": (0, _change_reject),
    "Retry": (0, _check_retry),
    "signature": (1, _change_named_signature),
    "subtask": (1, _change_named_signature),
    "maybe_signature": (1, _change_named_signature),
}
"""Functions and classes of Celery, with how many arguments a call has at least, and what changes the call."""


def expand_arguments(
    context: FileContext, call: ast.Call, positional: tuple[str, ...] = ("args", "kwargs", "task_id")
) -> NewCall:
    """Return what becomes of the arguments of `apply_async` and of those like it."""
    new = NewCall()
    named: list[tuple[str | None, ast.expr]] = list(zip(positional, call.args, strict=False))
    if len(call.args) > len(positional) or any(isinstance(argument, ast.Starred) for argument in call.args):
        new.problems.append(
            ("apply_async", "task.options(...).delay(...): the arguments cannot be read here")
        )
    named += [(option.arg, option.value) for option in call.keywords]
    for name, value in sorted(named, key=lambda item: item[0] == "kwargs"):
        if name == "args":
            new.arguments += _spread(context, value)
        elif name in ("kwargs", "kwarg"):
            new.arguments += _spread_named(context, value)
        elif name == "name" and "name" in positional:
            continue
        else:
            _add_option(context, new, name, value)
    return new


def _check_options_of(context: FileContext, new: NewCall, task: KnownTask | None) -> None:
    """Report options that a call of this task cannot have, or that mean something else with it."""
    if task is None:
        return
    _check_queue(new, task)
    if context.index.calls_on_failure(task):
        advice = _TWO_HANDLERS.replace("TASK", task.name)
        new.problems = [(name, advice if name == "link_error" else said) for name, said in new.problems]


_TWO_HANDLERS = (
    "options(on_failure=task) for link_error, and Middleware.running for what on_failure of TASK did (job.outcome is "
    "Dead(reason, error)): of two on_failure= only that of the call is called"
)


def _check_queue(new: NewCall, task: KnownTask) -> None:
    """Report a task with a rate that is sent to another queue: celery5 refuses that. Its own queue is fine."""
    if not task.is_limited:
        return
    for option in [option for option in new.options if option.startswith("queue=")]:
        new.options.remove(option)
        if not task.queue or option[len("queue=") :].strip("'\"") != task.queue:
            new.problems.append(
                (
                    f"{option} of {task.name}, which has a rate_limit",
                    "a rate is counted on the queue of the task, and no job of it goes to another: name the queue in "
                    "the declaration, @app.task(queue=...), and leave it out here (celery5 docs limits)",
                )
            )


def _spread(context: FileContext, value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant) and value.value is None:
        return []
    if isinstance(value, ast.List | ast.Tuple):
        return [context.render(element) for element in value.elts]
    return [f"*{_in_parentheses(context, value)}"]


def _spread_named(context: FileContext, value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant) and value.value is None:
        return []
    if isinstance(value, ast.Dict):
        names = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
        if all(
            isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) for name in names
        ):
            return [
                f"{name!s}={context.render(item)}" for name, item in zip(names, value.values, strict=True)
            ]
    return [f"**{_in_parentheses(context, value)}"]


def _in_parentheses(context: FileContext, value: ast.expr) -> str:
    text = context.render(value)
    simple = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.List | ast.Dict | ast.ListComp
    return text if isinstance(value, simple) else f"({text})"


def _add_option(context: FileContext, new: NewCall, name: str | None, value: ast.expr) -> None:
    """Add an option of a call, or the problem that there is with it."""
    if name in ("link", "link_error"):
        context.keep_immutable(value)
    text = context.render(value)
    constant = value.value if isinstance(value, ast.Constant) else ...
    if name is None:
        advice = "task.options(**options).delay(...), with the names of celery5"
        new.problems.append(("apply_async(**options)", advice))
    elif constant is None or (name in ("serializer", "compression") and constant in ("json", ...)):
        return
    elif name == "task_id":
        new.options.append(f"id={text}")
    elif name in _KEPT:
        new.options.append(f"{name}={text}")
        if name in ("eta", "expires") and _is_naive(value):
            new.problems.append((f"{name}={text}", "a time with its zone: datetime.now(UTC)"))
    else:
        advice = _ADVICE.get(name, "").replace("TEXT", text) or find_equivalent("option", name)
        if name in _ADVICE or not advice.startswith(("nothing", "not needed")):
            new.problems.append((name, advice or _NO_OPTION))


_NO_OPTION = "leave it out, or pass it to the task as an argument: a call has no such option"
_ADVICE = {
    "serializer": "annotate the parameters: arguments and results are JSON",
    "compression": "leave it out: arguments and results are JSON",
    "priority": 'options(priority="high"): high, normal or low',
    "link": "(task.s(...) | TEXT).start()",
    "retry_policy": "leave it out: a lost connection is retried; retry_policy of celery5 is about failed jobs",
    "link_error": "options(on_failure=task), which is called with a list of StepFailure, in place of the task's own: "
    "Celery calls both",
}
"""What is to be written instead of options that cannot be changed as they stand."""


def _is_naive(value: ast.expr) -> bool:
    """Return whether an expression surely makes a time without a zone."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "utcnow" or (node.func.attr == "now" and _is_datetime(node) and not node.args))
        for node in ast.walk(value)
    )


def _is_datetime(call: ast.Call) -> bool:
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    last = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    return last == "datetime" and not call.keywords


def _change_apply_async(
    context: FileContext, call: ast.Call, receiver: ast.expr, *, method: str = "delay"
) -> None:
    kind = context.kind_of(receiver)
    if not kind:
        check_unknown_task(context, call, "apply_async", receiver)
        return
    new = expand_arguments(context, call)
    called = _find_called_task(context, receiver)
    _check_options_of(context, new, context.find_task(called or receiver))
    for name, advice in new.problems:
        context.by_hand(call, name, (kind == "workflow" and find_equivalent("workflow", name)) or advice)
    if called is not None and isinstance(receiver, ast.Call):
        task = context.render(called)
        arguments = _arguments_of(context, receiver)
        if not new.arguments and not new.problems:
            _write_sending(context, call, task, arguments, new.options)
        return
    if kind in ("workflow", "signature"):
        if not (new.arguments or new.options or new.problems):
            text = f"{_shown(context, receiver)}.{'start' if kind == 'workflow' else 'delay'}()"
            context.replace(call, text)
            context.changed(call, "apply_async", text)
        elif not new.problems:
            context.report(call, kind, "apply_async")
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


def _arguments_of(context: FileContext, call: ast.Call) -> list[str]:
    return [
        *(context.render(argument) for argument in call.args),
        *(context.render(option) for option in call.keywords),
    ]


def _shown(context: FileContext, node: ast.expr) -> str:
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


def _change_signature(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    new = expand_arguments(context, call, positional=("args", "kwargs"))
    _check_options_of(context, new, context.find_task(receiver))
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


def _change_set(context: FileContext, call: ast.Call, receiver: ast.expr) -> None:
    new = expand_arguments(context, call, positional=())
    called = _find_called_task(context, receiver)
    _check_options_of(context, new, context.find_task(called or receiver))
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
    task, arguments = context.render(called), ", ".join(_arguments_of(context, receiver))
    chosen = f".options({', '.join(new.options)})" if new.options else ""
    context.replace(call, f"{task}{chosen}.s({arguments})")
    context.changed(call, "set", f"{task}.options(...).s(...)")


def _change_app_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    app = render_app(context, receiver)
    if call.args and method in ("send_task", "signature", "subtask"):
        _check_declared(context, call.args[0])
    if call.args and (method == "send_task" or (method in ("signature", "subtask") and _is_celerys(call))):
        _change_by_name(context, call, app, is_sent=method == "send_task")
    elif method == "AsyncResult" and call.args:
        context.replace(call, f"{app}.result({context.render(call.args[0])})")
        context.changed(call, "AsyncResult", f"{app}.result(...)")
    elif method == "task" and id(call) not in context.decorators:
        context.by_hand(call, "app.task(...) in a function", _MADE_IN_A_FUNCTION)
    elif method in ("config_from_object", "autodiscover_tasks", "task"):
        return  # statements and decorators
    else:
        answer_name(context, call, "app", method, receiver, call="()")


def _is_celerys(call: ast.Call) -> bool:
    """Return whether a call of `app.signature` has its arguments as Celery takes them, and not one by one."""
    named = {option.arg for option in call.keywords}
    packed = any(isinstance(argument, ast.List | ast.Tuple | ast.Dict) for argument in call.args[1:])
    return packed or bool(named & {"args", "kwargs", "immutable", "options"})


def _change_by_name(context: FileContext, call: ast.Call, app: str, *, is_sent: bool) -> None:
    """Change `app.send_task("shop.add", args=(1,))`, or `app.signature(...)`."""
    new = expand_arguments(context, call, positional=("name", "args", "kwargs"))
    match call.args[0]:
        case ast.Constant(value=str(name)):
            _check_options_of(context, new, context.index.find_task(name))
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


def _check_declared(context: FileContext, name: ast.expr) -> None:
    """Report a task that is called by its name, and that no file of the project declares."""
    match name:
        case ast.Constant(value=str(text)) if text.rpartition(".")[2] not in context.index.tasks:
            if text not in context.index.task_names:
                context.by_hand(name, f'the task "{text}"', _ELSEWHERE)
        case ast.Constant():
            pass
        case _:
            context.note(name, "check", f"the task {context.render(name)}", _NAMED_LATER)


_NAMED_LATER = (
    "its name is known only when this runs: app.signature(...) raises UnknownTask where this application does not "
    "declare it"
)
_ELSEWHERE = (
    "no file that was read declares it, and this application must: import its module, or send it to Celery's workers "
    "by @celery_task (celery5 docs beside-celery)"
)


def render_app(context: FileContext, receiver: ast.expr) -> str:
    """Return how an application is written: `current_app` is that of the project."""
    return (context.find_app() if context.celery_name(receiver) else "") or context.render(receiver)


def _change_control(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    app = render_app(context, receiver.value) if isinstance(receiver, ast.Attribute) else "app"
    if (
        method == "revoke"
        and len(call.args) == 1
        and {option.arg for option in call.keywords} <= {"terminate", "signal"}
    ):
        value = call.args[0]
        if not isinstance(value, ast.List | ast.Tuple | ast.ListComp | ast.Starred):
            text = f"{app}.result({context.render(value)}).revoke()"
            context.replace(call, text)
            context.changed(call, "control.revoke", text)
            return
    answer_name(context, call, "control", method, receiver)


def _change_result(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    if method == "get":
        for option in call.keywords:
            if option.arg and option.arg != "timeout":
                context.report(option, "result option", option.arg, f"get({option.arg}=)")
        if not (call.args or call.keywords or context.is_written or is_test_module(context)):
            text = f"{_shown(context, receiver)}.get(timeout=None)"
            context.replace(call, text)
            context.changed(call, "get()", "get(timeout=None), since get() waits 10 s")
    elif method == "revoke" and call.keywords:
        context.replace(call, f"{_shown(context, receiver)}.revoke()")
        context.changed(call, "revoke", "revoke(), which stops a running job")
    else:
        answer_name(context, call, "result", method, receiver, call="()")


def _check_task_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    if method == "options":
        options = [
            f"queue={context.render(option.value)}" for option in call.keywords if option.arg == "queue"
        ]
        new = NewCall(options=options)
        _check_options_of(context, new, context.find_task(receiver))
        for name, advice in new.problems:
            context.by_hand(call, name, advice)
    elif method == "AsyncResult" and call.args:
        task = context.render(receiver)
        context.replace(call, f"{task}.app.result({context.render(call.args[0])}, task={task})")
        context.changed(call, "AsyncResult", f"{task}.app.result(..., task={task})")
    elif method == "chunks":
        context.by_hand(
            call,
            "chunks",
            "task.chunks(items, n) passes each item as the first argument; starmap has several",
        )
    elif method == "delay" and context.is_async and context.is_sure_task(receiver):
        context.by_hand(call, "delay in async def", f"await {context.render(receiver)}.adelay(...)")
    else:
        answer_name(context, call, "task", method, receiver, call="()")


def _check_canvas_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    answer_name(context, call, context.kind_of(receiver), method, receiver, call="()")


_BY_METHOD: dict[str, Callable[[FileContext, ast.Call, ast.expr], None]] = {
    "add_periodic_task": _check_periodic_task,
    "apply_async": _change_apply_async,
}
"""What changes the calls of methods that only Celery has."""
_BY_KIND: dict[str, Callable[[FileContext, ast.Call, str, ast.expr], None]] = {
    "app": _change_app_call,
    "control": _change_control,
    "result": _change_result,
    "task": _check_task_call,
    "signature": _check_canvas_call,
    "workflow": _check_canvas_call,
    "inspect": _check_canvas_call,
}
"""What changes the calls of methods, by what they are methods of."""
