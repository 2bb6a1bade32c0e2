"""Read `CELERY5 = {...}` in the settings of a Django project."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from django.conf import settings

from celery5.errors import Misconfigured
from celery5.middleware.django_connections import SETTINGS_VARIABLE

SETTING = "CELERY5"
"""The name of the setting in Django's settings."""
OWN_KEYS = ("app", "broker_in_tests", "dashboard_url", "ignored_apps", "name")
"""The keys in it that say something of the project, and are no settings of an application."""
UNNAMED = "django"
"""The name of an application of a project whose settings are in no package."""


def read_project_settings() -> Mapping[str, Any]:
    """Return `CELERY5` of Django's settings; empty when it is not there. Raises Misconfigured."""
    values = getattr(settings, SETTING, {})
    if not isinstance(values, Mapping):
        raise Misconfigured(
            f"{SETTING} in Django's settings is {values!r}: write a dictionary, such as "
            f'{SETTING} = {{"broker": "redis://localhost:6379/0"}}'
        )
    return cast("Mapping[str, Any]", values)


def get_project_package() -> str:
    """Return the package of the project: the one that has the module or package `settings`; '' for none."""
    words = os.environ.get(SETTINGS_VARIABLE, "").split(".")
    ends = [place for place, word in enumerate(words) if word.startswith("settings")]
    return ".".join(words[: ends[0] if ends else -1])


def get_application_name() -> str:
    """Return the name of the application of a project that declares none."""
    name = read_project_settings().get("name")
    return str(name or get_project_package().rpartition(".")[2] or UNNAMED)


class ProjectConfiguration:
    """The configuration of an application whose settings are in Django's."""

    where: str = f"{SETTING} of Django's settings"

    def load(self) -> Mapping[str, Any]:
        """Return the settings by name. Raises Misconfigured."""
        return {name: value for name, value in read_project_settings().items() if name not in OWN_KEYS}

    async def watch(self) -> None:
        """Wait for ever: Django's settings do not change while a process runs."""
        trio: Any = import_module("trio")  # a web process does not watch, and never imports it
        await trio.sleep_forever()
