"""The entry in `INSTALLED_APPS`."""

import sys
from traceback import walk_stack
from typing import Any

from django.apps import AppConfig
from django.core.checks import register

from celery5.app import App
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
            sys.stderr.write(f"Error: {error}\n")
            raise SystemExit(MISCONFIGURED) from None
        # Only a project on Django 6 that has named the backend, and tasks so early, has imported its module.
        backend: Any = sys.modules.get("celery5.contrib.django.backend")
        if backend is not None:
            backend.declare_early_tasks()


def _is_command() -> bool:
    """Return whether a command of `manage.py` sets Django up, where a traceback would hide the one line.

    Not `runserver`: Django shows its errors, and waits until the file is changed.
    """
    if "runserver" in sys.argv[1:2]:
        return False
    return any(frame.f_globals.get("__name__") == "django.core.management" for frame, _ in walk_stack(None))
