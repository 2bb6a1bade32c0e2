"""Daemon Line: a client's connection to the Publisher daemon, over a unix socket, TLS, or TCP on the loopback (C79).

Floor: domain. Reads: TLS files, if the address names some. Writes: what it is told to say.
"""

import os
import socket
from pathlib import Path

from celery5.errors import Misconfigured
from celery5.protocol.daemon_address import DaemonAddress, check_socket_path
from celery5.protocol.parcels import (
    FRAME_OVERHEAD_BYTES,
    ClientMessage,
    ConnectionRefusal,
    DaemonMessage,
    FrameReader,
    decode_daemon_message,
    encode_frame,
)

SOCKET_FOLDER_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")
"""What names the folder of the usual socket, the first that does."""
CONNECT_LIMIT = 2.0
"""Seconds that one attempt to reach the daemon may take."""


def connect_to_daemon(address: DaemonAddress, app: str) -> socket.socket:
    """A connection to a daemon, before the first word. Raises OSError."""
    if not address.host:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(CONNECT_LIMIT)
            line.connect(address.path or str(get_default_socket(app)))
        except BaseException:
            line.close()
            raise
        return line
    line = socket.create_connection((address.host, address.port), CONNECT_LIMIT)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return line
        import ssl  # only who speaks TLS need have it loaded

        context = ssl.create_default_context(cafile=address.ca or None)
        if address.certificate:
            context.load_cert_chain(address.certificate, address.key or None)
        return context.wrap_socket(line, server_hostname=address.host)
    except BaseException:
        line.close()
        raise


def get_default_socket(app: str) -> Path:
    """Where the daemon of an application listens unless told otherwise: in the user's folder for such things, which
    nobody else may enter. Raises Misconfigured."""
    said = next(
        (each for name in SOCKET_FOLDER_VARIABLES if os.path.isabs(each := os.environ.get(name, ""))), ""
    )
    try:
        root = Path(said) if said else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no folder for a socket: say --socket PATH") from None
    return Path(check_socket_path(str(root / "celery5" / f"{app.replace('/', '_')}.publisher.sock")))


def send_request(connection: socket.socket, message: ClientMessage) -> DaemonMessage:
    """Say one word, and read the one that answers it. Raises OSError, also when the daemon has no time now, and
    Corrupt."""
    connection.sendall(encode_frame(message))
    frames = FrameReader(FRAME_OVERHEAD_BYTES)
    while (body := frames.next_frame()) is None:
        received = connection.recv(65536)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        frames.feed(received)
    answer = decode_daemon_message(body)
    if isinstance(answer, ConnectionRefusal) and answer.code == "unavailable":
        raise ConnectionRefusedError(answer.why)
    return answer
