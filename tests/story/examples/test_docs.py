"""Docs: every Python block of the tour and the guide is run, and says what the page says that it says.

A page is a session at a desk. A block with a title is a file: it is written and imported; one in `py`
is only written, since it is a program of Celery's. Any other Python block is a
script: it is run in the page's one namespace while a worker of each application so far is up. A script that awaits is
run twice, on Trio and on asyncio. A `sh` block that begins with `celery5` is run, too, unless it would serve: then only
its words are checked. A `text` block right after one of these is what it prints; `...` stands for anything on the line.
"""

import ast
import asyncio
import contextlib
import gc
import importlib
import inspect
import io
import json
import re
import shlex
import sqlite3
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.main import cli
from celery5.logs.log import LogWriter
from celery5.processes.development import run_in_background
from celery5.processes.foreground import ServeOptions

DOCS = Path(__file__).parents[3] / "docs"
DJANGO_PAGE = DOCS / "guide" / "django.md"
"""Its project runs in processes of its own: `tests/story/django/test_guide.py`."""
PAGES = [
    *(DOCS / page for page in ("index.md", "tour.md", "internals/amqp.md")),
    *sorted(set((DOCS / "guide").glob("*.md")) - {DJANGO_PAGE}),
]
LIMIT = 30.0
"""Seconds that one script, and one start or stop of a worker, may take."""


@dataclass(frozen=True)
class Block:
    """What is fenced on a page: its language, its title, its text, and the line where it begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text, found = page.read_text(), []
    for match in re.finditer(r"(?ms)^```(\w+)([^\n]*)\n(.*?)^```$", text):
        title = re.search(r'title="([^"]+)"', match[2])
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match[1], title[1] if title else "", match[3], line))
    return found


@dataclass
class Desk:
    """One page's session: its folder of files, its modules, its namespace, and the workers that are up."""

    page: Path
    folder: Path
    modules: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    workers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    up: bool = False

    def keep(self, block: Block) -> None:
        """A file of that title: written, and a module imported as a worker would."""
        self._stop()
        file = self.folder / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        if block.language != "python":
            return
        importlib.invalidate_caches()
        name = block.title.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sys.modules.pop(name, None)
        self.modules[name] = importlib.import_module(name)

    def run(self, block: Block) -> list[str]:
        """What the script prints: once in plain Python, or on Trio and on asyncio."""
        self._start()
        where = f"{self.page.name}:{block.line}"
        code = compile(
            "\n" * (block.line - 1) + block.text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True
        )
        if not code.co_flags & inspect.CO_COROUTINE:
            return [self._said(lambda: exec(code, self.names))]
        return [
            self._said(lambda: trio.run(self._awaited, code)),
            self._said(lambda: self._on_asyncio(code)),
        ]

    def command(self, block: Block) -> list[str]:
        """What the commands print; a command that serves is only asked for its help, which an unknown word spoils."""
        self._start()
        said = []
        for line in block.text.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["celery5"]:
                serves = not {"start", "demo"}.isdisjoint(words)
                more = ["--help"] if serves else []
                printed = self._said(lambda words=words[1:] + more: cli.main(words, standalone_mode=False))
                said += [] if serves else [printed]
        return ["".join(said)] if said else []

    def _on_asyncio(self, code: CodeType) -> None:
        asyncio.run(asyncio.wait_for(self._awaited(code), LIMIT))

    async def _awaited(self, code: CodeType) -> None:
        await eval(code, self.names)

    def _said(self, script: Any) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            script()
        return said.getvalue()

    def _start(self) -> None:
        if not self.up:
            apps = [
                value for module in self.modules.values() if isinstance(value := vars(module).get("app"), App)
            ]
            for app in dict.fromkeys(apps):
                app.load()
                self.workers.enter_context(worker(app))
        self.up = True

    def _stop(self) -> None:
        self.workers.close()
        self.up = False

    def close(self) -> None:
        """Stop the workers and forget the files."""
        self._stop()
        for name, module in self.modules.items():
            if isinstance(app := vars(module).get("app"), App):
                app.close()
            sys.modules.pop(name, None)
        for value in self.names.values():
            _let_go(value)
        self.modules.clear()
        self.names.clear()
        gc.collect()


