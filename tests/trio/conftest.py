"""Fixtures of the tests on a Trio loop: the runner of asyncio tasks, which has its own loop."""

from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest
import trio

from celery5.runners import jobs_loop
from celery5.runners.on_asyncio import AsyncioRunner
from tests.trio.cluster.desk import desk, lines, notes

__all__ = ["desk", "lines", "notes"]


LOOPS = ("asyncio", "uvloop") if find_spec("uvloop") else ("asyncio",)
"""The libraries whose event loops are installed."""


@pytest.fixture(params=LOOPS)
async def loop(
    request: pytest.FixtureRequest, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncioRunner]:
    """An asyncio runner, whose loop is one of asyncio, or of uvloop."""
    if request.param == "asyncio":
        monkeypatch.setattr(jobs_loop, "_find_uvloop_class", lambda: None)
    one = AsyncioRunner()
    await nursery.start(one.run)
    yield one
    nursery.cancel_scope.cancel()
