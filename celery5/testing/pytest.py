"""Pytest: the fixtures of `celery5.testing`. Load them by `pytest_plugins = ["celery5.testing.pytest"]`.

They are not registered as an entry point: every run of pytest in an environment with celery5 would load them, and with
them Trio and eliot, also where no test uses celery5 (docs/decisions/0015-a-testing-kit.md).
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack

import pytest

from celery5.app import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.testing import Recorded, recorded, running_worker


@pytest.fixture(scope="session")
def celery5_broker() -> Generator[str, None, None]:
    """The URL of a private server that lives as long as the test session. Override it to use another one."""
    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture
def celery5_worker(celery5_broker: str) -> Generator[Callable[[App], None], None, None]:
    """Call it with an application: a worker for it runs in a thread until the test ends."""
    with ExitStack() as stack:

        def start(app: App) -> None:
            stack.enter_context(running_worker(app, broker=celery5_broker))

        yield start


@pytest.fixture
def celery5_recorded() -> Generator[Callable[[App], Recorded], None, None]:
    """Call it with an application: until the test ends, what it sends is recorded and not published."""
    with ExitStack() as stack:

        def record(app: App) -> Recorded:
            return stack.enter_context(recorded(app))

        yield record
