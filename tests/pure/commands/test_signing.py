"""Signing: a sealed command is opened by whom it is for, in time, if somebody trusted vouches for its sender."""

import base64
import datetime
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App
from celery5.commands.keyring import Keyring
from celery5.config.key_folder import get_key_folder
from celery5.errors import Misconfigured
from celery5.protocol.commands.certificates import (
    TrustStore,
    fingerprint,
    get_fingerprints,
    key_fingerprint,
    parse_certificates,
)
from celery5.protocol.commands.definitions import (
    MAX_COMMAND_SIZE,
    REFUSAL_MESSAGES,
    CommandNotAccepted,
    RefusalReason,
)
from celery5.protocol.commands.signing import (
    ControlCommand,
    Signer,
    format_audience,
    sign_command,
    verify_command,
)

NOW = 1_800_000_000.0
HERE = format_audience("shop", "w1")


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Keys that were made by whoever first signed."""
    ring = Keyring(tmp_path_factory.mktemp("keys") / "shop", owner="shop")
    ring.get_signer()
    return ring


def order(**changes: Any) -> ControlCommand:
    """A command as it should be."""
    usual: dict[str, Any] = {"id": "a" * 22, "audience": HERE, "issued": NOW, "expires": NOW + 60}
    said: dict[str, Any] = usual | {"command": "ping", "parameters": {"n": [1, "zwei"]}} | changes
    return ControlCommand(**said)


def refusal(sealed: bytes, trust: TrustStore | None, now: float = NOW) -> str:
    """Why it is not opened."""
    with pytest.raises(CommandNotAccepted) as caught:
        verify_command(sealed, audience=HERE, trust=trust, now=now)
    return caught.value.reason.value


def test_what_was_sealed_is_opened_as_it_was(ring: Keyring) -> None:
    for signer, trust in (
        (ring.get_signer(), ring.get_trust_store()),
        (None, None),
        (ring.get_signer(), None),
    ):
        assert verify_command(sign_command(order(), signer), audience=HERE, trust=trust, now=NOW) == order()


@pytest.mark.parametrize(
    ("changes", "now", "reason"),
    [
        ({}, NOW + 59.9, ""),
        ({}, NOW + 60, "expired"),
        ({}, NOW - 5, ""),
        ({}, NOW - 5.1, "not-yet"),
        ({"expires": NOW + 60.1}, NOW, "too-long-lived"),
        ({"expires": NOW - 1, "issued": NOW - 2}, NOW, "expired"),
        ({"audience": format_audience("shop", "w2")}, NOW, "wrong-audience"),
        ({"audience": format_audience("mail", "w1")}, NOW, "wrong-audience"),
        ({"id": "short"}, NOW, "malformed"),
        ({"id": "x" * 20 + "\n"}, NOW, "malformed"),
    ],
)
def test_times_audience_and_nonce_decide(
    ring: Keyring, changes: dict[str, Any], now: float, reason: str
) -> None:
    sealed = sign_command(order(**changes), ring.get_signer())
    if reason:
        assert refusal(sealed, ring.get_trust_store(), now) == reason
    else:
        verify_command(sealed, audience=HERE, trust=ring.get_trust_store(), now=now)


def changed(sealed: bytes, **header: Any) -> bytes:
    """The command with another header."""
    head, _, rest = sealed.partition(b".")
    said = json.loads(base64.urlsafe_b64decode(head + b"=" * (-len(head) % 4))) | header
    return base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=") + b"." + rest


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"alg": "none"}, "malformed"),
        ({"alg": "HS256"}, "malformed"),
        ({"typ": "JWT"}, "malformed"),
        ({"crit": ["exp"]}, "malformed"),
        ({"x5c": []}, "malformed"),
        ({"x5c": "abc"}, "malformed"),
        ({"x5c": ["AAAA"]}, "unknown-issuer"),
        ({"x5c": ["AAAA"] * 6}, "malformed"),
        ({"jwk": {"kty": "EC"}}, "bad-signature"),
    ],
)
def test_a_header_that_is_not_ours_opens_nothing(ring: Keyring, header: dict[str, Any], reason: str) -> None:
    assert (
        refusal(changed(sign_command(order(), ring.get_signer()), **header), ring.get_trust_store()) == reason
    )


def test_every_single_byte_counts(ring: Keyring) -> None:
    sealed, trust = sign_command(order(), ring.get_signer()), ring.get_trust_store()
    start = sealed.index(b".") + 1
    for at in range(start, len(sealed) - 1, 17):
        other = b"A" if sealed[at : at + 1] != b"A" else b"B"
        assert refusal(sealed[:at] + other + sealed[at + 1 :], trust) in ("bad-signature", "malformed")


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    assert refusal(noise, TrustStore()) in ("malformed", "unsigned")
    assert refusal(noise, None) in ("malformed", "wrong-audience")


def test_deeply_nested_noise_is_refused() -> None:
    for noise in (b'{"v":' + b"[" * 30_000, b"." * 30_000, b"e30." * 10_000):
        assert refusal(noise, TrustStore()) in ("malformed", "unsigned")
        assert refusal(noise, None) == "malformed"


def test_what_is_too_large_is_neither_sealed_nor_opened(ring: Keyring) -> None:
    with pytest.raises(CommandNotAccepted, match="larger than 65536 bytes"):
        sign_command(order(parameters={"text": "x" * MAX_COMMAND_SIZE}), ring.get_signer())
    assert refusal(b"x" * (MAX_COMMAND_SIZE + 1), ring.get_trust_store()) == "oversized"


def test_who_is_trusted_by_nobody_is_refused_by_name(ring: Keyring) -> None:
    with pytest.raises(CommandNotAccepted, match="trusts nobody yet"):
        verify_command(sign_command(order(), ring.get_signer()), audience=HERE, trust=TrustStore(), now=NOW)
    stranger = trustme.CA().cert_pem.bytes()
    trust = TrustStore(parse_certificates(stranger))
    assert refusal(sign_command(order(), ring.get_signer()), trust) == "unknown-issuer"


def test_a_sender_is_trusted_without_an_authority_and_denied_with_one(ring: Keyring) -> None:
    signer = ring.get_signer()
    sealed = sign_command(order(), signer)
    leaf = signer.chain[0]
    verify_command(sealed, audience=HERE, trust=TrustStore((leaf,)), now=NOW)
    for denied in (leaf, *ring.get_trust_store().anchors):
        trust = TrustStore(ring.get_trust_store().anchors, frozenset([fingerprint(denied)]))
        assert refusal(sealed, trust) == "revoked"


def test_an_authority_in_between_is_followed(tmp_path: Path) -> None:
    root = trustme.CA()
    between = root.create_child_ca()
    leaf = between.issue_cert("sender.celery5", key_type=trustme.KeyType.ECDSA)
    chain = tuple(der for pem in leaf.cert_chain_pems for der in parse_certificates(pem.bytes()))
    sealed = sign_command(order(), Signer(leaf.private_key_pem.bytes(), chain))
    anchors = parse_certificates(root.cert_pem.bytes())
    verify_command(sealed, audience=HERE, trust=TrustStore(anchors), now=NOW)
    denied = fingerprint(parse_certificates(between.cert_pem.bytes())[0])
    assert refusal(sealed, TrustStore(anchors, frozenset([denied]))) == "revoked"


def test_a_sender_is_no_authority(ring: Keyring) -> None:
    """Whoever has a key that is trusted must not be able to make others that are."""
    root = trustme.CA()
    leaf = root.issue_cert("sender.celery5", key_type=trustme.KeyType.ECDSA)
    forger = trustme.CA.from_pem(leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes())
    forged = forger.issue_cert("other.celery5", key_type=trustme.KeyType.ECDSA)
    pems = (*forged.cert_chain_pems[:1], *leaf.cert_chain_pems)
    chain = tuple(der for pem in pems for der in parse_certificates(pem.bytes()))
    sealed = sign_command(order(), Signer(forged.private_key_pem.bytes(), chain))
    assert refusal(sealed, TrustStore(parse_certificates(root.cert_pem.bytes()))) == "unknown-issuer"


def test_another_kind_of_key_cannot_sign() -> None:
    leaf = trustme.CA().issue_cert("sender.celery5", key_type=trustme.KeyType.RSA)
    signer = Signer(leaf.private_key_pem.bytes(), parse_certificates(leaf.cert_chain_pems[0].bytes()))
    with pytest.raises(Misconfigured, match="EC key on P-256"):
        sign_command(order(), signer)


def test_every_reason_has_its_sentence() -> None:
    assert set(REFUSAL_MESSAGES) == set(RefusalReason)


def spoilt(ring: Keyring, what: str) -> Callable[[], object]:
    """Something that is asked of keys which are not as they must be."""
    (ring.folder / "trusted").mkdir(parents=True, mode=0o700)
    ring.folder.chmod(0o700)
    if what == "a denylist":
        (ring.folder / "revoked").write_text("abc\n")
    else:
        (ring.folder / "mine.pem").write_text("nothing")
        return ring.get_signer
    return ring.get_trust_store


@pytest.mark.parametrize("what", ["a denylist", "a key"])
def test_files_that_make_no_sense_are_told_of(tmp_path: Path, what: str) -> None:
    with pytest.raises(Misconfigured, match=r"revoked|mine\.pem"):
        spoilt(Keyring(tmp_path / "keys", owner="shop"), what)()


def test_files_that_are_no_text_or_no_keys_are_told_of_in_one_line(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="test")
    ring.get_signer()
    (ring.folder / "revoked").write_bytes(b"\xff\xfe")
    for look in (ring.get_trust_store, ring.list_certificates, lambda: ring.revoke("a" * 64)):
        with pytest.raises(Misconfigured, match="revoked is no text"):
            look()
    (ring.folder / "revoked").unlink()
    (ring.folder / "trusted" / "folder.pem").mkdir()
    with pytest.raises(Misconfigured, match="cannot be read: Is a directory"):
        ring.list_certificates()
    private = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    (ring.folder / "ca.pem").write_bytes(private)
    with pytest.raises(Misconfigured, match=r"ca\.pem is no authority's"):
        ring.renew()


def test_keys_are_made_once_by_whoever_signs_first(tmp_path: Path) -> None:
    keyring, other = (Keyring(tmp_path / "keys", owner="shop") for _ in range(2))
    assert keyring.get_trust_store() == TrustStore()
    assert not (tmp_path / "keys").exists()
    assert keyring.get_signer() == other.get_signer()
    verify_command(
        sign_command(order(), keyring.get_signer()), audience=HERE, trust=other.get_trust_store(), now=NOW
    )


def test_trusting_a_revoked_key_keeps_the_rest_of_the_denylist(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    ring.get_signer()
    file = ring.folder / "mine.pem"
    (mark,) = ring.revoke(str(file))
    shouted = ":".join(mark[n : n + 2] for n in range(0, 64, 2)).upper()
    (ring.folder / "revoked").write_text(f"# ours\n{shouted} # lost laptop\n{'a' * 64} # theirs")
    ring.revoke("b" * 64)
    assert refusal(sign_command(order(), ring.get_signer()), ring.get_trust_store()) == "revoked"
    assert ring.trust_file(file) == {mark: True}
    left = (ring.folder / "revoked").read_text()
    assert left == f"# ours\n# lost laptop\n{'a' * 64} # theirs\n{'b' * 64}\n"
    assert ring.trust_file(file) == {mark: False}
    sealed = sign_command(order(issued=time.time(), expires=time.time() + 9), ring.get_signer())
    verify_command(sealed, audience=HERE, trust=ring.get_trust_store(), now=time.time())


def test_revoking_the_own_key_says_how_to_be_accepted_again(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    assert ring.get_remedy() == ""
    ring.get_signer()
    ring.revoke("a" * 64)
    assert ring.get_remedy() == ""
    ring.revoke(str(ring.folder / "mine.pem"))
    assert ring.get_remedy() == "celery5 keys new"
    ring.renew()
    assert ring.get_remedy() == ""
    ring.revoke(str(ring.folder / "ca.pem"))
    assert ring.get_remedy() == "celery5 keys new --authority"
    ring.renew(authority=True)
    assert ring.get_remedy() == ""
    (ring.folder / "ca.pem").unlink()
    ring.revoke(str(ring.folder / "mine.pem"))
    assert "have your authority sign" in ring.get_remedy()


# ---- what is denied stays denied


def flipped(der: bytes) -> bytes:
    """The same certificate with the other one of the two signatures that fit: anybody can make it, without a key."""
    found = x509.load_der_x509_certificate(der)
    r, s = decode_dss_signature(found.signature)
    curve = ec.SECP256R1() if len(found.signature) < 80 else ec.SECP384R1()
    signature = encode_dss_signature(r, curve.group_order - s)
    content = der[der.index(found.tbs_certificate_bytes) : -len(found.signature) - 3]
    content += bytes((3, len(signature) + 1, 0)) + signature
    return b"\x30\x82" + len(content).to_bytes(2) + content


class Issuer:
    """An authority that signs what it is asked to sign."""

    def __init__(self, name: str, by: "Issuer | None" = None, curve: ec.EllipticCurve | None = None) -> None:
        self.key = ec.generate_private_key(curve or ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.by = by or self
        self.der = self.by.certify(self.name, self.key.public_key(), ca=True)

    def certify(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        *extensions: x509.ExtensionType,
        ca: bool = False,
    ) -> bytes:
        """A certificate for somebody's key."""
        now = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(self.name).public_key(key)
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1))
        made = made.not_valid_after(now + datetime.timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        for extension in (x509.SubjectAlternativeName([x509.DNSName("sender.celery5")]), *extensions):
            made = made.add_extension(extension, critical=False)
        digest = hashes.SHA384() if isinstance(self.key.curve, ec.SECP384R1) else hashes.SHA256()
        return made.sign(self.key, digest).public_bytes(Encoding.DER)


class Path3:
    """A sender, an authority in between, and the root that is trusted."""

    def __init__(self, curve: ec.EllipticCurve | None = None) -> None:
        self.root = Issuer("root", curve=curve)
        self.between = Issuer("between", by=self.root, curve=curve)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pem = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self.leaf = self.issued()

    def issued(self, *extensions: x509.ExtensionType) -> bytes:
        """A certificate for the sender's key: another one each time."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sender")])
        return self.between.certify(name, self.key.public_key(), *extensions)

    def sealed(self, leaf: bytes = b"", between: bytes = b"", *more: bytes) -> bytes:
        """A command that is signed by the sender, with that path."""
        return sign_command(
            order(), Signer(self.pem, (leaf or self.leaf, between or self.between.der, *more))
        )

    def trust(self, *revoked: str, usage: str = "") -> TrustStore:
        """Whoever the root vouches for, but for those."""
        return TrustStore((self.root.der,), frozenset(revoked), usage)


@pytest.fixture(scope="module", params=[ec.SECP256R1(), ec.SECP384R1()], ids=["P-256", "P-384"])
def path(request: pytest.FixtureRequest) -> Path3:
    """A path of three."""
    return Path3(request.param)


@pytest.mark.parametrize("by", [fingerprint, key_fingerprint], ids=["an old entry", "a new entry"])
def test_denied_key_stays_denied_with_another_signature(path: Path3, by: Callable[[bytes], str]) -> None:
    leaf, between = flipped(path.leaf), flipped(path.between.der)
    assert fingerprint(leaf) != fingerprint(path.leaf)
    for sealed in (path.sealed(), path.sealed(leaf), path.sealed(b"", between), path.sealed(leaf, between)):
        verify_command(sealed, audience=HERE, trust=path.trust(), now=NOW)  # as good as the other one
        for denied in (path.leaf, leaf, path.between.der, between):
            assert refusal(sealed, path.trust(by(denied))) == "revoked"
    root = path.trust(by(path.root.der))
    assert refusal(path.sealed(leaf, between, flipped(path.root.der)), root) == "revoked"


def test_a_denied_key_is_denied_in_whatever_certificate_it_comes(path: Path3) -> None:
    again = path.issued()
    verify_command(path.sealed(again), audience=HERE, trust=path.trust(fingerprint(path.leaf)), now=NOW)
    assert refusal(path.sealed(again), path.trust(key_fingerprint(path.leaf))) == "revoked"
    other = Issuer("another name", by=path.root)
    other.key = path.between.key
    renamed = path.root.certify(path.between.name, path.between.key.public_key(), ca=True)
    assert refusal(path.sealed(b"", renamed), path.trust(key_fingerprint(path.between.der))) == "revoked"


def test_a_sender_who_is_trusted_by_name_is_denied_in_both_forms(path: Path3) -> None:
    for anchor in (path.leaf, flipped(path.leaf)):
        for denied in (fingerprint(path.leaf), key_fingerprint(path.leaf)):
            trust = TrustStore((anchor,), frozenset([denied]))
            assert refusal(path.sealed(anchor), trust) == "revoked"


def test_every_name_of_a_certificate_is_a_name_of_its_other_form(path: Path3) -> None:
    assert {fingerprint(path.leaf), fingerprint(flipped(path.leaf))} <= get_fingerprints(path.leaf)
    assert {fingerprint(path.leaf), fingerprint(flipped(path.leaf))} <= get_fingerprints(flipped(path.leaf))
    assert get_fingerprints(path.leaf).isdisjoint(get_fingerprints(path.between.der))


def test_what_is_revoked_from_a_folder_is_its_key(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    (leaf, *_), (authority,) = ring.get_signer().chain, ring.get_trust_store().anchors
    ring.trust_file(ring.folder / "mine.pem")
    assert ring.list_certificates()[0].fingerprint == key_fingerprint(leaf)
    # The old fingerprint of a certificate that is known here names its key.
    assert ring.revoke(fingerprint(leaf)) == [key_fingerprint(leaf)]
    assert ring.revoke("a" * 64) == ["a" * 64]
    assert (ring.folder / "revoked").read_text() == f"{key_fingerprint(leaf)}\n{'a' * 64}\n"
    denied = [certificate.role for certificate in ring.list_certificates() if certificate.revoked]
    assert denied == ["mine", "trusted"]
    # An old denylist is lifted, too, also where it names the other form.
    (ring.folder / "revoked").write_text(f"{fingerprint(flipped(leaf))}\n{fingerprint(leaf)} # us\n")
    assert ring.find_refusal() == "revoked"
    assert ring.trust_file(ring.folder / "mine.pem") == {key_fingerprint(leaf): True}
    assert (ring.folder / "revoked").read_text() == "# us\n"
    assert ring.find_refusal() is None
    ring.revoke(str(ring.folder / "ca.pem"))
    assert ring.revoke(fingerprint(authority)) == [key_fingerprint(authority)]


# ---- what a certificate is for


def usage(*, sign: bool) -> x509.KeyUsage:
    """What a key is for: signatures, or something else."""
    others = ("content_commitment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign")
    words = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=sign, key_encipherment=not sign, **words)


@pytest.mark.parametrize("direct", [False, True], ids=["by an authority", "directly"])
def test_a_certificate_that_says_what_it_is_for_must_say_signing(path: Path3, direct: bool) -> None:
    for sign, reason in ((True, ""), (False, "wrong-usage")):
        leaf = path.issued(usage(sign=sign))
        trust = TrustStore((leaf,)) if direct else path.trust()
        if reason:
            assert refusal(path.sealed(leaf), trust) == reason
        else:
            verify_command(path.sealed(leaf), audience=HERE, trust=trust, now=NOW)


def test_a_certificate_must_have_the_extended_usage_that_is_asked_for(path: Path3) -> None:
    wanted, other = "1.3.6.1.5.5.7.3.3", "1.3.6.1.5.5.7.3.1"
    some = path.issued(x509.ExtendedKeyUsage([x509.ObjectIdentifier(wanted), x509.ObjectIdentifier(other)]))
    for leaf in (path.leaf, some):
        verify_command(path.sealed(leaf), audience=HERE, trust=path.trust(), now=NOW)
    verify_command(path.sealed(some), audience=HERE, trust=path.trust(usage=wanted), now=NOW)
    for leaf, asked in ((path.leaf, wanted), (some, "1.2.3")):
        assert refusal(path.sealed(leaf), path.trust(usage=asked)) == "wrong-usage"


def test_the_usage_that_is_asked_for_is_a_setting(tmp_path: Path) -> None:
    app = App("shop", keys=str(tmp_path / "keys"), keys_usage="1.2.3")
    app.control.keyring.get_signer()
    assert app.control.keyring.find_refusal() == "wrong-usage"
    with pytest.raises(Misconfigured, match="keys_usage"):
        App("shop", keys_usage="codeSigning")


# ---- what was done is remembered


def done(ring: Keyring, one: ControlCommand, now: float) -> str:
    """Why a command must not be done, or ''."""
    return ring.record_command(one, now) or ""


def test_a_command_is_done_once_by_whatever_processes_share_a_folder(tmp_path: Path) -> None:
    folder, now = tmp_path / "keys", time.time()
    first = Keyring(folder, owner="shop")
    first.get_signer()
    one = order(issued=now + 1, expires=now + 61)
    assert done(first, one, now) == ""
    assert done(first, one, now + 1) == "replayed"
    second = Keyring(folder, owner="shop")  # the next process, which knows nothing of the first
    assert done(second, one, now + 60) == "replayed"
    assert done(second, order(id="b" * 22, issued=now + 2, expires=now + 62), now + 60) == ""
    assert done(second, order(audience="shop/w2", issued=now + 2, expires=now + 62), now + 60) == ""
    later = json.loads((folder / "done").read_bytes())["done"]
    assert done(second, order(id="c" * 22, issued=now + 300, expires=now + 301), now + 300) == ""
    kept = json.loads((folder / "done").read_bytes())["done"]
    assert (len(later), len(kept)) == (3, 1)  # what has expired is forgotten


@pytest.mark.parametrize("lost", ["gone", "no record", "another one's"])
def test_what_may_have_been_done_before_the_record_began_is_not_done(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "keys"
    ring = Keyring(folder, owner="shop")
    ring.get_signer()
    before = order(issued=time.time(), expires=time.time() + 60)
    assert done(ring, before, time.time()) == ""
    if lost == "gone":
        (folder / "done").unlink()
    else:
        (folder / "done").write_text("nothing" if lost == "no record" else '{"v":1}')
    again = Keyring(folder, owner="shop")
    again.get_trust_store()
    assert done(again, before, time.time()) == "unremembered"
    assert done(again, order(issued=time.time(), expires=time.time() + 60), time.time()) == ""


def test_without_a_writable_folder_a_process_does_what_was_sent_since_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = order(issued=time.time() - 1)
    ring = Keyring(tmp_path / "none", owner="shop")
    since = order(issued=time.time(), expires=time.time() + 60)
    assert done(ring, before, time.time()) == "unremembered"
    assert done(ring, since, time.time()) == ""
    assert done(ring, since, time.time()) == "replayed"
    assert not (tmp_path / "none").exists()


def test_there_is_a_bound_on_what_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.commands.keyring.MAX_EXECUTED", 3)
    ring, now = Keyring(tmp_path / "none", owner="shop"), time.time() + 1
    said = [done(ring, order(id=str(n) * 22, issued=now, expires=now + 60), now) for n in range(4)]
    assert said == ["", "", "", "unremembered"]


# ---- files


def test_keys_in_a_folder_of_another_user_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    ring.get_signer()
    theirs = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: theirs)
    for ask in (ring.get_signer, ring.get_trust_store, ring.list_certificates, ring.check):
        with pytest.raises(Misconfigured, match="belongs to another user: chown it, or set CELERY5_KEYS"):
            ask()


def test_folders_that_are_made_for_keys_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Keyring(tmp_path / "state" / "celery5" / "keys" / "shop", owner="shop").get_signer()
    finally:
        os.umask(before)
    made = [folder for folder in (tmp_path / "state").rglob("*") if folder.is_dir()] + [tmp_path / "state"]
    assert len(made) == 5
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in made} == {0o700}
    files = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


@pytest.mark.parametrize("name", [".", ".."])
def test_no_application_and_no_folder_of_keys_is_named_after_where_it_is(name: str) -> None:
    with pytest.raises(Misconfigured, match="no folder can have this name"):
        App(name)
    for said in (name, f"some/{name}/..", "/"):
        with pytest.raises(Misconfigured, match="name a folder that has only keys"):
            get_key_folder("shop", said, {})
    assert get_key_folder("shop", "keys", {}) == Path("keys")
