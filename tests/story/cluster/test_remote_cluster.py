"""A cluster on two machines: `celery5 controller start` has a worker on the other one, over ssh.

Sshd, ssh, the Controller and the worker are real; `tests/trio/cluster/systemctl_there.py` is in the place of systemd.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.story.cluster.controlling import Controlling, until
from tests.story.conftest import Desk
from tests.trio.cluster import sshd
from tests.trio.cluster.sshd import OtherHost

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not()),
]
NAME = "worker-default-1@web2"
HERE = Path(__file__).resolve().parents[3]


@pytest.fixture
def host(desk: Desk) -> Iterator[OtherHost]:
    """Another machine, which the `ssh` of the user calls web2."""
    folder = desk.folder / "web2"
    folder.mkdir()
    with sshd.other_host(folder) as one:
        (folder / "ssh").mkdir()
        program = folder / "ssh" / "ssh"
        program.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
        program.chmod(0o755)
        yield one


def test_remote_worker_survives_its_connection_and_ends_in_order(desk: Desk, host: OtherHost) -> None:
    cluster = f"""
[workers.default]
hosts = ["web2"]
[hosts.web2]
command = "{sys.executable} -m celery5"
directory = "{desk.folder}"
environment = {{ PYTHONPATH = "{HERE}:{desk.folder}" }}
"""
    path = f"{host.folder}/ssh:{os.environ['PATH']}"
    whose = desk.app.tasks["shop.whose"]
    with Controlling(desk.folder, cluster, env={"PATH": path}).up() as controller:
        (unit,) = host.units().values()
        assert whose.delay().get(timeout=60) == int(unit["MainPID"])
        host.down()
        until(
            lambda: controller.members()[NAME]["trouble"].startswith(
                "unknown: host web2 (web2) is unreachable"
            )
        )
        assert whose.delay().get(timeout=60) == int(unit["MainPID"]), "it goes on working"
        host.up()
        until(lambda: controller.members()[NAME]["trouble"] == "")
        assert controller.tell("stop").out == "stopped\n"
        assert controller.ended().code == 0
    (unit,) = host.units().values()
    assert (unit["ActiveState"], unit["ExecMainStatus"]) == ("inactive", "0")
    assert controller.logged("member:killed") == []
