"""A platform of one's own: the guide's is named in a cluster description, and keeps workers alive."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.story.cluster.controlling import Controlling, until
from tests.story.conftest import Desk

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "platforms.md"


@pytest.mark.timeout(300)
def test_the_platform_of_the_guide_keeps_workers_alive(desk: Desk) -> None:
    said = re.search(r'```python title="mine.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert said
    (desk.folder / "mine.py").write_text(said[1])
    whose = desk.app.tasks["shop.whose"]
    cluster = 'platform = "mine:Mine"\n[workers.default]\n'
    with Controlling(
        desk.folder, cluster, env={"PYTHONPATH": f"{desk.folder}:{PAGE.parents[2]}"}
    ).up() as controller:
        first = whose.delay().get(timeout=60)
        os.kill(first, signal.SIGKILL)
        until(lambda: controller.of("worker-default-1", "ended"))
        assert whose.delay().get(timeout=90) != first
        assert controller.tell("stop").out == "stopped\n"
        assert controller.ended().code == 0
