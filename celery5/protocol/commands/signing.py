"""Sign control commands for one inbox, and verify received ones.

A signed command is a compact JWS (RFC 7515), signed with ES256. Its header carries the sender's certificate and those
between it and a trusted authority (`x5c`); its payload has the audience, the expiry time and a nonce. joserfc and
cryptography take 15 MB and a tenth of a second to load: they are imported when the first command is handled.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from celery5.errors import CommandRefused, Misconfigured
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_COMMAND_LIFETIME = 60.0
"""Seconds between issue and expiry, at most."""
SKEW = 5.0
"""Seconds that the sender's clock may be ahead of this host's."""
MAX_COMMAND_SIZE = 64 * 1024
"""Bytes of a signed command, at most."""
LARGEST_HEADER = 16 * 1024
LONGEST_CHAIN = 5
"""Certificates in a command's header, at most."""
_TYPE = "celery5-command"
_GROUP_ORDERS = (
    0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973,
    0x1FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFA51868783BF2F966B7FCC0148F709A5D03BB5C9B8899C47AEBB6FB71E91386409,
)
"""The orders of the groups of P-256, P-384 and P-521: the `n` of their signatures."""
_ID = r"^[A-Za-z0-9_@-]{16,64}\Z"


class RefusalReason(StrEnum):
    """Why a command is not accepted."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    UNSIGNED = "unsigned"
    UNKNOWN_ISSUER = "unknown-issuer"
    REVOKED = "revoked"
    BAD_SIGNATURE = "bad-signature"
    WRONG_AUDIENCE = "wrong-audience"
    EXPIRED = "expired"
    TOO_LONG_LIVED = "too-long-lived"
    NOT_YET = "not-yet"
    REPLAYED = "replayed"
    UNREMEMBERED = "unremembered"
    WRONG_USAGE = "wrong-usage"
    NO_KEYS = "no-keys"


REFUSAL_MESSAGES: dict[RefusalReason, str] = {
    RefusalReason.OVERSIZED: f"it is larger than {MAX_COMMAND_SIZE} bytes",
    RefusalReason.MALFORMED: "it is no command of ours",
    RefusalReason.UNSIGNED: "it is not signed, and this worker takes signed commands only",
    RefusalReason.UNKNOWN_ISSUER: "no authority that this worker trusts has signed the certificate of the sender: "
    "celery5 keys trust, on the worker's host",
    RefusalReason.REVOKED: "the sender's key, or that of an authority in its certificate chain, is "
    "on this worker's denylist",
    RefusalReason.BAD_SIGNATURE: "the signature does not fit: it was changed on the way, or signed with another key",
    RefusalReason.WRONG_AUDIENCE: "it was signed for another inbox",
    RefusalReason.EXPIRED: "its time is over",
    RefusalReason.TOO_LONG_LIVED: f"it is good for longer than {MAX_COMMAND_LIFETIME:g} s",
    RefusalReason.NOT_YET: "it is from the future: the clocks of sender and worker differ",
    RefusalReason.REPLAYED: "it came before: a command is done once",
    RefusalReason.UNREMEMBERED: "it is not known here whether it was done before: send it again",
    RefusalReason.WRONG_USAGE: "the sender's certificate is not for signing commands",
    RefusalReason.NO_KEYS: "this worker cannot read its keys",
}
"""The message that the sender of a refused command gets."""


class CommandNotAccepted(CommandRefused):
    """A command was not accepted. `reason` is why."""

    def __init__(self, reason: RefusalReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{REFUSAL_MESSAGES[reason]}{f' ({detail})' if detail else ''}")


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


@dataclass(frozen=True, slots=True)
class Signer:
    """A sender's key and certificates."""

    key: bytes  # private, as PEM
    chain: tuple[bytes, ...]  # as DER, the sender's own first


@dataclass(frozen=True, slots=True)
class TrustStore:
    """The senders to trust."""

    # Certificates as DER, of authorities or of senders themselves.
    anchors: tuple[bytes, ...] = ()
    # Fingerprints of denied public keys or certificates.
    revoked: frozenset[str] = frozenset()
    # The extended key usage (an OID) that a sender's certificate must have; '' for any.
    usage: str = ""


