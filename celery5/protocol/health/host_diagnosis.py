"""Diagnose this machine for `celery5 doctor`: keys, units, the application, its workers, Python."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from types import MappingProxyType

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.job.failure_groups import EXAMPLE_LENGTH, DeadJobGroup, DeadJobGroups
from celery5.protocol.names import is_queue_name
from celery5.protocol.process.missing import (
    BY_HAND,
    MAX_RETRIED,
    MembersReport,
    MissingMember,
    StartAdvice,
    format_retry,
)
from celery5.similar_names import count_rest, join_names

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
        files = shlex.join(f"{path}/{name}" for name in readable)
        return Finding("keys folder", "warn", f"others may read {', '.join(readable)}", f"chmod 600 {files}")
    return Finding("keys folder", "ok", f"{path}, for nobody else")


def diagnose_certificates(
    found: Sequence[Credential],
    refusal_reason: str,
    today: date,
    *,
    folder: str = "",
    remedy_if_revoked: str = "",
) -> Finding:
    """Diagnose the certificates.

    Args:
        found: Those in the folder of the keys.
        refusal_reason: Why this host refuses its own signature; '' when it does not.
        today: The date.
        folder: The folder of the keys.
        remedy_if_revoked: What to do if this host's own key is on the denylist.
    """
    name = "certificates"
    mine = [credential for credential in found if credential.role == "mine"]
    if not mine:
        return Finding(name, "ok", "no key of its own yet: the first signed command makes it")
    ends = {
        credential: date.fromisoformat(credential.until) for credential in found if not credential.revoked
    }
    expired = [credential for credential in mine if credential in ends and ends[credential] < today]
    own_authorities = [credential for credential in found if credential.role == "authority"]
    new_key = _find_new_key(own_authorities, ends, today, folder)
    if expired:
        summary = f"{expired[0].fingerprint[:16]} ended on {expired[0].until}"
        return Finding(name, "fail", summary, new_key)
    if refusal_reason:
        remedy = (
            remedy_if_revoked
            or (refusal_reason == UNKNOWN_ISSUER and _trust_authority(own_authorities, folder))
            or new_key
        )
        return Finding(name, "fail", f"what is signed here is refused here: {refusal_reason}", remedy)
    ending = sorted(
        (end, credential.role) for credential, end in ends.items() if (end - today).days < EXPIRY_WARNING_DAYS
    )
    if ending:
        what = ", ".join(f"{role} until {end}" for end, role in ending)
        of_others = {role for _, role in ending} == {"trusted"}
        remedy = _REPLACE_TRUSTED if of_others else f"{new_key}; other hosts must trust a new authority first"
        return Finding(name, "warn", f"they end soon, or have ended: {what}", remedy)
    revoked = sum(credential.revoked for credential in found)
    return Finding(
        name, "ok", f"{len(found)}, until {min(ends.values(), default=today)}; {revoked} of them revoked"
    )


UNKNOWN_ISSUER = "unknown-issuer"
"""The reason of a refusal: no authority that is trusted has signed."""
_REPLACE_TRUSTED = "have its owner renew it, then here: celery5 keys trust FILE, with the new certificate"


def _find_new_key(
    own_authorities: Sequence[Credential], ends: Mapping[Credential, date], today: date, folder: str
) -> str:
    """Return how a new key is made: by the authority in the folder, unless that has ended, or by the user's own."""
    if not own_authorities:
        return f"have your authority sign a new key, and put both into {shlex.quote(f'{folder}/mine.pem')}"
    are_valid = all(authority in ends and ends[authority] >= today for authority in own_authorities)
    return "celery5 keys new" if are_valid else "celery5 keys new --authority"


def _trust_authority(own_authorities: Sequence[Credential], folder: str) -> str:
    """Return how the authority of this host's key comes to be trusted here."""
    if own_authorities:
        return f"celery5 keys trust {shlex.quote(f'{folder}/ca.pem')}"
    return "celery5 keys trust FILE, with the certificate of the authority that has signed this host's key"


