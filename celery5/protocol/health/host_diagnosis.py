"""Diagnose this machine for `celery5 doctor`: keys, units, the application, its workers, Python."""

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import date

import msgspec

from celery5.protocol.health.broker_diagnosis import Finding

EXPIRY_WARNING_DAYS = 30
"""Days before the end of a certificate from which on there is a warning."""
OLDEST_PYTHON = (3, 11)
MANY_WAITING_MESSAGES = 10_000
"""Messages in the backlog of a Publisher from which on there is a warning."""
OLDEST_SYSTEMD = 240
"""The first systemd that knows all options of the units."""


class Credential(msgspec.Struct, frozen=True):
    """A certificate: its `role` (`mine`, `authority`, `trusted`), its fingerprint, until when it holds
    (`2027-01-31`), and whether it was revoked."""

    role: str
    fingerprint: str
    until: str
    revoked: bool


class SystemdUnit(msgspec.Struct, frozen=True):
    """An installed unit of systemd: whether a target wants it (`enabled`), and the path in its ExecStart that does not
    exist (`missing`)."""

    name: str
    is_user_unit: bool
    enabled: bool
    missing: str = ""


class WorkerVersion(msgspec.Struct, frozen=True):
    """A live worker and its version, which is '' when it did not answer, or answered with a `refusal`."""

    name: str
    version: str
    refusal: str = ""


def diagnose_key_folder(path: str, modes: Mapping[str, int] | None) -> Finding:
    """Diagnose the folder of the keys, by the modes of itself (`.`) and its files; None when it does not exist."""
    if modes is None:
        return Finding("keys folder", "ok", f"{path} is not there yet: the first signed command makes it")
    if modes.get(".", 0) & 0o077:
        return Finding("keys folder", "fail", f"others may enter {path}", f"chmod 700 {shlex.quote(path)}")
    readable = sorted(name for name, mode in modes.items() if name != "." and mode & 0o077)
    if readable:
        files = shlex.join(f"{path}/{each}" for each in readable)
        return Finding("keys folder", "warn", f"others may read {', '.join(readable)}", f"chmod 600 {files}")
    return Finding("keys folder", "ok", f"{path}, for nobody else")


def diagnose_certificates(found: Sequence[Credential], refusal_reason: str, today: date) -> Finding:
    """Diagnose the certificates; `refusal_reason` is why this host refuses its own signature, '' when it does not."""
    name = "certificates"
    mine = [each for each in found if each.role == "mine"]
    if not mine:
        return Finding(name, "ok", "no key of its own yet: the first signed command makes it")
    ends = {each: date.fromisoformat(each.until) for each in found if not each.revoked}
    expired = [each for each in mine if each in ends and ends[each] < today]
    if expired:
        return Finding(
            name, "fail", f"{expired[0].fingerprint[:16]} ended on {expired[0].until}", "celery5 keys new"
        )
    if refusal_reason:
        remedy = "celery5 keys new; where its authority was revoked: celery5 keys new --authority"
        return Finding(name, "fail", f"what is signed here is refused here: {refusal_reason}", remedy)
    ending = sorted(
        (end, each.role) for each, end in ends.items() if (end - today).days < EXPIRY_WARNING_DAYS
    )
    if ending:
        what = ", ".join(f"{role} until {end}" for end, role in ending)
        return Finding(
            name,
            "warn",
            f"they end soon, or have ended: {what}",
            "celery5 keys new, and trust it on other hosts",
        )
    revoked = sum(each.revoked for each in found)
    return Finding(
        name, "ok", f"{len(found)}, until {min(ends.values(), default=today)}; {revoked} of them revoked"
    )


