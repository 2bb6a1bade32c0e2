"""Keyring: the folder of the keys that commands are signed with, and of the certificates that are trusted (C74).

    mine.pem       the private key, and the certificates for it: who signs here
    ca.pem         the authority that was made here, with its private key; not there with an authority of your own
    trusted/*.pem  certificates of authorities, or of senders, that are trusted
    revoked        a denylist: the SHA-256 of a public key on each line, in hex; # begins a comment. The fingerprint of
                   a certificate, as older versions wrote it, denies that certificate
    done           which commands were done here in the last minutes, and since when that is known

Files are read again when they have changed, so keys and authorities are replaced without a restart.
"""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import Misconfigured
from celery5.protocol.commands.signing import (
    CommandNotAccepted,
    ControlCommand,
    RefusalReason,
    Signer,
    TrustStore,
    describe_certificate,
    fingerprint,
    format_pem,
    get_fingerprints,
    key_fingerprint,
    parse_certificates,
    sign_command,
    verify_command,
)

if TYPE_CHECKING:
    import trustme

_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----\n?", re.DOTALL)
_FINGERPRINT = re.compile(r"^[0-9a-f]{64}\Z")
MOST_DONE = 10_000
"""The most commands that are remembered at once; others are refused meanwhile. A worker does fewer in two minutes."""
KEPT_DONE = 60.0
"""Seconds that a command is remembered after it has expired: this host's clock may be set back meanwhile."""


class Certificate(msgspec.Struct, frozen=True):
    """A certificate in the folder: its `role` (`mine`, `authority` or `trusted`), the fingerprint of its public key,
    whose it is, who signed it, until when it holds, and whether it was revoked."""

    role: str
    fingerprint: str
    subject: str
    issuer: str
    until: str
    revoked: bool


class _Done(msgspec.Struct, frozen=True):
    """Which commands were done: by inbox and id, the time at which each may be forgotten. Complete from `since` on."""

    since: float
    done: dict[str, float] = {}


def get_key_folder(app: str, setting: str, environ: Mapping[str, str]) -> Path:
    """Where the keys of an application are: what the setting `keys` says, else a folder of the user's state, which all
    of this user's processes on this host find. Raises Misconfigured for a user without a home, and for no folder's
    name."""
    if setting:
        if Path(setting).name in ("", ".."):
            raise Misconfigured(f"keys is {setting!r}: name a folder that has only keys")
        try:
            return Path(setting).expanduser()
        except RuntimeError:
            raise Misconfigured(f"keys is {setting!r}: there is no such user, or no home folder") from None
    state = environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no home folder to keep keys in: set CELERY5_KEYS") from None
    return root / "celery5" / "keys" / app.replace("/", "_")