def diagnose_units(found: Sequence[SystemdUnit], *, version: str, is_lingering: bool, user: str) -> Finding:
    """Diagnose the installed units of systemd."""
    if not found:
        return Finding("units", "ok", "none of systemd's is installed")
    summary = f"systemd {version or 'of an unknown version'}: {', '.join(unit.name for unit in found)}"
    missing = [unit for unit in found if unit.missing]
    if missing:
        names = ", ".join(f"{unit.missing} of {unit.name}" for unit in missing)
        remedy = f"correct ExecStart in a drop-in: {_format_systemctl('edit', missing[:1])}"
        return Finding("units", "fail", f"not there: {names}", remedy)
    number = re.match(r"\d+", version)
    if number and int(number[0]) < OLDEST_SYSTEMD:
        return Finding("units", "warn", summary, f"upgrade systemd to {OLDEST_SYSTEMD} or newer")
    if any(unit.is_user_unit for unit in found) and not is_lingering:
        remedy = f"loginctl enable-linger {shlex.quote(user)}"
        return Finding("units", "warn", f"{summary}; those of {user} end when {user} logs out", remedy)
    if idle := _find_not_started(found):
        names = ", ".join(unit.name for unit in idle)
        return Finding("units", "warn", f"not started at boot: {names}", _enable(idle))
    return Finding("units", "ok", f"{summary}; enabled")


def _find_not_started(found: Sequence[SystemdUnit]) -> Sequence[SystemdUnit]:
    """Return the units for which nothing starts at boot.

    All units may be installed, and only some be used: a Controller, for example, starts its members by itself. But the
    target that starts those that are enabled must be, too.
    """
    if not any(unit.enabled for unit in found):
        return found
    return [unit for unit in found if unit.name.endswith(".target") and not unit.enabled]


def _enable(units: Sequence[SystemdUnit]) -> str:
    """Return how units are enabled: the Controller alone if it is there, since it starts all others."""
    controllers = [unit for unit in units if unit.name == "celery5-controller.service"]
    chosen = controllers or [unit for unit in units if not unit.name.endswith(".target")] or units
    has_instances = any("@." in unit.name for unit in chosen)
    explained = ", each NAME that of an environment file" if has_instances else ""
    return f"{_format_systemctl('enable', chosen)}{explained}"


def _format_systemctl(verb: str, units: Sequence[SystemdUnit]) -> str:
    """Return a command of systemctl. A template has no instance that could be named: that is for the user to fill in.

    A drop-in of a template is for all of its instances.
    """
    flag = " --user" if units[0].is_user_unit else ""
    names = [unit.name.replace("@.", "@NAME.") if verb == "enable" else unit.name for unit in units]
    return f"systemctl{flag} {verb} {shlex.join(names)}"


def diagnose_application(name: str, tasks: int, processors: int = 0) -> Finding:
    """Diagnose the application, which could be imported. One may have processors of streams and no task."""
    if not (tasks or processors):
        remedy = "name the modules that declare them: App(include=[...])"
        return Finding("application", "warn", f"{name} has no tasks", remedy)
    also = f", {format_count(processors, 'processor')}" if processors else ""
    return Finding("application", "ok", f"{name}, {format_count(tasks, 'task')}{also}")


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


MAX_CAUSES = 3
"""Causes of dead jobs that are named of many."""


def diagnose_dead_jobs(found: DeadJobGroups) -> Finding:
    """Diagnose the jobs and records that died in the last day, by what made them fail."""
    if not found.matched:
        return Finding("dead jobs", "ok", "none of the last day")
    causes = [f"{group.count} of {group.task} ({_describe_cause(group)})" for group in found.groups]
    return Finding(
        "dead jobs",
        "warn",
        f"{'more than ' if found.next else ''}{found.matched} of the last day: {join_names(causes, MAX_CAUSES)}",
        "celery5 dlq groups shows each cause; when it is mended, run the jobs again: celery5 dlq replay",
    )


def _describe_cause(group: DeadJobGroup) -> str:
    """Return why jobs failed, with the message of the newest one: the pattern may hide what an error names."""
    what = group.type or " and ".join(group.reasons)
    message = group.example or group.pattern[:EXAMPLE_LENGTH]
    return f"{what}: {message}" if message else what


MAX_QUEUES = 20
"""Queues that are named of many."""


def _more(texts: Sequence[str]) -> str:
    return count_rest(len(texts) - 1)


