"""Django: name `"celery5.contrib.django"` in `INSTALLED_APPS`, and the project has an application of celery5.

`manage.py celery5` runs its commands, `CELERY5 = {...}` in Django's settings has its settings, and its tasks are those
in the modules `tasks` of the installed apps.
"""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.contrib.django.application import get_app
    from celery5.contrib.django.backend import Celery5Backend
    from celery5.middleware.django_connections import DjangoConnections

__all__ = ["Celery5Backend", "DjangoConnections", "get_app"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Celery5Backend": "celery5.contrib.django.backend",
            "DjangoConnections": "celery5.middleware.django_connections",
            "get_app": "celery5.contrib.django.application",
        },
    )
