"""The folder of the keys that sign commands, and of the certificates that are trusted.

    mine.pem       the private key that signs on this host, and the certificates for it
    ca.pem         the authority that was made in this folder, with its private key; absent with one of your own
    trusted/*.pem  certificates of authorities, or of senders, that are trusted
    revoked        a denylist: the SHA-256 of a public key on each line, in hex; # begins a comment. The fingerprint of
                   a certificate, as older versions wrote it, denies that certificate
    done           which commands were executed on this host in the last minutes, and since when this is recorded

Files are read again when they have changed, so keys and authorities are replaced without a restart.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Container, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import Misconfigured
from celery5.protocol.commands.certificates import (
    TrustStore,
    describe_certificate,
    fingerprint,
    format_pem,
    get_fingerprints,
    key_fingerprint,
    parse_certificates,
)
from celery5.protocol.commands.definitions import CommandNotAccepted, RefusalReason
from celery5.protocol.commands.signing import ControlCommand, Signer, sign_command, verify_command

if TYPE_CHECKING:
    import trustme

_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----\n?", re.DOTALL)
_FINGERPRINT = re.compile(r"^[0-9a-f]{64}\Z")
MAX_EXECUTED = 10_000
"""The most commands that are remembered at once; more are refused. A worker executes fewer in two minutes."""
EXECUTED_KEPT = 60.0
"""Seconds that a command is remembered after it has expired: this host's clock may be set back."""


class Certificate(msgspec.Struct, frozen=True):
    """A certificate in the folder."""

    # `mine`, `authority` or `trusted`.
    role: str
    # Of its public key.
    fingerprint: str
    subject: str
    issuer: str
    # The end of its validity.
    until: str
    # Whether it is on the denylist.
    revoked: bool


class _ExecutedCommands(msgspec.Struct, frozen=True):
    """The commands that were executed on this host."""

    # The record is complete from this time on.
    since: float
    # The time at which each may be forgotten, by inbox and id.
    done: dict[str, float] = {}


