"""Of which library the loop of asyncio jobs is."""

import asyncio
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery5.runners.jobs_loop import JobsLoop, make_loop


class FastLoop(asyncio.SelectorEventLoop):
    """Stands for the loop of uvloop, which may not be installed."""


class OwnLoop(asyncio.SelectorEventLoop):
    """A loop of the application."""


@pytest.fixture
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(Loop=FastLoop))


@pytest.fixture
def policy() -> Iterator[Any]:
    """Sets the class of the loops that the application's policy makes."""
    names: Any = asyncio
    if sys.version_info >= (3, 14):
        pytest.skip("Python deprecates policies")
    before = names.get_event_loop_policy()

    class Policy(names.DefaultEventLoopPolicy):  # type: ignore[misc]
        loop_class = asyncio.SelectorEventLoop

        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return self.loop_class()

    policy: Any = Policy()
    names.set_event_loop_policy(policy)
    yield policy
    names.set_event_loop_policy(before)


def get_classes() -> set[type]:
    """Return the classes of a new loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = make_loop()
    loop.close()
    return set(type(loop).__mro__)


@pytest.mark.usefixtures("_uvloop")
def test_jobs_run_on_uvloop_where_it_is_installed() -> None:
    assert {JobsLoop, FastLoop} <= get_classes()


def test_jobs_run_on_the_loop_of_asyncio_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert {JobsLoop, asyncio.SelectorEventLoop} <= get_classes()


@pytest.mark.usefixtures("_uvloop")
def test_the_event_loop_policy_of_the_application_decides_before_uvloop(policy: Any) -> None:
    found = get_classes()
    assert {JobsLoop, asyncio.SelectorEventLoop} <= found
    assert FastLoop not in found
    policy.loop_class = FastLoop
    assert {JobsLoop, FastLoop} <= get_classes()
    policy.loop_class = OwnLoop
    found = get_classes()
    assert OwnLoop in found
    assert JobsLoop not in found
