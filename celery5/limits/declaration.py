"""Gate: what a task declares of limits, rates and fairness, and the keys that its jobs take along for that.

The keys are worked out where a job is sent, from its arguments, and travel in its message: so workers need not decode
the arguments to know before which gate a job waits, and producers in other languages can give them, too.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from celery5.errors import BadArguments, Misconfigured
from celery5.protocol.job.job import hash_call
from celery5.protocol.limits import (
    AdmissionRule,
    DeclaredLimits,
    Limit,
    Range,
    Rate,
    get_waiting_list,
    make_admission_rule,
    parse_declared_limits,
)

LimitKey = str | Callable[..., object]
"""What a job is counted by, or stands in line for: a parameter's name, or a function of the arguments."""
MAX_KEY_LENGTH = 200
"""Characters of a key; of a longer one its digest is taken."""


class LimitDeclaration:
    """The gate of one task, and how its jobs' keys are made. Raises Misconfigured."""

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        gate: DeclaredLimits,
        keys: tuple[LimitKey | None, LimitKey | None],
        queue: str | None,
    ) -> None:
        self.declared = gate
        self._task = task
        self._signature = inspect.signature(function)
        self._keys = keys
        self._queue = queue
        self._turns = _turns_of(task, gate)
        for name, key in zip(("concurrency_key", "fair_key"), keys, strict=True):
            if key is not None and not callable(key) and key not in self._signature.parameters:
                known = ", ".join(self._signature.parameters) or "none"
                raise Misconfigured(
                    f"task {task}: {name} is {key!r}, which is no parameter of it; it has: {known}"
                )

    def check_queue(self, queue: str | None) -> None:
        """Raises Misconfigured when its jobs are to be sent to a queue on which they are not counted."""
        if queue != self._queue:
            raise Misconfigured(
                f"task {self._task} has a limit, which is counted on its own queue: send it nowhere else"
            )

    def make_keys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
        """The concurrency key and the fair key of a job with these arguments; '' where it has none. Raises what a
        function that was given for a key raises, and BadArguments where there is no such argument."""
        given: dict[str, Any] | None = None
        found = ["", ""]
        for n, key in enumerate(self._keys):
            if key is None:
                continue
            if callable(key):
                value = key(*args, **kwargs)
            else:
                given = self._bound(args, kwargs) if given is None else given
                value = given[key]
            found[n] = _text(value)
        return found[0], found[1]

    def get_waiting_list(self, slot: str, turn: str) -> str:
        """The line in which a job with these keys waits; '' where jobs do not take turns."""
        return get_waiting_list(self._turns, slot, turn) if self._turns else ""

    def complete_keys(
        self, slot: str, turn: str, arguments: Callable[[], tuple[Any, Any]]
    ) -> tuple[str, str]:
        """The keys that a message says, and where it lacks one, as from an event or a producer that knows none, what
        the `arguments` say, which are decoded for that. What cannot be worked out is ''."""
        lacks = [key is not None and not said for key, said in zip(self._keys, (slot, turn), strict=True)]
        if not any(lacks):
            return slot, turn
        try:
            args, kwargs = arguments()
            found = self.make_keys(tuple(args), dict(kwargs))
        except Exception:
            # Arguments that do not fit are told of when the job is to run; the function is the user's.
            return slot, turn
        return slot or found[0], turn or found[1]

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"{self._task}: {error}") from None
        bound.apply_defaults()
        return bound.arguments


class LimitOptions(TypedDict, total=False):
    """What `@task(...)` takes of it."""

    limit: int | Limit | Range | None
    rate_limit: str | Rate | None
    concurrency_key: LimitKey | None
    fair_key: LimitKey | None


def declare_limits(
    task: str, function: Callable[..., Any], queue: str | None, **said: Unpack[LimitOptions]
) -> LimitDeclaration | None:
    """The gate of a task that was declared so, for that queue; None when it was declared without any. Raises
    Misconfigured."""
    concurrency_key, fair_key = said.get("concurrency_key"), said.get("fair_key")
    for name, key in (("concurrency_key", concurrency_key), ("fair_key", fair_key)):
        given: object = key
        is_text = isinstance(given, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        if given is not None and not callable(given) and not is_text:
            raise Misconfigured(f"task {task}: {name} is {key!r}: give a parameter's name, or a function")
    limit, rate = said.get("limit"), said.get("rate_limit")
    gate = parse_declared_limits(
        task, limit, rate, keyed=concurrency_key is not None, fair=fair_key is not None
    )
    return (
        None if gate is None else LimitDeclaration(task, function, gate, (concurrency_key, fair_key), queue)
    )


def _turns_of(task: str, gate: DeclaredLimits) -> AdmissionRule | None:
    """By what the lines of a task are made whose jobs take turns. What is imposed on it makes no others."""
    rule = make_admission_rule(task, gate, computed=None, override=None, suspended=False)
    return rule if gate.fair else None


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_KEY_LENGTH else hash_call(text.encode(errors="replace"))
