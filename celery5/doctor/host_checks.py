"""Read what `celery5 doctor` checks of an application on this host. `protocol/health/host_diagnosis.py` judges it."""

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import celery5
from celery5.config.configuration import list_warnings
from celery5.config.settings import get_origins
from celery5.doctor.needed_processes import needs_router, needs_scheduler
from celery5.errors import Corrupt
from celery5.observability.alerts import summarize_alerts
from celery5.observability.shown_values import mask_groups
from celery5.protocol.health import host_diagnosis as diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.health.host_diagnosis import Credential, SystemdUnit, WorkerVersion
from celery5.protocol.job.states import JobState
from celery5.protocol.observability.overview import format_lost, select_unrepaired
from celery5.protocol.process.missing import BY_HAND
from celery5.protocol.publisher.address import parse_daemon_address
from celery5.protocol.publisher.frames import ClientHello, ConnectionRefusal, Welcome
from celery5.protocol.streams.diagnosis import ArchiveHealth, GroupHealth, diagnose_streams
from celery5.results.job_details import WAITING_STATES
from celery5.sending.publisher_client import connect_to_daemon, send_request

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.commands.control import Reply
    from celery5.scheduling.schedules import ScheduleState
    from celery5.streams.lags import GroupLag, StreamState
    from celery5.streams.registry import Streams

REPLY_TIMEOUT = 3.0
"""Seconds that workers and a Publisher have to answer."""
SYSTEMCTL_TIMEOUT = 3.0
JOBS_LOOKED_AT = 100
"""Jobs that are looked at of each state of a queue that nobody reads."""
MAX_DEAD_JOBS = 10_000
"""Dead jobs that are looked at."""
SEARCH_LIMIT = 4.0
"""Seconds after which no further state of a queue is looked at."""
UNIT_SUFFIXES = (".service", ".socket", ".target")


class _Process(msgspec.Struct):
    celery5: str


class _Stats(msgspec.Struct):
    """The part of a reply to `stats` that is read here."""

    process: _Process


