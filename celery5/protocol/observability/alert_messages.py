"""Write the notifications of alerts, and sign them as Standard Webhooks specifies.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import binascii
import hashlib
import hmac
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.observability.alerting import AlertTransition, Severity

SECRET_PREFIX = "whsec_"
SECRET_HINT = "give whsec_ and the base64 of 24 to 64 bytes: echo whsec_$(head -c 32 /dev/urandom | base64)"


class AlertPayload(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one alert."""

    # The name of the application.
    app: str
    # The name of the rule, and the queue, task or group: `queue mail`; '' for the cluster.
    name: str
    subject: str
    severity: Severity
    # `firing` or `resolved`.
    status: Literal["firing", "resolved"]
    description: str
    value: float
    # The threshold.
    above: float
    # When the value became too high, in seconds since 1970.
    since: float


class AlertMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a notification."""

    type: Literal["alert.fired", "alert.resolved", "alert.test"]
    # When it fired or resolved, in seconds since 1970.
    timestamp: float
    data: AlertPayload


def make_alert_message(app: str, transition: AlertTransition, *, is_test: bool = False) -> bytes:
    """Return the body of a notification."""
    payload = AlertPayload(
        app=app,
        name=transition.name,
        subject=transition.subject,
        severity=transition.severity,
        status="firing" if transition.change == "fired" else "resolved",
        description=transition.description,
        value=transition.value,
        above=transition.above,
        since=transition.since,
    )
    kind: Literal["alert.fired", "alert.resolved"] = (
        "alert.fired" if transition.change == "fired" else "alert.resolved"
    )
    return msgspec.json.encode(
        AlertMessage(type="alert.test" if is_test else kind, timestamp=transition.at, data=payload)
    )


def sign_webhook(key: bytes, name: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a message: over its id, its time and its body."""
    mac = hmac.new(key, f"{name}.{timestamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(mac.digest()).decode()


def check_webhook_url(url: str) -> str:
    """Return the URL of a webhook, '' for none. Raises Misconfigured."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_valid = is_valid and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        is_valid = False
    if url and not is_valid:
        raise Misconfigured("alert_webhook is no URL of a webhook: give https://host/path")
    return url


def parse_webhook_secret(secret: str) -> bytes:
    """Return the key in a secret, b"" for an empty one. Raises Misconfigured."""
    if not secret:
        return b""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not 24 <= len(key) <= 64:
        raise Misconfigured(f"alert_webhook_secret cannot be read: {SECRET_HINT}")
    return key
