"""Run members of a cluster as systemd services: names, properties, and events from their changes.

Members are transient units (StartTransientUnit): no file has to be installed, each has its own command line,
and it is gone when it has ended. They are hardened like the unit files in systemd/. Their environment comes
from a file that only they can read, since systemd shows a unit's properties to everybody.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery5.protocol.cluster.members import (
    PARENT_VARIABLE,
    Ended,
    Member,
    MemberEvent,
    Ready,
    State,
    Stopping,
)
from celery5.protocol.process.liveness import get_silence_limit

SLICE = "celery5.slice"
"""The slice of all members: `systemctl --user stop celery5.slice` ends them, whatever started them."""
SERVICE_INTERFACE = "org.freedesktop.systemd1.Service"
UNIT_INTERFACE = "org.freedesktop.systemd1.Unit"
UNIT_PATH = "/org/freedesktop/systemd1/unit"
STOP_MARGIN = 15.0
"""Seconds beyond `stop_after` until systemd kills: the Foreman should act first."""
SIDECAR_GRACE_COMMANDS = (
    ("ExecStop", 'test -n "$$MAINPID" || sleep 0.5'),
    ("ExecStopPost", 'test "$$SERVICE_RESULT" != watchdog || sleep 0.5'),
)
"""The half second that a dead worker's sidecar needs to put its jobs back, before all is killed.

When the watchdog ends a service there is no ExecStop.
"""
SIGNAL_NAMES: Mapping[int, str] = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
    24: "SIGXCPU",
    31: "SIGSYS",
}
"""Signal numbers of Linux: systemd runs on Linux only."""
CRASH_SIGNALS = (4, 6, 7, 8, 9, 11, 31)
"""Signals that systemd should take for a success: after a failure it kills the rest at once, and runs no
ExecStop.

The Foreman judges how the member ended.
"""
HARDENING: Mapping[str, tuple[str, Any]] = {
    "LockPersonality": ("b", True),
    "NoNewPrivileges": ("b", True),
    "PrivateTmp": ("b", True),
    "ProtectControlGroups": ("b", True),
    "ProtectKernelTunables": ("b", True),
    "ProtectSystem": ("s", "full"),
    "RestrictRealtime": ("b", True),
    "RestrictSUIDSGID": ("b", True),
    "SystemCallArchitectures": ("as", ["native"]),
    "UMask": ("u", 0o077),
}
"""The hardening of the unit files in systemd/."""
EXCLUDED_VARIABLES = frozenset({
    "CREDENTIALS_DIRECTORY", "FDSTORE", "INVOCATION_ID", "JOURNAL_STREAM", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID",
    "MAINPID", "MANAGERPID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "MONITOR_EXIT_CODE", "NOTIFY_SOCKET",
    PARENT_VARIABLE, "PIDFILE", "RUNTIME_DIRECTORY", "SERVICE_RESULT", "SYSTEMD_EXEC_PID", "WATCHDOG_PID", "WATCHDOG_USEC",  # noqa: E501
})  # fmt: skip
"""Variables that systemd sets for each service, and those that are the Controller's alone."""

