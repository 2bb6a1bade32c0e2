"""Fixtures of the stories: a folder with an application, and this process' own handle of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import App
from celery5.cli.terminal.loading import load_app
from tests.story.cli.commands import celery5

SHOP = """
import os
import trio
from celery5 import App, current_job, progress

app = App({name!r}, broker={url!r}, grace_period=5)

@app.task
async def add(a: int, b: int) -> int:
    return a + b

@app.task(queue="slow")
def multiply(a: int, b: int) -> int:
    return a * b

@app.task(max_retries=2, backoff=0.1)
async def moody() -> int:
    if current_job().attempt < 3:
        raise ConnectionError("not now")
    return current_job().attempt

@app.task(max_retries=0)
async def hopeless() -> None:
    raise ValueError("never")

@app.task
def whose() -> int:
    return os.getpid()

@app.task
async def resize() -> None:
    progress(30, 120, "resizing")
    await trio.sleep_forever()

@app.task
async def stuck() -> None:
    open("stuck", "w").close()
    await trio.sleep(60)
"""


class Desk:
    """A folder with the application `shop`, and this process' own handle of it."""

    def __init__(self, folder: Path, app: App) -> None:
        self.folder = folder
        self.app = app

    def __call__(self, *words: object, **env: str) -> str:
        """What the command prints; it must go well."""
        ended = celery5("-A", "shop", *words, cwd=self.folder, env=env)
        assert (ended.code, ended.err) == (0, "")
        return ended.out


@pytest.fixture
def desk(
    tmp_path: Path, app_name: str, url: str, fresh_modules: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name, url=url))
    monkeypatch.chdir(tmp_path)
    app = load_app("shop")
    yield Desk(tmp_path, app)
    app.close()


@pytest.fixture
def fresh_modules() -> Iterator[None]:
    """Forgets what the test has imported, and its folder on the import path.

    What is installed stays: an extension module keeps types of the first import, which are not those of a second one.
    """
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if not name.startswith("celery5.") and not file.startswith((sys.prefix, sys.base_prefix)):
            del sys.modules[name]
