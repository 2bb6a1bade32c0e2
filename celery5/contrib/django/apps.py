"""The entry in `INSTALLED_APPS`."""

import sys
from traceback import walk_stack, walk_tb
from types import ModuleType, TracebackType
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import register

from celery5.app import App
from celery5.config.include import locate_error
from celery5.errors import BadBrokerURL, CeleryError, Misconfigured
from celery5.protocol.masking import describe_error

MISCONFIGURED = 2
"""The exit code of a command of `manage.py` for a mistake in the settings; that of `celery5` for it, too."""


class Celery5Config(AppConfig):
    """Gives the project its application of celery5 when Django is ready."""

    name = "celery5.contrib.django"
    label = "celery5"
    verbose_name = "Celery5"
    default_auto_field = "django.db.models.AutoField"
    application: App
    """The application of the project."""

    def __init__(self, app_name: str, app_module: ModuleType) -> None:
        """Have a module of tasks that fails named in one line, whatever imports it: models, views, other apps."""
        super().__init__(app_name, app_module)
        if _is_command() and "--traceback" not in sys.argv:
            _report_failing_tasks()

    def ready(self) -> None:
        """Find the application, or make one; give it the project's settings and tasks.

        Raises:
            Misconfigured: The settings have a mistake. For a command of `manage.py` it is printed, in one line.
            BadBrokerURL: The broker's URL cannot be parsed; printed in the same way.
        """
        # Django's settings are ready only now.
        from celery5.contrib.django.application import connect_application
        from celery5.contrib.django.checks import check_application, check_leftovers_of_celery

        register(check_application)
        register(check_leftovers_of_celery)

        try:
            self.application = connect_application()
        except (Misconfigured, BadBrokerURL) as error:
            if not _is_command():
                raise
            where = f" {locate_error(error)}" if _find_failing_tasks(error) else ""
            sys.stderr.write(f"Error: {error}{where}\n")
            raise SystemExit(MISCONFIGURED) from None
        # Only a project on Django 6 that has named the backend, and tasks so early, has imported its module.
        backend: Any = sys.modules.get("celery5.contrib.django.backend")
        if backend is not None:
            backend.declare_early_tasks()


def _report_failing_tasks() -> None:
    """Print one line where a command of `manage.py` would end in the traceback of a module of tasks.

    `manage.py check` prints what is left of Celery, too: whatever imports such modules, the check of the URLs among
    it, ends Django's own checks.
    """
    report_others = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        module = _find_failing_tasks(error) or _find_refused_module(error)
        if not module:
            report_others(kind, error, trace)
            return
        why = f"{describe_error(error)} {locate_error(error)}".rstrip()
        sys.stderr.write(
            f"Error: module {module!r} fails while it is imported: {why}; --traceback shows all\n"
        )
        if sys.argv[1:2] == ["check"] and apps.ready:
            from celery5.contrib.django.checks import check_leftovers_of_celery

            sys.stderr.writelines(f"{message}\n" for message in check_leftovers_of_celery())

    sys.excepthook = report


def _find_failing_tasks(error: BaseException) -> str:
    """Return the innermost module of tasks of an installed app that was imported when it was raised; '' for none."""
    packages = [config.name for config in apps.app_configs.values()]
    prefixes = tuple(f"{package}.tasks." for package in packages)
    return next((name for name in _list_imported(error) if f"{name}.".startswith(prefixes)), "")


def _find_refused_module(error: BaseException) -> str:
    """Return the innermost module that was imported when celery5 refused what it declares; '' for another error."""
    if not isinstance(error, CeleryError):
        return ""
    return next((name for name in _list_imported(error) if name != "__main__"), "")


def _list_imported(error: BaseException) -> list[str]:
    """Return the modules that were imported when an error was raised, the innermost first."""
    modules = [
        str(frame.f_globals.get("__name__"))
        for frame, _ in walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    return modules[::-1]


def _is_command() -> bool:
    """Return whether a command of `manage.py` sets Django up, where a traceback would hide the one line.

    Not `runserver`: Django shows its errors, and waits until the file is changed.
    """
    if "runserver" in sys.argv[1:2]:
        return False
    return any(frame.f_globals.get("__name__") == "django.core.management" for frame, _ in walk_stack(None))
