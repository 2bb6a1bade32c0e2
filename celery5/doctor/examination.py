"""Doctor: all checks of an application and of where it runs, each by itself, each within its time."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from celery5.broker.keys import Keys
from celery5.doctor.broker_checks import BrokerChecks
from celery5.doctor.host_checks import HostChecks
from celery5.errors import CeleryError
from celery5.protocol.health import host_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from celery5.app import App

LIMIT = 15.0
"""Seconds that one check may take."""


class DoctorCheck(NamedTuple):
    """One check: its name, what looks, and what is to be done when all checks have looked."""

    name: str
    run: Callable[[], Finding]
    cleanup: Callable[[], None] | None = None


def get_checks(app: "App", *, root: Path = Path("/")) -> list[DoctorCheck]:
    """The checks of an application: of its broker, its keys, its workers. `root` is where systemd's folders begin."""
    host = HostChecks(os.environ, root=root)
    first, *others = app.brokers.names
    broker = _broker(app, first)
    return [
        DoctorCheck("application", lambda: host_diagnosis.diagnose_application(app.name, len(app.tasks))),
        DoctorCheck("settings", partial(host.check_settings, app)),
        *_checks_of_broker(broker),
        *(each for name in others for each in _checks_of_broker(_broker(app, name), f" {name}")),
        *([DoctorCheck("publisher", partial(host.check_publisher, app))] if app.settings.publisher else []),
        DoctorCheck("keys folder", partial(host.check_key_folder, app)),
        DoctorCheck("certificates", partial(host.check_certificates, app)),
        DoctorCheck("workers", partial(_unless_away, broker, partial(host.check_workers, app))),
        *get_host_checks(root=root),
    ]


def _broker(app: "App", name: str) -> BrokerChecks:
    return BrokerChecks(app.brokers.get(name).endpoint, Keys(app.name), app.settings.default_queue)


def _checks_of_broker(broker: BrokerChecks, which: str = "") -> list[DoctorCheck]:
    """The checks of one broker; `which` follows their names, where there are several."""
    checks = {
        "persistence": broker.check_persistence,
        "memory": broker.check_memory,
        "clock": broker.check_clock,
        "latency": broker.check_latency,
        "permissions": broker.check_permissions,
        "keys": broker.check_keys,
    }
    return [
        DoctorCheck(f"server{which}", broker.check_server, broker.close),
        *(
            DoctorCheck(f"{name}{which}", partial(_unless_away, broker, check))
            for name, check in checks.items()
        ),
    ]


def get_host_checks(*, root: Path = Path("/")) -> list[DoctorCheck]:
    """The checks that need no application."""
    host = HostChecks(os.environ, root=root)
    return [
        DoctorCheck("units", host.check_units),
        DoctorCheck("python", host.check_python),
        DoctorCheck("libraries", host.check_libraries),
    ]


def run_checks(checks: Sequence[DoctorCheck], *, limit: float = LIMIT) -> Iterator[Finding]:
    """What each check finds, one after the other. One that fails, or takes longer than `limit` seconds, says that, and
    the others go on. What they have opened is closed afterwards. For plain Python."""
    try:
        for each in checks:
            yield _within(each, limit)
    finally:
        for each in checks:
            if each.cleanup is not None:
                each.cleanup()


class _Away(CeleryError):
    """The broker is not there to be looked at."""


def _unless_away(broker: BrokerChecks, look: Callable[[], Finding]) -> Finding:
    if broker.is_away:
        raise _Away("not looked at: the broker does not let us in")
    return look()


def _within(check: DoctorCheck, limit: float) -> Finding:
    """A daemon: one that hangs is left behind, and holds up neither the others nor the end."""
    found: list[Finding] = []
    thread = threading.Thread(
        target=lambda: found.append(_looked(check)), daemon=True, name=f"doctor {check.name}"
    )
    thread.start()
    thread.join(limit)
    if found:
        return replace(found[0], check=check.name)
    return Finding(check.name, "fail", f"no answer within {limit:g} s", "see why it hangs")


def _looked(check: DoctorCheck) -> Finding:
    try:
        return check.run()
    except _Away as error:
        return Finding(check.name, "warn", str(error), "see above")
    except CeleryError as error:
        return Finding(check.name, "fail", get_error_text(error), "see docs/guide/doctor.md")
    except Exception as error:  # one check that is broken says so, and the others go on
        return Finding(
            check.name,
            "fail",
            f"the check itself failed: {type(error).__name__}: {error}",
            "please report it",
        )