def diagnose_units(found: Sequence[SystemdUnit], *, version: str, is_lingering: bool, user: str) -> Finding:
    """Diagnose the installed units of systemd."""
    if not found:
        return Finding("units", "ok", "none of systemd's is installed")
    summary = f"systemd {version or 'of an unknown version'}: {', '.join(each.name for each in found)}"
    missing = [f"{each.missing} of {each.name}" for each in found if each.missing]
    if missing:
        return Finding(
            "units",
            "fail",
            f"not there: {', '.join(missing)}",
            "correct ExecStart in a drop-in: systemctl edit",
        )
    number = re.match(r"\d+", version)
    if number and int(number[0]) < OLDEST_SYSTEMD:
        return Finding("units", "warn", summary, f"upgrade systemd to {OLDEST_SYSTEMD} or newer")
    if any(each.is_user_unit for each in found) and not is_lingering:
        remedy = f"loginctl enable-linger {shlex.quote(user)}"
        return Finding("units", "warn", f"{summary}; those of {user} end when {user} logs out", remedy)
    idle = [each for each in found if not each.enabled]
    if idle:
        flag = " --user" if idle[0].is_user_unit else ""
        remedy = f"systemctl{flag} enable {shlex.join(each.name for each in idle)}"
        return Finding(
            "units", "warn", f"not started at boot: {', '.join(each.name for each in idle)}", remedy
        )
    return Finding("units", "ok", f"{summary}; enabled")


def diagnose_application(name: str, tasks: int) -> Finding:
    """Diagnose the application, which could be imported."""
    if not tasks:
        remedy = "name the modules that declare them: App(include=[...])"
        return Finding("application", "warn", f"{name} has no tasks", remedy)
    return Finding("application", "ok", f"{name}, {tasks} tasks")


def diagnose_settings(set_count: int, oddities: Sequence[str]) -> Finding:
    """Diagnose the settings, which are valid: how many are set, and what is odd about them."""
    if oddities:
        return Finding("settings", "warn", "; ".join(oddities), "celery5 config show --origin says where")
    return Finding("settings", "ok", f"{set_count} set, the rest are defaults")


def diagnose_alerts(summary: str) -> Finding:
    """Diagnose the alerts, from one line on those that fire and are not silenced, and on what was not delivered."""
    if not summary:
        return Finding("alerts", "ok", "none fires")
    return Finding("alerts", "warn", summary, "celery5 alert list says since when, and what was measured")


def diagnose_workers(
    found: Sequence[WorkerVersion],
    own_version: str,
    *,
    is_version_known: bool,
    unrouted: bool,
    unread: Sequence[str] = (),
) -> Finding:
    """Diagnose the live workers.

    Args:
        found: The live workers.
        own_version: The version of celery5 here.
        is_version_known: Whether the workers could be asked for their versions: that needs a key.
        unrouted: Whether the application has events of its own, and no Router lives.
        unread: The queues on which jobs wait, and that no worker reads.
    """
    if not found:
        return Finding("workers", "warn", "none is alive", "celery5 worker start")
    summary = f"{len(found)} live"
    if unrouted:
        return Finding("workers", "warn", f"{summary}, and no Router: events wait", "celery5 router start")
    if unread:
        queues = ",".join(unread)
        return Finding(
            "workers",
            "warn",
            f"{summary}, and jobs wait on queues that none of them reads: {queues}",
            f"celery5 worker start --queues {shlex.quote(queues)}; a misspelt queue stays until its jobs are done",
        )
    if not is_version_known:
        return Finding("workers", "ok", f"{summary}; no key to ask them with yet")
    refused = [each for each in found if each.refusal]
    if refused:
        names = ", ".join(each.name for each in refused)
        remedy = "celery5 keys show says what is trusted; celery5 keys trust, on the worker's host"
        return Finding("workers", "fail", f"{summary}; {names}: {refused[0].refusal}", remedy)
    silent = [each.name for each in found if not each.version]
    if silent:
        remedy = "look at their logs; a worker without an inbox does not answer"
        return Finding("workers", "warn", f"{summary}; no answer from {', '.join(silent)}", remedy)
    others = [f"{each.name} {each.version}" for each in found if each.version != own_version]
    if others:
        remedy = (
            "restart them: celery5 worker shutdown --to NAME, then start each as it was started; "
            "under a Controller: celery5 controller restart"
        )
        return Finding(
            "workers", "warn", f"{summary}; not of version {own_version}: {', '.join(others)}", remedy
        )
    return Finding("workers", "ok", f"{summary}, of version {own_version}")


