"""Offer `celery5.testing` as fixtures of pytest. Load them by `pytest_plugins = ["celery5.testing.pytest"]`.

They are not registered as an entry point: every run of pytest in an environment with celery5 would load them, and with
them Trio and eliot, also where no test uses celery5 (docs/decisions/0015-a-testing-kit.md).
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack

import pytest

from celery5.app import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.testing import Recorded, VirtualClock, recorded, running_worker, virtual_time


@pytest.fixture(scope="session")
def celery5_broker() -> Generator[str, None, None]:
    """Return the URL of a private server that ends with the test session. Override it to use a different server."""
    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture
def celery5_worker(celery5_broker: str) -> Generator[Callable[[App], None], None, None]:
    """Return a function that runs a worker for an application, in a thread, until the test ends."""
    with ExitStack() as stack:

        def start(app: App) -> None:
            stack.enter_context(running_worker(app, broker=celery5_broker))

        yield start


@pytest.fixture
def celery5_virtual_time(celery5_broker: str) -> Generator[Callable[[App], VirtualClock], None, None]:
    """Return a function that runs a worker for an application until the test ends, and returns its clock."""
    with ExitStack() as stack:

        def start(app: App) -> VirtualClock:
            return stack.enter_context(virtual_time(app, broker=celery5_broker))

        yield start


@pytest.fixture
def celery5_recorded() -> Generator[Callable[[App], Recorded], None, None]:
    """Return a function that records what an application sends until the test ends, instead of publishing it."""
    with ExitStack() as stack:

        def record(app: App) -> Recorded:
            return stack.enter_context(recorded(app))

        yield record
