"""Host checks: what `celery5 doctor` looks at on this machine; `protocol/health/host_diagnosis.py` says what it
means."""

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import celery5
from celery5.config.settings import find_warnings, get_origins
from celery5.errors import Corrupt
from celery5.protocol.health import host_diagnosis as diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.health.host_diagnosis import Credential, SystemdUnit, WorkerVersion
from celery5.protocol.publisher.address import parse_daemon_address
from celery5.protocol.publisher.frames import ClientHello, ConnectionRefusal, Welcome
from celery5.sending.publisher_client import connect_to_daemon, send_request

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply

ANSWERS = 3.0
"""Seconds that workers have to answer."""
SYSTEMCTL = 3.0
"""Seconds that it has to tell its version."""
SUFFIXES = (".service", ".socket", ".target")


class _Process(msgspec.Struct):
    celery5: str


class _Stats(msgspec.Struct):
    """What of an answer to `stats` is read here."""

    process: _Process


class HostChecks:
    """The checks of this machine, by an application's view; `root` is where systemd's folders begin."""

    def __init__(self, environ: Mapping[str, str], *, root: Path = Path("/")) -> None:
        self._environ = environ
        self._root = root

    def check_python(self) -> Finding:
        """The interpreter."""
        return diagnosis.diagnose_python(sys.version_info[:3], celery5.__version__)

    def check_libraries(self) -> Finding:
        """The libraries, by what the package that is installed requires."""
        try:
            required = metadata.requires("celery5") or []
        except metadata.PackageNotFoundError:
            required = []
        names = {diagnosis.parse_requirement_name(each) for each in required if ";" not in each}
        return diagnosis.diagnose_libraries(required, {name: _version_of(name) for name in sorted(names)})

    def check_units(self) -> Finding:
        """The units of systemd that are installed for this user or for all."""
        found = list(self._units())
        user = _user()
        lingers = (self._root / "var/lib/systemd/linger" / user).exists()
        version = _systemd() if found else ""
        return diagnosis.diagnose_units(found, version=version, is_lingering=lingers, user=user)

    def check_settings(self, app: "App") -> Finding:
        """The application's settings."""
        said = sum(each.origin != "default" for each in get_origins(app))
        return diagnosis.diagnose_settings(said, find_warnings(app.settings, self._environ))

    def check_key_folder(self, app: "App") -> Finding:
        """The folder of its keys."""
        keyring = app.control.keyring
        place = keyring.folder
        if not place.exists():
            keyring.check()
            return diagnosis.diagnose_key_folder(str(place), None)
        modes = {".": place.stat().st_mode}
        for each in (place / "mine.pem", place / "ca.pem"):
            if each.exists():
                modes[each.name] = each.stat().st_mode
        return diagnosis.diagnose_key_folder(str(place), modes)

    def check_certificates(self, app: "App") -> Finding:
        """The certificates in it."""
        keyring = app.control.keyring
        found = [
            Credential(each.role, each.fingerprint, each.until, each.revoked)
            for each in keyring.list_certificates()
        ]
        refusal = keyring.find_refusal()
        today = datetime.now(UTC).date()
        return diagnosis.diagnose_certificates(found, "" if refusal is None else refusal.value, today)

    def check_publisher(self, app: "App") -> Finding:
        """The Publisher daemon that takes this application's jobs here, asked as a producer asks it."""
        address = parse_daemon_address(app.settings.publisher)
        try:
            with connect_to_daemon(address, app.name) as line:
                line.settimeout(ANSWERS)
                answer = send_request(line, ClientHello(app.name))
        except (OSError, Corrupt) as error:
            why = f"no answer within {ANSWERS:g} s" if isinstance(error, TimeoutError) else str(error)
            return diagnosis.diagnose_unreachable_publisher(str(address), why)
        if isinstance(answer, Welcome):
            return diagnosis.diagnose_publisher(str(address), answer.waiting, answer.trouble)
        why = answer.why if isinstance(answer, ConnectionRefusal) else "it answers with something else"
        return diagnosis.diagnose_refusing_publisher(str(address), why)

    def check_workers(self, app: "App") -> Finding:
        """The workers that live. They are asked for their version, if there is a key to ask with: none is made."""
        state = app.info()
        asked = not app.settings.inbox_signatures or (app.control.keyring.folder / "mine.pem").exists()
        found = [WorkerVersion(each, "") for each in state.workers]
        if found and asked:
            replies = app.control.send("stats", timeout=ANSWERS)
            found = [
                WorkerVersion(each.worker, _told_version(each.answer), _refusal(each)) for each in replies
            ]
        unrouted = app.events.has_own_events and not state.routers
        unread = [
            name
            for name, each in state.queues.items()
            if each.waiting and not any(one.alive for one in each.workers)
        ]
        return diagnosis.diagnose_workers(
            found, celery5.__version__, asked=asked, unrouted=unrouted, unread=unread
        )

    def _units(self) -> Iterator[SystemdUnit]:
        home = self._environ.get("XDG_CONFIG_HOME") or os.path.join(
            self._environ.get("HOME", "/root"), ".config"
        )
        for folder, is_users in (
            (self._root / home.lstrip("/") / "systemd/user", True),
            (self._root / "etc/systemd/user", True),
            (self._root / "etc/systemd/system", False),
        ):
            wanted = {each.name for each in folder.glob("*.wants/*")}
            wanted |= {each.name for each in folder.glob("*.requires/*")}
            for file in sorted(folder.glob("celery5*")):
                if file.suffix in SUFFIXES and file.is_file():
                    stem, at, _ = file.name.partition("@.")
                    instances = [each for each in wanted if at and each.startswith(f"{stem}@")]
                    enabled = bool(instances) or file.name in wanted
                    yield SystemdUnit(file.name, is_users, enabled, _missing(file))


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _missing(file: Path) -> str:
    """What an ExecStart names by its full path, and is not there."""
    for line in file.read_text(errors="replace").splitlines():
        key, _, words = line.partition("=")
        program = words.strip().lstrip("-@:+!").split(" ")[0]
        if key.strip() == "ExecStart" and program.startswith("/") and not os.access(program, os.X_OK):
            return program
    return ""


def _systemd() -> str:
    """The version of systemd; '' when that cannot be found out."""
    program = shutil.which("systemctl")
    if program is None:
        return ""
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=SYSTEMCTL, check=False
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said[1] if said[:1] == ["systemd"] and len(said) > 1 else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _refusal(reply: "Reply") -> str:
    """Why a worker does not do what it was asked for; '' when it does, or has not answered."""
    return "" if reply.ok or reply.reason == "no-answer" else reply.why or reply.reason


def _told_version(answer: object) -> str:
    """The version in an answer to `stats`."""
    try:
        return msgspec.convert(answer, _Stats).process.celery5
    except msgspec.ValidationError:
        return ""
