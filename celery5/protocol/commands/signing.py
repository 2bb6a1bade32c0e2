"""Signing: seals a command for one inbox, and opens what came, or says why it will not (C74).

A sealed command is a JWS (RFC 7515), compact, signed with ES256. Its header carries the sender's certificate and those
between it and a trusted authority (`x5c`); its payload says for whom it is, until when, and a nonce. joserfc and
cryptography take 15 MB and a tenth of a second to load: they are imported by the first command.
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
"""Seconds that a command may live at most."""
SKEW = 5.0
"""Seconds that the sender's clock may be ahead of ours."""
MAX_COMMAND_SIZE = 64 * 1024
"""Bytes of a sealed command."""
LARGEST_HEADER = 16 * 1024
LONGEST_CHAIN = 5
"""Certificates that a command may bring along."""
_TYPE = "celery5-command"
_ORDERS = (
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
    RefusalReason.UNKNOWN_ISSUER: "nobody whom this worker trusts vouches for the sender's certificate: "
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
"""What each refusal says to whoever sent the command."""


class CommandNotAccepted(CommandRefused):
    """A command was not accepted. `reason` is why."""

    def __init__(self, reason: RefusalReason, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{REFUSAL_MESSAGES[reason]}{f' ({detail})' if detail else ''}")


class ControlCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it travels. Times are seconds since 1970. `id` is the nonce; `sender` is for people to read, who it
    really was says the certificate."""

    id: str = msgspec.field(name="jti")
    audience: str = msgspec.field(name="aud")
    issued: float = msgspec.field(name="iat")
    expires: float = msgspec.field(name="exp")
    command: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    sender: str = msgspec.field(name="iss", default="")
    v: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signs: a private key as PEM, and the certificates for it as DER, its own first."""

    key: bytes
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Which senders to trust.

    `anchors` are certificates as DER, of authorities or of senders themselves. `revoked` names those that are denied:
    by the fingerprint of the public key, or of the certificate. `usage` is the extended key usage, an OID, that a
    sender's certificate must have; '' for any.
    """

    anchors: tuple[bytes, ...] = ()
    revoked: frozenset[str] = frozenset()
    usage: str = ""


def format_audience(app: str, inbox: str) -> str:
    """For whom a command is: one inbox of one application."""
    return f"{app}/{inbox}"


def fingerprint(der: bytes) -> str:
    """The SHA-256 of a certificate's bytes, in hex. To deny one by it is not enough: see `names_of`."""
    return sha256(der).hexdigest()


def key_fingerprint(der: bytes) -> str:
    """The SHA-256 of a certificate's public key (SubjectPublicKeyInfo), in hex. Raises Misconfigured."""
    return _key_fingerprint(_loaded(der))


def get_fingerprints(der: bytes) -> frozenset[str]:
    """Return every fingerprint by which a denylist may name a certificate. Raises Misconfigured.

    The first is that of its public key, which is signed, so the holder of the certificate cannot change it. The others
    are for older denylists, which have the fingerprint of the certificate: its signature is not signed. Anyone can
    change an ECDSA signature (r, s) into (r, n - s), which is valid, too, and changes the fingerprint.
    """
    return _names_of(_loaded(der), der)


def parse_certificates(pem: bytes) -> tuple[bytes, ...]:
    """The certificates in a PEM file, as DER. Raises Misconfigured for one that is none."""
    found = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        return tuple([base64.b64decode(b"".join(each.split()), validate=True) for each in found])
    except binascii.Error as error:
        raise Misconfigured(f"a certificate is no PEM: {error}") from None


def format_pem(der: bytes) -> bytes:
    """A certificate as a PEM file."""
    text = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + text + b"-----END CERTIFICATE-----\n"


def describe_certificate(der: bytes) -> tuple[str, str, str]:
    """Whose a certificate is, who signed it, and until when it holds. Raises Misconfigured for bytes that are none."""
    found = _loaded(der)
    whose, by = found.subject.rfc4514_string(), found.issuer.rfc4514_string()
    return whose, by, f"{found.not_valid_after_utc:%Y-%m-%d}"


def sign_command(command: ControlCommand, signer: Signer | None) -> bytes:
    """The bytes of a command: signed, or bare JSON without a signer. Raises CommandRefused when it is too large,
    Misconfigured for a key that cannot sign."""
    payload = msgspec.json.encode(command)
    sealed = payload if signer is None else _signed(payload, signer)
    if len(sealed) > MAX_COMMAND_SIZE:
        raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{len(sealed)} bytes")
    return sealed


def verify_command(message: bytes, *, audience: str, trust: TrustStore | None, now: float) -> ControlCommand:
    """The command in `sealed`, if it may be done at `now`. Without `trust` signatures are not asked for.

    Raises CommandNotAccepted. Whether it came before is not known here.
    """
    if len(message) > MAX_COMMAND_SIZE:
        raise CommandNotAccepted(RefusalReason.OVERSIZED, f"{len(message)} bytes")
    if trust is not None:
        payload = _verified(message, trust, now)
    else:
        payload = message if message.startswith(b"{") else _unverified(message)
    try:
        order = _ORDER.decode(payload)
    except (ValueError, RecursionError) as error:
        raise CommandNotAccepted(RefusalReason.MALFORMED, str(error)) from None
    if not re.match(_ID, order.id):
        raise CommandNotAccepted(RefusalReason.MALFORMED, "its nonce is no nonce")
    _check_claims(order, audience, now)
    return order


def is_command_id(text: str) -> bool:
    """Whether a text may be the id of a command: what came unverified may be anything."""
    return re.match(_ID, text) is not None


def _check_claims(order: ControlCommand, audience: str, now: float) -> None:
    if order.audience != audience:
        raise CommandNotAccepted(
            RefusalReason.WRONG_AUDIENCE, f"for {order.audience[:200]!r}, this is {audience!r}"
        )
    if not order.expires > now:
        raise CommandNotAccepted(RefusalReason.EXPIRED, f"{now - order.expires:.1f} s ago")
    if not order.issued <= now + SKEW:
        raise CommandNotAccepted(RefusalReason.NOT_YET, f"by {order.issued - now:.1f} s")
    if not order.expires - order.issued <= MAX_COMMAND_LIFETIME:
        raise CommandNotAccepted(RefusalReason.TOO_LONG_LIVED)


def _signed(payload: bytes, signer: Signer) -> bytes:
    from joserfc import jws
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey

    chain = [base64.b64encode(each).decode() for each in signer.chain]
    header: dict[str, Any] = {"alg": "ES256", "typ": _TYPE, "x5c": chain}
    try:
        return jws.serialize_compact(
            header, payload, ECKey.import_key(signer.key), registry=_registry()
        ).encode()
    except (JoseError, ValueError, TypeError) as error:
        raise Misconfigured(f"the key cannot sign: it must be an EC key on P-256, as PEM ({error})") from None


def _verified(sealed: bytes, trust: TrustStore, now: float) -> bytes:
    """The payload, when the signature is good and somebody trusted vouches for its key."""
    from joserfc import jws
    from joserfc.errors import JoseError

    if sealed.startswith(b"{"):
        raise CommandNotAccepted(RefusalReason.UNSIGNED)
    try:
        token = jws.extract_compact(sealed, registry=_registry())
        chain = _chain(token.headers())
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise CommandNotAccepted(RefusalReason.MALFORMED, _short(error)) from None
    leaf = _vouched(chain, trust, now)
    try:
        good = jws.validate_compact(token, _public_key(leaf), algorithms=["ES256"], registry=_registry())
    except (JoseError, ValueError, TypeError) as error:
        raise CommandNotAccepted(RefusalReason.BAD_SIGNATURE, _short(error)) from None
    if not good:
        raise CommandNotAccepted(RefusalReason.BAD_SIGNATURE)
    return token.payload


def _unverified(sealed: bytes) -> bytes:
    """The payload of a signed command, where nobody asks for signatures."""
    parts = sealed.split(b".")
    try:
        return base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4))
    except (IndexError, binascii.Error):
        raise CommandNotAccepted(RefusalReason.MALFORMED) from None


