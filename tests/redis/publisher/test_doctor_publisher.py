"""Doctor and Publisher: whether the daemon of the setting `publisher` answers, and what waits there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor.examination import get_checks, run_checks
from celery5.protocol.health import host_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from tests.redis.commands.staff import wait_until
from tests.redis.publisher.publishing import Daemon, publishing
from tests.redis.publisher.test_publisher_daemon_ways import free_port

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def own_daemon(own_server: EmbeddedServer, app_name: str, short_path: Path) -> Iterator[Daemon]:
    with publishing(app_name, own_server.url, short_path) as one:
        yield one


def found(app: App) -> list[Finding]:
    """What the doctor finds about the Publisher."""
    try:
        return list(run_checks([check for check in get_checks(app) if check.name == "publisher"]))
    finally:
        app.close()


def test_the_daemon_is_asked_whether_it_answers_and_what_waits(
    own_daemon: Daemon, own_server: EmbeddedServer
) -> None:
    where = f"unix://{own_daemon.socket}"
    (away,) = found(own_daemon.app())
    assert (away.state, away.summary.startswith(f"{where} cannot be reached: ")) == ("fail", True)
    assert away.remedy.startswith("celery5 publisher start on this host")
    own_server.kill()
    own_daemon.start()
    app: Any = own_daemon.app()
    app.send_many([app.tasks["number"].s(n) for n in range(3)])
    wait_until(lambda: found(app)[0].state == "warn")
    (unpublished,) = found(app)
    assert unpublished.summary.startswith(f"{where}, 3 messages wait, and nothing is published: ")
    assert own_server.url.partition("?")[0] in unpublished.summary
    (other,) = found(App("stranger", broker=own_daemon.url, publisher=where))
    assert (other.state, "it publishes for the application" in other.summary) == ("fail", True)
    assert found(App(own_daemon.name, broker=own_daemon.url)) == []
    own_server.revive()
    wait_until(lambda: found(app) == [Finding("publisher", "ok", f"{where}, 0 messages wait")])


def test_the_daemon_is_asked_over_tls_and_by_whom_it_trusts(own_daemon: Daemon) -> None:
    authority, folder, port = trustme.CA(), own_daemon.folder, free_port()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    own_daemon.start("--tcp", f"127.0.0.1:{port}", "--certificate", f"{folder}/server.pem")
    where = f"tls://127.0.0.1:{port}"
    (well,) = found(own_daemon.app(publisher=f"{where}?ca={folder}/ca.pem"))
    assert (well.state, well.summary) == ("ok", f"{where}, 0 messages wait")
    (unknown,) = found(own_daemon.app(publisher=where))
    assert (unknown.state, "certificate verify failed" in unknown.summary) == ("fail", True)


@pytest.mark.parametrize(
    ("waiting", "trouble", "outage", "told"),
    [
        (1, "", "", ("ok", "1 message waits")),
        (host_diagnosis.MANY_WAITING_MESSAGES, "", "", ("warn", "jobs come faster than they are published")),
        (0, "disk full", "", ("warn", "has jobs in memory only: disk full")),
        (0, "", "no answer", ("warn", "nothing is published: no answer")),
    ],
)
def test_what_waits_there_is_judged(waiting: int, trouble: str, outage: str, told: tuple[str, str]) -> None:
    finding = host_diagnosis.diagnose_publisher("unix://", waiting, trouble, outage)
    assert (finding.state, told[1] in finding.summary) == (told[0], True)
    assert bool(finding.remedy) == (finding.state != "ok")
