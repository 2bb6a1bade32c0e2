"""Systemd Place: whether systemd has started this process, which systemd is its own, and where files for that may be.

Floor: services. Reads: an environment it is given; which sockets are there. Writes: nothing.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from celery5.errors import PlatformError

SYSTEM_BUS = "/run/dbus/system_bus_socket"


def is_service(environ: Mapping[str, str], pid: int) -> bool:
    """Whether the process `pid` is a service of systemd's that is to say how it does, and not a child of one, which
    inherits the variables (C91)."""
    ours = environ.get("SYSTEMD_EXEC_PID", str(pid)) == str(pid)  # systemd 248
    return ours and bool(environ.get("INVOCATION_ID")) and bool(environ.get("NOTIFY_SOCKET"))


def should_use_systemd(environ: Mapping[str, str], pid: int) -> bool:
    """Whether a Controller should have systemd start its members, when nobody said otherwise: it is a service itself,
    and may ask the systemd that has started it. A service of the system's that runs as a user may not."""
    if not is_service(environ, pid) or (os.geteuid() != 0 and "MANAGERPID" not in environ):
        return False
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1.0)
            line.connect(find_bus(environ))
    except (OSError, PlatformError):
        return False
    return True


def find_bus(environ: Mapping[str, str]) -> str:
    """The socket of the bus on which our systemd is: the system's for root, else the user's; the user's, too, for root
    in a service of its own systemd. Raises PlatformError for an address that is no unix socket."""
    if os.geteuid() == 0 and "MANAGERPID" not in environ:
        return _socket_of(environ.get("DBUS_SYSTEM_BUS_ADDRESS", "")) or SYSTEM_BUS
    return _socket_of(environ.get("DBUS_SESSION_BUS_ADDRESS", "")) or f"{_runtime(environ)}/bus"


def get_runtime_folder(environ: Mapping[str, str]) -> Path:
    """A folder for files that are gone when the machine is: systemd's for this service, else one below the user's."""
    given = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    system = os.geteuid() == 0 and "MANAGERPID" not in environ
    return Path("/run" if system else _runtime(environ)) / "celery5"


def _runtime(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"


def _socket_of(address: str) -> str:
    """The path in an address as D-Bus writes it; '' for none."""
    if not address:
        return ""
    from jeepney.bus import get_connectable_addresses

    try:
        return str(next(iter(get_connectable_addresses(address))))
    except (RuntimeError, ValueError, StopIteration):
        raise PlatformError(f"D-Bus at {address!r}: only unix sockets will do") from None
