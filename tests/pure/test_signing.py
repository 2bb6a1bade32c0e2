"""Signing: a sealed command is opened by whom it is for, in time, if somebody trusted vouches for its sender.

Floor: tests. Reads: nothing. Writes: keys in folders of the tests' own.
"""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.keyring import Keyring
from celery5.protocol.signing import (
    LARGEST,
    MEANING,
    NotAccepted,
    Order,
    Refusal,
    Signer,
    Trust,
    audience_of,
    certificates_in,
    fingerprint,
    seal,
    unseal,
)

NOW = 1_800_000_000.0
HERE = audience_of("shop", "w1")


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Keys that were made by whoever first signed."""
    ring = Keyring(tmp_path_factory.mktemp("keys") / "shop", owner="shop")
    ring.signer()
    return ring


def order(**changes: Any) -> Order:
    """A command as it should be."""
    usual: dict[str, Any] = {"id": "a" * 22, "audience": HERE, "issued": NOW, "expires": NOW + 60}
    said: dict[str, Any] = usual | {"command": "ping", "parameters": {"n": [1, "zwei"]}} | changes
    return Order(**said)


def refusal(sealed: bytes, trust: Trust | None, now: float = NOW) -> str:
    """Why it is not opened."""
    with pytest.raises(NotAccepted) as caught:
        unseal(sealed, audience=HERE, trust=trust, now=now)
    return caught.value.reason.value


def test_what_was_sealed_is_opened_as_it_was(ring: Keyring) -> None:
    for signer, trust in ((ring.signer(), ring.trust()), (None, None), (ring.signer(), None)):
        assert unseal(seal(order(), signer), audience=HERE, trust=trust, now=NOW) == order()


@pytest.mark.parametrize(
    ("changes", "now", "reason"),
    [
        ({}, NOW + 59.9, ""),
        ({}, NOW + 60, "expired"),
        ({}, NOW - 5, ""),
        ({}, NOW - 5.1, "not-yet"),
        ({"expires": NOW + 60.1}, NOW, "too-long-lived"),
        ({"expires": NOW - 1, "issued": NOW - 2}, NOW, "expired"),
        ({"audience": audience_of("shop", "w2")}, NOW, "wrong-audience"),
        ({"audience": audience_of("mail", "w1")}, NOW, "wrong-audience"),
        ({"id": "short"}, NOW, "malformed"),
        ({"id": "x" * 20 + "\n"}, NOW, "malformed"),
    ],
)
def test_times_audience_and_nonce_decide(
    ring: Keyring, changes: dict[str, Any], now: float, reason: str
) -> None:
    sealed = seal(order(**changes), ring.signer())
    if reason:
        assert refusal(sealed, ring.trust(), now) == reason
    else:
        unseal(sealed, audience=HERE, trust=ring.trust(), now=now)


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
    assert refusal(changed(seal(order(), ring.signer()), **header), ring.trust()) == reason


def test_every_single_byte_counts(ring: Keyring) -> None:
    sealed, trust = seal(order(), ring.signer()), ring.trust()
    start = sealed.index(b".") + 1
    for at in range(start, len(sealed) - 1, 17):
        other = b"A" if sealed[at : at + 1] != b"A" else b"B"
        assert refusal(sealed[:at] + other + sealed[at + 1 :], trust) in ("bad-signature", "malformed")


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    assert refusal(noise, Trust()) in ("malformed", "unsigned")
    assert refusal(noise, None) in ("malformed", "wrong-audience")


def test_deeply_nested_noise_is_refused() -> None:
    for noise in (b'{"v":' + b"[" * 30_000, b"." * 30_000, b"e30." * 10_000):
        assert refusal(noise, Trust()) in ("malformed", "unsigned")
        assert refusal(noise, None) == "malformed"


def test_what_is_too_large_is_neither_sealed_nor_opened(ring: Keyring) -> None:
    with pytest.raises(NotAccepted, match="larger than 65536 bytes"):
        seal(order(parameters={"text": "x" * LARGEST}), ring.signer())
    assert refusal(b"x" * (LARGEST + 1), ring.trust()) == "oversized"


def test_who_is_trusted_by_nobody_is_refused_by_name(ring: Keyring) -> None:
    with pytest.raises(NotAccepted, match="trusts nobody yet"):
        unseal(seal(order(), ring.signer()), audience=HERE, trust=Trust(), now=NOW)
    stranger = trustme.CA().cert_pem.bytes()
    trust = Trust(certificates_in(stranger))
    assert refusal(seal(order(), ring.signer()), trust) == "unknown-issuer"


def test_a_sender_is_trusted_without_an_authority_and_denied_with_one(ring: Keyring) -> None:
    signer = ring.signer()
    sealed = seal(order(), signer)
    leaf = signer.chain[0]
    unseal(sealed, audience=HERE, trust=Trust((leaf,)), now=NOW)
    for denied in (leaf, *ring.trust().anchors):
        trust = Trust(ring.trust().anchors, frozenset([fingerprint(denied)]))
        assert refusal(sealed, trust) == "revoked"


def test_an_authority_in_between_is_followed(tmp_path: Path) -> None:
    root = trustme.CA()
    between = root.create_child_ca()
    leaf = between.issue_cert("sender.celery5", key_type=trustme.KeyType.ECDSA)
    chain = tuple(der for pem in leaf.cert_chain_pems for der in certificates_in(pem.bytes()))
    sealed = seal(order(), Signer(leaf.private_key_pem.bytes(), chain))
    anchors = certificates_in(root.cert_pem.bytes())
    unseal(sealed, audience=HERE, trust=Trust(anchors), now=NOW)
    denied = fingerprint(certificates_in(between.cert_pem.bytes())[0])
    assert refusal(sealed, Trust(anchors, frozenset([denied]))) == "revoked"


def test_a_sender_is_no_authority(ring: Keyring) -> None:
    """Whoever has a key that is trusted must not be able to make others that are."""
    root = trustme.CA()
    leaf = root.issue_cert("sender.celery5", key_type=trustme.KeyType.ECDSA)
    forger = trustme.CA.from_pem(leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes())
    forged = forger.issue_cert("other.celery5", key_type=trustme.KeyType.ECDSA)
    pems = (*forged.cert_chain_pems[:1], *leaf.cert_chain_pems)
    chain = tuple(der for pem in pems for der in certificates_in(pem.bytes()))
    sealed = seal(order(), Signer(forged.private_key_pem.bytes(), chain))
    assert refusal(sealed, Trust(certificates_in(root.cert_pem.bytes()))) == "unknown-issuer"


def test_another_kind_of_key_cannot_sign() -> None:
    leaf = trustme.CA().issue_cert("sender.celery5", key_type=trustme.KeyType.RSA)
    signer = Signer(leaf.private_key_pem.bytes(), certificates_in(leaf.cert_chain_pems[0].bytes()))
    with pytest.raises(Misconfigured, match="EC key on P-256"):
        seal(order(), signer)


def test_every_reason_has_its_sentence() -> None:
    assert set(MEANING) == set(Refusal)


def spoilt(ring: Keyring, what: str) -> Callable[[], object]:
    """Something that is asked of keys which are not as they must be."""
    (ring.folder / "trusted").mkdir(parents=True, mode=0o700)
    ring.folder.chmod(0o700)
    if what == "a denylist":
        (ring.folder / "revoked").write_text("abc\n")
    else:
        (ring.folder / "mine.pem").write_text("nothing")
        return ring.signer
    return ring.trust


@pytest.mark.parametrize("what", ["a denylist", "a key"])
def test_files_that_make_no_sense_are_told_of(tmp_path: Path, what: str) -> None:
    with pytest.raises(Misconfigured, match=r"revoked|mine\.pem"):
        spoilt(Keyring(tmp_path / "keys", owner="shop"), what)()


def test_files_that_are_no_text_or_no_keys_are_told_of_in_one_line(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="test")
    ring.signer()
    (ring.folder / "revoked").write_bytes(b"\xff\xfe")
    for look in (ring.trust, ring.certificates, lambda: ring.revoke("a" * 64)):
        with pytest.raises(Misconfigured, match="revoked is no text"):
            look()
    (ring.folder / "revoked").unlink()
    (ring.folder / "trusted" / "folder.pem").mkdir()
    with pytest.raises(Misconfigured, match="cannot be read: Is a directory"):
        ring.certificates()
    private = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    (ring.folder / "ca.pem").write_bytes(private)
    with pytest.raises(Misconfigured, match=r"ca\.pem is no authority's"):
        ring.renew()


def test_keys_are_made_once_by_whoever_signs_first(tmp_path: Path) -> None:
    one, other = (Keyring(tmp_path / "keys", owner="shop") for _ in range(2))
    assert one.trust() == Trust()
    assert not (tmp_path / "keys").exists()
    assert one.signer() == other.signer()
    unseal(seal(order(), one.signer()), audience=HERE, trust=other.trust(), now=NOW)


def test_what_was_revoked_is_trusted_again_and_the_rest_of_the_denylist_stays(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    ring.signer()
    file = ring.folder / "mine.pem"
    (mark,) = ring.revoke(str(file))
    shouted = ":".join(mark[n : n + 2] for n in range(0, 64, 2)).upper()
    (ring.folder / "revoked").write_text(f"# ours\n{shouted} # lost laptop\n{'a' * 64} # theirs")
    ring.revoke("b" * 64)
    assert refusal(seal(order(), ring.signer()), ring.trust()) == "revoked"
    assert ring.trust_file(file) == {mark: True}
    left = (ring.folder / "revoked").read_text()
    assert left == f"# ours\n# lost laptop\n{'a' * 64} # theirs\n{'b' * 64}\n"
    assert ring.trust_file(file) == {mark: False}
    sealed = seal(order(issued=time.time(), expires=time.time() + 9), ring.signer())
    unseal(sealed, audience=HERE, trust=ring.trust(), now=time.time())


def test_who_revokes_their_own_key_is_told_how_to_be_accepted_again(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys", owner="shop")
    assert ring.remedy() == ""
    ring.signer()
    ring.revoke("a" * 64)
    assert ring.remedy() == ""
    ring.revoke(str(ring.folder / "mine.pem"))
    assert ring.remedy() == "celery5 keys new"
    ring.renew()
    assert ring.remedy() == ""
    ring.revoke(str(ring.folder / "ca.pem"))
    assert ring.remedy() == "celery5 keys new --authority"
    ring.renew(authority=True)
    assert ring.remedy() == ""
    (ring.folder / "ca.pem").unlink()
    ring.revoke(str(ring.folder / "mine.pem"))
    assert "have your authority sign" in ring.remedy()
