"""HTTP check: asks an endpoint what it would take, with one OPTIONS request of the standard library's client.

Floor: domain. Reads: the endpoint. Writes: nothing. Loaded when the first check of an endpoint looks.
"""

import http.client
import ssl
import time
from urllib.parse import urlsplit

from celery5.protocol.health import EndpointResponse


def request_options(url: str, limit: float, cafile: str | None) -> EndpointResponse:
    """One request, in a thread; each step of it has what is left of `limit` seconds."""
    began = time.monotonic()
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection: http.client.HTTPConnection | None = None
    try:
        connection = _connection(parts.scheme, parts.hostname or "", parts.port, limit, cafile)
        connection.request("OPTIONS", path, headers={"User-Agent": "celery5", "Connection": "close"})
        if connection.sock is not None:
            connection.sock.settimeout(max(limit - (time.monotonic() - began), 0.001))
        response = connection.getresponse()
        return EndpointResponse(
            status=response.status,
            seconds=time.monotonic() - began,
            allow=response.getheader("Allow"),
            accept=response.getheader("Accept"),
        )
    except (ssl.SSLError, ssl.CertificateError) as error:
        if isinstance(error, TimeoutError):
            return EndpointResponse(seconds=time.monotonic() - began, why="no answer in time")
        return EndpointResponse(seconds=time.monotonic() - began, is_insecure=True, why=f"TLS: {error}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return EndpointResponse(seconds=time.monotonic() - began, why=f"{type(error).__name__}: {error}")
    finally:
        if connection is not None:
            connection.close()


def _connection(
    scheme: str, host: str, port: int | None, limit: float, cafile: str | None
) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=limit)
    return http.client.HTTPSConnection(
        host, port, timeout=limit, context=ssl.create_default_context(cafile=cafile)
    )
