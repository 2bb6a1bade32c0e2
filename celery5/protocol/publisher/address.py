"""Daemon address: where a Publisher daemon listens, as its clients write it: unix://, tls:// or tcp://."""

from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.text_values import COUNT, HOST_AND_PORT, RANGE

ADDRESS_FORMS = (
    "unix:///path/to/publisher.sock, unix:// for the usual place, or "
    "tls://host:port[?ca=FILE&certificate=FILE&key=FILE]"
)
MAX_SOCKET_PATH_BYTES = 107
"""The most bytes that the system allows in the path of a socket."""
MAX_CONNECTIONS = 64
"""The most connections to one broker."""
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


class DaemonAddress(msgspec.Struct, frozen=True):
    """The address of the daemon: a unix socket, or TCP when there is a `host`."""

    path: str = ""  # '' for the usual one
    host: str = ""
    port: int = 0
    tls: bool = False
    ca: str = ""  # the authority to trust; '' for those of the system
    certificate: str = ""  # the client's own
    key: str = ""  # of the client's certificate

    def __str__(self) -> str:
        if self.host:
            return f"{'tls' if self.tls else 'tcp'}://{_format_host(self.host)}:{self.port}"
        return f"unix://{self.path}"


def parse_daemon_address(address: str) -> DaemonAddress:
    """Return the address in a client's setting `publisher`. Raises Misconfigured."""
    scheme, _, rest = address.partition("://")
    if scheme == "unix":
        return DaemonAddress(path=check_socket_path(unquote(rest)) if rest else "")
    if scheme not in ("tls", "tcp"):
        raise Misconfigured(f"publisher is {address!r}: give {ADDRESS_FORMS}")
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    host, port = HOST_AND_PORT.parse(parts.netloc)
    if unknown := sorted(set(options) - {"ca", "certificate", "key"}):
        raise Misconfigured(
            f"publisher {address!r} has an option {unknown[0]!r}: there are ca, certificate and key"
        )
    if parts.path.strip("/"):
        raise Misconfigured(f"publisher is {address!r}: give {ADDRESS_FORMS}")
    if scheme == "tcp" and (options or host not in LOOPBACK_HOSTS):
        raise Misconfigured(f"publisher is {address!r}: what leaves this host goes by tls://")
    return DaemonAddress(host=host, port=port, tls=scheme == "tls", **options)


def check_socket_path(path: str) -> str:
    """Return the path of a socket if the system allows its length. Raises Misconfigured."""
    if not path.startswith("/"):
        raise Misconfigured(f"the publisher's socket {path!r}: give an absolute path")
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise Misconfigured(
            f"the publisher's socket {path!r}: the system takes {MAX_SOCKET_PATH_BYTES} bytes at most"
        )
    return path


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_optional_address(address: str) -> DaemonAddress | None:
    """Return the address in the setting `publisher`; None when it is empty. Raises Misconfigured."""
    return parse_daemon_address(address) if address else None


def parse_connections(connections: str | int | list[int]) -> tuple[int, int]:
    """Return the least and the most connections: 2 means `2..2`. Raises Misconfigured."""
    text = "..".join(map(str, connections)) if isinstance(connections, list) else str(connections)
    try:
        least, most = RANGE.parse(text)
        limits = least, least if most is None else COUNT.parse(most)
    except Misconfigured:
        limits = 0, 0
    if not 1 <= limits[0] <= limits[1] <= MAX_CONNECTIONS:
        raise Misconfigured(f"give 1, or 1..4, and at most {MAX_CONNECTIONS}")
    return limits
