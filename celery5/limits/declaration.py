"""Declare limits, rates and fairness of a task, and compute the keys of its jobs for them.

The keys are computed from the arguments where a job is sent, and are part of its message. So workers need not decode
the arguments to know at which limit a job waits, and producers in other languages can set the keys, too.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from celery5.errors import BadArguments, Misconfigured
from celery5.logs.fence import pass_cancellation
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
"""How the key of a job is computed: the name of a parameter, or a function of the arguments."""
MAX_KEY_LENGTH = 200
"""The most characters of a key; a longer one is replaced by its digest."""


class LimitDeclaration:
    """The limits of one task, and how the keys of its jobs are computed. Raises Misconfigured."""

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        limits: DeclaredLimits,
        keys: tuple[LimitKey | None, LimitKey | None],
        queue: str | None,
    ) -> None:
        self.declared = limits
        self._task = task
        self._signature = inspect.signature(function)
        self._keys = keys
        self._queue = queue
        self._fair_rule = _make_fair_rule(task, limits)
        for name, key in zip(("concurrency_key", "fair_key"), keys, strict=True):
            if key is not None and not callable(key) and key not in self._signature.parameters:
                parameters = ", ".join(self._signature.parameters) or "none"
                raise Misconfigured(
                    f"task {task}: {name} is {key!r}, which is no parameter of it; it has: {parameters}"
                )

    @property
    def is_keyed(self) -> bool:
        """Whether a key of a job is computed from its arguments."""
        return any(key is not None for key in self._keys)

    def check_queue(self, queue: str | None) -> None:
        """Raise Misconfigured if jobs would go to a queue on which they are not counted."""
        if queue != self._queue:
            raise Misconfigured(
                f"task {self._task} has a limit, which is counted on its own queue: send it nowhere else; "
                "name its queue in its declaration, @app.task(queue=...) (see celery5 docs limits)"
            )

    def make_keys(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
        """Return the concurrency key and the fair key of a job with these arguments; '' where it has none.

        Raises BadArguments where an argument is missing, and what a key function of the user's raises.
        """
        bound: dict[str, Any] | None = None
        computed_keys = ["", ""]
        for n, key in enumerate(self._keys):
            if key is None:
                continue
            if callable(key):
                value = key(*args, **kwargs)
            else:
                bound = self._bind(args, kwargs) if bound is None else bound
                value = bound[key]
            computed_keys[n] = _shorten_key(value)
        return computed_keys[0], computed_keys[1]

    def get_waiting_list(self, concurrency_key: str, fair_key: str) -> str:
        """Return the waiting list of a job with these keys; '' if its task has no fairness."""
        return get_waiting_list(self._fair_rule, concurrency_key, fair_key) if self._fair_rule else ""

    def complete_keys(
        self, concurrency_key: str, fair_key: str, arguments: Callable[[], tuple[Any, Any]]
    ) -> tuple[str, str]:
        """Return the keys of a message, with missing ones computed from the arguments.

        Messages of events, and of producers that know no keys, lack them. `arguments` decodes the arguments, and is
        called only if a key is missing. A key that cannot be computed is ''.
        """
        missing = [
            key is not None and not value
            for key, value in zip(self._keys, (concurrency_key, fair_key), strict=True)
        ]
        if not any(missing):
            return concurrency_key, fair_key
        try:
            args, kwargs = arguments()
            computed = self.make_keys(tuple(args), dict(kwargs))
        except BaseException as error:
            # Bad arguments are reported when the job runs. Any error can come from a function of the user's.
            if not isinstance(error, Exception):
                pass_cancellation(error)
            return concurrency_key, fair_key
        return concurrency_key or computed[0], fair_key or computed[1]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"{self._task}: {error}") from None
        bound.apply_defaults()
        return bound.arguments


class LimitOptions(TypedDict, total=False):
    """The options of `@task(...)` that declare limits."""

    limit: int | Limit | Range | None
    rate_limit: str | Rate | None
    concurrency_key: LimitKey | None
    fair_key: LimitKey | None


def declare_limits(
    task: str, function: Callable[..., Any], queue: str | None, **options: Unpack[LimitOptions]
) -> LimitDeclaration | None:
    """Return the limits that a task's options declare for a queue; None without any. Raises Misconfigured."""
    concurrency_key, fair_key = options.get("concurrency_key"), options.get("fair_key")
    for name, key in (("concurrency_key", concurrency_key), ("fair_key", fair_key)):
        untyped: object = key
        is_text = isinstance(untyped, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        if untyped is not None and not callable(untyped) and not is_text:
            raise Misconfigured(f"task {task}: {name} is {key!r}: give a parameter's name, or a function")
    limit, rate = options.get("limit"), options.get("rate_limit")
    limits = parse_declared_limits(
        task, limit, rate, keyed=concurrency_key is not None, fair=fair_key is not None
    )
    if limits is None:
        return None
    return LimitDeclaration(task, function, limits, (concurrency_key, fair_key), queue)


def _make_fair_rule(task: str, limits: DeclaredLimits) -> AdmissionRule | None:
    """Return the rule that makes the waiting lists of a fair task; None for others. Overrides make no other lists."""
    rule = make_admission_rule(task, limits, computed=None, override=None, suspended=False)
    return rule if limits.fair else None


def _shorten_key(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_KEY_LENGTH else hash_call(text.encode(errors="replace"))
