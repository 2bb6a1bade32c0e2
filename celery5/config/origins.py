"""Origins: each setting of an application with its value and where that was said; and what is odd about them.

Whoever wonders why a worker does what it does asks this first (Celery's answer is to read the source).
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from celery5.config.settings import PREFIX, Settings, find_source
from celery5.protocol.masking import mask_passwords

if TYPE_CHECKING:
    from celery5.config.settings import ExplicitSettings, LoadedConfiguration

_OTHERS = ("APP", "CLUSTER", "CONFIG", "CONTROLLER", "JOB", "JOURNAL", "TEST")
"""What variables of ours that are no settings begin with."""


class SettingOrigin(msgspec.Struct, frozen=True):
    """One setting: its value, passwords masked, and its `origin`: `flag --concurrency`, `code`, `CELERY5_CONCURRENCY`,
    `file celery5.toml`, or `default`."""

    setting: str
    value: Any
    origin: str


class ConfiguredApplication(Protocol):
    """The application whose settings are explained."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    @property
    def explicit_settings(self) -> "ExplicitSettings":
        """Those that code and flags give."""
        ...

    def read_configuration(self) -> "LoadedConfiguration | None":
        """Return what the configuration says now, None without one. Raises Misconfigured."""
        ...


def get_origins(app: ConfiguredApplication) -> list[SettingOrigin]:
    """All settings of an application, in the order of the guide. Reads its configuration. Raises Misconfigured."""
    found, settings = app.read_configuration(), app.settings
    return [
        SettingOrigin(name, mask_passwords(getattr(settings, name)), _origin(name, app, found))
        for name in Settings.__struct_fields__
    ]


def find_warnings(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """What is allowed and hardly meant, a line each."""
    found: list[str] = []
    hard, soft = settings.time_limit, settings.soft_time_limit
    if hard is not None and soft is not None and soft >= hard:
        found.append(f"soft_time_limit={soft:g} never comes: time_limit={hard:g} is not longer")
    if settings.inbox and not settings.inbox_signatures:
        found.append("inbox_signatures=False: whoever can write to Redis commands the workers")
    if settings.status_port and settings.status_host not in ("127.0.0.1", "::1", "localhost"):
        found.append(f"status_host={settings.status_host}: the status port asks nobody who they are")
    return found + [
        f"{each} is in the environment, and is no setting" for each in find_unknown_variables(environ)
    ]


def find_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """The names of variables that look like ours, and mean nothing."""
    known = {PREFIX + each.upper() for each in Settings.__struct_fields__}
    others = tuple(PREFIX + each for each in _OTHERS)
    ours = sorted(each for each in environ if each.startswith(PREFIX) and not each.startswith(others))
    return [each for each in ours if each not in known]


def _origin(name: str, app: ConfiguredApplication, found: "LoadedConfiguration | None") -> str:
    source = find_source(name, app.explicit_settings, os.environ, found)
    if source is None:
        return "default"
    if source.kind == "said":
        return f"flag --{name.replace('_', '-')}" if name in app.explicit_settings.flags else "code"
    return found.where if found is not None and source.kind == "configuration" else source.where
