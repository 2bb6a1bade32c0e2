"""An operation is added by one file: all surfaces have it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.story.cli.commands import environment

HERE = Path(__file__).parent


def test_an_operation_in_one_new_file_is_on_all_surfaces(url: str, app_name: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "toys.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.redis.operations.surfaces", str(tmp_path), app_name],
        env=environment(CELERY5_BROKER=url),
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)

    assert "toy         See toys, and wind them up." in seen["help"]
    assert "TOY" in seen["wind --help"]
    assert "--turns INTEGER RANGE  How often its key is turned." in seen["wind --help"]
    assert seen["wind"] == "mouse is wound up\n"

    # One order of columns.
    columns = ["toy", "turns", "colour"]
    assert seen["list"].splitlines()[0].split() == columns
    (toy,) = json.loads(seen["list --json"])
    assert list(toy) == columns
    assert seen["api"] == [toy]
    heads = [seen["page"].index(f'<th scope="col">{column}</th>') for column in columns]
    assert heads == sorted(heads)

    assert "How often its key is turned." in seen["form"]
    assert "toy:wind is for admins" in seen["refused"]
    assert seen["openapi"] == {"/api/v1/{app}/toy/list": ["get"], "/api/v1/{app}/toy/wind": ["post"]}
    assert seen["docs"] == [
        "| `toy list` | Show all toys. |  | viewer |",
        "| `toy wind TOY` | Wind up a toy. | `--turns` | admin |",
    ]
    assert seen["audit"] == [
        ["dashboard", "toy:wind", "mouse", {"turns": 5}, 1, "done"],
        ["cli", "toy:wind", "mouse", {"turns": 7}, 1, "done"],
    ]
