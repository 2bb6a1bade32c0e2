"""The entry in `INSTALLED_APPS`."""

import sys
from typing import Any

from django.apps import AppConfig

from celery5.app import App


class Celery5Config(AppConfig):
    """Gives the project its application of celery5 when Django is ready."""

    name = "celery5.contrib.django"
    label = "celery5"
    verbose_name = "Celery5"
    default_auto_field = "django.db.models.AutoField"
    application: App
    """The application of the project."""

    def ready(self) -> None:
        """Find the application, or make one; give it the project's settings and tasks. Raises Misconfigured."""
        from celery5.contrib.django.application import (
            connect_application,  # Django's settings are ready only now
        )

        self.application = connect_application()
        # Only a project on Django 6 that has named the backend, and tasks so early, has imported its module.
        backend: Any = sys.modules.get("celery5.contrib.django.backend")
        if backend is not None:
            backend.declare_early_tasks()
