"""Unit files: systemd itself finds nothing to say about them, they are hardened, and they fit the processes."""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from celery5.cli.main import cli
from celery5.config.settings import Settings
from celery5.processes import foreground
from celery5.processes.lifecycle import fleet
from celery5.protocol.cluster.description import STOP_MARGIN
from celery5.protocol.cluster.members import KINDS, Member
from celery5.protocol.cluster.remote_units import RemoteSetup, format_unit_file
from celery5.protocol.cluster.units import CRASH_SIGNALS, SIDECAR_GRACE_COMMANDS
from celery5.protocol.cluster.units import HARDENING as OF_MEMBERS

UNITS = sorted(path for path in (Path(__file__).parents[2] / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
PROCESSES = ("controller", "publisher", "router", "scheduler", "worker")
HARDENED = {
    "LockPersonality": "yes",
    "NoNewPrivileges": "yes",
    "PrivateTmp": "yes",
    "ProtectControlGroups": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectSystem": "full",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}
"""What each service must have."""
WITHOUT_JOBS = {
    "RestrictNamespaces": "yes",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
}
"""What those must have, too, that run no code of jobs."""
NOT_FOR_USERS = {
    "CapabilityBoundingSet",
    "PrivateDevices",
    "ProtectClock",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "User",
    "Group",
    "DynamicUser",
}
"""What a user's systemd may not do: the unit would not start."""


def options(unit: Path) -> dict[str, str]:
    """The options of a unit file; none of ours is given twice."""
    found = [line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"[A-Za-z]+=", line)]
    assert len(dict(found)) == len(found)
    return dict(found)


def service(word: str) -> dict[str, str]:
    """The options of the service of a kind of process."""
    return options(
        next(file for file in SERVICES if file.name.split("@")[0].split(".")[0] == f"celery5-{word}")
    )


def test_there_is_a_unit_for_each_kind_of_process_and_a_target_and_a_slice() -> None:
    assert {file.name.removesuffix(".service").removesuffix("@") for file in SERVICES} == {
        f"celery5-{process}" for process in PROCESSES
    }
    assert {unit.name for unit in UNITS} - {file.name for file in SERVICES} == {
        "celery5.slice",
        "celery5.target",
        "celery5-publisher@.socket",
    }


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    """A user's systemd wants a folder for sockets, whose paths are short."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("kind", ["--system", "--user"])
def test_systemd_has_nothing_to_say(unit: Path, kind: str, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        return
    for file in UNITS:  # they name each other
        text = re.sub(r"(?m)^(ExecStart=)\S+", r"\1/bin/true", file.read_text())
        (tmp_path / file.name.replace("@.", "@shop.")).write_text(text)
    completed = subprocess.run(
        ["systemd-analyze", kind, "verify", str(tmp_path / unit.name.replace("@.", "@shop."))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    # It exits 0 on lines that it ignores, so its words count, too.
    assert (completed.stdout + completed.stderr, completed.returncode) == ("", 0)


@pytest.mark.parametrize("word", PROCESSES)
def test_a_service_says_when_it_is_ready_is_watched_reloads_and_stops_by_sigterm(word: str) -> None:
    unit = service(word)
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "main")
    assert float(unit["WatchdogSec"]) > 0
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert (unit["KillMode"], unit["KillSignal"]) == ("mixed", "SIGTERM")
    again = (unit["Restart"], unit.get("RestartPreventExitStatus"))
    assert again in [("on-failure", None), ("always", "0")], "again, but after it was told to end"
    assert (unit["PartOf"], unit["WantedBy"], unit["Also"].split()[0]) == ("celery5.target",) * 3


@pytest.mark.parametrize("word", PROCESSES)
def test_a_service_is_hardened_and_runs_for_a_user_too(word: str) -> None:
    unit = service(word)
    wanted = HARDENED if word in ("worker", "controller") else HARDENED | WITHOUT_JOBS
    assert {name: unit.get(name) for name in wanted} == wanted
    assert not unit.keys() & NOT_FOR_USERS


@pytest.mark.parametrize("word", PROCESSES)
def test_a_service_is_started_by_a_command_that_exists(word: str) -> None:
    command = shlex.split(service(word)["ExecStart"])
    assert command[:2] == ["/usr/bin/env", "celery5"]
    with cli.make_context("celery5", command[2:], resilient_parsing=True) as context:
        found = cli.get_command(context, word)
        assert found is not None
        assert "start" in found.to_info_dict(context)["commands"]


def test_members_that_a_controller_starts_are_as_hardened_as_the_unit_files() -> None:
    told: dict[str, Any] = {name: value for name, (_, value) in OF_MEMBERS.items()}
    shown: dict[Any, str] = {True: "yes", "full": "full", 0o077: "0077"}
    assert {
        name: "native" if name == "SystemCallArchitectures" else shown[value] for name, value in told.items()
    } == (HARDENED)


MOUNTS = {"PrivateTmp", "ProtectSystem", "ProtectControlGroups", "ProtectKernelTunables"}
"""What another host's kernel may not give a user's service."""


def test_remote_members_are_hardened_without_a_mount_namespace() -> None:
    member = Member(name="worker-default-1@web2", kind="worker", host="web2", arguments=("worker", "start"))
    lines = format_unit_file(RemoteSetup(app="shop"), member).splitlines()
    assert {name for name, value in HARDENED.items() if f"{name}={value}" not in lines} == MOUNTS


def test_the_sidecar_of_a_worker_that_has_died_is_left_half_a_second() -> None:
    unit = service("worker")
    assert [(name, unit[name]) for name, _ in SIDECAR_GRACE_COMMANDS] == [
        (name, f"/bin/sh -c '{shell_command}'") for name, shell_command in SIDECAR_GRACE_COMMANDS
    ]
    assert [int(signal.Signals[name]) for name in unit["SuccessExitStatus"].split()] == list(CRASH_SIGNALS)
    assert unit["OOMPolicy"] == "continue"


def test_systemd_opens_the_socket_at_which_producers_look_for_the_publisher() -> None:
    unit = options(next(file for file in UNITS if file.suffix == ".socket"))
    assert unit["ListenStream"] == "%t/celery5/%i.publisher.sock"
    assert (unit["SocketMode"], unit["DirectoryMode"]) == ("0600", "0700")
    assert "celery5-publisher@%i.socket" in service("publisher")["Also"]


def test_systemd_waits_longer_than_a_parent_and_a_parent_than_a_worker() -> None:
    grace = Settings().grace_period
    assert float(service("worker")["TimeoutStopSec"]) >= grace + fleet.KILL_AFTER + 5
    assert fleet.KILL_AFTER >= foreground.STOP_LIMIT + 5


def test_systemd_waits_longer_than_a_controller_stops_its_members() -> None:
    kinds = len(KINDS)
    assert (
        float(service("controller")["TimeoutStopSec"]) >= kinds * (Settings().grace_period + STOP_MARGIN) + 5
    )