def format_audience(app: str, inbox: str) -> str:
    """Return the audience of a command: one inbox of one application."""
    return f"{app}/{inbox}"


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate, in hex. Not enough to deny one: see `get_fingerprints`."""
    return sha256(der).hexdigest()


def key_fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate's public key (SubjectPublicKeyInfo), in hex. Raises Misconfigured."""
    return _key_fingerprint(_loaded(der))


def get_fingerprints(der: bytes) -> frozenset[str]:
    """Return every fingerprint by which a denylist may name a certificate. Raises Misconfigured.

    The first is that of its public key, which is signed, so the holder of the certificate cannot change it. The rest
    are for older denylists, which have the fingerprint of the certificate: its signature is not signed. Anyone can
    change an ECDSA signature (r, s) into (r, n - s), which is valid, too, and changes the fingerprint.
    """
    return _list_fingerprints(_loaded(der), der)


def parse_certificates(pem: bytes) -> tuple[bytes, ...]:
    """Return the certificates in a PEM file, as DER. Raises Misconfigured for invalid base64."""
    blocks = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        return tuple([base64.b64decode(b"".join(block.split()), validate=True) for block in blocks])
    except binascii.Error as error:
        raise Misconfigured(f"a certificate is no PEM: {error}") from None


def format_pem(der: bytes) -> bytes:
    """Return a certificate as a PEM file."""
    text = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + text + b"-----END CERTIFICATE-----\n"


def describe_certificate(der: bytes) -> tuple[str, str, str]:
    """Return subject, issuer and last day of a certificate. Raises Misconfigured when it cannot be parsed."""
    certificate = _loaded(der)
    subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    return subject, issuer, f"{certificate.not_valid_after_utc:%Y-%m-%d}"


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
        raise CommandNotAccepted(RefusalReason.MALFORMED, _shorten(error)) from None
    leaf = _find_trusted_sender(chain, trust, now)
    try:
        is_valid = jws.validate_compact(token, _public_key(leaf), algorithms=["ES256"], registry=_registry())
    except (JoseError, ValueError, TypeError) as error:
        raise CommandNotAccepted(RefusalReason.BAD_SIGNATURE, _shorten(error)) from None
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


def _find_trusted_sender(chain: Sequence[bytes], trust: TrustStore, now: float) -> "Certificate":
    """Return the sender's certificate if it, or one that signed it, is trusted, and none in the chain is denied."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        leaf, *intermediates = [x509.load_der_x509_certificate(certificate) for certificate in chain]
        for certificate, der in zip((leaf, *intermediates), chain, strict=True):
            _refuse_revoked(certificate, der, trust)
        _check_usage(leaf, trust.usage)
        if chain[0] in trust.anchors:
            _check_dates(leaf, now)
            return leaf
        authorities = [x509.load_der_x509_certificate(anchor) for anchor in trust.anchors]
        _check_path(leaf, intermediates, authorities, trust, now)
    except (
        ValueError,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
        x509.DuplicateExtension,
        UnsupportedAlgorithm,
    ) as error:
        raise CommandNotAccepted(RefusalReason.UNKNOWN_ISSUER, _shorten(error)) from None
    return leaf


def _check_path(
    leaf: "Certificate",
    intermediates: "list[Certificate]",
    authorities: "list[Certificate]",
    trust: TrustStore,
    now: float,
) -> None:
    from cryptography.x509 import verification as checking

    subject = leaf.subject.rfc4514_string()
    if not authorities:
        raise CommandNotAccepted(
            RefusalReason.UNKNOWN_ISSUER, f"it is from {subject}, and this worker trusts nobody yet"
        )
    time = datetime.fromtimestamp(now, UTC)
    policy = checking.PolicyBuilder().store(checking.Store(authorities)).time(time)
    policy = policy.extension_policies(
        ca_policy=_make_authority_policy(), ee_policy=checking.ExtensionPolicy.permit_all()
    )
    try:
        path = policy.build_client_verifier().verify(leaf, intermediates).chain
    except checking.VerificationError as error:
        raise CommandNotAccepted(
            RefusalReason.UNKNOWN_ISSUER, f"it is from {subject}: {_shorten(error)}"
        ) from None
    for certificate in path:
        _refuse_revoked(certificate, _der(certificate), trust)


def _refuse_revoked(certificate: "Certificate", der: bytes, trust: TrustStore) -> None:
    if trust.revoked and not trust.revoked.isdisjoint(_list_fingerprints(certificate, der)):
        raise CommandNotAccepted(RefusalReason.REVOKED, f"it is {certificate.subject.rfc4514_string()[:200]}")


def _check_usage(leaf: "Certificate", required_usage: str) -> None:
    """Refuse a sender's certificate whose key usage does not allow this. Without one it may sign."""
    from cryptography import x509

    for extension in leaf.extensions:
        if isinstance(extension.value, x509.KeyUsage) and not extension.value.digital_signature:
            raise CommandNotAccepted(RefusalReason.WRONG_USAGE, "its key usage has no digitalSignature")
    if not required_usage:
        return
    usages = [
        extension.value for extension in leaf.extensions if isinstance(extension.value, x509.ExtendedKeyUsage)
    ]
    if not any(usage.dotted_string == required_usage for each in usages for usage in each):
        raise CommandNotAccepted(
            RefusalReason.WRONG_USAGE,
            f"its extended key usage has no {required_usage}, which keys_usage asks for",
        )


