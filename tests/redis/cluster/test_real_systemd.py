"""Real systemd: a Controller and its cluster under a systemd that has really booted, in a throw-away machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis.cluster.throwaway_machine import Machine, throwaway_machine

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("CELERY5_TEST_SYSTEMD"),
        reason="boots a systemd in a throw-away root; say CELERY5_TEST_SYSTEMD=1, as root, where little is lost",
    ),
    pytest.mark.timeout(400),
]

CLUSTER = """
hung_after = 20
[routers.default]
[schedulers.default]
[publishers.default]
[workers.default]
count = {workers}
"""
ENVIRONMENT = """
CELERY5_APP=tests.redis.events.historian:app
CELERY5_BROKER=unix:///run/redis.sock
HISTORY=/tmp/history
HISTORY_APP=shop
PYTHONPATH=/mnt/celery5
"""
MEMBER = "celery5-shop-{}.service"
WORKER = MEMBER.format("worker-default-1")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with throwaway_machine() as one:
        one.run("mkdir -p /etc/celery5 /etc/systemd/system/celery5-controller.service.d")
        one.run(f"cat > /etc/celery5/controller.env <<'END'\n{ENVIRONMENT}\nEND")
        one.run("cp /etc/celery5/controller.env /etc/celery5/shop.env")
        one.run(f"cat > /etc/celery5/cluster.toml <<'END'\n{CLUSTER.format(workers=2)}\nEND")
        path = f"[Service]\nEnvironment=PATH={Path(sys.executable).parent}:/usr/bin:/bin\n"
        one.run(f"cat > /etc/systemd/system/celery5-controller.service.d/x.conf <<'END'\n{path}\nEND")
        one.run(
            "cp -r /etc/systemd/system/celery5-controller.service.d /etc/systemd/system/celery5-publisher@.service.d"
        )
        one.run("systemctl daemon-reload; systemctl start redis-server")
        yield one


def shown(machine: Machine, name: str, unit: str) -> str:
    return machine.run(f"systemctl show -P {name} {unit}")


def test_a_controller_under_systemd(machine: Machine) -> None:
    machine.run("systemctl start celery5-controller", limit=200)
    # READY came when the whole cluster was up: `start` has returned, and so it is.
    units = [
        "publisher-default-1",
        "router-default-1",
        "scheduler-default-1",
        "worker-default-1",
        "worker-default-2",
    ]
    assert [shown(machine, "ActiveState", MEMBER.format(unit)) for unit in units] == ["active"] * 5
    assert shown(machine, "ActiveState", "celery5-controller") == "active"
    assert shown(machine, "StatusText", "celery5-controller") != ""
    assert "pass" not in shown(machine, "Environment", WORKER)
    assert machine.run("ls /tmp") != "", "its own /tmp, with the canary in it, is as it was"

    # A member that dies: its sidecar has its moment, and another is started.
    before = shown(machine, "MainPID", WORKER)
    machine.run(f"kill -9 {before}")
    machine.until(f'test "$(systemctl show -P MainPID {WORKER})" != {before} && systemctl is-active {WORKER}')
    assert "worker:died" in machine.run(f"journalctl -u {WORKER}")

    # The Controller dies: its members go on, and the next one takes them over.
    pids = [shown(machine, "MainPID", MEMBER.format(unit)) for unit in units]
    controller = shown(machine, "MainPID", "celery5-controller")
    machine.run(f"kill -9 {controller}")
    machine.until(
        f'test "$(systemctl show -P MainPID celery5-controller)" != {controller}'
        " && systemctl is-active celery5-controller",
        within=120,
    )
    assert [shown(machine, "MainPID", MEMBER.format(unit)) for unit in units] == pids

    # Reload: only what has changed.
    machine.run(f"cat > /etc/celery5/cluster.toml <<'END'\n{CLUSTER.format(workers=1)}\nEND")
    machine.run("systemctl reload celery5-controller")
    gone = MEMBER.format("worker-default-2")
    machine.until(f'test "$(systemctl show -P ActiveState {gone})" = inactive', within=120)
    assert [shown(machine, "MainPID", MEMBER.format(unit)) for unit in units[:-1]] == pids[:-1]

    # Every role's lines are in the journal.
    for role in ("controller", "publisher", "router", "scheduler", "worker"):
        assert machine.run(f"journalctl -t celery5 CELERY5_EVENT=celery5:{role}:started -o cat") != ""

    # Stop: all in order.
    machine.run("systemctl stop celery5-controller", limit=200)
    assert machine.run("systemctl list-units --plain --no-legend 'celery5-shop-*'") == ""
    assert shown(machine, "Result", "celery5-controller") == "success"


def test_a_publisher_whose_socket_systemd_holds(machine: Machine) -> None:
    machine.run("systemctl start celery5-publisher@shop.socket")
    assert machine.run("stat -c %a /run/celery5/shop.publisher.sock") == "600"
    machine.run("systemctl start celery5-publisher@shop", limit=120)
    assert shown(machine, "ActiveState", "celery5-publisher@shop") == "active"
    before = shown(machine, "MainPID", "celery5-publisher@shop")
    machine.run(f"kill -9 {before}")
    machine.run("test -S /run/celery5/shop.publisher.sock")
    machine.until(
        f'test "$(systemctl show -P MainPID celery5-publisher@shop)" != {before}'
        " && systemctl is-active celery5-publisher@shop"
    )
    machine.run("systemctl stop celery5-publisher@shop", limit=120)
    assert shown(machine, "Result", "celery5-publisher@shop") == "success"
