"""User errors: what user code raises, or does to cancel scopes, leaves the calls of user code in order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from celery5.runners.user_errors import (
    UnmanageableError,
    call_in_thread,
    call_user_code,
    guard_scopes,
    make_manageable,
)
from tests.odd_errors import ERRORS


@contextmanager
def noting(errors: list[BaseException]) -> Iterator[None]:
    """Note what is raised: pytest could not show it."""
    try:
        yield
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("name", ERRORS)
async def test_an_odd_error_comes_through_scopes_nurseries_and_threads(name: str) -> None:
    def fail() -> None:
        raise ERRORS[name]()

    async def fail_late() -> None:
        await trio.lowlevel.checkpoint()
        fail()

    async def fail_in_thread() -> None:
        await call_in_thread(fail)

    async def never() -> None:
        await trio.sleep_forever()

    for function in (fail_late, fail_in_thread):
        errors: list[BaseException] = []
        with trio.fail_after(30), noting(errors):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(never)
                with trio.move_on_after(10):
                    await call_user_code(function)
        (group,) = errors
        assert type(group) in (ExceptionGroup, BaseExceptionGroup)
        await trio.lowlevel.checkpoint()  # this task is in order


def test_an_ordinary_error_is_passed_on_itself() -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), ExceptionGroup("two", [ValueError(), KeyError()])):
        assert make_manageable(error) is error


def test_the_error_in_place_of_another_says_which_one_it_was() -> None:
    try:
        raise ERRORS["no class"]()
    except BaseException as error:
        other = make_manageable(error)
    assert isinstance(other, UnmanageableError)
    assert str(other) == "NoClass (an error that cannot be examined)"
    assert other.__traceback__ is not None


def get_scope() -> Any:
    """Return the innermost cancel scope of this task."""
    task: Any = trio.lowlevel.current_task()
    return task._cancel_status._scope


def leak_scopes() -> None:
    trio.CancelScope().__enter__()
    trio.move_on_after(0).__enter__()


def cancel_scope() -> None:
    get_scope().cancel()


def close_scope() -> None:
    get_scope().__exit__(None, None, None)


def shorten_scope() -> None:
    get_scope().deadline = -1


def shield_scope() -> None:
    get_scope().shield = True


HARM = [leak_scopes, cancel_scope, close_scope, shorten_scope, shield_scope]


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
async def test_what_a_plain_call_does_to_the_current_scope_ends_with_it(harm: Callable[[], None]) -> None:
    with trio.CancelScope() as outer:
        inside = get_scope()
        with guard_scopes():
            harm()
        assert get_scope() is inside
        await trio.sleep(0.01)
        assert (outer.cancel_called, outer.shield, outer.deadline) == (False, False, float("inf"))
    assert not outer.cancelled_caught
