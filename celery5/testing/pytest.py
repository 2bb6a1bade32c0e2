"""Offer `celery5.testing` as fixtures of pytest, which finds this module by its entry point.

Each run of pytest in an environment with celery5 loads it, also where no test uses it: so nothing is imported before
a fixture is used.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.tasks import Resource
    from celery5.testing import InMemoryWorker, Recorded, VirtualClock


@pytest.fixture(scope="session")
def celery5_broker() -> Generator[str, None, None]:
    """Return the URL of a private server that ends with the test session. Override it to use a different server."""
    from celery5.broker.servers.embedded import EmbeddedServer

    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture
def celery5_worker(celery5_broker: str) -> "Generator[Callable[[App], None], None, None]":
    """Return a function that runs a worker for an application, in a thread, until the test ends."""
    from celery5.testing import running_worker

    with ExitStack() as stack:

        def start(app: "App") -> None:
            stack.enter_context(running_worker(app, broker=celery5_broker))

        yield start


@pytest.fixture
def celery5_virtual_time(celery5_broker: str) -> "Generator[Callable[[App], VirtualClock], None, None]":
    """Return a function that runs a worker for an application until the test ends, and returns its clock."""
    from celery5.testing import virtual_time

    with ExitStack() as stack:

        def start(app: "App") -> "VirtualClock":
            return stack.enter_context(virtual_time(app, broker=celery5_broker))

        yield start


@pytest.fixture
def celery5_in_memory() -> "Generator[Callable[[App], InMemoryWorker], None, None]":
    """Return a function that keeps what an application sends in this process until the test ends, and runs it."""
    from celery5.testing import in_memory

    with ExitStack() as stack:

        def start(app: "App", *, schedules: bool = False) -> "InMemoryWorker":
            return stack.enter_context(in_memory(app, schedules=schedules))

        yield start


@pytest.fixture
def celery5_recorded() -> "Generator[Callable[[App], Recorded], None, None]":
    """Return a function that records what an application sends until the test ends, instead of publishing it."""
    from celery5.testing import recorded

    with ExitStack() as stack:

        def record(app: "App") -> "Recorded":
            return stack.enter_context(recorded(app))

        yield record


@pytest.fixture
def celery5_replaced() -> "Generator[Callable[[Resource | Callable[..., object], object], None], None, None]":
    """Return a function that has jobs get something in place of a resource until the test ends."""
    from celery5.testing import replaced

    with ExitStack() as stack:

        def replace(resource: "Resource | Callable[..., object]", value: object) -> None:
            stack.enter_context(replaced(resource, value))

        yield replace