def _chain(header: dict[str, Any]) -> list[bytes]:
    """The certificates that the header brings. Raises ValueError when it is no header of ours."""
    chain = header.get("x5c")
    if header.get("typ") != _TYPE or header.get("alg") != "ES256" or "crit" in header:
        raise ValueError("it is no JWS of the type celery5-command, signed with ES256")
    if not isinstance(chain, list) or not 0 < len(cast("list[object]", chain)) <= LONGEST_CHAIN:
        raise ValueError(f"it brings no certificates, or more than {LONGEST_CHAIN}")
    return [base64.b64decode(str(each), validate=True) for each in cast("list[object]", chain)]


def _vouched(chain: Sequence[bytes], trust: TrustStore, now: float) -> "Certificate":
    """Return the sender's certificate if it, or one that signed it, is trusted, and none in the chain is denied."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        leaf, *between = [x509.load_der_x509_certificate(each) for each in chain]
        for each, der in zip((leaf, *between), chain, strict=True):
            _refuse_revoked(each, der, trust)
        _check_usage(leaf, trust.usage)
        if chain[0] in trust.anchors:
            _check_dates(leaf, now)
            return leaf
        authorities = [x509.load_der_x509_certificate(each) for each in trust.anchors]
        _check_path(leaf, between, authorities, trust, now)
    except (
        ValueError,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
        x509.DuplicateExtension,
        UnsupportedAlgorithm,
    ) as error:
        raise CommandNotAccepted(RefusalReason.UNKNOWN_ISSUER, _short(error)) from None
    return leaf


def _check_path(
    leaf: "Certificate",
    between: "list[Certificate]",
    authorities: "list[Certificate]",
    trust: TrustStore,
    now: float,
) -> None:
    from cryptography.x509 import verification as checking

    who = leaf.subject.rfc4514_string()
    if not authorities:
        raise CommandNotAccepted(
            RefusalReason.UNKNOWN_ISSUER, f"it is from {who}, and this worker trusts nobody yet"
        )
    moment = datetime.fromtimestamp(now, UTC)
    policy = checking.PolicyBuilder().store(checking.Store(authorities)).time(moment)
    policy = policy.extension_policies(
        ca_policy=_authorities(), ee_policy=checking.ExtensionPolicy.permit_all()
    )
    try:
        path = policy.build_client_verifier().verify(leaf, between).chain
    except checking.VerificationError as error:
        raise CommandNotAccepted(RefusalReason.UNKNOWN_ISSUER, f"it is from {who}: {_short(error)}") from None
    for each in path:
        _refuse_revoked(each, _der(each), trust)


def _refuse_revoked(certificate: "Certificate", der: bytes, trust: TrustStore) -> None:
    if trust.revoked and not trust.revoked.isdisjoint(_names_of(certificate, der)):
        raise CommandNotAccepted(RefusalReason.REVOKED, f"it is {certificate.subject.rfc4514_string()[:200]}")


def _check_usage(leaf: "Certificate", wanted: str) -> None:
    """Refuse a sender's certificate whose key usage does not allow this. One without a key usage may sign."""
    from cryptography import x509

    for each in leaf.extensions:
        if isinstance(each.value, x509.KeyUsage) and not each.value.digital_signature:
            raise CommandNotAccepted(RefusalReason.WRONG_USAGE, "its key usage has no digitalSignature")
    if not wanted:
        return
    usages = [each.value for each in leaf.extensions if isinstance(each.value, x509.ExtendedKeyUsage)]
    if not any(usage.dotted_string == wanted for each in usages for usage in each):
        raise CommandNotAccepted(
            RefusalReason.WRONG_USAGE, f"its extended key usage has no {wanted}, which keys_usage asks for"
        )


