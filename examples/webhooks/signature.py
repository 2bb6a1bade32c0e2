"""Verify the sender, the content and the time of a webhook, as Standard Webhooks specifies.

The signature covers the id, the time and the body, by HMAC with SHA-256 and a shared secret. The time rejects old
messages. A document is published once under its id, so repetitions within that time have no effect.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

TOLERANCE = 300.0
"""Seconds by which the time of a message may differ from this clock."""


class Unsigned(Exception):
    """A message is not signed as it must be. The sender gets no details."""


def key_of(secret: str) -> bytes:
    """Return the key in a secret, which is `whsec_` and base64. Raises ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        key = b""
    if not 24 <= len(key) <= 64:
        raise ValueError("a secret is whsec_ and the base64 of 24 to 64 bytes")
    return key


def signed(key: bytes, name: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a message."""
    mac = hmac.new(key, f"{name}.{timestamp}.".encode("latin-1") + body, hashlib.sha256)
    return "v1," + base64.b64encode(mac.digest()).decode()


def verified(fields: Mapping[str, str], body: bytes, keys: Sequence[bytes], *, now: float) -> str:
    """Return the id of a message whose header has these fields. Raises Unsigned.

    `now` is seconds since 1970. Several `keys` may be valid at once, while a new one replaces an old one.
    """
    name, timestamp = fields.get("webhook-id", ""), fields.get("webhook-timestamp", "")
    signatures = fields.get("webhook-signature", "").split(" ")[:10]
    if not re.fullmatch(r"[!-~]{1,200}", name) or not re.fullmatch(r"\d{1,12}", timestamp, re.ASCII):
        raise Unsigned("there is no id, or no time")
    expected = [signed(key, name, timestamp, body) for key in keys]
    # All are compared, each in constant time, so that the time gives no hint about a signature.
    matches = [
        hmac.compare_digest(signature.encode("latin-1"), expected_signature.encode())
        for signature in signatures
        for expected_signature in expected
    ]
    if not any(matches):
        raise Unsigned("no signature is right")
    if abs(now - int(timestamp)) > TOLERANCE:
        raise Unsigned("it is too old, or from the future")
    return name
