"""Unit files: systemd itself finds nothing to say about them, and they fit the worker.

Floor: tests. Reads: systemd/. Writes: copies in a folder of its own.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from celery5.processes import fleet, foreground
from celery5.settings import Settings

UNITS = sorted((Path(__file__).parents[2] / "systemd").glob("*.service"))


def options(unit: Path) -> dict[str, str]:
    """The options of a unit file; none of ours is given twice."""
    found = [line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"[A-Za-z]+=", line)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_there_are_units() -> None:
    assert UNITS


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("kind", ["--system", "--user"])
def test_systemd_has_nothing_to_say(
    unit: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("systemd-analyze"):
        return
    name = unit.name.replace("@.", "@shop.")
    (tmp_path / name).write_text(re.sub(r"(?m)^(ExecStart=)\S+", r"\1/bin/true", unit.read_text()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a user manager wants one
    said = subprocess.run(
        ["systemd-analyze", kind, "verify", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    # It exits 0 on lines that it ignores, so its words count, too.
    assert (said.stdout + said.stderr, said.returncode) == ("", 0)


def test_systemd_has_more_patience_than_a_parent_and_that_has_more_than_a_worker() -> None:
    unit = options(next(path for path in UNITS if path.name == "celery5-worker@.service"))
    grace = Settings().grace_period
    assert float(unit["TimeoutStopSec"]) >= grace + fleet.KILL_AFTER + 5
    assert fleet.KILL_AFTER >= foreground.STOP_LIMIT + 5


def test_the_worker_is_started_by_a_command_that_exists() -> None:
    unit = options(next(path for path in UNITS if path.name == "celery5-worker@.service"))
    assert unit["Type"] == "notify"
    assert unit["ExecStart"].endswith(" celery5 worker start")
