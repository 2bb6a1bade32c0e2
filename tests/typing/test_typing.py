"""Typing: both type checkers see the parameters of `delay` and the type of `get`, and refuse what is wrong."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = re.sub(r"# type: ignore\[.*\]", "# wrong", Path(__file__).with_name("sample.py").read_text())
"""The sample with its mistakes in the open."""
WRONG = {number for number, line in enumerate(SAMPLE.splitlines(), 1) if line.endswith("# wrong")}

pytestmark = pytest.mark.timeout(180)


def said(*command: str) -> str:
    """What a checker says, on both of its streams."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    return done.stdout or done.stderr


def needs(checker: str) -> None:
    """Skip where the checker is not installed: it is in the group of the session `types`, which runs this, too."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed here")


def test_the_sample_holds_mistakes() -> None:
    assert len(WRONG) > 15


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """The sample as its own file."""
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    return path


def page(name: str, folder: Path) -> Path:
    """The first file that a page of the guide shows, which is to pass `--strict` as it stands there."""
    text = (ROOT / "docs" / "guide" / f"{name}.md").read_text()
    shown = re.search(r'(?ms)^```python title="[^"]+"\n(.*?)^```$', text)
    assert shown
    path = folder / f"page_{name}.py"
    path.write_text(shown[1])
    return path


def test_mypy_sees_the_types_and_refuses_the_mistakes_and_nothing_in_the_guide(sample: Path) -> None:
    needs("mypy")
    pages = [
        page(name, sample.parent) for name in ("logging", "testing", "results", "dead-letters", "resources")
    ]
    text = said("mypy", f"--cache-dir={sample.parent / 'cache'}", str(sample), *map(str, pages))
    assert "page_" not in text, text
    errors = {int(line): what for line, what in re.findall(rf"{sample.name}:(\d+): error: (.*)", text)}
    assert set(errors) == WRONG, text


def test_basedpyright_sees_the_types_and_refuses_the_mistakes(sample: Path) -> None:
    needs("basedpyright")
    settings = {
        "include": [str(sample)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    (sample.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    text = said("basedpyright", "-p", str(sample.parent), "--pythonpath", sys.executable, "--outputjson")
    found = json.loads(text)["generalDiagnostics"]
    errors = {
        diagnostic["range"]["start"]["line"] + 1: diagnostic["message"]
        for diagnostic in found
        if diagnostic["severity"] == "error"
    }
    assert set(errors) == WRONG, json.dumps(errors, indent=1)
