"""Change the options of a task's declaration."""

import ast

from celery5.hints import ONE_AT_A_TIME, find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import Function, get_dotted
from celery5.migration.values.priorities import describe_priority
from celery5.migration.values.rates import translate_rate
from celery5.tasks.declaration import TaskOptions

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
_CELERY_DELAY = ("backoff=180", "cap=180", "jitter=False")
"""Celery's delay before a retry without a countdown."""
CHECK_OPTIONS = "check that celery5 has these options"
_HANDLER_OF_CELERY = (
    "on_failure= takes a task, which is called with a list of StepFailure; what a function with (self, exc, task_id, "
    "...) did is Middleware.running, where job.outcome is Dead(reason, error)"
)
_UNKNOWN_OPTION = "middleware, or a decorator below @app.task"
TASK_OPTIONS = {"bind", *TaskOptions.__optional_keys__}


def change_options(
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
            context.by_hand(option, "**options", CHECK_OPTIONS)
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
    has_delay = "backoff" in present or _find_delay(given) != ""
    count = _find_retries(function) if uses_retry and "autoretry_for" not in present else 3
    missing: list[str] = [] if "max_retries" in present else [f"max_retries={count}"]
    is_delayed = "autoretry_for" in present or (uses_retry and _retries_without_countdown(function))
    if is_delayed and not has_delay and not _is_constant(given.get("max_retries"), 0):
        missing += _CELERY_DELAY
        context.changed(call, "default_retry_delay", "180 s, as with Celery")
    if "autoretry_for" in present:
        return missing
    if _is_constant(given.get("max_retries"), 0) or not (uses_retry or "max_retries" in present):
        return []
    return [*missing, *(() if "dont_autoretry_for" in given else ("dont_autoretry_for=[Exception]",))]


def _find_delay(given: dict[str, ast.keyword]) -> str:
    """Return the option by which Celery waits before a retry of `autoretry_for`; '' for its default delay."""
    backoff, arguments = given.get("retry_backoff"), given.get("retry_kwargs")
    if backoff is not None and get_constant(backoff) not in (False, None):
        return "retry_backoff"
    keys = arguments.value.keys if arguments is not None and isinstance(arguments.value, ast.Dict) else ()
    if any(isinstance(key, ast.Constant) and key.value == "countdown" for key in keys):
        return "countdown"
    return "default_retry_delay" if "default_retry_delay" in given else ""


def _drop_delay(context: FileContext, option: ast.keyword, name: str, used: str) -> list[str]:
    """Drop an option that Celery does not look at, beside another that says how long a task waits."""
    context.changed(option, name, f"dropped: {used} decides, as with Celery")
    return []


def _find_retries(function: Function) -> int:
    """Return the `max_retries` of all calls of `retry`; Celery's default if they have none, or differ."""
    numbers = {
        next((get_constant(option) for option in call.keywords if option.arg == "max_retries"), None)
        for call in _find_retry_calls(function)
    }
    (number, *others) = numbers or {None}
    return number if isinstance(number, int) and not (others or isinstance(number, bool)) else 3


def _find_retry_calls(function: Function) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "retry"
    ]


def _retries_without_countdown(function: Function) -> bool:
    calls = _find_retry_calls(function)
    return any(not {option.arg for option in call.keywords} & {"countdown", "eta", None} for call in calls)


def _is_constant(option: ast.keyword | None, value: object) -> bool:
    return option is not None and isinstance(option.value, ast.Constant) and option.value.value is value


