"""List each setting of an application with its value and its origin, and find suspicious settings.

This answers why a worker behaves as it does; with Celery one has to read the source.
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
"""The beginnings, after PREFIX, of variables that are no settings."""


class SettingOrigin(msgspec.Struct, frozen=True):
    """One setting with its value and its origin."""

    setting: str
    # With passwords masked.
    value: Any
    # `flag --concurrency`, `code`, `CELERY5_CONCURRENCY`, `file celery5.toml`, or `default`.
    origin: str


class ConfiguredApplication(Protocol):
    """The application whose settings are listed."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    @property
    def explicit_settings(self) -> "ExplicitSettings":
        """The settings from code and flags."""
        ...

    def read_configuration(self) -> "LoadedConfiguration | None":
        """Return the current content of the configuration, None without one. Raises Misconfigured."""
        ...


def get_origins(app: ConfiguredApplication) -> list[SettingOrigin]:
    """Return all settings of an application, in the order of the guide. Raises Misconfigured."""
    configuration, settings = app.read_configuration(), app.settings
    return [
        SettingOrigin(name, mask_passwords(getattr(settings, name)), _origin(name, app, configuration))
        for name in Settings.__struct_fields__
    ]


def find_warnings(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that is allowed, but probably a mistake."""
    warnings: list[str] = []
    hard, soft = settings.time_limit, settings.soft_time_limit
    if hard is not None and soft is not None and soft >= hard:
        warnings.append(f"soft_time_limit={soft:g} never comes: time_limit={hard:g} is not longer")
    if settings.inbox and not settings.inbox_signatures:
        warnings.append("inbox_signatures=False: whoever can write to Redis commands the workers")
    if settings.status_port and settings.status_host not in ("127.0.0.1", "::1", "localhost"):
        warnings.append(f"status_host={settings.status_host}: the status port asks nobody who they are")
    return warnings + [
        f"{name} is in the environment, and is no setting" for name in find_unknown_variables(environ)
    ]


def find_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that begin with PREFIX and mean nothing."""
    settings = {PREFIX + name.upper() for name in Settings.__struct_fields__}
    other_prefixes = tuple(PREFIX + name for name in _OTHERS)
    ours = sorted(name for name in environ if name.startswith(PREFIX) and not name.startswith(other_prefixes))
    return [name for name in ours if name not in settings]


def _origin(name: str, app: ConfiguredApplication, configuration: "LoadedConfiguration | None") -> str:
    source = find_source(name, app.explicit_settings, os.environ, configuration)
    if source is None:
        return "default"
    if source.kind == "said":
        return f"flag --{name.replace('_', '-')}" if name in app.explicit_settings.flags else "code"
    return (
        configuration.where if configuration is not None and source.kind == "configuration" else source.where
    )
