"""Sign control commands for one inbox, and verify received ones.

A signed command is a compact JWS (RFC 7515), signed with ES256. Its header carries the sender's certificate and those
between it and a trusted authority (`x5c`); its payload has the audience, the expiry time and a nonce. joserfc and
cryptography take 15 MB and a tenth of a second to load: they are imported when the first command is handled.
"""

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.commands.certificates import TrustStore, find_trusted_sender, shorten_error
from celery5.protocol.commands.definitions import (
    MAX_COMMAND_LIFETIME,
    MAX_COMMAND_SIZE,
    CommandNotAccepted,
    RefusalReason,
)

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SKEW = 5.0
"""Seconds that the sender's clock may be ahead of this host's."""
LARGEST_HEADER = 16 * 1024
LONGEST_CHAIN = 5
"""Certificates in a command's header, at most."""
_TYPE = "celery5-command"
_ID = r"^[A-Za-z0-9_@-]{16,64}\Z"


class ControlCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command on the wire. Times are seconds since 1970."""

    # The nonce.
    id: str = msgspec.field(name="jti")
    audience: str = msgspec.field(name="aud")
    issued: float = msgspec.field(name="iat")
    expires: float = msgspec.field(name="exp")
    command: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    # For the log only: the certificate identifies the sender.
    sender: str = msgspec.field(name="iss", default="")
    v: Literal[1] = 1


class Signer(msgspec.Struct, frozen=True):
    """A sender's key and certificates."""

    key: bytes  # private, as PEM
    chain: tuple[bytes, ...]  # as DER, the sender's own first


def format_audience(app: str, inbox: str) -> str:
    """Return the audience of a command: one inbox of one application."""
    return f"{app}/{inbox}"


def sign_command(command: ControlCommand, signer: Signer | None) -> bytes:
    """Return a command as bytes: signed, or plain JSON without a signer.

    Raises CommandRefused when it is too large, Misconfigured for a key that cannot sign.
    """
    payload = msgspec.json.encode(command)
    message = payload if signer is None else _signed(payload, signer)
    if len(message) > MAX_COMMAND_SIZE:
        raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{len(message)} bytes")
    return message


def verify_command(message: bytes, *, audience: str, trust: TrustStore | None, now: float) -> ControlCommand:
    """Return the command in `message`, if it is valid at `now`. Without `trust`, signatures are not required.

    Raises CommandNotAccepted. The caller detects repeated commands.
    """
    if len(message) > MAX_COMMAND_SIZE:
        raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{len(message)} bytes")
    if trust is not None:
        payload = _verify_payload(message, trust, now)
    else:
        payload = message if message.startswith(b"{") else _read_payload(message)
    try:
        command = _COMMAND.decode(payload)
    except (ValueError, RecursionError) as error:
        raise CommandNotAccepted(RefusalReason.MALFORMED, str(error)) from None
    if not re.match(_ID, command.id):
        raise CommandNotAccepted(RefusalReason.MALFORMED, "its nonce is no nonce")
    _check_claims(command, audience, now)
    return command


def is_command_id(text: str) -> bool:
    """Return whether a text is a valid id of a command: an unverified one may be any text."""
    return re.match(_ID, text) is not None


def _check_claims(command: ControlCommand, audience: str, now: float) -> None:
    if command.audience != audience:
        raise CommandNotAccepted(
            RefusalReason.WRONG_AUDIENCE, f"for {command.audience[:200]!r}, this is {audience!r}"
        )
    if not command.expires > now:
        raise CommandNotAccepted(RefusalReason.EXPIRED, f"{now - command.expires:.1f} s ago")
    if not command.issued <= now + SKEW:
        raise CommandNotAccepted(RefusalReason.NOT_YET, f"by {command.issued - now:.1f} s")
    if not command.expires - command.issued <= MAX_COMMAND_LIFETIME:
        raise CommandNotAccepted(RefusalReason.TOO_LONG_LIVED)


def _signed(payload: bytes, signer: Signer) -> bytes:
    from joserfc import jws
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey

    chain = [base64.b64encode(certificate).decode() for certificate in signer.chain]
    header: dict[str, Any] = {"alg": "ES256", "typ": _TYPE, "x5c": chain}
    try:
        return jws.serialize_compact(
            header, payload, ECKey.import_key(signer.key), registry=_registry()
        ).encode()
    except (JoseError, ValueError, TypeError) as error:
        raise Misconfigured(f"the key cannot sign: it must be an EC key on P-256, as PEM ({error})") from None


def _verify_payload(message: bytes, trust: TrustStore, now: float) -> bytes:
    """Return the payload, if the signature is valid and its certificate leads to a trusted one."""
    from joserfc import jws
    from joserfc.errors import JoseError

    if message.startswith(b"{"):
        raise CommandNotAccepted(RefusalReason.UNSIGNED)
    try:
        token = jws.extract_compact(message, registry=_registry())
        chain = _read_chain(token.headers())
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise CommandNotAccepted(RefusalReason.MALFORMED, shorten_error(error)) from None
    leaf = find_trusted_sender(chain, trust, now)
    try:
        is_valid = jws.validate_compact(token, _public_key(leaf), algorithms=["ES256"], registry=_registry())
    except (JoseError, ValueError, TypeError) as error:
        raise CommandNotAccepted(RefusalReason.BAD_SIGNATURE, shorten_error(error)) from None
    if not is_valid:
        raise CommandNotAccepted(RefusalReason.BAD_SIGNATURE)
    return token.payload


def _read_payload(message: bytes) -> bytes:
    """Return the payload of a signed command, without verification."""
    parts = message.split(b".")
    try:
        return base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4))
    except (IndexError, binascii.Error):
        raise CommandNotAccepted(RefusalReason.MALFORMED) from None


def _read_chain(header: dict[str, Any]) -> list[bytes]:
    """Return the certificates in a header. Raises ValueError when the header is not a command's."""
    chain = header.get("x5c")
    if header.get("typ") != _TYPE or header.get("alg") != "ES256" or "crit" in header:
        raise ValueError("it is no JWS of the type celery5-command, signed with ES256")
    if not isinstance(chain, list) or not 0 < len(cast("list[object]", chain)) <= LONGEST_CHAIN:
        raise ValueError(f"it brings no certificates, or more than {LONGEST_CHAIN}")
    return [base64.b64decode(str(certificate), validate=True) for certificate in cast("list[object]", chain)]


def _public_key(leaf: "Certificate") -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from joserfc.jwk import ECKey

    return ECKey.import_key(leaf.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _registry() -> Any:
    """Return the limits for joserfc: ES256 alone, and headers large enough for certificates."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=["ES256"])
    registry.max_header_length = LARGEST_HEADER
    return registry


_COMMAND = msgspec.json.Decoder(ControlCommand)
