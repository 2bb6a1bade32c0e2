"""Under which names the dashboard is reached: by the header `Host`, and by the `Origin` of forms.

A page of another site can have its own name point to an address of this host (DNS rebinding), and then send requests
which the browser takes for its own. Their `Host` gives them away: so only names that the operator has given are taken,
besides those that always mean the browser's own host, on whatever port a tunnel has there.
"""

import re
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from celery5.errors import Misconfigured

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?", re.ASCII)
DEFAULT_PORTS = {"http": 80, "https": 443}


class HostName(NamedTuple):
    """A name or address, in lower case and without a trailing dot, and a port."""

    name: str
    # None where it is not given.
    port: int | None


def parse_host(text: str) -> HostName | None:
    """Return what a header `Host` names; None when it cannot be read."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    name, port = match[1].lower(), int(match[2]) if match[2] else None
    if port is not None and not 0 < port < 65536:
        return None
    if name.startswith("["):
        try:
            address = ip_address(name[1:-1])
        except ValueError:
            return None
        return HostName(f"[{address}]", port) if address.version == 6 else None
    name = name.removesuffix(".")
    return HostName(name, port) if name and not name.startswith(".") else None


def is_loopback_name(name: str) -> bool:
    """Return whether a name means the host itself wherever it is used: no server of names is asked for it."""
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """The names under which a dashboard is reached: loopback names, and those that are given.

    Args:
        names: Each `NAME`, with any port, or `NAME:PORT`.
        public_url: The address that browsers have for it; '' for none.

    Raises:
        Misconfigured: One cannot be read.
    """

    def __init__(self, names: Collection[str] = (), public_url: str = "") -> None:
        given = [_parse_given(name) for name in names]
        self.is_secure: bool = public_url.startswith("https:")
        """Whether browsers reach it by TLS."""
        if public_url:
            given.append(_parse_public_url(public_url))
        self._given = frozenset(given)

    def allows(self, values: Sequence[str]) -> bool:
        """Return whether the values of a request's header `Host` name this dashboard: one value, of a known name."""
        host = parse_host(values[0]) if len(values) == 1 else None
        return host is not None and (is_loopback_name(host.name) or self._is_given(host))

    def is_own_origin(self, origin: str, host: str) -> bool | None:
        """Return whether a page of this origin is of this dashboard; None when the origin cannot be read.

        Args:
            origin: The header `Origin`.
            host: The header `Host`, which is allowed.
        """
        if origin == "null":
            return False
        scheme, separator, rest = origin.partition("://")
        parsed = parse_host(rest)
        if not separator or parsed is None:
            return None
        if scheme not in DEFAULT_PORTS:
            return False
        # A proxy may have changed `Host`: then the names that were given say which pages are of here.
        return parsed == parse_host(host) or _with_default_port(parsed, scheme) in {
            _with_default_port(given, scheme) for given in self._given
        }

    def _is_given(self, host: HostName) -> bool:
        candidates = {host, HostName(host.name, None)}
        if host.port is None:
            candidates |= {HostName(host.name, port) for port in DEFAULT_PORTS.values()}
        return bool(candidates & self._given)


def _with_default_port(host: HostName, scheme: str) -> HostName:
    return HostName(host.name, host.port or DEFAULT_PORTS[scheme])


def _parse_given(text: str) -> HostName:
    host = parse_host(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
    if host is None:
        raise Misconfigured(
            f"{text!r} is no name of a host: write NAME or NAME:PORT, without a scheme and a path"
        )
    return host


def _parse_public_url(url: str) -> HostName:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    host = parse_host(parts.netloc)
    if parts.scheme not in DEFAULT_PORTS or host is None or parts.path not in ("", "/") or parts.query:
        raise Misconfigured(
            f"the public URL {url!r} cannot be used: write https://NAME or https://NAME:PORT, without a path"
        )
    return HostName(host.name, host.port or DEFAULT_PORTS[parts.scheme])
