"""Change the calls of functions and classes that are imported from Celery."""

import ast
from collections.abc import Callable

from celery5.migration.calls.by_name import change_named_signature
from celery5.migration.calls.canvas import change_canvas
from celery5.migration.project.context import FileContext
from celery5.migration.values.crontabs import parse_crontab_call

MADE_IN_A_FUNCTION = (
    "the options that it passes on, **options too, have celery5's names; what Celery's current_task did, current_job() "
    "does"
)


def change_function(context: FileContext, call: ast.Call, name: str) -> None:
    """Change a call of a function of Celery's."""
    if name == "shared_task" and id(call) not in context.decorators:
        context.by_hand(call, "shared_task(...) in a function", f"task(...) of celery5: {MADE_IN_A_FUNCTION}")
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


ERRORS = ("Reject", "Retry")
"""Errors that celery5 has, too, with other arguments."""
_FUNCTIONS: dict[str, tuple[int, Callable[[FileContext, ast.Call, str], None]]] = {
    "get_task_logger": (1, _change_logger),
    "AsyncResult": (1, _change_handle),
    "crontab": (0, _change_crontab),
    "Ignore": (0, _change_ignore),
    "Reject": (0, _change_reject),
    "Retry": (0, _check_retry),
    "signature": (1, change_named_signature),
    "subtask": (1, change_named_signature),
    "maybe_signature": (1, change_named_signature),
}
"""Functions and classes of Celery, with how many arguments a call has at least, and what changes the call."""
