"""The endpoint of a broker: where it is and how to log in, as one frozen value.

All three drivers start from it, so a URL means the same to each of them.
"""

import os
import ssl
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from celery5.errors import BadBrokerURL
from celery5.protocol.brokers import parse_broker_url

Kind = Literal["tcp", "tls", "unix"]
Topology = Literal["server", "sentinel", "cluster"]
"""What the URL names: the server itself, sentinels that know which server is the primary, or nodes of a cluster."""
Role = Literal["any", "primary", "sentinel", "node"]
"""What the server must be, as it says itself in the handshake."""

_CERTIFICATE_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One server, or several that know it; one database, one user.

    The `ssl_*` fields have the names and the meaning that redis-py gives them. Neither `repr` nor `masked_url` shows
    the password.
    """

    kind: Kind = "tcp"  # "unix" needs a path, the others a host and a port
    host: str = "localhost"
    port: int = 6379
    path: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True
    topology: Topology = "server"
    nodes: tuple[tuple[str, int], ...] = ()  # of sentinels, or of a cluster: hosts and ports, as in the URL
    service: str = ""  # the name under which the sentinels watch the primary
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    role: Role = "any"
    found_through: str = ""  # of a server or cluster that the URL does not name itself: the masked URL

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "Endpoint":
        """Read a broker URL.

        Args:
            url: `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://`;
                the last two with TLS as `rediss+sentinel://` and `rediss+cluster://`.
            options: Values for the fields, which replace those of the URL.

        Raises:
            BadBrokerURL: One line that says what is wrong and what is expected, password masked.
        """
        return cls(**(parse_broker_url(url) | options))

    @property
    def masked_url(self) -> str:
        """The URL without the password, for people to read."""
        user = self.username or ""
        secret = ":***" if self.password else ""
        login = f"{user}{secret}@" if user or secret else ""
        if self.kind == "unix":
            return f"unix://{login}{self.path}?db={self.db}"
        scheme = "rediss" if self.kind == "tls" else "redis"
        if self.topology == "sentinel":
            nodes = ",".join(format_node(host, port) for host, port in self.nodes)
            return f"{scheme}+sentinel://{login}{nodes}/{self.service}/{self.db}"
        if self.topology == "cluster":
            return self.found_through or (
                f"{scheme}+cluster://{login}{','.join(format_node(host, port) for host, port in self.nodes)}"
            )
        node = format_node(self.host, self.port)
        if self.role == "sentinel":
            return f"sentinel {node}"
        if self.found_through:
            return f"{self.found_through} ({'node' if self.role == 'node' else 'primary'} {node})"
        return f"{scheme}://{login}{node}/{self.db}"

    @property
    def masked_cluster_url(self) -> str:
        """The URL, without the password, of the cluster of which this server is a node."""
        node = ("host", 6379) if self.kind == "unix" else (self.host, self.port)
        kind: Kind = "tls" if self.kind == "tls" else "tcp"
        return replace(self, kind=kind, topology="cluster", nodes=(node,), found_through="").masked_url

    @property
    def may_be_cluster(self) -> bool:
        """Whether this server may turn out to be a node of a cluster, which has a host and only the database 0."""
        return self.topology == "server" and self.role == "any" and self.kind != "unix" and not self.db

    def as_cluster(self) -> "Endpoint":
        """Return the endpoint of the cluster of which this server is a node."""
        node = (self.host, self.port)
        return replace(self, topology="cluster", nodes=(node,), found_through=self.masked_url)

    def at_node(self, host: str, port: int) -> "Endpoint":
        """Return the endpoint of one node of this cluster."""
        return replace(self, topology="server", nodes=(), host=host, port=port, role="node")

    def as_named(self) -> "Endpoint":
        """Return the endpoint of a node of a cluster that was found, as the URL names it."""
        return replace(self, role="any", found_through="")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings of a `rediss://` endpoint; None for other kinds.

        Raises:
            BadBrokerURL: A certificate or key file cannot be read.
        """
        if self.kind != "tls":
            return None
        files = (self.ssl_ca_certs, self.ssl_certfile, self.ssl_keyfile)
        try:
            written = tuple(os.stat(file).st_mtime_ns for file in files if file)
            return _make_context(*files, written, self.ssl_cert_reqs, checks_name=self.ssl_check_hostname)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or getattr(error, "reason", None) or str(error)
            raise BadBrokerURL(
                f"the TLS files of broker {self.masked_url} cannot be used: {reason}; "
                "check ssl_ca_certs, ssl_certfile and ssl_keyfile"
            ) from error


@lru_cache(maxsize=32)
def _make_context(
    ca_certs: str | None,
    certfile: str | None,
    keyfile: str | None,
    _written: tuple[int, ...],
    cert_reqs: str,
    *,
    checks_name: bool,
) -> ssl.SSLContext:
    """Return TLS settings, the same object until one of the files is written again.

    To read the authorities of the system takes 50 ms, and keeps an event loop from its work: a process that opens a
    hundred connections would need five seconds. These are read once in a process.
    """
    context = ssl.create_default_context(cafile=ca_certs)
    if certfile:
        context.load_cert_chain(certfile, keyfile)
    verify_mode = _CERTIFICATE_CHECKS[cert_reqs]
    # The order matters to the ssl module: CERT_NONE is refused while host names are checked.
    context.check_hostname = checks_name and verify_mode is not ssl.CERT_NONE
    context.verify_mode = verify_mode
    return context


def format_node(host: str, port: int) -> str:
    """Return a host and a port as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
