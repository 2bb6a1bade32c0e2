"""Run members on a remote host as units of its systemd: the scripts to send, and their replies.

Each member is a unit of the user's own service manager on that host, in its runtime folder: so nothing survives the
next boot, and nothing depends on the connection. All goes in one script on standard input, none of it on a
command line that others can see. The script is one group in braces: half of one is a syntax error, and does
nothing. Secrets are in an environment file that only the user can read.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from celery5.protocol.cluster.members import Member
from celery5.protocol.process.liveness import get_silence_limit

UnitVerb = Literal["start", "stop", "kill", "reload"]

LINE_PREFIX = "celery5:"
"""The prefix of the scripts' output lines: a login shell may print other things."""
BOOTSTRAP_SCRIPT = (
    'exec 3<&0; read -r n; s=$(head -c "$n" <&3); '
    'printf %s "$s" | timeout -k 2 "$1" sh & m=$!; '
    '{ cat <&3; kill "$m"; } >/dev/null 2>&1 & w=$!; '
    'wait "$m"; r=$?; kill "$w" 2>/dev/null; exit "$r"'
)
"""The command for the remote shell: read a script, run it with a time limit, and end it when the connection
ends, since sshd would leave it running.
"""
NO_LINGER_REPORT = "no-linger"
_EXITED, _KILLED, _DUMPED = "1", "2", "3"
"""How a main process ended: ExecMainCode is a code of waitid(2)."""
_SHOWN = "Id,ActiveState,Result,ExecMainCode,ExecMainStatus,InvocationID,StatusText,MainPID"
_BEFORE = """umask 077
export LC_ALL=C SYSTEMD_PAGER=cat SYSTEMD_COLORS=0
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
echo celery5:begin
"""
_WATCH = """if [ "$(loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null)" = no ]; then
  echo celery5:no-linger
fi
while :; do
  systemctl --user show --property=%s %s || exit 3
  echo celery5:seen
  sleep %s
done
"""
_ACTS = """units=$XDG_RUNTIME_DIR/systemd/user
secrets=$XDG_RUNTIME_DIR/celery5
mkdir -p "$units" "$secrets" || exit 4
put() { printf %s "$2" > "$1.new" && mv -f "$1.new" "$1" || exit 4; }
show() { systemctl --user show --value --property="$2" "$1"; }
did() { printf 'celery5:%s %s %s\\n' "$1" "$2" "$(printf %s "$3" | tr '\\n' ' ')"; }
do_start() {
  case $(show "$1" ActiveState) in
    active | activating | reloading) did begun "$1" "$(show "$1" InvocationID)"; return ;;
  esac
  was=$(show "$1" InvocationID)
  systemctl --user reset-failed "$1" 2>/dev/null
  why=$(systemctl --user start --no-block "$1" 2>&1) || { did refused "$1" "$why"; return; }
  for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    is=$(show "$1" InvocationID)
    [ "$is" = "$was" ] || break
    sleep 0.1
  done
  did begun "$1" "$is"
}
do_stop() { systemctl --user stop --no-block "$1" 2>/dev/null; }
do_kill() { systemctl --user kill --kill-who=main --signal=SIGKILL "$1" 2>/dev/null || do_stop "$1"; }
do_reload() { systemctl --user kill --kill-who=main --signal=SIGHUP "$1" 2>/dev/null; }
"""
_UNIT = """# Written by a Controller of celery5. It is gone with the next boot.
[Unit]
Description=celery5 {name} of {app}
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
TimeoutStartSec={start_limit:.0f}
EnvironmentFile=%t/celery5/{unit}.env
{own}WorkingDirectory={directory}
ExecStart=/usr/bin/env {words}
# Who is started again, and when, the Foreman decides.
Restart=no
WatchdogSec={silence:g}
WatchdogSignal=SIGKILL
# A worker that has died leaves its sidecar, which puts its jobs back within moments, if it is left half a second.
KillMode=mixed
ExecStop=/bin/sh -c 'test -n "$$MAINPID" || sleep 0.5'
KillSignal=SIGTERM
TimeoutStopSec={stop_after:.0f}
NoNewPrivileges=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077
"""


class RemoteSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How members run on a host. `~` is the user's home there. Limits are seconds; 0: none."""

    app: str
    command: str = "celery5"  # the celery5 program there
    directory: str = "~"
    environment: Mapping[str, str] = {}
    environment_file: str = ""  # a file there with more variables
    start_limit: float = 180.0
    hung_after: float = 60.0


class UnitCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An action on a member there."""

    verb: UnitVerb
    name: str
    member: Member | None = None  # to be started


class UnitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a unit, as systemd reports it."""

    member: str
    active: str
    result: str = ""
    code: str = ""
    status: str = ""
    invocation: str = ""  # another one for each start
    status_text: str = ""
    pid: int = 0


def get_unit_name(app: str, member: str) -> str:
    """Return the name of a member's unit."""
    return f"celery5.{_plain(app)}.{_plain(member)}.service"


def _plain(name: str) -> str:
    """Return the name with each byte but letters, digits and dashes as _xx: safe in shells, patterns and unit
    names.
    """
    return "".join(
        chr(byte) if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) == "-") else f"_{byte:02x}"
        for byte in name.encode()
    )


def _spoken(name: str) -> str | None:
    """Return the name that `_plain` encoded as `name`; None if it cannot have: anybody on that host may start
    units.
    """
    first, *others = name.split("_")
    try:
        decoded = (
            first.encode() + b"".join(bytes.fromhex(other[:2]) + other[2:].encode() for other in others)
        ).decode()
    except ValueError:
        return None
    return decoded if _plain(decoded) == name else None


