"""Sockets: what a Publisher listens on, opened by itself or by systemd."""

import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import msgspec
import trio

from celery5.broker.servers.kept_folder import check_owned, make_private
from celery5.errors import AlreadyInUse, Misconfigured
from celery5.logs.log import Log
from celery5.services.process.client_connections import BACKLOG

FIRST_INHERITED_FD = 3


class SocketPlan(msgspec.Struct, frozen=True):
    """Where to listen. Sockets that other hosts reach need a certificate, unless `plain` is true."""

    path: str = ""  # a unix socket; '' for none
    tcp: tuple[str, int] | None = None  # host and port
    certificate: str = ""  # makes TCP use TLS
    key: str = ""  # '' when it is in the certificate's file
    client_ca: str = ""  # TLS clients must have a certificate signed by this authority
    inherited: tuple[int, ...] = ()  # file descriptors of open sockets, used instead of a unix socket
    plain: bool = False


def get_inherited_sockets(environ: Mapping[str, str], pid: int) -> tuple[int, ...]:
    """Return the file descriptors that systemd opened for the process `pid`, as in sd_listen_fds(3)."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid) or not (count.isascii() and count.isdigit()):
        return ()
    return tuple(range(FIRST_INHERITED_FD, FIRST_INHERITED_FD + int(count)))


class PublisherSockets:
    """Opens the sockets of a `plan`, and closes them."""

    def __init__(self, *, plan: SocketPlan, log: Log) -> None:
        self._plan = plan
        self._log = log
        self._lock: int | None = None
        self._bound: tuple[str, int] | None = None

    async def open_listeners(self) -> Sequence[trio.SocketListener]:
        """Open the sockets and listen. Raises Misconfigured when one cannot be opened."""
        listeners: list[trio.SocketListener] = []
        try:
            for number in self._plan.inherited:
                opened = socket.socket(fileno=os.dup(number))
                if not self._plan.certificate and not self._plan.plain and not _is_local(opened):
                    opened.close()
                    raise Misconfigured(
                        f"socket {number} of systemd is one that other hosts reach: give the publisher a certificate "
                        "(--certificate, --key, --client-ca), or say --plain if the network is as safe as this host"
                    )
                listeners.append(_make_listener(opened))
                self._log.event("listener:opened", where=f"socket {number} of systemd")
            if self._plan.path and not self._plan.inherited:
                listeners.append(_make_listener(self._open_unix(Path(self._plan.path))))
                self._log.event("listener:opened", where=f"unix://{self._plan.path}")
            if self._plan.tcp is not None:
                listeners += await self._open_tcp(*self._plan.tcp)
        except BaseException:
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            self.close()
            raise
        return listeners

    def make_tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for TCP clients; None for plain TCP. Raises Misconfigured."""
        plan = self._plan
        if not plan.certificate:
            return None
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=plan.client_ca or None)
            context.load_cert_chain(plan.certificate, plan.key or None)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or getattr(error, "reason", None) or str(error)
            raise Misconfigured(
                f"the publisher's TLS files cannot be used: {why}; check publisher_certificate, publisher_key and "
                "publisher_client_ca"
            ) from error
        if plan.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def close(self) -> None:
        """Remove the unix socket, if it is our own."""
        if self._bound is not None:
            path, inode = self._bound
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
            self._bound = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open_unix(self, path: Path) -> socket.socket:
        """Return a socket at `path` that only our user may use. Replace one that a dead daemon left there."""
        try:
            check_owned(make_private(path.parent), str(path.parent))
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Misconfigured(f"no socket at {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyInUse(
                f"another Publisher listens at {path}: give this one another --socket"
            ) from None
        opened = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            _remove_old_socket(path)
            opened.bind(str(path))
            opened.listen(BACKLOG)
            self._bound = (str(path), os.stat(path).st_ino)
        except OSError as error:
            opened.close()
            raise Misconfigured(f"no socket at {path}: {error.strerror}") from None
        except BaseException:
            opened.close()
            raise
        finally:
            os.umask(before)
        return opened

    async def _open_tcp(self, host: str, port: int) -> Sequence[trio.SocketListener]:
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        except OSError as error:
            raise Misconfigured(f"no listening on {host}:{port}: {error.strerror or error}") from None
        for listener in listeners:
            where = listener.socket.getsockname()
            self._log.event(
                "listener:opened", where=f"{where[0]}:{where[1]}", tls=bool(self._plan.certificate)
            )
        return listeners


def _is_local(opened: socket.socket) -> bool:
    """Return whether only processes of this host can reach the socket."""
    if opened.family not in (socket.AF_INET, socket.AF_INET6):
        return opened.family == socket.AF_UNIX
    return ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


def _remove_old_socket(path: Path) -> None:
    """Remove an old socket. Raises Misconfigured for anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Misconfigured(f"there is something at {path} that is no socket: choose another --socket")
    os.unlink(path)


def _make_listener(opened: socket.socket) -> trio.SocketListener:
    opened.setblocking(False)
    try:
        return trio.SocketListener(trio.socket.from_stdlib_socket(opened))
    except ValueError as error:
        opened.close()
        raise Misconfigured(f"no socket to listen on: {error}") from None
