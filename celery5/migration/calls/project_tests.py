"""Find what the tests of a project use of Celery: its plugin for pytest, and stand-ins for its methods."""

import ast

from celery5.migration.project.context import FileContext
from celery5.migration.project.index import TEST_FILE, Function, get_dotted

_FIXTURES = {
    **dict.fromkeys(
        ("celery_worker", "celery_session_worker"),
        "with running_worker(app): ... (celery5.testing), or in_memory(app), which needs no server",
    ),
    **dict.fromkeys(("celery_app", "celery_session_app"), "your App: from shop import app"),
    **dict.fromkeys(
        (
            "celery_config",
            "celery_parameters",
            "celery_enable_logging",
            "celery_includes",
            "celery_worker_parameters",
        ),
        "leave it out: with in_memory(app) as jobs: ... jobs.run() needs no settings (celery5 docs testing)",
    ),
}
"""The fixtures of Celery's plugin for pytest."""
_METHODS = {"apply_async", "si", "apply", "retry"}
_OF_A_TASK = {*_METHODS, "run"}
_STAND_IN = (
    "no method has this name: with in_memory(app) as jobs: ... jobs.assert_sent(task, 7) (celery5.testing)"
)


def is_test_module(context: FileContext) -> bool:
    """Return whether a module has tests, which must not wait for ever where no worker runs."""
    packages = {origin.partition(".")[0] for origin in context.origins.values()}
    is_of_django = any(origin.startswith("django.test") for origin in context.origins.values())
    return (
        is_of_django or bool(packages & {"unittest", "pytest"}) or bool(TEST_FILE.search(context.file.name))
    )


def check_fixtures(context: FileContext, function: Function) -> None:
    """Report the replacements of Celery's fixtures that a test uses or defines."""
    is_fixture = any(
        get_dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).endswith("fixture")
        for decorator in function.decorator_list
    )
    if is_fixture and function.name in _FIXTURES:
        context.by_hand(function, f"fixture {function.name}", _FIXTURES[function.name])
    if not (is_fixture or function.name.startswith("test")):
        return
    for argument in function.args.args:
        if argument.arg in _FIXTURES:
            context.by_hand(argument, f"fixture {argument.arg}", _FIXTURES[argument.arg])


def check_stand_in(context: FileContext, call: ast.Call) -> None:
    """Report a method of Celery that a test patches: `patch("shop.tasks.charge.apply_async")`."""
    called = get_dotted(call.func)
    match call.args:
        case [task, ast.Constant(value=str(name)), *_] if context.find_task(task) is not None:
            if called.rpartition(".")[2] in ("object", "setattr") and name in _OF_A_TASK:
                context.by_hand(call, f'{called}({get_dotted(task)}, "{name}")', _STAND_IN)
                return
        case _:
            pass
    if called.endswith("mark.celery"):
        context.by_hand(call, "pytest.mark.celery", _FIXTURES["celery_config"])
        return
    if called.rpartition(".")[2] not in ("patch", "object", "setattr"):
        return
    for argument in call.args[:2]:
        match argument:
            case ast.Constant(value=str(name)) if name.rpartition(".")[2] in _METHODS and _is_of_task(name):
                context.by_hand(call, f'{called}("{name}")', _STAND_IN)
            case _:
                pass


def check_replaced(context: FileContext, node: ast.Assign) -> None:
    """Report a method of Celery that a test replaces by assignment: `charge.retry = MagicMock()`."""
    for target in node.targets:
        match target:
            case ast.Attribute(attr=name, value=task) if (
                name in _OF_A_TASK and context.find_task(task) is not None
            ):
                context.by_hand(node, f"{get_dotted(target)} = ...", _STAND_IN)
            case _:
                pass


def _is_of_task(name: str) -> bool:
    """Return whether a name is a method of a task. Other classes have methods `apply` and `retry`, too."""
    method = name.rpartition(".")[2]
    return method in ("apply_async", "si") or ".tasks." in name
