"""Fixtures of the tests on a Trio loop: the runner of asyncio tasks, which has its own loop."""

from collections.abc import AsyncIterator

import pytest
import trio

from celery5.runners.on_asyncio import AsyncioRunner
from tests.trio.cluster.desk import desk, lines, notes

__all__ = ["desk", "lines", "notes"]


@pytest.fixture
async def loop(nursery: trio.Nursery) -> AsyncIterator[AsyncioRunner]:
    """An asyncio runner."""
    one = AsyncioRunner()
    await nursery.start(one.run)
    yield one
    nursery.cancel_scope.cancel()
