"""Daemon Line: a client's connection to the Publisher daemon, over a unix socket, TLS, or TCP on the loopback (C79).

Floor: domain. Reads: TLS files, if the address names some. Writes: what it is told to say.
"""

import os
import socket
from pathlib import Path

from celery5.errors import Misconfigured
from celery5.protocol.daemon_address import DaemonAddress, fitting
from celery5.protocol.parcels import ROOM, Frames, FromClient, FromDaemon, Refused, daemon_word, frame

FOLDERS = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")
"""What names the folder of the usual socket, the first that does."""
CONNECT_LIMIT = 2.0
"""Seconds that one attempt to reach the daemon may take."""


def connected(address: DaemonAddress, app: str) -> socket.socket:
    """A connection to a daemon, before the first word. Raises OSError."""
    if not address.host:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(CONNECT_LIMIT)
            line.connect(address.path or str(usual_socket(app)))
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


def usual_socket(app: str) -> Path:
    """Where the daemon of an application listens unless told otherwise: in the user's folder for such things, which
    nobody else may enter. Raises Misconfigured."""
    said = next((each for name in FOLDERS if os.path.isabs(each := os.environ.get(name, ""))), "")
    try:
        root = Path(said) if said else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no folder for a socket: say --socket PATH") from None
    return Path(fitting(str(root / "celery5" / f"{app.replace('/', '_')}.publisher.sock")))


def exchange(line: socket.socket, word: FromClient) -> FromDaemon:
    """Say one word, and read the one that answers it. Raises OSError, also when the daemon has no time now, and
    Corrupt."""
    line.sendall(frame(word))
    frames = Frames(ROOM)
    while (body := frames.next()) is None:
        received = line.recv(65536)
        if not received:
            raise ConnectionResetError("it has closed the connection")
        frames.feed(received)
    answer = daemon_word(body)
    if isinstance(answer, Refused) and answer.code == "unavailable":
        raise ConnectionRefusedError(answer.why)
    return answer
