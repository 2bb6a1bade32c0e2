"""Platform factory: make the platform that a cluster description names."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from celery5.errors import Misconfigured, PlatformError
from celery5.extras import describe_installation
from celery5.logs.log import Log
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.remote_units import RemoteSetup
from celery5.services.controller import systemd_bus
from celery5.services.controller.multi_host_platform import MultiHostPlatform
from celery5.services.controller.remote_host import RemoteHost
from celery5.services.controller.ssh_line import SSHConnection
from celery5.services.controller.sub_processes import SubProcesses
from celery5.services.controller.systemd_units import SystemdUnits

PlatformFactory = Callable[..., Platform]


def make_kubernetes_members(*, cluster: Cluster, app: str) -> Platform:
    """Return the platform of Kubernetes. Raises PlatformError."""
    try:
        from celery5.services.controller.kubernetes_members import KubernetesMembers
    except ImportError:
        raise PlatformError(f"it needs more packages: {describe_installation('kubernetes')}") from None
    return KubernetesMembers(cluster=cluster, app=app)


BUILT_IN_PLATFORMS: Mapping[str, PlatformFactory] = {
    "kubernetes": make_kubernetes_members,
    "processes": SubProcesses,
    "systemd": SystemdUnits,
}
"""celery5's own platforms, by the names that descriptions have for them."""
SINGLE_HOST_PLATFORMS = frozenset({"processes", "systemd"})
"""Those that run members on this host; members of other hosts are run by ssh."""


def make_platform(cluster: Cluster, app: str, environ: Mapping[str, str], log: Log | None = None) -> Platform:
    """Return the platform of a description, with ssh for its hosts. Raises Misconfigured.

    A user's platform runs all members, also those with a host.
    """
    name = resolve_platform_name(cluster.platform, environ)
    factory = BUILT_IN_PLATFORMS.get(name) or _load_platform(name)
    try:
        platform: Any = factory(cluster=cluster, app=app)
    except TypeError as error:
        raise Misconfigured(
            f"platform {name!r}: it is called with cluster and app, and raises {error}"
        ) from None
    except PlatformError as error:
        raise Misconfigured(f"platform {name!r}: {error}") from None
    if not isinstance(platform, Platform):
        raise Misconfigured(f"platform {name!r} is not a subclass of celery5.platform.Platform")
    if not cluster.hosts or name not in SINGLE_HOST_PLATFORMS:
        return platform
    remote = {host: make_remote_host(cluster, host, app, log) for host in cluster.hosts}
    return MultiHostPlatform(local=platform, remote=remote)


def make_remote_host(cluster: Cluster, name: str, app: str, log: Log | None = None) -> RemoteHost:
    """Return the platform for one host of a description. Its units wait twice as long for a start as the Foreman."""
    host = cluster.hosts[name]
    setup = RemoteSetup(
        app=app,
        command=host.command,
        directory=host.directory,
        environment=host.environment,
        environment_file=host.environment_file,
        start_limit=2 * cluster.start_limit,
        hung_after=cluster.hung_after,
    )
    return RemoteHost(
        name=name, setup=setup, connection=SSHConnection(name=name, destination=host.ssh), log=log
    )


def resolve_platform_name(name: str, environ: Mapping[str, str]) -> str:
    """Return the name that `auto` stands for: systemd if the Controller is a systemd service that may call systemd."""
    if name != "auto":
        return name
    return "systemd" if systemd_bus.should_use_systemd(environ, os.getpid()) else "processes"


def _load_platform(name: str) -> PlatformFactory:
    """Return a user's platform, named `module:Class`. Raises Misconfigured."""
    if not all(name.partition(":")):
        names = ", ".join(["auto", *BUILT_IN_PLATFORMS])
        raise Misconfigured(f"platform {name!r} is not known: {names}, or module:Class of your own")
    return cast("PlatformFactory", load_class(name, f"platform {name!r}"))


def load_class(name: str, what: str) -> Callable[..., object]:
    """Return a user's class, named `module:Class`. Raises Misconfigured, which names `what`."""
    module, _, attribute = name.partition(":")
    try:
        source: Any = importlib.import_module(module)
    except Exception as error:  # the user's code
        raise Misconfigured(f"{what}: {type(error).__name__}: {error}") from None
    if not callable(getattr(source, attribute, None)):
        raise Misconfigured(f"{what}: module {module} has no class {attribute}")
    return cast("Callable[..., object]", getattr(source, attribute))
