"""Platforms: which platform a cluster description means, and how it is made."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from celery5.errors import Misconfigured, PlatformError
from celery5.logs.log import Log
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.remote_units import RemoteSetup
from celery5.services.controller import systemd_bus
from celery5.services.controller.platforms import MultiHostPlatform
from celery5.services.controller.remote_host import RemoteHost
from celery5.services.controller.ssh_line import SSHConnection
from celery5.services.controller.sub_processes import SubProcesses
from celery5.services.controller.systemd_units import SystemdUnits

PlatformFactory = Callable[..., Platform]

BUILT_IN_PLATFORMS: Mapping[str, PlatformFactory] = {"processes": SubProcesses, "systemd": SystemdUnits}
"""celery5's own platforms, by the names that descriptions have for them."""


def make_platform(cluster: Cluster, app: str, environ: Mapping[str, str], log: Log | None = None) -> Platform:
    """The platform for a description: what is named there, and for its hosts ssh. A platform of the user's own has all
    members, those on hosts, too. Raises Misconfigured."""
    name = resolve_platform_name(cluster.platform, environ)
    makes = BUILT_IN_PLATFORMS.get(name) or _users(name)
    try:
        made: Any = makes(cluster=cluster, app=app)
    except TypeError as error:
        raise Misconfigured(
            f"platform {name!r}: it is called with cluster and app, and raises {error}"
        ) from None
    except PlatformError as error:
        raise Misconfigured(f"platform {name!r}: {error}") from None
    if not isinstance(made, Platform):
        raise Misconfigured(f"platform {name!r} lacks a method: see celery5.platform.Platform")
    platform: Platform = made
    if not cluster.hosts or name not in BUILT_IN_PLATFORMS:
        return platform
    there = {host: make_remote_host(cluster, host, app, log) for host in cluster.hosts}
    return MultiHostPlatform(local=platform, remote=there)


def make_remote_host(cluster: Cluster, name: str, app: str, log: Log | None = None) -> RemoteHost:
    """The members on one host of a description. Their unit bears twice as long with a start as the Foreman does."""
    host = cluster.hosts[name]
    place = RemoteSetup(
        app=app,
        command=host.command,
        directory=host.directory,
        environment=host.environment,
        environment_file=host.environment_file,
        start_limit=2 * cluster.start_limit,
        hung_after=cluster.hung_after,
    )
    return RemoteHost(
        name=name, setup=place, connection=SSHConnection(name=name, destination=host.ssh), log=log
    )


def resolve_platform_name(name: str, environ: Mapping[str, str]) -> str:
    """What `auto` means here: systemd, for a Controller that is a service of systemd's itself and may ask it."""
    if name != "auto":
        return name
    return "systemd" if systemd_bus.should_use_systemd(environ, os.getpid()) else "processes"


def _users(name: str) -> PlatformFactory:
    """A class of the user's. Raises Misconfigured."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        known = ", ".join(["auto", *BUILT_IN_PLATFORMS])
        raise Misconfigured(f"platform {name!r} is not known: {known}, or module:Class of your own")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the user's code
        raise Misconfigured(f"platform {name!r}: {type(error).__name__}: {error}") from None
    if not callable(getattr(found, attribute, None)):
        raise Misconfigured(f"platform {name!r}: module {module} has no class {attribute}")
    return cast("PlatformFactory", getattr(found, attribute))