def _key_fingerprint(certificate: "Certificate") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(key).hexdigest()


def _list_fingerprints(certificate: "Certificate", der: bytes) -> frozenset[str]:
    """Return the fingerprints of the key, of the certificate, and of it with each equivalent signature."""
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

    signed, signature = certificate.tbs_certificate_bytes, certificate.signature
    algorithm = _algorithm_after(signed, der)
    forms = [signature]
    try:
        r, s = decode_dss_signature(signature)
    except ValueError:  # it is no ECDSA signature
        pass
    else:
        forms += [
            encode_dss_signature(r, group_order - s) for group_order in _GROUP_ORDERS if s < group_order
        ]
    rebuilt = (_encode_tlv(0x30, signed + algorithm + _encode_tlv(0x03, b"\0" + form)) for form in forms)
    return frozenset([_key_fingerprint(certificate), fingerprint(der), *map(fingerprint, rebuilt)])


def _algorithm_after(signed: bytes, der: bytes) -> bytes:
    """Return the signature's algorithm in a certificate, as DER. It follows the signed part."""
    start = der.index(signed) + len(signed)
    size = der[start + 1]
    if size < 0x80:
        return der[start : start + 2 + size]
    head = 2 + (size & 0x7F)
    return der[start : start + head + int.from_bytes(der[start + 2 : start + head])]


def _encode_tlv(tag: int, content: bytes) -> bytes:
    """Return one DER value: tag, length, content."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + content


def _make_authority_policy() -> Any:
    """Return the requirements on a certificate that signs others.

    The rules of the web require more than small authorities, such as those of trustme and openssl, have.
    """
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy

    def may_sign(_policy: object, _certificate: object, constraints: x509.BasicConstraints) -> None:
        if not constraints.ca:
            raise ValueError("a certificate between the sender's and a trusted one is no authority's")

    def for_signing(_policy: object, _certificate: object, usage: x509.KeyUsage | None) -> None:
        if usage is not None and not usage.key_cert_sign:
            raise ValueError("an authority's certificate is not for signing certificates")

    policy = ExtensionPolicy.permit_all()
    policy = policy.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, may_sign)
    return policy.may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, for_signing)


def _check_dates(leaf: "Certificate", now: float) -> None:
    time = datetime.fromtimestamp(now, UTC)
    if not leaf.not_valid_before_utc <= time <= leaf.not_valid_after_utc:
        raise CommandNotAccepted(
            RefusalReason.UNKNOWN_ISSUER, f"its certificate ended {leaf.not_valid_after_utc:%Y-%m-%d}"
        )


def _public_key(leaf: "Certificate") -> Any:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from joserfc.jwk import ECKey

    return ECKey.import_key(leaf.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _loaded(der: bytes) -> "Certificate":
    """Parse a certificate. Raises Misconfigured for other bytes, and for an unknown kind of key."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise Misconfigured(f"this is not a certificate: {_shorten(error)}") from None
    return certificate


def _der(certificate: "Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _registry() -> Any:
    """Return the limits for joserfc: ES256 alone, and headers large enough for certificates."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=["ES256"])
    registry.max_header_length = LARGEST_HEADER
    return registry


def _shorten(error: BaseException) -> str:
    return get_error_text(error, 200)


_COMMAND = msgspec.json.Decoder(ControlCommand)
