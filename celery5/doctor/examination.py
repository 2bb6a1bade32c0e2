"""Run all checks of `celery5 doctor`, each by itself and with a time limit."""

import os
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from celery5.broker.keys import Keys
from celery5.doctor.broker_checks import BrokerChecks
from celery5.doctor.host_checks import HostChecks
from celery5.errors import BrokerDenied, BrokerUnavailable, CeleryError
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.storage import describe_filling

if TYPE_CHECKING:
    from celery5.app import App

SKIPPED = "not looked at"
"""The check of the finding on all checks that were left out."""
LIMIT = 15.0
"""Seconds that one check may take."""


class DoctorCheck(NamedTuple):
    """One check, with a function that is called when all checks have run."""

    name: str
    run: Callable[[], Finding]
    cleanup: Callable[[], None] | None = None
    # Whether there is anything to check, which only an earlier check may find out.
    is_due: Callable[[], bool] = lambda: True


def get_checks(app: "App", *, root: Path = Path("/")) -> list[DoctorCheck]:
    """Return the checks of an application, its brokers and this host. systemd's folders are below `root`."""
    host = HostChecks(os.environ, root=root)
    first_broker, *other_brokers = app.brokers.names
    broker = _make_broker_checks(app, first_broker)
    return [
        DoctorCheck("application", partial(host.check_application, app)),
        DoctorCheck("settings", partial(host.check_settings, app)),
        *_list_broker_checks(broker),
        *(
            check
            for name in other_brokers
            for check in _list_broker_checks(_make_broker_checks(app, name), f" {name}")
        ),
        *([DoctorCheck("publisher", partial(host.check_publisher, app))] if app.settings.publisher else []),
        DoctorCheck("keys folder", partial(host.check_key_folder, app)),
        DoctorCheck("certificates", partial(host.check_certificates, app)),
        DoctorCheck("members", partial(_unless_unreachable, broker, partial(host.check_members, app))),
        DoctorCheck("workers", partial(_unless_unreachable, broker, partial(host.check_workers, app))),
        DoctorCheck("streams", partial(_unless_unreachable, broker, partial(host.check_streams, app))),
        DoctorCheck("dead jobs", partial(_unless_unreachable, broker, partial(host.check_dead_jobs, app))),
        DoctorCheck("alerts", partial(_unless_unreachable, broker, partial(host.check_alerts, app))),
        *get_host_checks(root=root),
    ]


def _make_broker_checks(app: "App", name: str) -> BrokerChecks:
    return BrokerChecks(
        app.brokers.get(name).endpoint,
        Keys(app.name),
        app.settings.default_queue,
        find_filling=lambda: describe_filling(app.metrics.storage(), name),
        replicas=app.settings.replicas,
    )


def _list_broker_checks(broker: BrokerChecks, suffix: str = "") -> list[DoctorCheck]:
    """Return the checks of one broker. `suffix` tells their names from those of another broker."""
    checks = {
        "persistence": broker.check_persistence,
        "replication": broker.check_replication,
        "memory": broker.check_memory,
        "clock": broker.check_clock,
        "latency": broker.check_latency,
        "permissions": broker.check_permissions,
        "keys": broker.check_keys,
    }
    return [
        DoctorCheck(f"server{suffix}", broker.check_server, broker.close),
        *(
            DoctorCheck(
                f"{name}{suffix}",
                partial(_unless_unreachable, broker, check),
                is_due=(lambda: broker.has_replicas) if name == "replication" else lambda: True,
            )
            for name, check in checks.items()
        ),
    ]


def get_host_checks(*, root: Path = Path("/")) -> list[DoctorCheck]:
    """Return the checks that need no application."""
    host = HostChecks(os.environ, root=root)
    return [
        DoctorCheck("units", host.check_units),
        DoctorCheck("python", host.check_python),
        DoctorCheck("libraries", host.check_libraries),
    ]


def run_checks(checks: Sequence[DoctorCheck], *, limit: float = LIMIT) -> Iterator[Finding]:
    """Yield what each check finds, one after the other. For plain Python.

    A check that fails, or takes longer than `limit` seconds, has a finding that reports this. Those that an unreachable
    broker left out have one finding together, the last one. At the end all connections are closed.
    """
    skipped: list[str] = []
    try:
        for check in checks:
            if not check.is_due():
                continue
            finding = _run_within(check, limit)
            if finding.skipped:
                skipped += finding.skipped
            else:
                yield finding
        if skipped:
            yield _describe_skipped(skipped)
    finally:
        for check in checks:
            if check.cleanup is not None:
                check.cleanup()


class _SkippedCheck(CeleryError):
    """A check was left out, since the broker cannot be reached."""


def _unless_unreachable(broker: BrokerChecks, check: Callable[[], Finding]) -> Finding:
    if broker.is_unreachable:
        raise _SkippedCheck
    return check()


def _describe_skipped(names: Sequence[str]) -> Finding:
    """Return the one finding on the checks that were left out."""
    why = f"{', '.join(names)}: the broker cannot be used"
    return Finding(
        SKIPPED, "warn", why, "do what is written below `server`, then: celery5 doctor", tuple(names)
    )


def _run_within(check: DoctorCheck, limit: float) -> Finding:
    """Run a check in a daemon thread: one that hangs delays neither the other checks nor the end of the process."""
    findings: list[Finding] = []
    thread = threading.Thread(
        target=lambda: findings.append(_run_safely(check)), daemon=True, name=f"doctor {check.name}"
    )
    thread.start()
    thread.join(limit)
    if findings:
        return replace(findings[0], check=check.name, skipped=(check.name,) if findings[0].skipped else ())
    return Finding(check.name, "fail", f"no answer within {limit:g} s", "see why it hangs")


def _choose_remedy(error: CeleryError) -> str:
    """Return what to do about the error that ended a check."""
    cause = (
        error.__cause__ or error.__context__
    )  # the driver hides the operating system's error, whose text it has
    is_refused = isinstance(cause, OSError) and not isinstance(cause, TimeoutError | ssl.SSLError)
    if type(error) is BrokerUnavailable and is_refused:  # nothing listens there, or the host is not known
        return "start it, or set CELERY5_BROKER; celery5 docs brokers"
    if type(error) is BrokerDenied and "password" in str(error):
        return (
            "set the right password in CELERY5_BROKER, or give back the old one beside the new one: "
            'redis-cli ACL SETUSER USER ">OLD"; celery5 docs on-call'
        )
    return "see celery5 docs doctor"


def _run_safely(check: DoctorCheck) -> Finding:
    try:
        return check.run()
    except _SkippedCheck:
        return Finding(check.name, "warn", "", skipped=(check.name,))
    except CeleryError as error:
        return Finding(check.name, "fail", get_error_text(error), _choose_remedy(error))
    except Exception as error:  # a defect of one check must not end the others
        why = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(check.name, "fail", why, "please report it")
