"""Keep the rulings of sections on an error, and choose the one that counts.

Rulings are an attribute of the error, which is neither replaced nor wrapped: user code may catch it, a nursery may put
it into a group. Each ruling is for one run of one job, since a module may raise the same object repeatedly.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from celery5.errors import Reject, Retry
from celery5.protocol.job.names import get_class_names
from celery5.protocol.job.verdict import Reason, Ruling

_ATTRIBUTE = "_celery5_rulings"
_MAX_RULINGS = 1000
"""The most runs with a ruling on one error object: far more than a worker runs at once."""


class ErrorLeaf(NamedTuple):
    """One error: the one that was raised, or one in a group. `kinds` names its classes and those of its groups."""

    error: BaseException
    kinds: tuple[str, ...]
    ruling: Ruling | None

    @property
    def is_request(self) -> bool:
        """Return whether it is not a failure but a request to the worker: `Retry` or `Reject`."""
        return isinstance(self.error, Retry | Reject)

    @property
    def is_final(self) -> bool:
        """Return whether outer sections do not count: a request, a poisonous error, or one that a section retries."""
        if self.ruling is None:
            return self.is_request
        return self.ruling.policy is not None or self.ruling.reason is Reason.POISONOUS


def set_ruling(error: BaseException, run: object, ruling: Ruling) -> None:
    """Keep a ruling for `error` in this run (a CurrentJob, or None outside of workers), replacing an earlier one."""
    others = [pair for pair in _pairs(error) if pair[0] is not run][-_MAX_RULINGS + 1 :]
    # Not by the error's own `__setattr__`: errors may be frozen. Every error has a dictionary.
    object.__setattr__(error, _ATTRIBUTE, (*others, (run, ruling)))


def get_ruling(error: BaseException, run: object) -> Ruling | None:
    """Return the ruling on this error object in this run; None without one."""
    return next((ruling for by, ruling in _pairs(error) if by is run), None)


def get_leaf_errors(error: BaseException, run: object) -> list[ErrorLeaf]:
    """Return the errors in a group, at any depth, in order; a single error itself."""
    return [
        ErrorLeaf(leaf, (*get_class_names(leaf), *kinds), get_ruling(leaf, run))
        for leaf, kinds in _walk(error)
    ]


def copy_ruling(heir: BaseException, error: BaseException, run: object) -> None:
    """Copy the strictest ruling on `error` to `heir`, which replaces it."""
    ruled = [leaf for leaf in get_leaf_errors(error, run) if leaf.ruling is not None]
    if ruled and (ruling := find_strictest(ruled).ruling) is not None:
        set_ruling(heir, run, ruling)


def find_strictest(found: Sequence[ErrorLeaf]) -> ErrorLeaf:
    """Return the error that decides: the strictest one.

    The order: a poisonous section, a section without retries left, `Reject`, `Retry`, an error without a ruling, an
    error that its section retries. Among equals the first counts.
    """
    return min(found, key=_rank)


def _rank(leaf: ErrorLeaf) -> int:
    ruling = leaf.ruling
    if ruling is not None and ruling.reason is not None:
        return 0 if ruling.reason is Reason.POISONOUS else 1
    if isinstance(leaf.error, Reject):
        return 2
    if isinstance(leaf.error, Retry):
        return 3
    return 4 if ruling is None else 5


def _walk(error: BaseException) -> Iterator[tuple[BaseException, tuple[str, ...]]]:
    """Yield each leaf with the kinds of the groups around it. Not recursive: groups may be nested very deeply."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(error, ())]
    while stack:
        current, kinds = stack.pop()
        if isinstance(current, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", current)
            inner = kinds or get_class_names(group)
            stack += [(exception, inner) for exception in reversed(group.exceptions)]
        else:
            yield current, kinds


def _pairs(error: BaseException) -> tuple[tuple[object, Ruling], ...]:
    try:
        pairs: tuple[tuple[object, Ruling], ...] = object.__getattribute__(error, _ATTRIBUTE)
    except AttributeError:
        return ()
    return pairs