def frame_script(text: str) -> bytes:
    """Return the input for the shell there: the length and the script."""
    script = f"{{\n{_BEFORE}{text}}}".encode()
    return b"%d\n%s" % (len(script), script)


def make_watch_script(app: str, interval: float) -> bytes:
    """Return a script that reports the units of an application every `interval` seconds, without end."""
    return frame_script(_WATCH % (_SHOWN, shlex.quote(f"celery5.{_plain(app)}.*.service"), f"{interval:g}"))


def make_command_script(setup: RemoteSetup, commands: Sequence[UnitCommand]) -> bytes:
    """Return a script that performs all these commands in order. It writes the files of what starts first."""
    lines = [_ACTS]
    for member in (command.member for command in commands if command.member is not None):
        unit = get_unit_name(setup.app, member.name)
        lines.append(f'put "$units/{unit}" {shlex.quote(format_unit_file(setup, member))}\n')
        lines.append(f'put "$secrets/{unit}.env" {shlex.quote(format_environment_file(setup, member))}\n')
    if any(command.member is not None for command in commands):
        lines.append("systemctl --user daemon-reload || exit 3\n")
    lines.extend(f"do_{command.verb} {get_unit_name(setup.app, command.name)}\n" for command in commands)
    lines.append("echo celery5:done\n")
    return frame_script("".join(lines))


def format_unit_file(setup: RemoteSetup, member: Member) -> str:
    """Return the unit file of a member."""
    own = f"EnvironmentFile={_path(setup.environment_file)}\n" if setup.environment_file else ""
    first, *others = shlex.split(setup.command)
    words = f'"%h{_quoted(first[1:])[1:]}' if first.startswith("~/") else _quoted(first)
    return _UNIT.format(
        name=member.name.replace("%", "%%"),
        app=setup.app.replace("%", "%%"),
        unit=get_unit_name(setup.app, member.name),
        own=own,
        directory=_path(setup.directory),
        words=" ".join([words, *map(_quoted, (*others, *member.arguments))]),
        start_limit=setup.start_limit,
        silence=get_silence_limit(setup.hung_after),
        stop_after=member.stop_after,
    )


def _path(path: str) -> str:
    home = path == "~" or path.startswith("~/")
    return ("%h" + path[1:].replace("%", "%%")) if home else path.replace("%", "%%")


def _quoted(word: str) -> str:
    """Return one word of a command line, quoted as systemd.service(5) requires."""
    for plain, escaped in (
        ("\\", "\\\\"),
        ('"', '\\"'),
        ("%", "%%"),
        ("$", "$$"),
        ("\n", "\\n"),
        ("\t", "\\t"),
    ):
        word = word.replace(plain, escaped)
    return f'"{word}"'


def format_environment_file(setup: RemoteSetup, member: Member) -> str:
    """Return the member's environment in the format of systemd.exec(5). Its own variables override the host's."""
    lines: list[str] = []
    for name, value in {**setup.environment, **member.environment}.items():
        for special in ("\\", '"', "`", "$"):
            value = value.replace(special, f"\\{special}")
        lines.append(f'{name}="{value}"\n')
    return "".join(lines)


def parse_unit_statuses(app: str, lines: Iterable[str]) -> dict[str, UnitStatus]:
    """Return the unit statuses in one report, by member. Other lines are ignored."""
    prefix, statuses = f"celery5.{_plain(app)}.", dict[str, UnitStatus]()
    properties: dict[str, str] = {}
    for line in [*lines, ""]:
        name, equals, value = line.partition("=")
        if equals:
            properties[name] = value
            continue
        unit = properties.get("Id", "")
        if unit.startswith(prefix) and unit.endswith(".service"):
            member = _spoken(unit.removeprefix(prefix).removesuffix(".service"))
            if member is None:
                properties = {}
                continue
            statuses[member] = UnitStatus(
                member=member,
                active=properties.get("ActiveState", ""),
                result=properties.get("Result", ""),
                code=properties.get("ExecMainCode", ""),
                status=properties.get("ExecMainStatus", ""),
                invocation=properties.get("InvocationID", ""),
                status_text=properties.get("StatusText", ""),
                pid=int(pid) if (pid := properties.get("MainPID", "")).isdecimal() and pid.isascii() else 0,
            )
        properties = {}
    return statuses


def parse_start_replies(app: str, lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the result of each start, by member: `begun` and its invocation, or `refused` and the reason."""
    prefix, replies = f"celery5.{_plain(app)}.", dict[str, tuple[str, str]]()
    for line in lines:
        word, _, rest = line.removeprefix(LINE_PREFIX).partition(" ")
        unit, _, more = rest.partition(" ")
        if line.startswith(LINE_PREFIX) and word in ("begun", "refused") and unit.startswith(prefix):
            member = _spoken(unit.removeprefix(prefix).removesuffix(".service"))
            if member is not None:
                replies[member] = (word, more.strip()[:300])
    return replies


def describe_exit(unit: UnitStatus) -> tuple[str, int | None]:
    """Return how a unit ended, for people, and its exit code: below zero for a signal, None when it is unknown."""
    number = int(unit.status) if unit.status.isascii() and unit.status.isdigit() else 0
    if unit.result == "watchdog":
        return "hung: its event loop said nothing for too long", -9
    if unit.code in (_KILLED, _DUMPED):
        return f"signal {number}", -number
    if unit.code == _EXITED:
        hint = ": celery5 is not found there, say `command` of the host" if number == 127 else ""
        return f"exit code {number}{hint}", number
    return f"systemd says {unit.result or unit.active or 'nothing'}", None