class HostChecks:
    """The checks of an application on this host. systemd's folders are below `root`."""

    def __init__(self, environ: Mapping[str, str], *, root: Path = Path("/")) -> None:
        self._environ = environ
        self._root = root

    def check_python(self) -> Finding:
        """Check the version of Python."""
        return diagnosis.diagnose_python(sys.version_info[:3], celery5.__version__)

    def check_libraries(self) -> Finding:
        """Check the installed libraries against those that the installed package requires."""
        try:
            required = metadata.requires("celery5") or []
        except metadata.PackageNotFoundError:
            required = []
        names = {diagnosis.parse_requirement_name(line) for line in required if ";" not in line}
        return diagnosis.diagnose_libraries(
            required,
            {name: _get_installed_version(name) for name in sorted(names)},
            str(Path(celery5.__file__).resolve().parent.parent),
        )

    def check_units(self) -> Finding:
        """Check the systemd units that are installed for this user or for all."""
        units = list(self._find_units())
        user = _get_user()
        is_lingering = (self._root / "var/lib/systemd/linger" / user).exists()
        version = _get_systemd_version() if units else ""
        return diagnosis.diagnose_units(units, version=version, is_lingering=is_lingering, user=user)

    def check_application(self, app: "App") -> Finding:
        """Check that the application, which could be imported, declares something to run."""
        return diagnosis.diagnose_application(app.name, len(app.tasks), len(app.streams.processors))

    def check_settings(self, app: "App") -> Finding:
        """Check the application's settings."""
        changed = sum(setting.origin != "default" for setting in get_origins(app))
        oddities = list_warnings(app.settings, app.configuration, list(app.tasks), self._environ)
        return diagnosis.diagnose_settings(changed, oddities)

    def check_key_folder(self, app: "App") -> Finding:
        """Check who may read the folder of the keys."""
        keyring = app.control.keyring
        folder = keyring.folder
        if not folder.exists():
            keyring.check()
            return diagnosis.diagnose_key_folder(str(folder), None)
        modes = {".": folder.stat().st_mode}
        for file in (folder / "mine.pem", folder / "ca.pem"):
            if file.exists():
                modes[file.name] = file.stat().st_mode
        return diagnosis.diagnose_key_folder(str(folder), modes)

    def check_certificates(self, app: "App") -> Finding:
        """Check the certificates in the folder of the keys."""
        keyring = app.control.keyring
        certificates = [
            Credential(certificate.role, certificate.fingerprint, certificate.until, certificate.revoked)
            for certificate in keyring.list_certificates()
        ]
        refusal = keyring.find_refusal()
        return diagnosis.diagnose_certificates(
            certificates,
            "" if refusal is None else refusal.value,
            datetime.now(UTC).date(),
            folder=str(keyring.folder),
            remedy_if_revoked=keyring.get_remedy(),
        )

    def check_publisher(self, app: "App") -> Finding:
        """Check that the Publisher that gets this application's jobs accepts a connection, as a producer opens one."""
        address = parse_daemon_address(app.settings.publisher)
        try:
            with connect_to_daemon(address, app.name) as connection:
                connection.settimeout(REPLY_TIMEOUT)
                reply = send_request(connection, ClientHello(app.name))
        except (OSError, Corrupt) as error:
            why = f"no answer within {REPLY_TIMEOUT:g} s" if isinstance(error, TimeoutError) else str(error)
            return diagnosis.diagnose_unreachable_publisher(str(address), why)
        if isinstance(reply, Welcome):
            return diagnosis.diagnose_publisher(str(address), reply.waiting, reply.trouble, reply.outage)
        why = reply.why if isinstance(reply, ConnectionRefusal) else "it answers with something else"
        return diagnosis.diagnose_refusing_publisher(str(address), why)

    def check_workers(self, app: "App") -> Finding:
        """Check that live workers have this version, and that all queues and events are read.

        Without a key that signs commands the versions are not requested: no key is made.
        """
        state = app.info()
        can_send = not app.settings.inbox_signatures or (app.control.keyring.folder / "mine.pem").exists()
        workers = [WorkerVersion(name, "") for name in state.workers]
        if workers and can_send:
            replies = app.control.send("stats", timeout=REPLY_TIMEOUT)
            workers = [
                WorkerVersion(reply.worker, _read_version(reply.answer), _get_refusal(reply))
                for reply in replies
            ]
        # Jobs that a dead worker had wait, too: for a live one that puts them back.
        unread = [
            name
            for name, queue in state.queues.items()
            if queue.unread or (queue.running and not queue.live_workers)
        ]
        is_scheduled, foreign_schedule = True, ""
        if not state.schedulers:
            stored = [schedule for schedule in app.schedule.list() if schedule.state in ("active", "paused")]
            is_scheduled = not (needs_scheduler(app) or stored)
            foreign_schedule = _find_foreign_schedule(app, stored)
        standings = app.metrics.workers(state)
        return diagnosis.diagnose_workers(
            workers,
            celery5.__version__,
            is_version_known=can_send,
            unrouted=needs_router(app) and not state.routers,
            unscheduled=not is_scheduled,
            foreign_schedule=foreign_schedule,
            unread=unread,
            foreign=_find_foreign(app, unread[: diagnosis.MAX_QUEUES]),
            lost=[format_lost(process) for process in select_unrepaired(standings.lost)],
            silent=[
                f"{worker.name} {worker.health}"
                for worker in standings.workers
                if worker.standing == "silent"
            ],
            breakers={worker.name: worker.breakers for worker in standings.workers if worker.breakers},
            lacking=[queue.lacks for queue in state.queues.values() if queue.lacks],
            awaiting={queue.queue: queue.awaits for queue in state.queues.values() if queue.awaits},
            paused={queue.queue: queue.backlog for queue in state.queues.values() if queue.paused},
            recycling=state.recycling,
            advice=state.start_advice,
        )

    def check_members(self, app: "App") -> Finding:
        """Check that no member of the cluster was given up or stays down.

        That no Scheduler works at all is for `check_workers`, which knows whose code declares the schedules.
        """
        state = app.info(limit=0)
        members = [member for member in state.missing if member.name]
        return diagnosis.diagnose_members(members, state.further_missing, state.cluster, time.time())

    def check_alerts(self, app: "App") -> Finding:
        """Check that no alert fires, and that the webhook takes what it is notified of."""
        return diagnosis.diagnose_alerts(summarize_alerts(app.alerts.list()))

    def check_dead_jobs(self, app: "App") -> Finding:
        """Check that no job died in the last day; of many, MAX_DEAD_JOBS are counted."""
        return diagnosis.diagnose_dead_jobs(
            mask_groups(app, app.dlq.groups(newer_than=86_400, limit=MAX_DEAD_JOBS))
        )

    def check_streams(self, app: "App") -> Finding:
        """Check that the streams are read: none is full, quarantined or without a worker, and nothing was lost."""
        states = app.streams.info()
        groups = [
            GroupHealth(
                stream=state.stream,
                group=group.group,
                lag=group.lag,
                is_live=bool(group.members),
                quarantined=[partition.partition for partition in group.partitions if partition.condition],
                lost=sum(partition.lost for partition in group.partitions),
                full=_find_full(app.streams, group, state.waiting_for_archive),
                archived=sum(partition.archived for partition in group.partitions),
                parked=group.parked_keys,
            )
            for state in states
            for group in state.groups
        ]
        archives = [archive for state in states for archive in _check_archive(app.streams, state)]
        advice = app.info(limit=0).start_advice if groups else BY_HAND
        return diagnose_streams(len(states), groups, archives, advice)

    def _find_units(self) -> Iterator[SystemdUnit]:
        home = self._environ.get("XDG_CONFIG_HOME") or os.path.join(
            self._environ.get("HOME", "/root"), ".config"
        )
        for folder, is_users in (
            (self._root / home.lstrip("/") / "systemd/user", True),
            (self._root / "etc/systemd/user", True),
            (self._root / "etc/systemd/system", False),
        ):
            wanted = {link.name for pattern in ("*.wants/*", "*.requires/*") for link in folder.glob(pattern)}
            for file in sorted(folder.glob("celery5*")):
                if file.suffix in UNIT_SUFFIXES and file.is_file():
                    stem, at, _ = file.name.partition("@.")
                    has_instances = bool(at) and any(name.startswith(f"{stem}@") for name in wanted)
                    enabled = has_instances or file.name in wanted
                    yield SystemdUnit(file.name, is_users, enabled, _find_missing_program(file))