def _let_go(value: object) -> None:
    """Close a database that a page has opened: Python 3.13 warns of one that is left to the collector."""
    if isinstance(value, sqlite3.Connection):
        value.close()
    elif type(value).__module__.startswith("sqlalchemy.engine"):
        value.dispose()  # type: ignore[attr-defined]
    elif type(value).__module__.startswith("django.utils.connection"):
        value.connection.close()  # type: ignore[attr-defined]  # its own close() spares a database in memory


@contextlib.contextmanager
def worker(app: App) -> Iterator[None]:
    """A worker for `app` in its own thread, up while the block lasts."""
    ready, stopping = threading.Event(), trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []
    failed: list[BaseException] = []

    async def work() -> None:
        async with run_in_background(app, ServeOptions()):
            tokens.append(trio.lowlevel.current_trio_token())
            ready.set()
            await stopping.wait()

    def serve() -> None:
        try:
            trio.run(work)
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(LIMIT)
    try:
        yield
    finally:
        for token in tokens:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(stopping.set)
        thread.join(LIMIT)
        assert not thread.is_alive()
        assert failed == []


@pytest.fixture(scope="module")
def empty_server(server_binary: str | None) -> Iterator[EmbeddedServer]:
    """A server for the pages alone: their applications have names that readers remember, and so the same ones."""
    with EmbeddedServer.start(server_binary) as one:
        yield one


@pytest.fixture
def desk(
    request: pytest.FixtureRequest,
    empty_server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Desk]:
    """The session of one page, at a server with nothing in it."""
    with redis.Redis.from_url(empty_server.url) as client:
        client.flushall()
    monkeypatch.setenv("CELERY5_BROKER", empty_server.url)
    if request.param.stem == "beside-celery":
        pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")
    path = empty_server.url.removeprefix("unix://").partition("?")[0]
    monkeypatch.setenv("CELERY_BROKER", f"redis+socket://{path}?virtual_host=9")
    if request.param.stem == "brokers":
        monkeypatch.setenv("CELERY5_BROKERS", json.dumps({"mails": empty_server.url.replace("db=0", "db=1")}))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it: pages show what a pipe gets
    one = Desk(request.param, tmp_path)
    yield one
    one.close()


def like(pattern: str) -> re.Pattern[str]:
    """What a page says that a script prints, as a pattern: `...` is anything on one line."""
    return re.compile(re.escape(pattern.rstrip()).replace(r"\.\.\.", "[^\n]*") + r"\s*")


@pytest.mark.parametrize("desk", PAGES, ids=lambda page: page.stem, indirect=True)
def test_what_a_page_shows_is_what_happens(desk: Desk) -> None:
    said: list[str] = []
    for block in blocks(desk.page):
        assert block.language == "text" or not any(said), (
            f"{desk.page.name}, line {block.line}: before it, {said}"
        )
        where = f"{desk.page.name}, line {block.line}"
        if block.language == "text" and said:
            for line in said:
                assert like(block.text).fullmatch(line), f"{where}: it printed\n{line}"
        elif block.title and block.language in ("python", "py", "toml", "json"):
            desk.keep(block)
        elif block.language == "python":
            said = desk.run(block)
            continue
        elif block.language == "sh":
            said = desk.command(block)
            continue
        said = []
    assert not any(said), f"{desk.page.name}: its last script printed {said}"


def test_the_pages_show_something() -> None:
    counts = {
        str(page.relative_to(DOCS)): sum(block.language == "python" for block in blocks(page))
        for page in PAGES
    }
    assert counts["tour.md"] >= 10
    assert counts["index.md"] >= 2


def test_the_log_line_of_the_guide_has_the_fields_of_a_real_one(url: str, app_name: str) -> None:
    app, written = App(app_name, broker=url), io.StringIO()

    @app.task
    async def noop() -> None: ...

    with LogWriter(written), worker(app):
        noop.delay().get()
    app.close()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    (real,) = [line for line in lines if line.get("task") == noop.name]
    shown, *_ = [
        json.loads(block.text) for block in blocks(DOCS / "guide" / "logging.md") if block.language == "json"
    ]
    assert {name: type(value) for name, value in shown.items()} == {
        name: type(value) for name, value in real.items()
    }