def _key_fingerprint(certificate: "Certificate") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(key).hexdigest()


def _names_of(certificate: "Certificate", der: bytes) -> frozenset[str]:
    """`names_of` a certificate that was read: key, bytes, and the bytes with each signature that is as good."""
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

    signed, signature = certificate.tbs_certificate_bytes, certificate.signature
    algorithm = _algorithm_after(signed, der)
    forms = [signature]
    try:
        r, s = decode_dss_signature(signature)
    except ValueError:  # it is no ECDSA signature
        pass
    else:
        forms += [encode_dss_signature(r, order - s) for order in _ORDERS if s < order]
    rebuilt = (_tlv(0x30, signed + algorithm + _tlv(0x03, b"\0" + form)) for form in forms)
    return frozenset([_key_fingerprint(certificate), fingerprint(der), *map(fingerprint, rebuilt)])


def _algorithm_after(signed: bytes, der: bytes) -> bytes:
    """The name of the signature's algorithm in a certificate, as DER: what follows the part that is signed."""
    start = der.index(signed) + len(signed)
    size = der[start + 1]
    if size < 0x80:
        return der[start : start + 2 + size]
    head = 2 + (size & 0x7F)
    return der[start : start + head + int.from_bytes(der[start + 2 : start + head])]


def _tlv(tag: int, content: bytes) -> bytes:
    """One value of DER: its tag, its length, its content."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + content


def _authorities() -> Any:
    """What makes a certificate one that may sign others. The rules of the web ask for more than small authorities,
    such as trustme's and openssl's, have."""
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
    moment = datetime.fromtimestamp(now, UTC)
    if not leaf.not_valid_before_utc <= moment <= leaf.not_valid_after_utc:
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
        found = x509.load_der_x509_certificate(der)
        found.public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise Misconfigured(f"this is not a certificate: {_short(error)}") from None
    return found


def _der(certificate: "Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _registry() -> Any:
    """What joserfc may take: ES256 alone, and headers with certificates in them."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=["ES256"])
    registry.max_header_length = LARGEST_HEADER
    return registry


def _short(error: BaseException) -> str:
    return get_error_text(error, 200)


_ORDER = msgspec.json.Decoder(ControlCommand)
