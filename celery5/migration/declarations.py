"""Change the declarations of tasks: decorators, options, base classes, and what a bound task does with `self`."""

import ast
from typing import TypeGuard

from celery5.hints import ONE_AT_A_TIME, RESOURCE, find_equivalent
from celery5.migration.context import FileContext
from celery5.migration.index import DECORATORS, Function, find_maker, find_task_decorator, get_dotted
from celery5.migration.rates import translate_rate
from celery5.runners.context import CurrentJob
from celery5.tasks.declaration import TaskOptions

MAX_WIDTH = 98
"""The longest call that is written on one line."""
_KEPT = {
    "name",
    "autoretry_for",
    "dont_autoretry_for",
    "time_limit",
    "soft_time_limit",
    "ignore_result",
    "queue",
}
"""Options that mean the same."""
_JSON = "arguments and results are JSON: annotate the parameters, and pass ids in place of objects"
_OF_THE_CLASS = (
    "self is the job, not an object of the task's class: a method of that is a function of the module, and "
    + RESOURCE
)
_CELERY_DELAY = ("backoff=180", "cap=180", "jitter=False")
"""Celery's delay before a retry without a countdown."""
_ERRBACK = (
    "on_failure=, which replaces link_error, calls it with one argument: failures: list[StepFailure] (from "
    "celery5.workflows import StepFailure), each with id, task, type and message of the error, state and reason; the "
    "traceback is in the dead letter: celery5 dlq read"
)
_PASSED_SELF = (
    "the function gets the running job: id, task, queue, attempt, worker, retry(), no options of the task"
)
_OPTION_OF_CLASS = "an option of each task: keep those of the class in a dict, and write @app.task(**OPTIONS)"
_CHECK_OPTIONS = "check that celery5 has these options"
_HANDLER_OF_CELERY = (
    "on_failure= takes a task, which is called with a list of StepFailure; what a function with (self, exc, task_id, "
    "...) did is Middleware.running, where job.outcome is Dead(reason, error)"
)
_UNKNOWN_OPTION = "middleware, or a decorator below @app.task"
_OPTIONS = {"bind", *TaskOptions.__optional_keys__}
_OF_A_JOB = {name for name in dir(CurrentJob) if not name.startswith("_")}


def change_decorator(context: FileContext, function: Function, decorator: ast.expr) -> None:
    """Change the decorator that makes a task of a function."""
    call = decorator if isinstance(decorator, ast.Call) else None
    called = call.func if call else decorator
    _check_errback(context, function, call)
    if is_written(context, decorator):
        _check_declaration(context, function, call)
        return
    name = get_dotted(called)
    is_shared = context.celery_name(called) == "shared_task"
    if not _is_changed(context, decorator):
        return
    if called.attr == "periodic_task" if isinstance(called, ast.Attribute) else False:
        context.by_hand(
            decorator, "periodic_task", '@app.task(schedule="0 3 * * *"), or schedule=every(minutes=5)'
        )
        return
    new_name = name
    if is_shared or context.celery_name(called.value if isinstance(called, ast.Attribute) else called):
        new_name = context.need("task", instead=get_dotted(called).rpartition(".")[2])
    uses_retry = _bound_name(function, call) is not None and _calls_retry(
        function, _bound_name(function, call)
    )
    options = _change_options(context, function, call, uses_retry)
    text = _write_call(context, decorator, new_name, options)
    before = context.source.decode(context.source.start_of(decorator), context.source.end_of(decorator))
    if text != before:
        context.replace(decorator, text)
        context.changed(decorator, f"@{name}", f"@{new_name}(...)" if options else f"@{new_name}")


def change_bound(context: FileContext, function: Function, decorator: ast.expr | None) -> None:
    """Change the first parameter of a bound task, and its uses.

    Comes before the calls in the task: who changes `other.apply_async((self.request.id,))` takes over what is in it.

    Args:
        decorator: What makes a task of the function; None where a function of the project may do so.
    """
    maker = find_maker(function, context.index) if decorator is None else None
    if decorator is not None and not (is_written(context, decorator) or _is_changed(context, decorator)):
        return
    made = maker or (decorator if isinstance(decorator, ast.Call) else None)
    if not _bound_name(function, made):
        return
    first = [*function.args.posonlyargs, *function.args.args][0]
    if first.annotation is not None and context.celery_name(first.annotation) == "Task":
        context.replace(first.annotation, context.need("CurrentJob", "celery5.tasks"))
    _change_self(context, function, first.arg)