def _change_option(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    """Return what becomes of one option of a declaration; nothing if it is dropped."""
    assert option.arg is not None
    name, value = option.arg, context.render(option.value)
    delay = _find_delay(given)
    if name in ("retry_backoff_max", "retry_jitter") and delay in ("countdown", "default_retry_delay"):
        return _drop_delay(context, option, name, delay)
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
    report_option(context, option, name)
    return [f"{name}={value}"]  # it is refused with a hint until it is changed


def report_option(context: FileContext, option: ast.keyword, name: str) -> None:
    """Report an option that celery5 does not have: of Celery, of a package beside it, or of the task's own class."""
    base = get_dotted(option.value).rpartition(".")[2] if name == "base" else ""
    if base in ("QueueOnce", "Singleton"):
        context.by_hand(option, f"base={base}", ONE_AT_A_TIME)
    else:
        context.report(option, "option", name, default=_UNKNOWN_OPTION)


def check_on_failure(context: FileContext, option: ast.keyword) -> None:
    """Report a handler of Celery's, a function that is no task."""
    if get_constant(option) is not None and context.kind_of(option.value) not in ("task", "signature"):
        context.by_hand(option, "on_failure", _HANDLER_OF_CELERY)


def _change_on_failure(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    if get_constant(option) is None:
        return []
    check_on_failure(context, option)
    return [f"on_failure={context.render(option.value)}"]


def get_constant(option: ast.keyword) -> object:
    """Return the value of an option that is a constant; `...` for another expression."""
    return option.value.value if isinstance(option.value, ast.Constant) else ...


def _change_bind(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    return [] if get_constant(option) is False else [f"bind={context.render(option.value)}"]


def _change_max_retries(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    if get_constant(option) is not None:
        return [f"max_retries={context.render(option.value)}"]
    context.changed(option, "max_retries=None", "max_retries=1000: no job is tried again for ever")
    return ["max_retries=1000"]


_RATE_BY_HAND = (
    'rate_limit=Rate("1/6s", per="worker") for 10/m, which spaces and counts as Celery does, with a number and s, m, h '
    "or d (celery5 docs limits)"
)

_AS_CELERY = (
    "for each worker, and spaced, as with Celery; {} is for all workers together, and as many may begin at once "
    "(celery5 docs limits)"
)


def check_rate(context: FileContext, option: ast.keyword) -> None:
    """Report a rate that neither celery5 nor Celery reads, and one that the files do not tell."""
    constant, value = get_constant(option), context.render(option.value)
    is_written = isinstance(option.value, ast.Call) and get_dotted(option.value.func).endswith("Rate")
    if constant is ... and not is_written:
        context.note(option, "decide", "rate_limit", f"{_RATE_BY_HAND}: {value} is known only when it runs")
    elif constant is not ... and translate_rate(constant) is None:
        context.by_hand(option, "rate_limit", f"{_RATE_BY_HAND}: {value} is no rate")


def _change_rate_limit(
    context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]
) -> list[str]:
    """Return a rate for each worker, over a short period, as Celery counts it."""
    constant, value = get_constant(option), context.render(option.value)
    text = None if constant is ... else translate_rate(constant)
    if text == "":
        context.changed(option, f"rate_limit={value}", "dropped: it is no limit")
        return []
    if text is None:
        check_rate(context, option)
        return [f"rate_limit={value}"]
    value = value if text == constant else f'"{text}"'
    rate = f'{context.need("Rate", "celery5.limits")}({value}, per="worker")'
    context.changed(option, "rate_limit", f"{rate}: {_AS_CELERY.format(value)}")
    return [f"rate_limit={rate}"]


def _change_expires(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    is_span = isinstance(option.value, ast.Call) and get_dotted(option.value.func).endswith("timedelta")
    if not isinstance(get_constant(option), int | float) and not is_span:
        context.by_hand(option, "expires", "seconds or a timedelta; a moment only for one call")
    return [f"expires={context.render(option.value)}"]


def _change_backoff(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    constant = get_constant(option)
    return [] if isinstance(constant, bool) or not constant else [f"backoff={context.render(option.value)}"]


def _change_delay(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    value, delay = context.render(option.value), _find_delay(given)
    if delay != "default_retry_delay":
        return _drop_delay(context, option, "default_retry_delay", delay)
    return [f"backoff={value}", f"cap={value}", "jitter=False"]


def _change_throws(context: FileContext, option: ast.keyword, given: dict[str, ast.keyword]) -> list[str]:
    return [] if "dont_autoretry_for" in given else [f"dont_autoretry_for={context.render(option.value)}"]


def change_serializer(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    """Drop `serializer="json"`, and report another one."""
    value = context.render(option.value)
    if get_constant(option) == "json":
        context.changed(option, "serializer", "dropped: it is always JSON")
        return []
    context.by_hand(option, f"serializer={value}", _JSON)
    return [f"serializer={value}"]


def change_priority(context: FileContext, option: ast.keyword, _given: dict[str, ast.keyword]) -> list[str]:
    """Report a priority that celery5 does not have."""
    if get_constant(option) not in ("high", "normal", "low"):
        name, advice = describe_priority(option.value, context.index.transport)
        context.by_hand(option, name, advice)
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
            delay = _find_delay(given)
            fixed = [f"backoff={text}", f"cap={text}", "jitter=False"]
            found += fixed if delay == "countdown" else _drop_delay(context, option, "countdown", delay)
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
    "serializer": change_serializer,
    "priority": change_priority,
}
"""Options whose values change."""
