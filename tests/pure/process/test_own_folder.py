"""Own folder: what a process that is gone has left is taken away, and what a living one has is not."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from celery5.services.process.own_folder import LOCK_NAME, remove_stale_folders, temporary_folder

OWNER = """
import sys, time
from celery5.services.process.own_folder import temporary_folder
with temporary_folder("kind") as folder:
    open(folder + "/socket", "w").close()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_for_this_user_alone_and_goes_with_the_block(place: Path) -> None:
    with temporary_folder("kind") as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        with temporary_folder("kind") as other:
            assert {Path(folder), Path(other)} == set(place.iterdir())
        assert Path(folder).exists()
    assert list(place.iterdir()) == []


def test_next_process_removes_only_what_a_killed_one_left(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        remove_stale_folders("kind")
        assert (folder / "socket").exists()  # it lives
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    strange, begun, target = place / "kind-strange", place / "kind-begun", place / "target"
    for made in (strange, begun, target):
        made.mkdir()
    (begun / LOCK_NAME).touch()  # somebody is about to have it
    (target / LOCK_NAME).write_text("held")
    (place / "kind-link").symlink_to(target)
    with temporary_folder("kind"):
        assert not folder.exists()
    assert {path.name for path in place.iterdir()} == {"kind-strange", "kind-begun", "target", "kind-link"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_is_let_be(place: Path) -> None:
    other = place / "kind-other"
    other.mkdir()
    (other / LOCK_NAME).write_text("held")
    os.chown(other, 12345, 12345)
    remove_stale_folders("kind")
    assert other.exists()
