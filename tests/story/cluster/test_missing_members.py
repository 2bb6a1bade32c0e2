"""Missing members: a Controller of real processes says which one it has given up, until that works again."""

import pytest

from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import Controlling, until
from tests.story.conftest import Desk

pytestmark = pytest.mark.timeout(500)
CLUSTER = "restart_limit = 2\n[workers.default]\n[schedulers.default]\n"
BROKEN = "import os\nif 'scheduler' in open('/proc/self/cmdline').read():\n    import prices\n"


def test_member_that_is_given_up_is_missing_until_it_works_again(desk: Desk) -> None:
    code = (desk.folder / "shop.py").read_text()
    (desk.folder / "shop.py").write_text(BROKEN + code)
    with Controlling(desk.folder, CLUSTER):
        until(lambda: desk.app.info().missing)
        (member,) = desk.app.info().missing
        assert (member.name, member.condition) == ("scheduler-default-1", "given up")
        assert "No module named 'prices'" in member.why
        assert member.since is not None
        said = celery5("-A", "shop", "health", cwd=desk.folder)
        assert said.code == 1
        restart = "celery5 -A shop controller restart scheduler-default-1"
        assert f"correct what ends it, then: {restart}" in said.out
        (desk.folder / "shop.py").write_text(code)
        again = celery5(*restart.split()[1:], cwd=desk.folder)
        assert again.code == 0, again.error
        until(lambda: not desk.app.info().missing and desk.app.info().schedulers)
        said = celery5("-A", "shop", "health", cwd=desk.folder)
        assert (said.code, "scheduler-default-1" in said.out) == (0, False), said.out


def test_the_only_scheduler_goes_on_while_its_new_code_cannot_start(desk: Desk) -> None:
    with Controlling(desk.folder, CLUSTER).up() as controller:
        before = controller.pids()["scheduler-default-1"]
        code = (desk.folder / "shop.py").read_text()
        (desk.folder / "shop.py").write_text(BROKEN + code)
        failed = controller.tell("restart", "--wait", "100")
        assert failed.code == 1
        assert "scheduler-default-2: given up" in failed.error
        assert controller.pids()["scheduler-default-1"] == before
        until(lambda: [member.name for member in desk.app.info().missing] == ["scheduler-default-2"])
        (desk.folder / "shop.py").write_text(code)
        assert controller.tell("restart", "--wait", "100").code == 0
        assert controller.pids()["scheduler-default-1"] != before
        until(lambda: not desk.app.info().missing)
