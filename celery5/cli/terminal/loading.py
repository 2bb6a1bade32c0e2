"""Load the application that `-A module[:app]` names."""

import importlib
import sys
import traceback
from contextlib import suppress
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from celery5.app import App, default_app
from celery5.config.import_path import add_current_folder, describe_import_path
from celery5.config.include import explain_load_error, locate_error
from celery5.config.settings import InvalidSettings
from celery5.errors import Misconfigured
from celery5.middleware.django_connections import set_up_django
from celery5.protocol.masking import collapse_whitespace
from celery5.similar_names import find_similar
from celery5.tasks.task import Task


class CannotLoad(Misconfigured):
    """The value of `-A` is no application. The message says what it is, and what to write instead.

    `app` is the application when only its tasks cannot be loaded.
    """

    app: App | None = None


class MisspeltTarget(CannotLoad):
    """There is an application, or a module, of a similar name. The message says which, and needs no further advice."""


def load_app(target: str) -> App:
    """Load the application `module` or `module:attribute`, and its tasks.

    A module without an application stands for that of its Django project, else for the default one, which then has the
    module's free tasks (declared with `celery5.task`). Django is set up first, where the environment names its
    settings. Raises CannotLoad.
    """
    folder = add_current_folder()
    name, colon, attribute = target.partition(":")
    if "/" in name or name.endswith(".py"):
        module_name = name.removesuffix(".py").strip("./").replace("/", ".")
        raise CannotLoad(f"-A {target!r}: it takes a module, not a file: -A {module_name}{colon}{attribute}")
    if not all(name.split(".")) or (colon and not attribute):
        raise CannotLoad(f"-A {target!r}: write module or module:app, such as -A shop:app")
    set_up_django()
    module = _import(name, folder)
    set_up_django()  # the module may have named Django's settings
    app = _get_attribute(module, attribute) if attribute else _get_only_application(module)
    try:
        app.load()
    except Misconfigured as error:
        _raise_if_not_in_code(error)
        cannot_load = CannotLoad(
            f"application {app.name!r} cannot load its tasks: {explain_load_error(error)}"
        )
        cannot_load.app = app
        raise cannot_load from error
    return app


def app_without_code(name: str) -> App:
    """Return an application of this name that declares nothing, with the settings of the environment, and of the
    configuration that `CELERY5_CONFIG` names or that a Django project has in its settings: enough to look at what is in
    Redis. Raises Misconfigured."""
    add_current_folder()  # a configuration may be a module in it
    app = App(name)
    if app.config is None:
        with suppress(Misconfigured):  # a project that cannot be set up: the environment may have the broker
            set_up_django()
        of_django = _find_application_of_django()
        if of_django is not None and of_django.config is not None:
            app.use_config(of_django.config)
    return app


def _import(name: str, folder: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise CannotLoad(
                f"module {name!r} fails while it is imported: {_summarize_error(error)}"
            ) from error
        parent, _, last = name.rpartition(".")
        if isinstance(getattr(sys.modules.get(parent), last, None), App):
            raise MisspeltTarget(
                f"no module {name!r}, but module {parent!r} has that application: -A {parent}:{last}"
            ) from None
        if suggestion := _suggest_module(error.name, folder):
            raise MisspeltTarget(f"no module {error.name!r}; {suggestion}") from None
        raise CannotLoad(f"no module {name!r}: {_describe_search(name, error.name, folder)}") from None
    except (Exception, SystemExit) as error:
        _raise_if_not_in_code(error)
        raise CannotLoad(f"module {name!r} fails while it is imported: {_summarize_error(error)}") from error


def _raise_if_not_in_code(error: BaseException) -> None:
    """Raise an error in the environment or the configuration unchanged: the module that read it is not at fault."""
    if isinstance(error, InvalidSettings) and not error.in_code:
        raise error


def _describe_search(name: str, missing: str, folder: str) -> str:
    if missing != name:
        return f"{missing!r} was not found, or is no package; {describe_import_path(folder)}"
    file = f"{name.replace('.', '/')}.py"
    return f"{describe_import_path(folder)}; run celery5 in the folder that has {file}"


def _suggest_module(missing: str, folder: str) -> str:
    """Return `did you mean 'shop'?` for a module or package where `missing` was looked for first; '' for none.

    That is the current folder, or the package that it names. Installed modules are not looked at: too many have names
    that are similar by chance.
    """
    parent, dot, last = missing.rpartition(".")
    places = [*getattr(sys.modules.get(parent), "__path__", ())] if parent else [folder]
    similar = find_similar(last, [module.name for module in iter_modules(places)])
    return f"did you mean {parent + dot + similar!r}?" if similar else ""


def _get_attribute(module: ModuleType, attribute: str) -> App:
    value: object = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            similar = find_similar(part, vars(module))
            wrong = f"module {module.__name__!r} has no {attribute!r}"
            if similar:
                raise MisspeltTarget(f"{wrong}; did you mean {module.__name__}:{similar}?")
            raise CannotLoad(f"{wrong}; {_list_applications(module)}")
        value = getattr(value, part)
    if not isinstance(value, App):
        raise CannotLoad(
            f"{module.__name__}:{attribute} is {_kind(value)}, not a celery5 App; {_list_applications(module)}"
        )
    return value


def _get_only_application(module: ModuleType) -> App:
    """Return the only application of a module, or the default one for its free tasks. Raises CannotLoad."""
    apps = _apps(module)
    if len(set(apps.values())) > 1:
        choices = " or ".join(f"-A {module.__name__}:{name}" for name in apps)
        raise CannotLoad(f"module {module.__name__!r} has several applications; say which: {choices}")
    if apps:
        return next(iter(apps.values()))
    if (django_app := _find_application_of_django()) is not None:
        return django_app
    tasks: list[Task[..., Any]] = [task for task in vars(module).values() if isinstance(task, Task)]
    if not tasks:
        raise CannotLoad(
            f"module {module.__name__!r} has no celery5 App and no tasks; "
            'write app = App("name") in it, or name another module'
        )
    owners = {task.app for task in tasks if not task.has_no_app}
    owner = owners.pop() if len(owners) == 1 else None
    if isinstance(owner, App) and not any(task.has_no_app for task in tasks):
        return owner
    app = default_app().choose()
    app.module = module.__name__
    return app


def _find_application_of_django() -> App | None:
    """Return what `celery5.contrib.django` has found or made, where Django is set up and has it installed."""
    apps: Any = getattr(sys.modules.get("django.apps"), "apps", None)
    config = None if apps is None else apps.app_configs.get("celery5")
    app = getattr(config, "application", None)
    return app if isinstance(app, App) else None


def _apps(module: ModuleType) -> dict[str, App]:
    return {name: value for name, value in vars(module).items() if isinstance(value, App)}


def _list_applications(module: ModuleType) -> str:
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


def _summarize_error(error: BaseException) -> str:
    """Return an error as its last line and the place where it was raised."""
    line = collapse_whitespace("".join(traceback.format_exception_only(error)[-1:]))
    return f"{line} {locate_error(error)}".rstrip()
