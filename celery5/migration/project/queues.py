"""Change the name of Celery's default queue, `celery`, which is `default` in celery5."""

import ast

from celery5.migration.project.context import FileContext

_NAMING = {"apply_async", "apply_async_on_commit", "send_task", "signature", "subtask", "set"}


def change_queue_option(context: FileContext, call: ast.Call) -> None:
    """Change `queue="celery"` of a call that sends a job, or of the declaration of a task."""
    is_naming = isinstance(call.func, ast.Attribute) and call.func.attr in _NAMING
    is_declaring = id(call) in context.decorators and context.celery_name(call.func) == "shared_task"
    if is_naming or is_declaring or (id(call) in context.decorators and not context.is_written):
        for option in call.keywords:
            if option.arg == "queue":
                change_queue(context, option.value)


def change_queue(context: FileContext, value: ast.expr) -> None:
    """Change the name of Celery's default queue in a project that has not chosen one."""
    is_default = isinstance(value, ast.Constant) and value.value == "celery"
    if is_default and not context.index.names_default_queue:
        context.replace(value, '"default"')
        context.changed(value, 'queue="celery"', '"default", the name of the default queue of celery5')