def _is_changed(context: FileContext, decorator: ast.expr) -> bool:
    """Return whether a decorator is one of those that are changed: `shared_task`, or a method of an application."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return context.celery_name(called) == "shared_task" or (
        isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app"
    )


def is_written(context: FileContext, decorator: ast.expr) -> bool:
    """Return whether a task is already declared by celery5, by an earlier run or by its authors."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not isinstance(called, ast.Attribute):
        return context.new_name(called) == "task"
    has_celery = "celery.Celery" in context.origins.values()
    return context.is_written and not has_celery and context.kind_of(called.value) == "app"


def _check_declaration(context: FileContext, function: Function, call: ast.Call | None) -> None:
    """Report what is left to do in a task that celery5 already declares."""
    for option in call.keywords if call else ():
        if option.arg is None:
            context.by_hand(option, "**options", _CHECK_OPTIONS)
        elif option.arg == "serializer":
            _change_serializer(context, option, {})
        elif option.arg == "priority":
            _change_priority(context, option, {})
        elif option.arg == "on_failure":
            _check_on_failure(context, option)
        elif option.arg == "rate_limit":
            _check_rate(context, option)
        elif option.arg not in _OPTIONS:
            _report_option(context, option, option.arg)


def _check_errback(context: FileContext, function: Function, call: ast.Call | None) -> None:
    """Report that a task called for failed jobs gets other arguments than with Celery."""
    parameters = [*function.args.posonlyargs, *function.args.args][1 if _bound_name(function, call) else 0 :]
    if function.name not in context.index.errbacks or not parameters:
        return
    first = parameters[0]
    if first.arg != "failures" and not (first.annotation and "StepFailure" in ast.unparse(first.annotation)):
        names = ", ".join(parameter.arg for parameter in parameters)
        context.by_hand(function, f"{function.name}({names}) of link_error", _ERRBACK)


def _write_call(context: FileContext, node: ast.expr, name: str, options: list[str]) -> str:
    """Return a call with these options, on several lines if it is long."""
    if not options:
        return name
    text = f"{name}({', '.join(options)})"
    if len(text) <= MAX_WIDTH:
        return text
    indentation = context.source.indentation_at(context.source.start_of(node))
    lines = "".join(f"\n{indentation}    {option}," for option in options)
    return f"{name}({lines}\n{indentation})"


def _bound_name(function: Function, call: ast.Call | None) -> str | None:
    """Return the name of the parameter that is the running job; None for a task that is not bound."""
    for option in call.keywords if call else ():
        if option.arg == "bind" and isinstance(option.value, ast.Constant) and option.value.value is True:
            arguments = [*function.args.posonlyargs, *function.args.args]
            return arguments[0].arg if arguments else None
    return None


def _calls_retry(function: Function, name: str | None) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "retry"
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in ast.walk(function)
    )


def _change_options(
    context: FileContext, function: Function, call: ast.Call | None, uses_retry: bool
) -> list[str]:
    """Return the options of the new decorator, as source."""
    if call is None:
        return []
    options = [context.render(argument) for argument in call.args]
    given = {option.arg: option for option in call.keywords if option.arg}
    for option in call.keywords:
        if option.arg is None:
            options.append(f"**{context.render(option.value)}")
            context.by_hand(option, "**options", _CHECK_OPTIONS)
        else:
            options += _change_option(context, option, given)
    added = _keep_retries(
        context, call, function, uses_retry, {option.partition("=")[0] for option in options}, given
    )
    replaced = {option.partition("=")[0] for option in added}
    return [*(option for option in options if option.partition("=")[0] not in replaced), *added]


def _keep_retries(
    context: FileContext,
    call: ast.Call,
    function: Function,
    uses_retry: bool,
    present: set[str],
    given: dict[str, ast.keyword],
) -> list[str]:
    """Return the options by which a task is tried again when Celery would try it again, and only then."""
    has_delay = "default_retry_delay" in given or "backoff" in present or "retry_backoff" in given
    missing: list[str] = [] if "max_retries" in present else ["max_retries=3"]
    is_delayed = "autoretry_for" in present or (uses_retry and _retries_without_countdown(function))
    if is_delayed and not has_delay and not _is_constant(given.get("max_retries"), 0):
        missing += _CELERY_DELAY
        context.changed(call, "default_retry_delay", "180 s, as with Celery")
    if "autoretry_for" in present:
        return missing
    if _is_constant(given.get("max_retries"), 0) or not (uses_retry or "max_retries" in present):
        return []
    return [*missing, *(() if "dont_autoretry_for" in given else ("dont_autoretry_for=[Exception]",))]