def diagnose_workers(
    found: Sequence[WorkerVersion],
    own_version: str,
    *,
    is_version_known: bool,
    unrouted: bool = False,
    unscheduled: bool = False,
    foreign_schedule: str = "",
    unread: Sequence[str] = (),
    foreign: Mapping[str, str] = MappingProxyType({}),
    lost: Sequence[str] = (),
    silent: Sequence[str] = (),
    breakers: Mapping[str, Sequence[str]] = MappingProxyType({}),
    lacking: Sequence[str] = (),
    awaiting: Mapping[str, str] = MappingProxyType({}),
    paused: Mapping[str, int] = MappingProxyType({}),
    recycling: str = "",
    advice: StartAdvice = BY_HAND,
) -> Finding:
    """Diagnose the workers.

    Args:
        found: The live workers.
        own_version: The version of celery5 here.
        is_version_known: Whether the workers could be asked for their versions: that needs a key.
        unrouted: Whether the application has what only a Router does, and no Router lives.
        unscheduled: Whether the application has what only a Scheduler does, and no Scheduler lives.
        foreign_schedule: A schedule that the code here does not declare, but other code has; '' for none.
        unread: The queues on which jobs wait, and that no worker reads.
        foreign: Of these, the ones with a job of a task that the code here does not declare, and that task.
        lost: Workers and other processes that were lost in the last hour, each in a line.
        silent: Live workers that are silent, likewise.
        breakers: Live workers whose circuit breakers hold something up, and the names of these.
        lacking: Which tasks have jobs that wait for a worker with what they take, for each queue in words.
        awaiting: Which tasks have jobs that wait for a worker whose code has them, for each queue in words.
        paused: The queues that are paused, and how many jobs wait on each.
        recycling: The worker that is being recycled; '' for none.
        advice: How processes are started.
    """
    finding = _diagnose_live(
        found,
        own_version,
        is_version_known=is_version_known,
        unrouted=unrouted,
        unscheduled=unscheduled,
        foreign_schedule=foreign_schedule,
        unread=unread,
        foreign=foreign,
        recycling=recycling,
        advice=advice,
    )
    warnings = list(_list_warnings(lost, silent, breakers, lacking, awaiting, paused, advice))
    if not warnings:
        return finding
    texts, remedies = zip(*warnings, strict=True)
    is_ok = finding.state == "ok"
    remedy = "; ".join(filter(None, ("" if is_ok else finding.remedy, *remedies)))
    return Finding(
        "workers", "warn" if is_ok else finding.state, "; ".join((finding.summary, *texts)), remedy
    )


def diagnose_members(
    missing: Sequence[MissingMember], further: int, report: MembersReport | None, now: float
) -> Finding:
    """Diagnose the members of the cluster: none was given up, and none stays down.

    Args:
        missing: The processes that should work and do not.
        further: How many more there are.
        report: What the leading Controller says; None if none leads.
        now: The time, in seconds since 1970.
    """
    if not missing:
        if report is None:
            return Finding("members", "ok", "no Controller runs this application")
        count = format_count(sum(group.declared for group in report.groups), "member")
        return Finding("members", "ok", f"none of {count} is missing")
    names = [member.name for member in missing if member.condition == "given up"]
    others = len(missing) - 1 + further
    summary = missing[0].describe(now) + (f"; and {others} more" if others else "")
    remedy = format_retry(*names[:MAX_RETRIED]) if names else missing[0].remedy
    more = "; celery5 controller status shows all" if others else ""
    return Finding("members", "fail" if names else "warn", summary, remedy + more)


def _list_warnings(
    lost: Sequence[str],
    silent: Sequence[str],
    breakers: Mapping[str, Sequence[str]],
    lacking: Sequence[str],
    awaiting: Mapping[str, str],
    paused: Mapping[str, int],
    advice: StartAdvice,
) -> Iterator[tuple[str, str]]:
    """Yield what is to be looked at beside what the live workers do, each with what to do."""
    if lost:
        yield (
            f"{len(lost)} lost in the last hour: {lost[0]}{_more(lost)}",
            "celery5 worker list shows all that were lost; their logs say more",
        )
    if silent:
        yield (
            f"{silent[0]}{_more(silent)}",
            "celery5 worker stack shows where the code of a silent one stands, unless it is frozen",
        )
    if breakers:
        open_breakers = [f"{join_names(names, MAX_QUEUES)} of {worker}" for worker, names in breakers.items()]
        yield (
            f"open circuit breakers: {open_breakers[0]}{_more(open_breakers)}",
            "celery5 worker health says why, and when each tries again",
        )
    if lacking:
        yield (
            join_names(lacking, MAX_QUEUES, separator="; "),
            "start a worker that has it: "
            + advice.format_worker("--capacity NAME=AMOUNT", "capacity = ...")
            + ", or the setting capacity",
        )
    if awaiting:
        yield (
            join_names(
                (f"queue {name}: {text}" for name, text in awaiting.items()), MAX_QUEUES, separator="; "
            ),
            "start a worker with that code, or correct the name or the arguments where the job is sent; a job that no "
            "live worker can read becomes a dead letter after unknown_task_grace",
        )
    if waiting := {name: count for name, count in paused.items() if count}:
        yield (
            _describe_paused(waiting),
            f"celery5 queue resume {shlex.quote(next(iter(waiting)))} when the reason is gone; "
            "celery5 audit list --action worker:pause-queue says who paused it",
        )


