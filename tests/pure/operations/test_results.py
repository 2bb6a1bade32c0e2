"""The types of results: the OpenAPI document is made of them, also where a program has no source code."""

import compileall
import json
import shutil
import subprocess
import sys
from pathlib import Path

import celery5
from celery5.dashboard.openapi import make_openapi

PROGRAM = """
import json
from celery5.dashboard.openapi import make_openapi
from celery5.operations import table
assert table.__file__.endswith(".pyc"), table.__file__
print(json.dumps(make_openapi()))
"""


def test_openapi_is_the_same_where_operations_have_no_source_code(tmp_path: Path) -> None:
    package = tmp_path / "celery5"
    shutil.copytree(Path(celery5.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package / "operations", quiet=1, legacy=True)
    for source in (package / "operations").glob("*.py"):
        source.unlink()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == make_openapi()