def _retries_without_countdown(function: Function) -> bool:
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "retry"
    ]
    return any(not {option.arg for option in call.keywords} & {"countdown", "eta", None} for call in calls)


def _is_constant(option: ast.keyword | None, value: object) -> bool:
    return option is not None and isinstance(option.value, ast.Constant) and option.value.value is value


def _change_option(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    """Return what becomes of one option of a declaration; nothing if it is dropped."""
    assert option.arg is not None
    name, value = option.arg, context.render(option.value)
    if name in _CHANGES:
        return _CHANGES[name](context, option, given)
    if name in _KEPT:
        return [f"{name}={value}"]
    equivalent = find_equivalent("option", name)
    if equivalent.isidentifier():
        context.changed(option, name, f"{equivalent}={value}")
        return [f"{equivalent}={value}"]
    if equivalent.startswith("nothing") and name != "backend":
        context.changed(option, name, f"dropped: {equivalent.removeprefix('nothing: ')}")
        return []
    _report_option(context, option, name)
    return [f"{name}={value}"]  # it is refused with a hint until it is changed


def _report_option(context: FileContext, option: ast.keyword, name: str) -> None:
    """Report an option that celery5 does not have: of Celery, of a package beside it, or of the task's own class."""
    base = get_dotted(option.value).rpartition(".")[2] if name == "base" else ""
    if base in ("QueueOnce", "Singleton"):
        context.by_hand(option, f"base={base}", ONE_AT_A_TIME)
    else:
        context.report(option, "option", name, default=_UNKNOWN_OPTION)


def _check_on_failure(context: FileContext, option: ast.keyword) -> None:
    """Report a handler of Celery's, a function that is no task."""
    if _constant(option) is not None and context.kind_of(option.value) not in ("task", "signature"):
        context.by_hand(option, "on_failure", _HANDLER_OF_CELERY)


def _change_on_failure(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    if _constant(option) is None:
        return []
    _check_on_failure(context, option)
    return [f"on_failure={context.render(option.value)}"]


def _constant(option: ast.keyword) -> object:
    """Return the value of an option that is a constant; `...` for another expression."""
    return option.value.value if isinstance(option.value, ast.Constant) else ...


def _change_bind(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    return [] if _constant(option) is False else [f"bind={context.render(option.value)}"]


def _change_max_retries(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    if _constant(option) is not None:
        return [f"max_retries={context.render(option.value)}"]
    context.changed(option, "max_retries=None", "max_retries=1000: no job is tried again for ever")
    return ["max_retries=1000"]


_RATE_BY_HAND = (
    'rate_limit=Rate("10/m", per="worker"), which counts as Celery does, with a number and s, m, h or d (celery5 docs '
    "limits)"
)


def _check_rate(context: FileContext, option: ast.keyword) -> None:
    """Report a rate that neither celery5 nor Celery reads, and one that the files do not tell."""
    constant, value = _constant(option), context.render(option.value)
    is_written = isinstance(option.value, ast.Call) and get_dotted(option.value.func).endswith("Rate")
    if constant is ... and not is_written:
        context.note(option, "check", "rate_limit", f"{_RATE_BY_HAND}: {value} is known only when it runs")
    elif constant is not ... and translate_rate(constant) is None:
        context.by_hand(option, "rate_limit", f"{_RATE_BY_HAND}: {value} is no rate")


def _change_rate_limit(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    """Return a rate for each worker, as Celery counts it."""
    constant, value = _constant(option), context.render(option.value)
    text = None if constant is ... else translate_rate(constant)
    if text == "":
        context.changed(option, f"rate_limit={value}", "dropped: it is no limit")
        return []
    if text is None:
        _check_rate(context, option)
        return [f"rate_limit={value}"]
    value = value if text == constant else f'"{text}"'
    rate = f'{context.need("Rate", "celery5.limits")}({value}, per="worker")'
    context.changed(
        option, "rate_limit", f"{rate}: for each worker, as with Celery; {value} is for all together"
    )
    return [f"rate_limit={rate}"]


def _change_expires(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    is_span = isinstance(option.value, ast.Call) and get_dotted(option.value.func).endswith("timedelta")
    if not isinstance(_constant(option), int | float) and not is_span:
        context.by_hand(option, "expires", "seconds or a timedelta; a moment only for one call")
    return [f"expires={context.render(option.value)}"]


def _change_backoff(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    return [] if isinstance(_constant(option), bool) else [f"backoff={context.render(option.value)}"]


def _change_delay(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    value = context.render(option.value)
    return [] if "retry_backoff" in given else [f"backoff={value}", f"cap={value}", "jitter=False"]


def _change_throws(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    return [] if "dont_autoretry_for" in given else [f"dont_autoretry_for={context.render(option.value)}"]


def _change_serializer(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    value = context.render(option.value)
    if _constant(option) == "json":
        context.changed(option, "serializer", "dropped: it is always JSON")
        return []
    context.by_hand(option, f"serializer={value}", _JSON)
    return [f"serializer={value}"]


def _change_priority(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    if _constant(option) not in ("high", "normal", "low"):
        context.by_hand(option, "priority", 'priority="high", "normal" or "low"')
    return [f"priority={context.render(option.value)}"]


def _change_retry_arguments(
    context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]
) -> list[str]:
    arguments = option.value
    if not isinstance(arguments, ast.Dict):
        context.report(option, "option", "retry_kwargs")
        return [f"retry_kwargs={context.render(arguments)}"]
    found: list[str] = []
    for key, value in zip(arguments.keys, arguments.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        text = context.render(value)
        if name == "max_retries" and "max_retries" not in given:
            found.append(f"max_retries={text}")
        elif name == "countdown":
            found += [f"backoff={text}", f"cap={text}", "jitter=False"]
        else:
            context.by_hand(option, "retry_kwargs", "max_retries, backoff, cap and jitter of the task")
    return found


_CHANGES = {
    "bind": _change_bind,
    "on_failure": _change_on_failure,
    "max_retries": _change_max_retries,
    "rate_limit": _change_rate_limit,
    "expires": _change_expires,
    "retry_backoff": _change_backoff,
    "retry_kwargs": _change_retry_arguments,
    "default_retry_delay": _change_delay,
    "throws": _change_throws,
    "serializer": _change_serializer,
    "priority": _change_priority,
}
"""Options whose values change."""


def _change_self(context: FileContext, function: Function, name: str) -> None:
    """Change what a bound task does with the running job."""
    parents = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    kept: set[str] = set()  # of the task's class: each is named once
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            _check_passed_self(context, node, name)
        if not (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        ):
            continue
        parent = parents.get(id(node))
        if node.attr == "request" and isinstance(parent, ast.Attribute):
            _change_request(context, name, parent, parents.get(id(parent)))
        elif node.attr == "name":
            context.replace(node, f"{name}.task")
            context.changed(node, f"{name}.name", f"{name}.task")
        elif node.attr == "retry":
            _check_retry(context, parent)
        elif node.attr not in (*_OF_A_JOB, *kept):
            of_the_class = _OPTION_OF_SELF if find_equivalent("option", node.attr) else _OF_THE_CLASS
            advice = _SELF.get(node.attr, of_the_class)
            if advice == of_the_class:
                kept.add(node.attr)
            context.by_hand(
                node, f"{name}.{node.attr}", advice.replace("TASK", function.name).replace("SELF", name)
            )


_OF_A_RUNNING_JOB = "nothing: a running job knows its id, task, queue, attempt, worker and run_id"
_OPTION_OF_SELF = "the value itself: a job does not know the options of its task"
_SELF = {
    "request": "SELF itself is the job: SELF.id, SELF.attempt, SELF.queue",
    "max_retries": "TASK.policy.max_retries; the last attempt is where SELF.attempt > TASK.policy.max_retries",
    "update_state": "progress(done, total, note): from celery5 import progress",
    "replace": "return the workflow, from a task with dynamic=True",
    "add_to_chord": "return the workflow, from a task with dynamic=True",
    "send_event": "the log, or @app.event",
    "is_aborted": "trio.from_thread.check_cancelled() in a def task, which ends a job that was revoked",
    "MaxRetriesExceededError": "nothing is raised: a job without retries left becomes a dead letter",
    "apply_async": "TASK.options(...).delay(...): the job is not the task",
    **{attribute: f"TASK.{attribute}: the job is not the task" for attribute in ("delay", "s", "si")},
}
"""The replacements of the attributes of a bound task."""


def _check_passed_self(context: FileContext, call: ast.Call, name: str) -> None:
    """Report that a bound task passes itself to a function, which gets the job."""
    called = get_dotted(call.func).rpartition(".")[2]
    if called in ("print", "repr", "str", "isinstance"):
        return
    if any(isinstance(value, ast.Name) and value.id == name for value in call.args):
        context.by_hand(call, f"{called}({name})" if called else f"({name})", _PASSED_SELF)


def _change_request(context: FileContext, name: str, node: ast.Attribute, parent: ast.AST | None) -> None:
    attribute = node.attr
    equivalent = find_equivalent("request", attribute)
    whole: ast.expr = node
    if attribute == "retries" and _is_plus_one(parent, node):
        whole, text = parent, f"{name}.attempt"
    elif attribute == "retries":
        text = f"{name}.attempt - 1"
        if not isinstance(parent, ast.FormattedValue | ast.keyword | ast.Assign | ast.Return | ast.Call):
            text = f"({text})"
    elif equivalent.isidentifier():
        text = f"{name}.{equivalent}"
    else:
        context.report(node, "request", attribute, f"{name}.request.{attribute}", default=_OF_A_RUNNING_JOB)
        return
    context.replace(whole, text)
    context.changed(node, f"{name}.request.{attribute}", text)


def _is_plus_one(parent: ast.AST | None, node: ast.expr) -> TypeGuard[ast.BinOp]:
    """Return whether an expression is `node + 1`."""
    match parent:
        case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=1)):
            return left is node
        case _:
            return False


def _check_retry(context: FileContext, call: ast.AST | None) -> None:
    """Report the arguments of `self.retry` that celery5 does not have."""
    if not isinstance(call, ast.Call):
        return
    for option in call.keywords:
        if option.arg == "eta":
            context.by_hand(option, "retry(eta=)", "countdown, in seconds")
        elif option.arg == "max_retries" and _constant(option) is None:
            context.by_hand(option, "retry(max_retries=None)", "a number: no job is tried again for ever")
        elif option.arg is None:
            context.by_hand(
                option, "retry(**options)", "retry(exc=, countdown=, max_retries=): it takes no others"
            )
        elif option.arg not in ("exc", "countdown", "max_retries"):
            context.by_hand(
                option,
                f"retry({option.arg}=)",
                "a retry is the same job with the same arguments: send another job",
            )
    if call.args:
        context.by_hand(
            call, "retry(args)", "a retry is the same job with the same arguments: send another job"
        )


def check_made_task(context: FileContext, function: Function) -> None:
    """Report the options of Celery on a task that a function of the project makes."""
    maker = find_maker(function, context.index)
    if maker is None:
        return
    own = context.index.makers[get_dotted(maker.func).rpartition(".")[2]]
    for option in maker.keywords:
        name = option.arg or ""
        equivalent = find_equivalent("option", name)
        if equivalent and name not in own and name not in _OPTIONS:
            advice = (
                f"leave it out{equivalent.removeprefix('nothing')}"
                if equivalent.startswith("nothing")
                else equivalent
            )
            context.by_hand(option, f"{get_dotted(maker.func)}({name}=)", advice)
    _check_errback(context, function, maker)


def check_class(context: FileContext, node: ast.ClassDef) -> None:
    """Report what to do with a base class of tasks, in one finding: what stays, its methods and its options."""
    if not any(
        context.celery_name(base) == "Task"
        or (isinstance(base, ast.Attribute) and base.attr == "Task" and context.kind_of(base.value) == "app")
        for base in node.bases
    ):
        return
    own: list[str] = []
    parts: dict[str, list[str]] = {}  # the members for each advice
    for member in node.body:
        names = [member.name] if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) else []
        targets = [*getattr(member, "targets", ()), getattr(member, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            if find_equivalent("task class", name):
                advice = find_equivalent("task class", name)
                left_out = f"leave it out{advice.removeprefix('nothing')}"
                parts.setdefault(left_out if advice.startswith("nothing") else advice, []).append(name)
            elif isinstance(member, ast.Assign | ast.AnnAssign) and (
                name in _OPTIONS - {"name"} or find_equivalent("option", name)
            ):
                parts.setdefault(_OPTION_OF_CLASS, []).append(name)
            else:
                own.append(name)
    advice = find_equivalent("module", "Task")
    kept = [f"here: {', '.join(own)}"] if own else []
    members = [f"{', '.join(names)}: {what}" for what, names in parts.items()]
    context.by_hand(node, f"class {node.name}(Task)", "; ".join([advice, *kept, *members]))


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


def is_task_decorator(context: FileContext, function: Function) -> ast.expr | None:
    """Return the decorator by which a function is a task of Celery; None for none."""
    decorator = find_task_decorator(function)
    if decorator is None:
        return None
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if context.celery_name(called) in DECORATORS or context.new_name(called) == "task":
        return decorator
    return decorator if isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app" else None