def _describe_paused(waiting: Mapping[str, int]) -> str:
    """Return on which paused queues jobs wait, and how many."""
    names = [f"{name} ({count})" for name, count in waiting.items()]
    return f"jobs wait on queues that are paused: {join_names(names, MAX_QUEUES)}"


def _diagnose_live(
    found: Sequence[WorkerVersion],
    own_version: str,
    *,
    is_version_known: bool,
    unrouted: bool,
    unscheduled: bool,
    foreign_schedule: str,
    unread: Sequence[str],
    foreign: Mapping[str, str],
    recycling: str,
    advice: StartAdvice,
) -> Finding:
    """Diagnose the live workers, and what they do not read."""
    if unread:
        finding = _diagnose_unread(len(found), unread, foreign, recycling, advice)
        if found or foreign:
            return finding
    if not found and recycling:
        return Finding("workers", "ok", f"{recycling} is being recycled: its next process starts")
    if not found:
        return Finding("workers", "warn", "none is alive", advice.format_start("worker"))
    summary = f"{len(found)} live"
    if unrouted or unscheduled:
        lacking = ["no Router: events and data wait"] if unrouted else []
        lacking += (
            ["no Scheduler: periodic tasks, rules of limits and scaling stand still"] if unscheduled else []
        )
        start = [advice.format_start("router")] if unrouted else []
        start += [_start_scheduler(foreign_schedule, advice)] if unscheduled else []
        return Finding("workers", "warn", f"{summary}, and {', and '.join(lacking)}", "; ".join(start))
    if not is_version_known:
        return Finding("workers", "ok", f"{summary}; no key to ask them with yet")
    return _diagnose_versions(found, own_version, summary)


def _start_scheduler(foreign_schedule: str, advice: StartAdvice) -> str:
    """Return how a Scheduler is started: one retires the schedules that no code of a live Scheduler declares."""
    if not foreign_schedule or advice.format_retry("scheduler"):
        return advice.format_start("scheduler")
    return (
        f"start a Scheduler of the code that declares the schedule {shlex.quote(foreign_schedule)}: "
        "one of this code would retire it"
    )


def _diagnose_unread(
    workers: int, unread: Sequence[str], foreign: Mapping[str, str], recycling: str, advice: StartAdvice
) -> Finding:
    """Diagnose queues that nobody reads. A worker whose code has not the task of a job ends it as a dead letter."""
    own = [name for name in unread if name not in foreign and is_queue_name(name) and name.isprintable()]
    odd = [name for name in unread if name not in foreign and name not in own]
    remedies: list[str] = []
    if own:
        names = own[:MAX_QUEUES]
        listed = ", ".join(f'"{name}"' for name in names)
        start = advice.format_worker(f"--queues {shlex.quote(','.join(names))}", f"queues = [{listed}]")
        remedies = [f"{start}; a misspelt queue stays until its jobs are done"]
    remedies += [
        f"for {shlex.quote(name)} start a worker of the code that has the task {shlex.quote(task)}, "
        "which this code has not: here its jobs would become dead letters"
        for name, task in list(foreign.items())[:MAX_QUEUES]
    ]
    if len(foreign) > MAX_QUEUES:
        remedies.append(f"so too for {format_count(len(foreign) - MAX_QUEUES, 'more queue')}")
    if odd:
        remedies.append(
            f"leave {join_names(map(repr, odd), MAX_QUEUES)}: no queue of celery5 has such a name"
        )
    shown = join_names(unread, MAX_QUEUES, separator=",")
    live = f"{workers} live" if workers else "none is alive"
    summary = f"{live}, and jobs wait on queues that {'none of them' if workers else 'nobody'} reads: {shown}"
    if recycling:
        summary += f"; {recycling} is being recycled, and perhaps reads them in a moment"
    return Finding("workers", "warn", summary, "; ".join(remedies))


