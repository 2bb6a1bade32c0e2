"""What nox and `.ci/run` do not try for want of a program is named in their output."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CI = (ROOT / ".ci" / "run").read_text()


def load_noxfile() -> ModuleType:
    """Return the noxfile, looked at anew."""
    pytest.importorskip("nox", reason="nox is in the group of the session `types`, which runs this, too")
    spec = importlib.util.spec_from_file_location("noxfile_of_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nox_names_each_supported_python_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    noxfile: Any = load_noxfile()
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    beside = [
        version
        for version in noxfile.SUPPORTED
        if Path(sys.executable).with_name(f"python{version}").exists()
    ]
    assert {*noxfile.MISSING} == {*noxfile.SUPPORTED} - {running, *beside}
    assert 'session.warn(f"not tried: CPython' in (ROOT / "noxfile.py").read_text()


def test_ci_lists_beside_the_times_what_was_not_tried(tmp_path: Path) -> None:
    (took,) = re.findall(r"(?ms)^took\(\) \{\n.*?^\}$", CI)
    log = tmp_path / "log"
    log.write_text(
        "nox > not tried: CPython 3.14\nnox > not tried: CPython 3.14\nnot tried: a browser\n"
        "nox > Session lint was successful in 3 seconds.\n"
    )
    script = f'times=""; began=0; log={log}\n{took}\ntook "a part"; printf "%s" "$times"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[1:] == ["not tried: CPython 3.14", "not tried: a browser", "lint: 3 seconds"]


def test_ci_says_of_each_program_that_it_installs_when_it_cannot() -> None:
    installed = re.findall(
        r"apt-get install .*--no-install-recommends (\S+).*\n\s+\|\| echo", CI.replace("\\\n", "\n")
    )
    assert {name.strip(";") for name in installed} == {"prometheus", "postgresql", "chromium", "redis-server"}
    assert CI.count("not tried: ") >= len(installed) + 1  # and the other Pythons
