"""Parse the certificates of senders, fingerprint them, and check that a chain leads to a trusted certificate.

cryptography is imported when the first certificate is parsed, since it takes long to load.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.commands.definitions import CommandNotAccepted, RefusalReason
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_GROUP_ORDERS = (
    0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973,
    0x1FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFA51868783BF2F966B7FCC0148F709A5D03BB5C9B8899C47AEBB6FB71E91386409,
)
"""The orders of the groups of P-256, P-384 and P-521: the `n` of their signatures."""


class TrustStore(msgspec.Struct, frozen=True):
    """The senders to trust."""

    # Certificates as DER, of authorities or of senders themselves.
    anchors: tuple[bytes, ...] = ()
    # Fingerprints of denied public keys or certificates.
    revoked: frozenset[str] = frozenset()
    # The extended key usage (an OID) that a sender's certificate must have; '' for any.
    usage: str = ""


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate, in hex. Not enough to deny one: see `get_fingerprints`."""
    return sha256(der).hexdigest()


def key_fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a certificate's public key (SubjectPublicKeyInfo), in hex. Raises Misconfigured."""
    return _key_fingerprint(_parse_certificate(der))


def get_fingerprints(der: bytes) -> frozenset[str]:
    """Return every fingerprint by which a denylist may name a certificate. Raises Misconfigured.

    The first is that of its public key, which is signed, so the holder of the certificate cannot change it. The rest
    are for older denylists, which have the fingerprint of the certificate: its signature is not signed. Anyone can
    change an ECDSA signature (r, s) into (r, n - s), which is valid, too, and changes the fingerprint.
    """
    return _list_fingerprints(_parse_certificate(der), der)


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
    certificate = _parse_certificate(der)
    subject, issuer = certificate.subject.rfc4514_string(), certificate.issuer.rfc4514_string()
    return subject, issuer, f"{certificate.not_valid_after_utc:%Y-%m-%d}"


def find_trusted_sender(chain: Sequence[bytes], trust: TrustStore, now: float) -> "Certificate":
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
        raise CommandNotAccepted(RefusalReason.UNKNOWN_ISSUER, shorten_error(error)) from None
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
            RefusalReason.UNKNOWN_ISSUER, f"it is from {subject}: {shorten_error(error)}"
        ) from None
    for certificate in path:
        _refuse_revoked(certificate, _encode_der(certificate), trust)


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
    if not any(usage.dotted_string == required_usage for extension in usages for usage in extension):
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
    algorithm = _read_signature_algorithm(signed, der)
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


def _read_signature_algorithm(signed: bytes, der: bytes) -> bytes:
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


def _parse_certificate(der: bytes) -> "Certificate":
    """Parse a certificate. Raises Misconfigured for other bytes, and for an unknown kind of key."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise Misconfigured(f"this is not a certificate: {shorten_error(error)}") from None
    return certificate


def _encode_der(certificate: "Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def shorten_error(error: BaseException) -> str:
    """Return the text of an error, shortened for a reply."""
    return get_error_text(error, 200)
