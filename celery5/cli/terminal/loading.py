"""Loading: from `-A module[:app]` to the application."""

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

import celery5
from celery5.app import App, default_app
from celery5.config.settings import InvalidSettings
from celery5.errors import Misconfigured
from celery5.protocol.masking import collapse_whitespace
from celery5.protocol.similar_names import find_similar
from celery5.tasks.task import Task


class CannotLoad(Misconfigured):
    """What `-A` names is no application. The message says what it is, and what to write instead."""


def load_app(target: str) -> App:
    """The application that `target` names: `module`, or `module:attribute`; its tasks are loaded.

    A module without an application but with free tasks (declared with `celery5.task`) gives them to the default
    application. Raises CannotLoad.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    name, colon, attribute = target.partition(":")
    if "/" in name or name.endswith(".py"):
        instead = name.removesuffix(".py").strip("./").replace("/", ".")
        raise CannotLoad(f"-A {target!r}: it takes a module, not a file: -A {instead}{colon}{attribute}")
    if not all(name.split(".")) or (colon and not attribute):
        raise CannotLoad(f"-A {target!r}: write module or module:app, such as -A shop:app")
    module = _imported(name, here)
    app = _named(module, attribute) if attribute else _only(module)
    try:
        app.load()
    except Misconfigured as error:
        _raise_if_said_elsewhere(error)
        where = f" {_place(error.__cause__)}" if error.__cause__ else ""
        raise CannotLoad(f"application {app.name!r} cannot load its tasks: {error}{where}") from error
    return app


def app_without_code(name: str) -> App:
    """Return an application of this name that declares nothing, with the settings of the environment and of the
    configuration that `CELERY5_CONFIG` names: enough to look at what is in Redis. Raises Misconfigured."""
    here = os.getcwd()
    if here not in sys.path:  # a configuration may be a module in this folder
        sys.path.insert(0, here)
    return App(name)


def _imported(name: str, here: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise CannotLoad(f"module {name!r} fails while it is imported: {_last_words(error)}") from error
        parent, _, last = name.rpartition(".")
        if isinstance(getattr(sys.modules.get(parent), last, None), App):
            raise CannotLoad(
                f"no module {name!r}, but module {parent!r} has that application: -A {parent}:{last}"
            ) from None
        raise CannotLoad(f"no module {name!r}: {_where_it_may_be(name, error.name, here)}") from None
    except (Exception, SystemExit) as error:
        _raise_if_said_elsewhere(error)
        raise CannotLoad(f"module {name!r} fails while it is imported: {_last_words(error)}") from error


def _raise_if_said_elsewhere(error: BaseException) -> None:
    """A wrong setting of the environment or the configuration is no fault of the module that asked for it first."""
    if isinstance(error, InvalidSettings) and not error.in_code:
        raise error


def _where_it_may_be(name: str, missing: str, here: str) -> str:
    if missing != name:
        return f"{missing!r} was not found, or is no package; looked in {here} and where Python is installed"
    file = f"{name.replace('.', '/')}.py"
    return f"looked in {here} and where Python is installed; run celery5 in the folder that has {file}"


def _named(module: ModuleType, attribute: str) -> App:
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            similar = find_similar(part, vars(module))
            hint = f"did you mean {module.__name__}:{similar}?" if similar else _what_there_is(module)
            raise CannotLoad(f"module {module.__name__!r} has no {attribute!r}; {hint}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise CannotLoad(
            f"{module.__name__}:{attribute} is {_kind(found)}, not a celery5 App; {_what_there_is(module)}"
        )
    return found


def _only(module: ModuleType) -> App:
    """The one application of a module, or the default one for its free tasks."""
    apps = _apps(module)
    if len(set(apps.values())) > 1:
        choices = " or ".join(f"-A {module.__name__}:{name}" for name in apps)
        raise CannotLoad(f"module {module.__name__!r} has several applications; say which: {choices}")
    if apps:
        return next(iter(apps.values()))
    tasks: list[Task[..., Any]] = [each for each in vars(module).values() if isinstance(each, Task)]
    if not tasks:
        raise CannotLoad(
            f"module {module.__name__!r} has no celery5 App and no tasks; "
            'write app = App("name") in it, or name another module'
        )
    owners = {each.app for each in tasks if not each.has_no_app}
    owner = owners.pop() if len(owners) == 1 else None
    if isinstance(owner, App) and not any(each.has_no_app for each in tasks):
        return owner
    app = default_app()
    app.module = module.__name__
    return app


def _apps(module: ModuleType) -> dict[str, App]:
    return {name: each for name, each in vars(module).items() if isinstance(each, App)}


def _what_there_is(module: ModuleType) -> str:
    names = [f"{module.__name__}:{name}" for name in _apps(module)]
    return f"its applications: {', '.join(names)}" if names else "it has no App"


def _kind(value: object) -> str:
    if isinstance(value, Task):
        return "a task"
    if isinstance(value, ModuleType):
        return "a module"
    if isinstance(value, type):
        return "a class"
    return f"a {type(value).__name__}"


def _last_words(error: BaseException) -> str:
    """An error as its last line and its place."""
    said = collapse_whitespace("".join(traceback.format_exception_only(error)[-1:]))
    return f"{said} {_place(error)}".rstrip()


def _place(error: BaseException) -> str:
    """Where an error comes from: the innermost line of the user's, else of anybody's."""
    if isinstance(error, SyntaxError):
        return f"({error.filename}:{error.lineno})"
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen")
    ]
    package = os.path.dirname(celery5.__file__)
    users = [
        each for each in frames if not os.path.abspath(each.filename).startswith((package, *_libraries()))
    ]
    place = (users or frames)[-1:]
    return f"({place[0].filename}:{place[0].lineno})" if place else ""


def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    return tuple(
        {os.path.dirname(os.__file__), *(path for path in sys.path if path.endswith("site-packages"))}
    )
