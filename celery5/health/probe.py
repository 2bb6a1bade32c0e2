"""Probe: asks a worker's status port how it does.

It is what containers run every few seconds: plain sockets, so that nothing heavy is imported.
"""

import re
import socket
import time
from typing import NamedTuple

LARGEST = 1024 * 1024
"""Bytes of an answer."""
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")


class ProbeResponse(NamedTuple):
    """What was answered: the `status` of HTTP and the `body`. Without an answer the status is 0; `why` says more."""

    status: int
    body: bytes = b""
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return self.status == 200


def send_probe(host: str, port: int, path: str, *, timeout: float = 5.0) -> ProbeResponse:
    """Ask the process that listens there, for at most `within` seconds. Never raises for what is wrong there."""
    end = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as line:
            name = f"[{host}]" if ":" in host else host
            asked = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
            line.sendall(asked.encode("ascii"))
            return _read(_received(line, end))
    except TimeoutError:
        return ProbeResponse(0, why=f"{host}:{port} did not answer within {timeout:g} s")
    except (OSError, ValueError) as error:
        return ProbeResponse(0, why=f"{host}:{port}: {getattr(error, 'strerror', None) or error}")


def _received(line: socket.socket, end: float) -> bytes:
    """All that comes until the other side is done."""
    data = bytearray()
    while len(data) <= LARGEST:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        line.settimeout(left)
        more = line.recv(65536)
        if not more:
            return bytes(data)
        data += more
    raise ValueError(f"the answer is larger than {LARGEST} bytes")


def _read(data: bytes) -> ProbeResponse:
    head, _, body = data.partition(b"\r\n\r\n")
    found = _STATUS.fullmatch(head.split(b"\r\n")[0])
    if found is None:
        return ProbeResponse(0, why="what answers there does not speak HTTP")
    return ProbeResponse(int(found[1]), body)
