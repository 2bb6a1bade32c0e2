"""Send blocking HTTP requests that end in time, however slowly the other side sends its answer.

The time limit of a socket is for each read: a server that sends a byte every few seconds would keep a thread for days.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from celery5.protocol.health.readings import EndpointResponse


@contextmanager
def end_in_time(
    connection: http.client.HTTPConnection, seconds: float
) -> Generator[threading.Event, None, None]:
    """End what is read from a connection, which is open, `seconds` after the start of the block.

    Yields:
        An event that is set then. The library takes a head that was cut off for a whole one.

    Raises:
        TimeoutError: Reading has failed because of that.
    """
    opened, expired = connection.sock, threading.Event()

    def end() -> None:
        expired.set()
        with suppress(OSError):
            # Not that of an SSLSocket, which the thread that reads would stumble over.
            socket.socket.shutdown(opened, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    except (OSError, http.client.HTTPException, ValueError):
        if expired.is_set():
            raise TimeoutError(f"the answer was not there within {seconds:.3g} s") from None
        raise
    finally:
        timer.cancel()


def resolve_host(url: str) -> list[str]:
    """Return the IP addresses of the host of a URL, in the order in which to try them. Blocking.

    Raises:
        OSError: The name cannot be resolved.
    """
    found = socket.getaddrinfo(urlsplit(url).hostname or "", None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def request_options(
    url: str, limit: float, cafile: str | None, addresses: Sequence[str] = ()
) -> EndpointResponse:
    """Send an OPTIONS request, in a thread. All its steps share `limit` seconds.

    Args:
        url: The endpoint.
        limit: Seconds.
        cafile: A file of certificates to trust instead of the system's.
        addresses: The addresses of the host, one of which is connected to; none: its name is resolved.
    """
    start = time.monotonic()
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection: http.client.HTTPConnection | None = None
    try:
        connection = _make_connection(parts.scheme, parts.hostname or "", parts.port, limit, cafile)
        if addresses:
            connection.sock = _connect_to_first(addresses, connection, start + limit, cafile)
        else:
            connection.connect()
        with end_in_time(connection, limit - (time.monotonic() - start)) as expired:
            connection.request("OPTIONS", path, headers={"User-Agent": "celery5", "Connection": "close"})
            # Closed here: it keeps the socket open, also when the connection is closed.
            with connection.getresponse() as response:
                if expired.is_set():
                    raise TimeoutError
        return EndpointResponse(
            status=response.status,
            seconds=time.monotonic() - start,
            allow=response.getheader("Allow"),
            accept=response.getheader("Accept"),
        )
    except (ssl.SSLError, ssl.CertificateError) as error:
        if isinstance(error, TimeoutError):
            return EndpointResponse(seconds=time.monotonic() - start, why="no answer in time")
        return EndpointResponse(seconds=time.monotonic() - start, is_insecure=True, why=f"TLS: {error}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return EndpointResponse(seconds=time.monotonic() - start, why=f"{type(error).__name__}: {error}")
    finally:
        if connection is not None:
            connection.close()


def _connect_to_first(
    addresses: Sequence[str], connection: http.client.HTTPConnection, deadline: float, cafile: str | None
) -> socket.socket:
    """Connect to the first of these addresses that accepts."""
    failure: OSError = OSError("it has no address")
    for address in addresses:
        try:
            left = max(deadline - time.monotonic(), 0.001)
            raw = socket.create_connection((address, connection.port), timeout=left)
            break
        except OSError as error:
            failure = error
    else:
        raise failure
    if not isinstance(connection, http.client.HTTPSConnection):
        return raw
    try:
        context = ssl.create_default_context(cafile=cafile)
        return context.wrap_socket(raw, server_hostname=connection.host)
    except BaseException:
        raw.close()
        raise


def _make_connection(
    scheme: str, host: str, port: int | None, limit: float, cafile: str | None
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=limit)
    return http.client.HTTPSConnection(
        host, port, timeout=limit, context=ssl.create_default_context(cafile=cafile)
    )
