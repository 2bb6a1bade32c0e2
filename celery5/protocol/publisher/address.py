"""Daemon address: where a Publisher daemon listens, as its clients write it: unix://, tls:// or tcp://."""

from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from celery5.errors import Misconfigured

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


def parse_daemon_address(text: str) -> DaemonAddress:
    """Return the address in a client's setting `publisher`. Raises Misconfigured."""
    scheme, _, rest = text.partition("://")
    if scheme == "unix":
        return DaemonAddress(path=check_socket_path(unquote(rest)) if rest else "")
    if scheme not in ("tls", "tcp"):
        raise Misconfigured(f"publisher is {text!r}: give {ADDRESS_FORMS}")
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query))
    host, port = parse_host_and_port(parts.netloc)
    if unknown := sorted(set(options) - {"ca", "certificate", "key"}):
        raise Misconfigured(
            f"publisher {text!r} has an option {unknown[0]!r}: there are ca, certificate and key"
        )
    if parts.path.strip("/"):
        raise Misconfigured(f"publisher is {text!r}: give {ADDRESS_FORMS}")
    if scheme == "tcp" and (options or host not in LOOPBACK_HOSTS):
        raise Misconfigured(f"publisher is {text!r}: what leaves this host goes by tls://")
    return DaemonAddress(host=host, port=port, tls=scheme == "tls", **options)


def parse_host_and_port(text: str) -> tuple[str, int]:
    """Return both parts of `HOST:PORT`; an IPv6 address is in brackets. Raises Misconfigured."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and 0 <= int(port) <= 65535):
        raise Misconfigured(f"{text!r} is no HOST:PORT: an example is 127.0.0.1:7070")
    return host, int(port)


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


def parse_optional_address(text: str) -> DaemonAddress | None:
    """Return the address in the setting `publisher`; None when it is empty. Raises Misconfigured."""
    return parse_daemon_address(text) if text else None


def parse_optional_tcp(text: str) -> tuple[str, int] | None:
    """Return host and port in the setting `publisher_tcp`; None when it is empty. Raises Misconfigured."""
    return parse_host_and_port(text) if text else None


def parse_connections(text: str | int | list[int]) -> tuple[int, int]:
    """Return the least and the most connections: 2 means `2..2`. Raises Misconfigured."""
    parts = text if isinstance(text, list) else str(text).split("..")
    numbers = [int(part) for part in parts if str(part).strip().isdigit()]
    if (
        len(numbers) != len(parts)
        or len(numbers) not in (1, 2)
        or not 1 <= numbers[0] <= numbers[-1] <= MAX_CONNECTIONS
    ):
        raise Misconfigured(f"give 1, or 1..4, and at most {MAX_CONNECTIONS}")
    return numbers[0], numbers[-1]