class Keyring:
    """The keys in `folder`. They are read when first needed; the first signature creates what is missing.

    Args:
        owner: The application, whose name new certificates get.
        usage: The extended key usage, an OID, that a sender's certificate must have; '' for any.
    """

    def __init__(self, folder: Path, *, owner: str, usage: str = "") -> None:
        self.folder = folder
        self._owner = owner
        self._usage = usage
        self._own_record = _ExecutedCommands(time.time())
        self._seen: object = None
        self._trust = TrustStore()

    def get_signer(self) -> Signer:
        """Return the signer of this host; create a key and an authority in a new folder. Raises Misconfigured."""
        file = self._ensure_folder() / "mine.pem"
        if not file.exists():
            with self._locked():
                if not file.exists():
                    self._make_first()
        return self._read(file)

    def create_keys(self) -> bool:
        """Create the first key and its authority, unless there are keys already; return whether they are new.

        Raises:
            Misconfigured: The folder cannot be used.
        """
        self._ensure_folder()
        with self._locked():
            if self._has_keys():
                return False
            self._make_first()
        return True

    def get_trust_store(self) -> TrustStore:
        """Return the trusted certificates, as of now. Raises Misconfigured when other users may enter the folder."""
        if not self.folder.exists():
            return TrustStore()
        self._ensure_folder()
        versions = [_version(file) for file in (*self._trusted_files(), self._denylist)]
        if versions != self._seen:
            self._trust = TrustStore(self._anchors(), self._revoked(), self._usage)
            self._seen = versions
        return self._trust

    def record_command(self, command: ControlCommand, now: float) -> RefusalReason | None:
        """Record that a command is about to be executed on this host; return the reason if it must not be.

        Anyone who can write to Redis may delete a nonce there, and the memory of a process ends with it. So the
        nonce is written to a file, which all processes with this folder share, before the command is executed. A
        command from before that file was created may have been executed by a process that could not record it, so it
        is refused. Where no file can be written, as in a read-only folder, the process uses a record in memory, and the
        time of its own start.
        """
        try:
            with self._locked():
                record = self._read_executed()
                new_record, refusal = _add_command(record, command, now)
                if refusal is not RefusalReason.REPLAYED:  # a record that could not be read begins now
                    self._write("done", msgspec.json.encode(new_record), safely=True)
                return refusal
        except OSError:
            self._own_record, refusal = _add_command(self._own_record, command, now)
            return refusal

    def check(self) -> None:
        """Check that these keys can be used. Creates nothing.

        Raises:
            Misconfigured: Other users may enter the folder, it cannot be read, or it is missing and this user
                cannot make it.
        """
        try:
            self.get_trust_store()
            missing = not self.folder.exists()
        except OSError as error:
            raise Misconfigured(f"keys cannot be kept in {self.folder}: {error}; set CELERY5_KEYS") from None
        nearest_folder = next((folder for folder in self.folder.absolute().parents if folder.exists()), None)
        if missing and nearest_folder is not None and not os.access(nearest_folder, os.W_OK | os.X_OK):
            raise Misconfigured(
                f"keys cannot be kept in {self.folder}: {nearest_folder} is not this user's to write; set CELERY5_KEYS"
            )

    def renew(self, *, authority: bool = False) -> Signer:
        """Make a new key, and with `authority` a new authority first. The old one stays trusted until it is revoked.

        Raises:
            Misconfigured: The authority was not made in this folder.
        """
        self._ensure_folder()
        with self._locked():
            if authority or not self._has_keys():
                self._make_authority()
            if not (self.folder / "ca.pem").exists():
                raise Misconfigured(
                    f"{self.folder} has no authority of its own: have yours sign a key, and put both into mine.pem"
                )
            self._make_mine()
        return self._read(self.folder / "mine.pem")

    def trust_file(self, file: Path) -> dict[str, bool]:
        """Trust the certificates in a PEM file, and remove them from the denylist.

        Returns:
            Whether each was on the denylist, by the fingerprint of its key.

        Raises:
            Misconfigured: The file has no certificate.
        """
        certificates = parse_certificates(_content(file))
        if not certificates:
            raise Misconfigured(f"{file} has no certificate: give a PEM file")
        for certificate in certificates:
            describe_certificate(certificate)
        self._ensure_folder()
        with self._locked():
            revoked = self._revoked()
            for certificate in certificates:
                self._write(f"trusted/{fingerprint(certificate)[:16]}.pem", format_pem(certificate))
            was_revoked = {
                key_fingerprint(certificate): not revoked.isdisjoint(get_fingerprints(certificate))
                for certificate in certificates
            }
            if any(was_revoked.values()):
                names = frozenset[str]().union(*map(get_fingerprints, certificates))
                self._write("revoked", _without(_content(self._denylist).decode(), names).encode())
        return was_revoked

    def revoke(self, what: str) -> list[str]:
        """Put the key of a certificate on the denylist; return its fingerprint.

        Args:
            what: The fingerprint of a key, a PEM file, or the fingerprint of a certificate. If that certificate is
                in this folder, its key is denied.
        """
        normalized = what.strip().lower().replace(":", "")
        if not _FINGERPRINT.match(normalized):
            certificates = parse_certificates(_content(Path(what)))
            if not certificates:
                raise Misconfigured(f"{what!r} is no fingerprint (64 hex digits) and no file of certificates")
            fingerprints = [key_fingerprint(certificates[0])]
        else:
            key_fingerprints = {fingerprint(der): key_fingerprint(der) for _, der in self._list_all()}
            fingerprints = [key_fingerprints.get(normalized, normalized)]
        self._ensure_folder()
        with self._locked():
            new = [denied for denied in fingerprints if denied not in self._revoked()]
            before = _content(self._denylist).decode() if self._denylist.exists() else ""
            if before and not before.endswith("\n"):
                before += "\n"  # an editor left it out
            self._write("revoked", (before + "".join(f"{denied}\n" for denied in new)).encode())
        return fingerprints

    def find_refusal(self) -> RefusalReason | None:
        """Return why a command that is signed with these keys would be refused on this host.

        None when it would be accepted, or when there is no key yet. Raises Misconfigured for keys that cannot sign.
        """
        mine, now = self.folder / "mine.pem", time.time()
        if not mine.exists():
            return None
        command = ControlCommand(id="0" * 22, audience="", issued=now, expires=now + 1, command="ping")
        try:
            verify_command(
                sign_command(command, self._read(mine)), audience="", trust=self.get_trust_store(), now=now
            )
        except CommandNotAccepted as error:
            return error.reason
        return None

    def get_remedy(self) -> str:
        """Return what to do when the own key, or its authority's, is on the denylist; '' when neither is.

        Raises:
            Misconfigured: The keys cannot sign.
        """
        if self.find_refusal() is not RefusalReason.REVOKED:
            return ""
        file, revoked = self.folder / "ca.pem", self._revoked()
        if not file.exists():
            return f"have your authority sign a new key, and put both into {self.folder / 'mine.pem'}"
        denied = any(
            not revoked.isdisjoint(get_fingerprints(certificate))
            for certificate in parse_certificates(_content(file))
        )
        return "celery5 keys new --authority" if denied else "celery5 keys new"

    def list_certificates(self) -> list[Certificate]:
        """Return all certificates in the folder. Raises Misconfigured when other users may enter it."""
        if not self.folder.exists():
            return []
        self._ensure_folder()
        revoked = self._revoked()
        return [
            Certificate(
                role,
                key_fingerprint(der),
                *describe_certificate(der),
                revoked=not revoked.isdisjoint(get_fingerprints(der)),
            )
            for role, der in self._list_all()
        ]

    def _list_all(self) -> list[tuple[str, bytes]]:
        """Return all certificates in the folder, each with its role."""
        places = [("mine", self.folder / "mine.pem"), ("authority", self.folder / "ca.pem")]
        places += [("trusted", file) for file in self._trusted_files()]
        return [
            (role, der)
            for role, file in places
            if file.exists()
            for der in parse_certificates(_content(file))
        ]

    @property
    def _denylist(self) -> Path:
        return self.folder / "revoked"

    def _trusted_files(self) -> list[Path]:
        return sorted((self.folder / "trusted").glob("*.pem"))

    def _anchors(self) -> tuple[bytes, ...]:
        return tuple(
            certificate
            for file in self._trusted_files()
            for certificate in parse_certificates(_content(file))
        )

    def _revoked(self) -> frozenset[str]:
        if not self._denylist.exists():
            return frozenset()
        try:
            text = _content(self._denylist).decode()
        except UnicodeDecodeError as error:
            raise Misconfigured(f"{self._denylist} is no text: {error}") from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        fingerprints = [line.lower().replace(":", "") for line in lines if line]
        invalid = [text for text in fingerprints if not _FINGERPRINT.match(text)]
        if invalid:
            raise Misconfigured(f"{self._denylist}: {invalid[0]!r} is no fingerprint (64 hex digits)")
        return frozenset(fingerprints)

    def _has_keys(self) -> bool:
        """Return whether the folder has keys already: then none are created except by an explicit command."""
        return any((self.folder / name).exists() for name in ("mine.pem", "ca.pem")) or bool(
            self._trusted_files()
        )

    def _ensure_folder(self) -> Path:
        """Return the folder, after making it and checking that it is private and this user's. Raises Misconfigured."""
        try:
            status = make_private(self.folder)
            (self.folder / "trusted").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Misconfigured(f"keys cannot be kept in {self.folder}: {error}; set CELERY5_KEYS") from None
        if status.st_uid != os.geteuid():
            raise Misconfigured(
                f"{self.folder}, where the keys are, belongs to another user: chown it, or set CELERY5_KEYS"
            )
        if status.st_mode & 0o077:
            raise Misconfigured(
                f"others may enter {self.folder}, where the keys are: chmod 700 {self.folder}"
            )
        if not (self.folder / "done").exists():
            with suppress(OSError), self._locked():
                self._begin_record()
        return self.folder

    def _begin_record(self) -> None:
        if not (self.folder / "done").exists():
            self._write("done", msgspec.json.encode(_ExecutedCommands(time.time())))

    def _read_executed(self) -> _ExecutedCommands:
        """Return the record of commands. One that cannot be read is replaced by a new one, which begins now."""
        try:
            return msgspec.json.decode((self.folder / "done").read_bytes(), type=_ExecutedCommands)
        except (FileNotFoundError, msgspec.DecodeError, ValueError, RecursionError):
            return _ExecutedCommands(time.time())

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        """Lock the folder for other processes."""
        with os.fdopen(os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self, file: Path) -> Signer:
        content = _content(file)
        key = _PRIVATE.search(content)
        chain = parse_certificates(content)
        if key is None or not chain:
            raise Misconfigured(f"{file} must have a private key and the certificates for it, as PEM")
        return Signer(key[0], chain)

    def _make_first(self) -> None:
        if self._has_keys():
            raise Misconfigured(
                f"{self.folder} has no mine.pem to sign with: celery5 keys new makes one, or have yours signed"
            )
        self._make_authority()
        self._make_mine()

    def _make_authority(self) -> None:
        import trustme

        authority = trustme.CA(organization_name="celery5", organization_unit_name=self._owner)
        certificate = authority.cert_pem.bytes()
        self._write("ca.pem", authority.private_key_pem.bytes() + certificate)
        (der,) = parse_certificates(certificate)
        self._write(f"trusted/{fingerprint(der)[:16]}.pem", certificate)

    def _make_mine(self) -> None:
        leaf: trustme.LeafCert = self._authority().issue_cert(
            "sender.celery5", common_name=self._owner, organization_name="celery5"
        )
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        self._write("mine.pem", leaf.private_key_pem.bytes() + chain)

    def _authority(self) -> "trustme.CA":
        import trustme

        content = _content(self.folder / "ca.pem")
        key = _PRIVATE.search(content)
        if key is None:
            raise Misconfigured(f"{self.folder / 'ca.pem'} has no private key")
        try:
            return trustme.CA.from_pem(content.replace(key[0], b""), key[0])
        except (ValueError, TypeError) as error:  # TypeError: it has a password
            raise Misconfigured(f"{self.folder / 'ca.pem'} is no authority's: {error}") from None

    def _write(self, name: str, content: bytes, *, safely: bool = False) -> None:
        """Write a file as a whole or not at all, for this user alone; with `safely` wait until the disk has it."""
        file = self.folder / name
        handle, draft = tempfile.mkstemp(dir=self.folder, prefix=".")
        try:
            with os.fdopen(handle, "wb") as writing:
                writing.write(content)
                writing.flush()
                if safely:
                    os.fsync(handle)
            Path(draft).replace(file)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


