"""Find the application of a Django project, and give it the settings and the tasks of the project."""

from collections.abc import Iterable
from contextvars import ContextVar
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from celery5.app import App
from celery5.config.include import explain_import_error
from celery5.contrib.django.project_settings import (
    SETTING,
    ProjectConfiguration,
    get_project_package,
    read_project_settings,
)
from celery5.errors import Misconfigured
from celery5.middleware.django_connections import is_django_tested

MODULE = "celery5"
"""The module in the project's package that may declare the application."""


def get_app() -> App:
    """Return the application of this Django project.

    Raises:
        Misconfigured: Django is not set up, or `INSTALLED_APPS` has no `celery5.contrib.django`.
    """
    try:
        application = apps.get_app_config("celery5").application
    except (LookupError, AttributeError, ImproperlyConfigured):
        application = None
    if not isinstance(application, App):
        raise Misconfigured(
            'this process has no application of a Django project: add "celery5.contrib.django" to INSTALLED_APPS, and '
            "call django.setup() first"
        )
    return application


def connect_application() -> App:
    """Return the application of the project, with the project's settings and tasks. Raises Misconfigured."""
    declared, configuration = _find_declared(), ProjectConfiguration()
    if declared is not None and "name" in read_project_settings():
        raise Misconfigured(
            f'{configuration.where}: "name" is for a project without an App, and this one declares {declared.name!r}'
        )
    app = declared or import_module("celery5.contrib.django.project").app
    if configuration.load():
        if app.config is not None and not isinstance(app.config, ProjectConfiguration):
            raise Misconfigured(
                f"application {app.name!r} has its settings from {app.config!r} and from {configuration.where}: leave "
                "out config= and CELERY5_CONFIG, and put what they have into Django's settings, or the other way round"
            )
        app.use_config(configuration)
    app.extend_include(find_task_modules(read_project_settings().get("ignored_apps", ())))
    app.guard_broker(refuse_in_tests)
    return app


IS_CHECKED = ContextVar("is_checked", default=False)
"""Whether the application is only checked now, which opens no connection."""


def refuse_in_tests() -> None:
    """Raise Misconfigured in a test of the project, which must not send to the broker of its settings."""
    if IS_CHECKED.get():
        return
    if is_django_tested() and not read_project_settings().get("broker_in_tests"):
        raise Misconfigured(
            "a test must not use the broker of Django's settings: send inside of `with in_memory(get_app()) as jobs:`, "
            "or of recorded or running_worker (from celery5.testing; celery5 docs django); or let tests use it: "
            f'"broker_in_tests": True in {SETTING}'
        )


def find_task_modules(ignored_apps: Iterable[str]) -> list[str]:
    """Return what the application includes for the installed apps: the module `tasks` of each that has one.

    All modules of a package `tasks` are included. Only the names are looked up: `App.load` imports the modules. Raises
    Misconfigured for an ignored app that is not installed.
    """
    return [
        f"{package}.tasks{'.**' if spec.submodule_search_locations else ''}"
        for package, spec in find_task_specs(ignored_apps).items()
    ]


def find_task_specs(ignored_apps: Iterable[str]) -> dict[str, ModuleSpec]:
    """Return the spec of the module `tasks` of each installed app that has one. Raises Misconfigured."""
    installed = [config.name for config in apps.get_app_configs()]
    ignored = [ignored_apps] if isinstance(ignored_apps, str) else list(ignored_apps)
    unknown = [name for name in ignored if name not in installed]
    if unknown:
        raise Misconfigured(
            f"{SETTING} of Django's settings: ignored_apps has {unknown[0]!r}, which is not installed; installed are "
            f"{', '.join(installed)}"
        )
    found = {package: _find_tasks(package) for package in installed if package not in ignored}
    return {package: spec for package, spec in found.items() if spec is not None}


def _find_tasks(package: str) -> ModuleSpec | None:
    """Return the spec of a package's module `tasks`; None when there is none. Django has imported the package."""
    try:
        return find_spec(f"{package}.tasks")
    except ModuleNotFoundError:  # an app may be a module
        return None


def _find_declared() -> App | None:
    """Return the application that the project declares: what `CELERY5["app"]` names, or the one of its package."""
    target = read_project_settings().get("app", "")
    if target:
        return _load_named(target)
    package = get_project_package()
    for module in (package, f"{package}.{MODULE}"):
        found = _find_in(module) if package else {}
        if len(set(found.values())) > 1:
            choices = " or ".join(f'"{module}:{name}"' for name in found)
            raise Misconfigured(
                f'{module} has several applications: say which in {SETTING} of Django\'s settings: "app": {choices}'
            )
        if found:
            return next(iter(found.values()))
    return None


def _find_in(module: str) -> dict[str, App]:
    """Return the applications of a module, by their names in it; none when there is no such module."""
    try:
        if find_spec(module) is None:
            return {}
    except ModuleNotFoundError:  # its parent is a module, and no package
        return {}
    return {name: value for name, value in vars(import_module(module)).items() if isinstance(value, App)}


def _load_named(target: object) -> App:
    where = f'{SETTING} of Django\'s settings: "app" is {target!r}'
    if not isinstance(target, str):
        raise Misconfigured(f"{where}: write a module and the name in it, such as 'shop.jobs:app'")
    module, _, attribute = target.partition(":")
    try:
        value = getattr(import_module(module), attribute or "app", None)
    except ImportError as error:
        raise Misconfigured(f"{where}: {explain_import_error(module, error)}") from error
    if not isinstance(value, App):
        raise Misconfigured(f"{where}, where there is no App: write module:name, such as 'shop.jobs:app'")
    return value
