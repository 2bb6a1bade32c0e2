"""The entry in `INSTALLED_APPS`."""

import sys
from types import ModuleType
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import register

from celery5.app import App
from celery5.config.django_command import (
    RefusalReport,
    describe_failed_import,
    is_django_command,
    list_imported,
)
from celery5.config.include import locate_error
from celery5.errors import BadBrokerURL, Misconfigured

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
        if is_django_command():
            _TaskReport.install()

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
            if not is_django_command():
                raise
            where = f" {locate_error(error)}" if _find_failing_tasks(error) else ""
            sys.stderr.write(f"Error: {error}{where}\n")
            raise SystemExit(MISCONFIGURED) from None
        # Only a project on Django 6 that has named the backend, and tasks so early, has imported its module.
        backend: Any = sys.modules.get("celery5.contrib.django.backend")
        if backend is not None:
            backend.declare_early_tasks()


class _TaskReport(RefusalReport):
    """Prints one line for a module of tasks that fails with any error, too.

    `manage.py check` prints what is left of Celery, too: whatever imports such modules, the check of the URLs among
    it, ends Django's own checks.
    """

    def describe(self, error: BaseException) -> str:
        module = _find_failing_tasks(error)
        line = describe_failed_import(module, error) if module else super().describe(error)
        if line and sys.argv[1:2] == ["check"] and apps.ready:
            from celery5.contrib.django.checks import check_leftovers_of_celery

            return "\n".join([line, *map(str, check_leftovers_of_celery())])
        return line


def _find_failing_tasks(error: BaseException) -> str:
    """Return the innermost module of tasks of an installed app that was imported when it was raised; '' for none."""
    packages = [config.name for config in apps.app_configs.values()]
    prefixes = tuple(f"{package}.tasks." for package in packages)
    return next((name for name in list_imported(error) if f"{name}.".startswith(prefixes)), "")