def _diagnose_versions(found: Sequence[WorkerVersion], own_version: str, summary: str) -> Finding:
    refused = [worker for worker in found if worker.refusal]
    if refused:
        names = ", ".join(worker.name for worker in refused)
        remedy = (
            "celery5 keys show says what is trusted here; on the worker's host: celery5 keys trust FILE, "
            "with the certificate of this host's authority"
        )
        return Finding("workers", "fail", f"{summary}; {names}: {refused[0].refusal}", remedy)
    unanswered = [worker.name for worker in found if not worker.version]
    if unanswered:
        remedy = "look at their logs; a worker without an inbox does not answer"
        return Finding("workers", "warn", f"{summary}; no answer from {', '.join(unanswered)}", remedy)
    others = [worker for worker in found if worker.version != own_version]
    if others:
        shown = ", ".join(f"{other.name} {other.version}" for other in others)
        remedy = (
            f"restart them: celery5 worker shutdown --to {shlex.quote(others[0].name)}; start it as it was started; "
            "then the next one; under a Controller: celery5 controller restart"
        )
        return Finding("workers", "warn", f"{summary}; not of version {own_version}: {shown}", remedy)
    return Finding("workers", "ok", f"{summary}, of version {own_version}")


def diagnose_publisher(address: str, waiting: int, trouble: str, outage: str = "") -> Finding:
    """Diagnose the Publisher daemon, which has answered.

    Args:
        address: Where it answers.
        waiting: How many messages wait there.
        trouble: Why it cannot write its backlog; "" if it can.
        outage: Why it publishes nothing; "" if it does.
    """
    count = f"{waiting} message{'s' * (waiting != 1)} wait{'s' * (waiting == 1)}"
    if trouble:
        summary = f"{address}, has jobs in memory only: {trouble}; {count}"
        return Finding(
            "publisher",
            "warn",
            summary,
            "let it write to the folder of its backlog, with room on that disk; the files there are jobs: keep them",
        )
    if outage:
        return Finding(
            "publisher",
            "warn",
            f"{address}, {count}, and nothing is published: {outage}",
            "check from that host that its broker can be reached; what waits is kept, and sent once it answers",
        )
    if waiting >= MANY_WAITING_MESSAGES:
        remedy = "give it more connections: celery5 publisher start --connections 1..4"
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


def diagnose_libraries(required: Sequence[str], installed: Mapping[str, str], folder: str = "") -> Finding:
    """Diagnose the libraries.

    Args:
        required: What the package requires (`trio>=0.30`).
        installed: The versions that are installed; '' for none.
        folder: Where the code is.
    """
    if not required:
        # Not by its name: that would be another version, beside the code that runs.
        remedy = f"pip install {shlex.quote(folder or '.')}"
        return Finding("libraries", "warn", "celery5 runs from a folder, not installed", remedy)
    wrong: dict[str, str] = {}
    for requirement in required:
        if ";" in requirement:
            continue  # required by an extra only
        name = parse_requirement_name(requirement)
        installed_version = installed.get(name, "")
        if not installed_version:
            wrong[requirement] = f"{name} is not there"
        elif not all(
            _holds(installed_version, *bound)
            for bound in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", requirement)
        ):
            wrong[requirement] = f"{name} {installed_version}, which is not {requirement}"
    if wrong:
        return Finding("libraries", "fail", "; ".join(wrong.values()), f"pip install {shlex.join(wrong)}")
    shown = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()) if version)
    return Finding("libraries", "ok", shown)


def parse_requirement_name(required: str) -> str:
    """Return the name in a requirement such as `redis[hiredis]<9,>=8`."""
    return re.split(r"[\[<>=!~; ]", required, maxsplit=1)[0]


def _holds(installed_version: str, relation: str, bound: str) -> bool:
    installed_numbers, bound_numbers = _numbers(installed_version), _numbers(bound)
    width = max(len(installed_numbers), len(bound_numbers))
    installed_numbers, bound_numbers = (
        installed_numbers + (0,) * (width - len(installed_numbers)),
        bound_numbers + (0,) * (width - len(bound_numbers)),
    )
    return {
        ">=": installed_numbers >= bound_numbers,
        "<=": installed_numbers <= bound_numbers,
        "==": installed_numbers == bound_numbers,
        "<": installed_numbers < bound_numbers,
        ">": installed_numbers > bound_numbers,
    }[relation]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", re.split(r"[a-zA-Z+]", version)[0]))
