"""Give Django in a box process the databases and mail backend of its worker, which a test may have changed.

Django's test runner changes the databases and the mail backend of its own process only. A box process reads the
settings of the project: without this module it would query the real databases and send real mail.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from celery5.errors import Misconfigured
from celery5.middleware.django_connections import is_django_configured, is_django_tested
from celery5.protocol.boxes.frames import BoxDjango

FIELDS = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
"""The settings that say where a database is."""


def read_django() -> BoxDjango | None:
    """Return the databases and mail backend of Django in this process; None if `django.db` is not imported."""
    database: Any = sys.modules.get("django.db")
    if database is None or not is_django_configured():
        return None
    try:
        configured: Mapping[str, Any] = database.connections.settings
    except Exception:  # invalid settings: the first use of a database raises this
        return None
    return BoxDjango(
        databases={alias: _read_fields(options) for alias, options in configured.items()},
        email_backend=str(import_module("django.conf").settings.EMAIL_BACKEND),
        is_test=is_django_tested(),
    )


class BoxSettings:
    """Changes the settings of Django in this process to those of its worker.

    Args:
        worker: The settings of the worker; None to change nothing.
    """

    def __init__(self, worker: BoxDjango | None) -> None:
        self._worker = worker

    def configure(self) -> None:
        """Change the settings, once, if Django is configured. Call this before any connection is opened."""
        worker = self._worker
        if worker is None or not is_django_configured():
            return
        self._worker = None
        if worker.is_test:
            import_module("django.conf").settings.EMAIL_BACKEND = worker.email_backend
        configured: Mapping[str, Any] = import_module("django.db").connections.settings
        refused = dict[str, str]()
        for alias, options in configured.items():
            own = _read_fields(options)
            wanted = worker.databases.get(alias, own)
            if why := find_refusal(alias, own, wanted) if worker.is_test else "":
                refused[alias] = why
            options.update({field: value for field, value in wanted.items() if value != own[field]})
        if refused:
            _refuse_to_connect(refused)


def find_refusal(alias: str, own: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return why a box of a test must not connect to a database; "" when it may.

    Args:
        alias: The database.
        own: Where it is in the settings of the project.
        wanted: Where it is in the test.
    """
    name = wanted["NAME"]
    if name == ":memory:" or "mode=memory" in name:
        return (
            f"the test's database {alias!r} is in the memory of another process, so a boxed task cannot use it: give "
            f"DATABASES[{alias!r}] a file for tests, 'TEST': {{'NAME': 'test.sqlite3'}}"
        )
    if own == wanted:
        return (
            f"database {alias!r} is the real one: this test has no test database for it, so a boxed task must not use "
            "it. Name it in the attribute `databases` of the test"
        )
    return ""


def _refuse_to_connect(refused: Mapping[str, str]) -> None:
    """Refuse connections to some databases in all threads, as Django does for databases that a test does not name."""
    base: Any = import_module("django.db.backends.base.base").BaseDatabaseWrapper
    connect = base.connect

    def check_and_connect(connection: Any) -> None:
        if connection.alias in refused:
            raise Misconfigured(refused[connection.alias])
        connect(connection)

    base.connect = check_and_connect


def _read_fields(options: Mapping[str, Any]) -> dict[str, str]:
    return {field: str(options.get(field) or "") for field in FIELDS}
