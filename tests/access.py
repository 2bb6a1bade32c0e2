"""Access to servers in tests: TLS alone, and users who may no more than `celery5 acl` prints for their roles."""

import shlex
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from celery5.broker.permissions import SENTINEL, AclUser, make_user
from tests.tls_files import make_tls_options, write_certificates

PASSWORD = "open-sesame"
SPARED = {"config|get", "config", "scan"}
"""What no role has (CONFIG; Redis 6.2 names no subcommand), or a viewer has not (SCAN): what tries it does without."""

SPARED_OF_SENDERS = {"info"}
"""What those who send have not. It tells how full Redis is, which their error says if it may be read."""


class Access:
    """Certificates and users: what servers and clients must know of them.

    Args:
        folder: For the certificates and the users.
        app: The name of the application.
        roles: The roles that have a user.
        more: Further rules of each of them, such as the keys of other applications.
    """

    def __init__(self, folder: Path, app: str, roles: Iterable[str], more: Sequence[str] = ()) -> None:
        self.certificates = write_certificates(folder)
        self.authority = folder / "ca.pem"
        self._folder = folder
        self._users = {role: make_user(app, role) for role in (*roles, SENTINEL)}
        self._lines = [_describe(user, more) for role, user in self._users.items() if role != SENTINEL]
        (folder / "users.acl").write_text("\n".join([*self._lines, ""]))

    @property
    def users_file(self) -> Path:
        """The file that a server reads its users from when it starts."""
        return self._folder / "users.acl"

    @property
    def client_options(self) -> dict[str, Any]:
        """What redis-py needs for these servers."""
        return {"ssl": True, "ssl_ca_certs": str(self.authority)}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """What `watched_servers` needs, to make servers and sentinels speak TLS and know the users."""
        lines = [f"{name} {value}" for name, value in make_tls_options(self.certificates).items()]
        users = {"options": self._lines, "sentinel_options": [_describe(self._users[SENTINEL])]}
        return {"tls": (lines, self.client_options), **users}

    def make_proxy_context(self) -> ssl.SSLContext:
        """Return what a proxy needs to speak TLS with clients."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificates / "own.pem")
        return context

    def write_program(self, binary: str, port: int = 0) -> str:
        """Write a program that is this server with these users, and speaks TLS on a port. Return its path."""
        options = {"aclfile": str(self.users_file)}
        if port:
            options |= {"tls-port": str(port), **make_tls_options(self.certificates)}
        words = [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]
        program = self._folder / "redis-server"
        first, *others = map(shlex.quote, words)
        program.write_text(f'#!/bin/sh\nexec {first} "$@" {" ".join(others)}\n')
        program.chmod(0o755)
        return str(program)

    def make_url(self, url: str, role: str) -> str:
        """Return the URL of servers, over TLS and for the user of a role."""
        parts = urlsplit(url)
        scheme = (
            parts.scheme if parts.scheme.startswith("rediss") else parts.scheme.replace("redis", "rediss")
        )
        nodes = parts.netloc.rpartition("@")[2]
        query = [f"ssl_ca_certs={self.authority}"]
        if scheme.endswith("+sentinel"):
            query += [f"sentinel_username={self._users[SENTINEL].user}", f"sentinel_password={PASSWORD}"]
        return f"{scheme}://{self._users[role].user}:{PASSWORD}@{nodes}{parts.path}?{'&'.join(query)}"


def list_denied(clients: Iterable[Any]) -> list[str]:
    """Return what servers have denied to users of `celery5 acl` since they started, but for what those do without."""
    found: list[str] = []
    for entry in (entry for client in clients for entry in client.acl_log()):
        if "-" not in entry["username"]:  # of a test, such as that of sentinels whose primary is cut off
            continue
        sends = entry["username"].endswith(("-producer", "-sender"))
        if entry["object"] not in SPARED | (SPARED_OF_SENDERS if sends else set()):
            found.append(f"{entry['username']} was denied {entry['object']} ({entry['reason']})")
    return found


def _describe(user: AclUser, more: Sequence[str] = ()) -> str:
    """Return the line of a configuration, or of a file of users, that makes a user."""
    return " ".join(["user", user.user, f">{PASSWORD}", *user.rules, *more])