class Keyring:
    """The keys in `folder`. They are read when they are first needed; the first signature creates what is missing.

    `usage` is the extended key usage, an OID, that a sender's certificate must have; '' for any.
    """

    def __init__(self, folder: Path, *, owner: str, usage: str = "") -> None:
        self.folder = folder
        self._owner = owner
        self._usage = usage
        self._own_memory = _Done(time.time())
        self._seen: object = None
        self._trust = TrustStore()

    def get_signer(self) -> Signer:
        """Who signs here. In a folder that is new a key and an authority for it are made. Raises Misconfigured."""
        file = self._entered() / "mine.pem"
        if not file.exists():
            with self._locked():
                if not file.exists():
                    self._make_first()
        return self._read(file)

    def create_keys(self) -> bool:
        """Make the first key and its authority, unless somebody has put keys here; gives whether they are new. Raises
        Misconfigured."""
        self._entered()
        with self._locked():
            if self._is_touched():
                return False
            self._make_first()
        return True

    def get_trust_store(self) -> TrustStore:
        """Who is trusted here, as of now. Raises Misconfigured when the folder can be entered by others."""
        if not self.folder.exists():
            return TrustStore()
        self._entered()
        seen = [_version(each) for each in (*self._trusted_files(), self._denylist)]
        if seen != self._seen:
            self._trust = TrustStore(self._anchors(), self._revoked(), self._usage)
            self._seen = seen
        return self._trust

    def record_command(self, order: ControlCommand, now: float) -> RefusalReason | None:
        """Record that a command is about to be done on this host; return the reason if it must not be.

        Anyone who can write to Redis may delete a nonce there, and the memory of a process ends with it. So the nonce
        is written to a file, which all processes with this folder share, before anything is done. A command from
        before that file was created may have been done by a process that could not record it, so it is refused. Where
        no file can be written, as in a read-only folder, the process uses its own memory, and the time of its own
        start.
        """
        try:
            with self._locked():
                record = self._done()
                known, refusal = _noted(record, order, now)
                if refusal is not RefusalReason.REPLAYED:  # a record that could not be read begins here
                    self._write("done", msgspec.json.encode(known), safely=True)
                return refusal
        except OSError:
            self._own_memory, refusal = _noted(self._own_memory, order, now)
            return refusal

    def check(self) -> None:
        """Raise Misconfigured when these keys cannot be used: others may enter the folder, it cannot be read, or it is
        not there and this user cannot make it. Makes nothing."""
        try:
            self.get_trust_store()
            missing = not self.folder.exists()
        except OSError as error:
            raise Misconfigured(f"keys cannot be kept in {self.folder}: {error}; set CELERY5_KEYS") from None
        near = next((each for each in self.folder.absolute().parents if each.exists()), None)
        if missing and near is not None and not os.access(near, os.W_OK | os.X_OK):
            raise Misconfigured(
                f"keys cannot be kept in {self.folder}: {near} is not this user's to write; set CELERY5_KEYS"
            )

    def renew(self, *, authority: bool = False) -> Signer:
        """Make a new key, and with `authority` a new authority first; the old one stays trusted until it is revoked.
        Raises Misconfigured where the authority is not one that was made here."""
        self._entered()
        with self._locked():
            if authority or not self._is_touched():
                self._make_authority()
            if not (self.folder / "ca.pem").exists():
                raise Misconfigured(
                    f"{self.folder} has no authority of its own: have yours sign a key, and put both into mine.pem"
                )
            self._make_mine()
        return self._read(self.folder / "mine.pem")

    def trust_file(self, file: Path) -> dict[str, bool]:
        """Trust the certificates in a PEM file, also those that were revoked; gives their fingerprints, and whether
        each was on the denylist, which it now is not. Raises Misconfigured when there is none."""
        found = parse_certificates(_content(file))
        if not found:
            raise Misconfigured(f"{file} has no certificate: give a PEM file")
        for each in found:
            describe_certificate(each)
        self._entered()
        with self._locked():
            revoked = self._revoked()
            for each in found:
                self._write(f"trusted/{fingerprint(each)[:16]}.pem", format_pem(each))
            lifted = {key_fingerprint(each): not revoked.isdisjoint(get_fingerprints(each)) for each in found}
            if any(lifted.values()):
                names = frozenset[str]().union(*map(get_fingerprints, found))
                self._write("revoked", _without(_content(self._denylist).decode(), names).encode())
        return lifted

    def revoke(self, what: str) -> list[str]:
        """Put the key of a certificate on the denylist; gives its fingerprint. `what` is that, or a PEM file, or the
        fingerprint of a certificate: of one that is in this folder its key is denied."""
        wanted = what.strip().lower().replace(":", "")
        if not _FINGERPRINT.match(wanted):
            found = parse_certificates(_content(Path(what)))
            if not found:
                raise Misconfigured(f"{what!r} is no fingerprint (64 hex digits) and no file of certificates")
            prints = [key_fingerprint(each) for each in found[:1]]
        else:
            known = {fingerprint(each): key_fingerprint(each) for _, each in self._all()}
            prints = [known.get(wanted, wanted)]
        self._entered()
        with self._locked():
            new = [each for each in prints if each not in self._revoked()]
            before = _content(self._denylist).decode() if self._denylist.exists() else ""
            if before and not before.endswith("\n"):
                before += "\n"  # somebody else's editor left it out
            self._write("revoked", (before + "".join(f"{each}\n" for each in new)).encode())
        return prints

    def find_refusal(self) -> RefusalReason | None:
        """Why a command that is signed here would not be accepted here; None when it would, or when nothing was signed
        yet. Raises Misconfigured for keys that cannot sign."""
        mine, now = self.folder / "mine.pem", time.time()
        if not mine.exists():
            return None
        order = ControlCommand(id="0" * 22, audience="", issued=now, expires=now + 1, command="ping")
        try:
            verify_command(
                sign_command(order, self._read(mine)), audience="", trust=self.get_trust_store(), now=now
            )
        except CommandNotAccepted as error:
            return error.reason
        return None

    def get_remedy(self) -> str:
        """What makes a sender of this folder accepted again whose key, or its authority's, is on the denylist here; ''
        when neither is. Raises Misconfigured for keys that cannot sign."""
        if self.find_refusal() is not RefusalReason.REVOKED:
            return ""
        file, revoked = self.folder / "ca.pem", self._revoked()
        if not file.exists():
            return f"have your authority sign a new key, and put both into {self.folder / 'mine.pem'}"
        denied = any(
            not revoked.isdisjoint(get_fingerprints(each)) for each in parse_certificates(_content(file))
        )
        return "celery5 keys new --authority" if denied else "celery5 keys new"

    def list_certificates(self) -> list[Certificate]:
        """All certificates in the folder. Raises Misconfigured when others may enter it, which no worker allows."""
        if not self.folder.exists():
            return []
        self._entered()
        revoked = self._revoked()
        return [
            Certificate(
                role,
                key_fingerprint(der),
                *describe_certificate(der),
                revoked=not revoked.isdisjoint(get_fingerprints(der)),
            )
            for role, der in self._all()
        ]

    def _all(self) -> list[tuple[str, bytes]]:
        """All certificates in the folder, each with its role."""
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
        return tuple(each for file in self._trusted_files() for each in parse_certificates(_content(file)))

    def _revoked(self) -> frozenset[str]:
        if not self._denylist.exists():
            return frozenset()
        try:
            text = _content(self._denylist).decode()
        except UnicodeDecodeError as error:
            raise Misconfigured(f"{self._denylist} is no text: {error}") from None
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        prints = [line.lower().replace(":", "") for line in lines if line]
        wrong = [each for each in prints if not _FINGERPRINT.match(each)]
        if wrong:
            raise Misconfigured(f"{self._denylist}: {wrong[0]!r} is no fingerprint (64 hex digits)")
        return frozenset(prints)

    def _is_touched(self) -> bool:
        """Whether somebody has put keys here: then none are made without being asked."""
        return any((self.folder / name).exists() for name in ("mine.pem", "ca.pem")) or bool(
            self._trusted_files()
        )

    def _entered(self) -> Path:
        """The folder, which is there, private, and this user's. Raises Misconfigured."""
        try:
            found = make_private(self.folder)
            (self.folder / "trusted").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Misconfigured(f"keys cannot be kept in {self.folder}: {error}; set CELERY5_KEYS") from None
        if found.st_uid != os.geteuid():
            raise Misconfigured(
                f"{self.folder}, where the keys are, belongs to another user: chown it, or set CELERY5_KEYS"
            )
        if found.st_mode & 0o077:
            raise Misconfigured(
                f"others may enter {self.folder}, where the keys are: chmod 700 {self.folder}"
            )
        if not (self.folder / "done").exists():
            with suppress(OSError), self._locked():
                self._begin_record()
        return self.folder

    def _begin_record(self) -> None:
        """Begin to record what is done."""
        if not (self.folder / "done").exists():
            self._write("done", msgspec.json.encode(_Done(time.time())))

    def _done(self) -> _Done:
        """Return the record of commands. When it cannot be read, a new one begins: nothing is known of the time
        before."""
        try:
            return msgspec.json.decode((self.folder / "done").read_bytes(), type=_Done)
        except (FileNotFoundError, msgspec.DecodeError, ValueError):
            return _Done(time.time())

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        """Nobody else makes keys here meanwhile."""
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
        if self._is_touched():
            raise Misconfigured(
                f"{self.folder} has no mine.pem to sign with: celery5 keys new makes one, or have yours signed"
            )
        self._make_authority()
        self._make_mine()

    def _make_authority(self) -> None:
        import trustme

        made = trustme.CA(organization_name="celery5", organization_unit_name=self._owner)
        certificate = made.cert_pem.bytes()
        self._write("ca.pem", made.private_key_pem.bytes() + certificate)
        (der,) = parse_certificates(certificate)
        self._write(f"trusted/{fingerprint(der)[:16]}.pem", certificate)

    def _make_mine(self) -> None:
        made: trustme.LeafCert = self._authority().issue_cert(
            "sender.celery5", common_name=self._owner, organization_name="celery5"
        )
        chain = b"".join(each.bytes() for each in made.cert_chain_pems)
        self._write("mine.pem", made.private_key_pem.bytes() + chain)

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


def _noted(record: _Done, order: ControlCommand, now: float) -> tuple[_Done, RefusalReason | None]:
    """Return the record with that command in it, and the reason if the command must not be done."""
    done = {each: until for each, until in record.done.items() if until > now}
    mark = f"{order.audience} {order.id}"
    if mark in done:
        return record, RefusalReason.REPLAYED
    if order.issued < record.since or len(done) >= MOST_DONE:
        return record, RefusalReason.UNREMEMBERED
    return _Done(record.since, {**done, mark: order.expires + KEPT_DONE}), None


def _without(denylist: str, lifted: Container[str]) -> str:
    """A denylist without some fingerprints, and with all else that is in it: what was said of one stays a comment."""
    kept: list[str] = []
    for line in denylist.splitlines(keepends=True):
        mark, hash_, said = line.partition("#")
        if mark.strip().lower().replace(":", "") not in lifted:
            kept.append(line)
        elif hash_:
            kept.append(hash_ + said)
    return "".join(kept)


def _version(file: Path) -> tuple[str, int, int, int]:
    """What changes when a file does."""
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
