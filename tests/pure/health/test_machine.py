"""Machine: what is left for this process, by the system and by the control groups that it is in."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from celery5.health.machine import (
    CONTROL_GROUP_TREES,
    available_memory,
    iter_free_memory,
    read_machine,
    used_memory,
)

MiB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that says")


def group(folder: Path, limit: object, taken: int, droppable: int) -> None:
    """The files of a control group, as the kernel writes them."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon {taken - droppable}\ninactive_file {droppable}\nslab 7\n")


def test_each_group_up_to_the_top_counts_and_files_that_may_be_dropped_do_not(tmp_path: Path) -> None:
    tree = CONTROL_GROUP_TREES[0]._replace(root=str(tmp_path))
    group(tmp_path / "work.slice", 1000, 900, 300)
    group(tmp_path / "work.slice" / "shop.service", 500, 200, 0)
    assert list(iter_free_memory(tree, "/work.slice/shop.service")) == [400, 300]
    group(tmp_path / "work.slice" / "shop.service", "max", 200, 0)
    assert list(iter_free_memory(tree, "/work.slice/shop.service")) == [400]
    assert list(iter_free_memory(tree, "/somewhere/else")) == []
    group(tmp_path, 300, 100, 0)  # the top is all that a container sees of its own
    assert list(iter_free_memory(tree, "/docker/of/the/host")) == [200]
    assert list(iter_free_memory(tree, "")) == [200]


@pytest.fixture
def own_group() -> Iterator[Path]:
    """A control group of the test's own."""
    for tree in CONTROL_GROUP_TREES:
        folder = Path(tree.root) / f"celery5-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                if (folder / tree.limit_file).exists():
                    (folder / tree.limit_file).write_text(str(256 * MiB))
                    yield folder
                    return
            finally:
                folder.rmdir()
    pytest.skip("no control group may be made here")


def test_a_process_with_a_limit_has_what_that_leaves(own_group: Path) -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from celery5.health.machine import available_memory; print(available_memory())"
    )
    line = (sys.executable, "-c", code, str(own_group / "cgroup.procs"))
    completed = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True)
    assert 100 * MiB < int(completed.stdout) <= 256 * MiB


def test_a_machine_has_cores_and_memory_and_a_process_uses_some() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert machine.memory > MiB
    assert available_memory() > MiB
    assert 5 * MiB < used_memory() < 64 * 1024 * MiB
