"""Send notifications of alerts to a webhook."""

import http.client
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from celery5.errors import CeleryError, Misconfigured
from celery5.health.http_requests import end_in_time
from celery5.protocol.observability.alert_messages import (
    SECRET_HINT,
    check_webhook_url,
    parse_webhook_secret,
    sign_webhook,
)

TIMEOUT = 5.0
"""Seconds that connecting may take, and that the receiver may take for its answer."""
MAX_ANSWER = 64 * 1024
"""Bytes of the answer that are read."""


PERMANENT_STATUSES = frozenset({400, 405, 406, 410, 411, 413, 414, 415, 422, 431, 451})
"""Statuses by which a receiver says that it will never take this notification. Others may be mended."""


class WebhookRefused(CeleryError):
    """A notification did not arrive, or its receiver did not take it.

    Attributes:
        status: The HTTP status of the answer; None when there was no answer.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status

    @property
    def is_permanent(self) -> bool:
        """Whether the receiver will never take this notification."""
        return self.status in PERMANENT_STATUSES


class _StatusResponse(http.client.HTTPResponse):
    """An answer of which the status counts: what follows may be cut off, or never end."""

    def begin(self) -> None:
        """Read the status and the headers. Raises what the library raises while there is no status."""
        try:
            super().begin()
        except (OSError, http.client.HTTPException):
            if cast("int | str", self.status) == "UNKNOWN":  # as the library has it until it has read one
                raise
            self.chunked, self.length, self.will_close = False, 0, True


@dataclass(frozen=True, slots=True)
class AlertWebhook:
    """Where notifications are sent. Make it by `parse_webhook`."""

    url: str = field(repr=False)
    key: bytes = field(repr=False)

    @property
    def masked_url(self) -> str:
        """The scheme and the host: a path may be a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def post(self, name: str, body: bytes, now: float) -> None:
        """Send one notification, and wait for a status of success. This blocks for some seconds at most.

        Args:
            name: The id by which the receiver can drop repetitions.
            body: The message.
            now: In seconds since 1970.

        Raises:
            WebhookRefused: It did not arrive, or was refused.
        """
        parts = urlsplit(self.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection = _connect(parts.scheme, parts.hostname or "", parts.port)
        connection.response_class = _StatusResponse
        try:
            connection.connect()
            with end_in_time(connection, TIMEOUT):
                connection.request("POST", path, body, self._make_headers(name, body, now))
                # Closed here: it keeps the socket open, also when the connection is closed.
                with (
                    connection.getresponse() as response,
                    suppress(OSError, http.client.HTTPException),  # the status says all
                ):
                    response.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WebhookRefused(f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            why = f"the receiver answered with status {response.status}"
            raise WebhookRefused(why, response.status)

    def _make_headers(self, name: str, body: bytes, now: float) -> dict[str, str]:
        timestamp = str(int(now))
        return {
            "Content-Type": "application/json",
            "User-Agent": "celery5",
            "Connection": "close",
            "webhook-id": name,
            "webhook-timestamp": timestamp,
            "webhook-signature": sign_webhook(self.key, name, timestamp, body),
        }


def _connect(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=ssl.create_default_context())


def parse_webhook(url: str, secret: str) -> AlertWebhook:
    """Return where notifications are sent. Raises Misconfigured."""
    if not secret:
        raise Misconfigured(f"alert_webhook needs alert_webhook_secret; {SECRET_HINT}")
    return AlertWebhook(check_webhook_url(url), parse_webhook_secret(secret))