_PLAIN = re.compile(r"[A-Za-z0-9_.]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KILLED = (2, 3)
_OF_SYSTEMD = range(200, 250)
"""systemd's own exit codes, between the fork and the program: see systemd.exec(5)."""
_WORDS: Mapping[str, str] = {
    "core-dump": "ended by {signal}, and left a core dump",
    "exit-code": "ended with exit code {code}",
    "exec-condition": "systemd did not start it",
    "not-started": "systemd could not start it, exit code {code}: see journalctl -u {unit}",
    "oom-kill": "the system had no memory left for it",
    "protocol": "ended before it was ready",
    "resources": "systemd had not what it needs to start it: see journalctl -u {unit}",
    "signal": "ended by {signal}",
    "start-limit-hit": "systemd starts it no more: it was started too often",
    "timeout": "systemd waited for it for too long",
    "watchdog": "its event loop hung: systemd killed it",
}


class LaunchCommand(NamedTuple):
    """How members are started on this host."""

    program: tuple[str, ...]  # with the arguments before those of the member
    directory: str
    environment_file: str  # the file in which systemd finds the environment
    hung_after: float  # seconds without a heartbeat after which systemd kills it; 0: never
    start_limit: float


def get_unit_prefix(app: str) -> str:
    """Return the prefix of a cluster's unit names.

    A drop-in in `celery5-shop-.service.d` applies to all of them.
    """
    return f"celery5-{_escaped(app)}-"


def get_unit_pattern(app: str) -> str:
    """Return the pattern of a cluster's unit names, for ListUnitsByPatterns."""
    return get_unit_prefix(app).replace("\\", "\\\\") + "*.service"


def get_unit_name(app: str, member: str) -> str:
    """Return the name of a member's unit.

    Dashes in a member's name stay, so that drop-ins may apply to a group.
    """
    return f"{get_unit_prefix(app)}{'-'.join(_escaped(part) for part in member.split('-'))}.service"


def parse_member_name(app: str, unit: str) -> str:
    """Return the member of a unit; '' for a unit of another cluster."""
    if not unit.startswith(get_unit_prefix(app)) or not unit.endswith(".service"):
        return ""
    member = unit.removeprefix(get_unit_prefix(app)).removesuffix(".service")
    name = bytearray()
    for index, part in enumerate(re.split(r"\\x([0-9a-f]{2})", member)):
        name += bytes.fromhex(part) if index % 2 else part.encode()
    return name.decode(errors="replace")


def get_unit_path(unit: str) -> str:
    """Return the D-Bus object path of a unit."""
    return f"{UNIT_PATH}/{''.join(_on_bus(index, byte) for index, byte in enumerate(unit.encode()))}"


def build_properties(member: Member, command: LaunchCommand) -> list[tuple[str, tuple[str, Any]]]:
    """Return the properties of a member for StartTransientUnit. Times are microseconds."""
    stop = member.stop_after + STOP_MARGIN
    words = [word.replace("$", "$$") for word in (*command.program, *member.arguments)]
    properties: dict[str, tuple[str, Any]] = {
        "Description": ("s", f"celery5 member {member.name}"),
        "Slice": ("s", SLICE),
        "CollectMode": ("s", "inactive-or-failed"),
        "Type": ("s", "notify"),
        "NotifyAccess": ("s", "main"),
        "ExecStart": ("a(sasb)", [(command.program[0], words, False)]),
        **{
            name: ("a(sasb)", [("/bin/sh", ["/bin/sh", "-c", shell_command], True)])
            for name, shell_command in SIDECAR_GRACE_COMMANDS
        },
        "WorkingDirectory": ("s", command.directory),
        "EnvironmentFiles": ("a(sb)", [(command.environment_file, False)]),
        "SuccessExitStatus": ("(aiai)", ([], list(CRASH_SIGNALS))),
        "OOMPolicy": ("s", "continue"),
        "Restart": ("s", "no"),
        "TimeoutStartUSec": ("t", _micro(command.start_limit + STOP_MARGIN)),
        "TimeoutStopUSec": ("t", _micro(stop)),
        "KillMode": ("s", "mixed"),
        "KillSignal": ("i", 15),
        "SyslogIdentifier": ("s", "celery5"),
        **HARDENING,
    }
    if command.hung_after:
        properties["WatchdogUSec"] = ("t", _micro(get_silence_limit(command.hung_after)))
        properties["WatchdogSignal"] = ("i", 9)
    return list(properties.items())


def format_environment_file(environment: Mapping[str, str]) -> str:
    """Return an environment as the text of a file for EnvironmentFile=.

    Like systemd, skip names that no shell could have.
    """
    return "".join(
        f'{name}="{_QUOTED.sub(_BACKSLASH, value)}"\n'
        for name, value in sorted(environment.items())
        if _VARIABLE.fullmatch(name) and name not in EXCLUDED_VARIABLES
    )


def make_ended(member: str, unit: str, properties: Mapping[str, Any]) -> Ended:
    """Return the event that a member has ended, and how, from the last properties of its unit."""
    result = str(properties.get("Result", "success"))
    how, status = properties.get("ExecMainCode"), properties.get("ExecMainStatus")
    if not how or status is None:  # it has never run, or its unit is gone already
        text = "ended" if result == "success" else _WORDS.get(result, result)
        return Ended(member, text.format(code="?", signal="a signal", unit=unit))
    code = -int(status) if how in _KILLED else int(status)
    by = _signal(-code) if code < 0 else ""
    if result == "success":
        return Ended(member, f"ended by {by}" if by else "ended as it was asked to", code)
    if result == "exit-code" and code in _OF_SYSTEMD:
        result = "not-started"
    text = _WORDS.get(result, result).format(code=code, signal=by or "a signal", unit=unit)
    # a member that ended before it was ready may exit with 0, but not because it was asked to
    return Ended(member, text, code or None)


def parse_state(active: str) -> State | None:
    """Return a member's state from the ActiveState of its unit; None when it does not run."""
    return _STATES.get(active)


def get_member_events(
    member: str, unit: str, properties: Mapping[str, Any], previous: State | None
) -> Sequence[MemberEvent]:
    """Return the events that changed properties mean for a member that was in the state `previous`."""
    state = parse_state(str(properties["ActiveState"])) if "ActiveState" in properties else previous
    if state is None:
        return () if previous is None else (make_ended(member, unit, properties),)
    events: list[MemberEvent] = []
    if state != previous and state == "up":
        events.append(Ready(member))
    if state != previous and state == "stopping":
        events.append(Stopping(member))
    return events


def _escaped(name: str) -> str:
    """Return the name as systemd-escape has it, with dashes escaped, too."""
    return "".join(
        character if _PLAIN.fullmatch(character) else "".join(f"\\x{byte:02x}" for byte in character.encode())
        for character in name
    )


def _on_bus(index: int, byte: int) -> str:
    letter = chr(byte)
    plain = letter.isascii() and letter.isalnum() and not (index == 0 and letter.isdigit())
    return letter if plain else f"_{byte:02x}"


def _micro(seconds: float) -> int:
    return int(seconds * 1_000_000)


def _signal(number: int) -> str:
    return SIGNAL_NAMES.get(number, f"signal {number}")


_QUOTED = re.compile(r'([\\"`$])')
_BACKSLASH = r"\\\1"
_STATES: Mapping[str, State] = {
    "activating": "starting",
    "active": "up",
    "reloading": "up",
    "deactivating": "stopping",
}