def _add_command(
    record: _ExecutedCommands, command: ControlCommand, now: float
) -> tuple[_ExecutedCommands, RefusalReason | None]:
    """Return the record with that command in it, and the reason if the command must not be done."""
    done = {name: until for name, until in record.done.items() if until > now}
    nonce = f"{command.audience} {command.id}"
    if nonce in done:
        return record, RefusalReason.REPLAYED
    if command.issued < record.since or len(done) >= MAX_EXECUTED:
        return record, RefusalReason.UNREMEMBERED
    return _ExecutedCommands(record.since, {**done, nonce: command.expires + EXECUTED_KEPT}), None


def _without(denylist: str, lifted: Container[str]) -> str:
    """Return a denylist without some fingerprints. Comments on their lines stay."""
    kept: list[str] = []
    for line in denylist.splitlines(keepends=True):
        fingerprint_text, hash_, comment = line.partition("#")
        if fingerprint_text.strip().lower().replace(":", "") not in lifted:
            kept.append(line)
        elif hash_:
            kept.append(hash_ + comment)
    return "".join(kept)


def _version(file: Path) -> tuple[str, int, int, int]:
    """Return a value that changes when the file does."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return (file.name, 0, 0, 0)
    return (file.name, stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Misconfigured(f"{file} cannot be read: {error.strerror}") from None
