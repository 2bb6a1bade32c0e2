"""Signature: whether a webhook is from whom it says, whole, and of now: as Standard Webhooks has it.

Signed are the id, the time and the body together, by HMAC with SHA-256 and a secret that both sides know. The time
keeps old messages out; the id, under which a document is published once, those that come again before they are old.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

TOLERANCE = 300.0
"""Seconds by which the sender's clock may differ from ours, and a message be late."""


class Unsigned(Exception):
    """It is not signed as it must be. Who sent it is told no more than that."""


def key_of(secret: str) -> bytes:
    """The key in a secret, `whsec_` and base64. Raises ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        key = b""
    if not 24 <= len(key) <= 64:
        raise ValueError("a secret is whsec_ and the base64 of 24 to 64 bytes")
    return key


def signed(key: bytes, name: str, timestamp: str, body: bytes) -> str:
    """The signature of a message."""
    mac = hmac.new(key, f"{name}.{timestamp}.".encode("latin-1") + body, hashlib.sha256)
    return "v1," + base64.b64encode(mac.digest()).decode()


def verified(fields: Mapping[str, str], body: bytes, keys: Sequence[bytes], *, now: float) -> str:
    """The id of the message whose header has these fields. `now`: seconds since 1970. Several `keys` may be good at
    once, while one takes the place of another. Raises Unsigned."""
    name, timestamp = fields.get("webhook-id", ""), fields.get("webhook-timestamp", "")
    given = fields.get("webhook-signature", "").split(" ")[:10]
    if not re.fullmatch(r"[!-~]{1,200}", name) or not re.fullmatch(r"\d{1,12}", timestamp, re.ASCII):
        raise Unsigned("there is no id, or no time")
    wanted = [signed(key, name, timestamp, body) for key in keys]
    # All are compared, each in constant time: how long it takes tells nothing.
    found = [hmac.compare_digest(one.encode("latin-1"), other.encode()) for one in given for other in wanted]
    if not any(found):
        raise Unsigned("no signature is right")
    if abs(now - int(timestamp)) > TOLERANCE:
        raise Unsigned("it is too old, or from the future")
    return name