def _get_installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _find_missing_program(file: Path) -> str:
    """Return the program that ExecStart names by a full path, if it does not exist; '' if it does."""
    for line in file.read_text(errors="replace").splitlines():
        key, _, words = line.partition("=")
        program = words.strip().lstrip("-@:+!").split(" ")[0]
        if key.strip() == "ExecStart" and program.startswith("/") and not os.access(program, os.X_OK):
            return program
    return ""


def _get_systemd_version() -> str:
    """Return the version of systemd; '' if it is unknown."""
    program = shutil.which("systemctl")
    if program is None:
        return ""
    try:
        words = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT, check=False
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return words[1] if words[:1] == ["systemd"] and len(words) > 1 else ""


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _get_refusal(reply: "Reply") -> str:
    """Return why a worker refused the command; '' if it did not, or has not answered."""
    return "" if reply.ok or reply.reason == "no-answer" else reply.why or reply.reason


def _find_full(streams: "Streams", group: "GroupLag", waiting: Mapping[int, int]) -> list[int]:
    """Return the partitions that refuse more records, as far as the stream is declared here.

    Args:
        streams: The streams of the application.
        group: A group of one of them.
        waiting: How many records of each partition wait for the archive.
    """
    keep = streams[group.stream].keep if group.stream in streams else None
    if keep is None or keep.full == "drop":
        return []
    return [
        partition.partition
        for partition in group.partitions
        if partition.lag - partition.archived - partition.lost >= keep.records
        and (keep.full == "refuse" or waiting.get(partition.partition, 0) >= keep.records)
    ]


def _check_archive(streams: "Streams", state: "StreamState") -> Iterator[ArchiveHealth]:
    """Yield how far the archive of a stream is behind, as far as the stream is declared here and records wait."""
    waiting = state.waiting_for_archive
    if waiting and state.stream in streams:
        partition = max(waiting, key=waiting.__getitem__)
        yield ArchiveHealth(state.stream, partition, waiting[partition], streams[state.stream].keep.records)


def _find_foreign(app: "App", queues: Sequence[str]) -> dict[str, str]:
    """Return which of these queues have a job of a task that is not declared here, and that task.

    A part of the jobs is looked at: of each queue and state those that a search finds first, for a few seconds.
    """
    foreign: dict[str, str] = {}
    end = time.monotonic() + SEARCH_LIMIT
    for queue in queues:
        for state in sorted({*WAITING_STATES, JobState.EXECUTING}):
            if queue in foreign or time.monotonic() >= end:
                break
            found = app.jobs.search(queue=queue, state=state, limit=JOBS_LOOKED_AT).jobs
            tasks = [job.task for job in found if not job.ended and job.task and job.task not in app.tasks]
            if tasks:
                foreign[queue] = tasks[0]
    return foreign


def _find_foreign_schedule(app: "App", stored: Sequence["ScheduleState"]) -> str:
    """Return a schedule that other code has declared; '' when the code here declares all of them."""
    declared = app.schedule.list_declared()
    return next(
        (
            schedule.name
            for schedule in stored
            if schedule.origin != "runtime" and schedule.name not in declared
        ),
        "",
    )


def _read_version(answer: object) -> str:
    """Return the version in a reply to `stats`; '' if it has none."""
    try:
        return msgspec.convert(answer, _Stats).process.celery5
    except msgspec.ValidationError:
        return ""
