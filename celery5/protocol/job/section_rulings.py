"""Rulings: what sections have said of an error, kept on the error itself, and whose word counts at the end.

An error goes its own way: it is neither replaced nor wrapped, user code may catch it, a nursery may put it into a
group. So what was said of it travels with it, and goes when it goes. Each word is for one run of one job, since a
module may raise the same object again and again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from celery5.errors import Reject, Retry
from celery5.protocol.job.names import get_class_names
from celery5.protocol.job.verdict import Reason, Ruling

_ATTRIBUTE = "_celery5_rulings"
_KEPT = 1000
"""Runs that may have their word on one error object at the same time: more than a worker has jobs in work, by far."""


class ErrorLeaf(NamedTuple):
    """One error: the one that was raised, or one in a group. `kinds` names its classes and those of its groups."""

    error: BaseException
    kinds: tuple[str, ...]
    ruling: Ruling | None

    @property
    def is_request(self) -> bool:
        """Whether it is not a failure but a word to the worker: `Retry` or `Reject`."""
        return isinstance(self.error, Retry | Reject)

    @property
    def is_final(self) -> bool:
        """Whether no section further out has a say: it asks, is poisonous, or has a section that tries again."""
        if self.ruling is None:
            return self.is_request
        return self.ruling.policy is not None or self.ruling.reason is Reason.POISONOUS


def set_ruling(error: BaseException, run: object, ruling: Ruling) -> None:
    """Keep a ruling for `error` in this run (a CurrentJob, or None outside of workers), over what was said before."""
    others = [pair for pair in _pairs(error) if pair[0] is not run][-_KEPT + 1 :]
    # Past a `__setattr__` of its own: errors may be frozen. Every error has a dictionary.
    object.__setattr__(error, _ATTRIBUTE, (*others, (run, ruling)))


def get_ruling(error: BaseException, run: object) -> Ruling | None:
    """What was said last of this very error in this run."""
    return next((ruling for by, ruling in _pairs(error) if by is run), None)


def get_leaf_errors(error: BaseException, run: object) -> list[ErrorLeaf]:
    """The errors that a group is of, however deep, in order; of any other error, itself."""
    return [
        ErrorLeaf(each, (*get_class_names(each), *kinds), get_ruling(each, run))
        for each, kinds in _walk(error)
    ]


def copy_ruling(heir: BaseException, error: BaseException, run: object) -> None:
    """What was said of `error`, the strictest, holds for `heir`, which stands for it."""
    ruled = [leaf for leaf in get_leaf_errors(error, run) if leaf.ruling is not None]
    if ruled and (ruling := find_strictest(ruled).ruling) is not None:
        set_ruling(heir, run, ruling)


def find_strictest(found: Sequence[ErrorLeaf]) -> ErrorLeaf:
    """The one that decides for all, the strictest: what ends a job beats what tries it again.

    A poisonous section, then a section whose retries are used up, then `Reject`, then `Retry`, then an error that no
    section has spoken of, then one that its section tries again; among equals the first.
    """
    return min(found, key=_leniency)


def _leniency(leaf: ErrorLeaf) -> int:
    ruling = leaf.ruling
    if ruling is not None and ruling.reason is not None:
        return 0 if ruling.reason is Reason.POISONOUS else 1
    if isinstance(leaf.error, Reject):
        return 2
    if isinstance(leaf.error, Retry):
        return 3
    return 4 if ruling is None else 5


def _walk(error: BaseException) -> Iterator[tuple[BaseException, tuple[str, ...]]]:
    """Each leaf with the kinds of the groups around it. On a stack of its own: groups may be nested without end."""
    left: list[tuple[Any, tuple[str, ...]]] = [(error, ())]
    while left:
        one, kinds = left.pop()
        if isinstance(one, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", one)
            inner = kinds or get_class_names(group)
            left += [(exception, inner) for exception in reversed(group.exceptions)]
        else:
            yield one, kinds


def _pairs(error: BaseException) -> tuple[tuple[object, Ruling], ...]:
    try:
        pairs: tuple[tuple[object, Ruling], ...] = object.__getattribute__(error, _ATTRIBUTE)
    except AttributeError:
        return ()
    return pairs