def diagnose_publisher(address: str, waiting: int, trouble: str) -> Finding:
    """Diagnose the Publisher daemon, which has answered: how many messages wait, and why it cannot write them."""
    count = f"{waiting} message{'s' * (waiting != 1)} wait{'s' * (waiting == 1)}"
    if trouble:
        summary = f"{address}, has jobs in memory only: {trouble}; {count}"
        return Finding(
            "publisher",
            "warn",
            summary,
            "let it write to the folder of its backlog, with room on that disk; the files there are jobs: keep them",
        )
    if waiting >= MANY_WAITING_MESSAGES:
        remedy = (
            "see whether its broker answers; else give it more: celery5 publisher start --connections 1..4"
        )
        return Finding(
            "publisher", "warn", f"{address}, {count}: jobs come faster than they are published", remedy
        )
    return Finding("publisher", "ok", f"{address}, {count}")


def diagnose_unreachable_publisher(address: str, why: str) -> Finding:
    """Diagnose the Publisher daemon that the setting `publisher` names, and that cannot be reached."""
    return Finding(
        "publisher",
        "fail",
        f"{address} cannot be reached: {why}",
        "celery5 publisher start on this host, as a user who may open its socket: it sends what waits in its backlog",
    )


def diagnose_refusing_publisher(address: str, why: str) -> Finding:
    """Diagnose a Publisher daemon that serves somebody else."""
    return Finding(
        "publisher", "fail", f"{address} refuses us: {why}", "give publisher the address of our own daemon"
    )


def diagnose_python(version: Sequence[int], celery5: str) -> Finding:
    """Diagnose the interpreter."""
    summary = f"celery5 {celery5} on Python {'.'.join(map(str, version[:3]))}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        return Finding("python", "fail", summary, "use Python 3.11 or newer")
    return Finding("python", "ok", summary)


def diagnose_libraries(required: Sequence[str], installed: Mapping[str, str]) -> Finding:
    """Diagnose the libraries: what the package requires (`trio>=0.30`), and what is installed (`""` if not)."""
    if not required:
        return Finding(
            "libraries", "warn", "celery5 runs from a folder, not installed", "pip install celery5"
        )
    wrong: list[str] = []
    for each in required:
        if ";" in each:
            continue  # required by an extra only
        name = parse_requirement_name(each)
        installed_version = installed.get(name, "")
        if not installed_version:
            wrong.append(f"{name} is not there")
        elif not all(
            _holds(installed_version, *bound) for bound in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", each)
        ):
            wrong.append(f"{name} {installed_version}, which is not {each}")
    if wrong:
        return Finding("libraries", "fail", "; ".join(wrong), "pip install --upgrade celery5")
    shown = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()) if version)
    return Finding("libraries", "ok", shown)


def parse_requirement_name(required: str) -> str:
    """Return the name in a requirement such as `redis[hiredis]<9,>=8`."""
    return re.split(r"[\[<>=!~; ]", required, maxsplit=1)[0]


def _holds(installed_version: str, relation: str, bound: str) -> bool:
    one, other = _numbers(installed_version), _numbers(bound)
    width = max(len(one), len(other))
    one, other = one + (0,) * (width - len(one)), other + (0,) * (width - len(other))
    return {
        ">=": one >= other,
        "<=": one <= other,
        "==": one == other,
        "<": one < other,
        ">": one > other,
    }[relation]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", re.split(r"[a-zA-Z+]", version)[0]))
