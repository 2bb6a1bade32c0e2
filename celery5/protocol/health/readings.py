"""Define the states of health checks, which of several counts, and the states of an HTTP endpoint."""

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from celery5.errors import Misconfigured

CHECK_STATES = ("unhealthy", "degraded", "healthy")
"""The states of a check that declares none: the worst first, the good one last."""
HTTP_STATES = ("insecure", "permanently-unavailable", "unhealthy", "degraded", "healthy")
"""The states of an HTTP endpoint: the worst first."""
DEGRADED_SHARE = 0.8
"""The share of a limit from which on it is almost reached."""
UNKNOWN_STATE = "unknown"
"""The state of a check that did not run yet."""


class CheckReading(msgspec.Struct, frozen=True):
    """The last known state of one check."""

    check: str
    state: str
    is_good: bool  # whether it is the last of the check's states
    at: float = 0.0  # seconds since 1970; 0: never
    is_stale: bool = False  # whether it is too old to count
    why: str = ""
    scope: str = "local"
    group: str = ""  # the group of workers that shares it, if its scope is `group`


def validate_states(states: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the states of the check `name`. Raises Misconfigured."""
    if isinstance(states, str) or len(set(states)) != len(states) or len(states) < 2 or not all(states):
        raise Misconfigured(
            f"health check {name}: states are {states!r}: give two or more words, the worst first, the good one last"
        )
    return tuple(states)


def get_worst_state(reported: Iterable[str], states: Sequence[str]) -> str | None:
    """Return the worst of the reported states; None when there are none."""
    ranks = [states.index(state) for state in reported]
    return states[min(ranks)] if ranks else None


def parse_states(answer: object, states: Sequence[str]) -> list[str]:
    """Return the states that a check's function has returned: one, or several of which the worst counts.

    True and None stand for the good state, False for the worst. Raises ValueError for a state that the check does not
    have.
    """
    if answer is None or answer is True:
        return [states[-1]]
    if answer is False:
        return [states[0]]
    is_several = isinstance(answer, list | tuple | set | frozenset)
    answers = list(cast("Iterable[object]", answer) if is_several else (answer,))
    if not answers or not all(isinstance(state, str) and state in states for state in answers):
        raise ValueError(f"{answer!r} is none of its states: {', '.join(states)}")
    return cast("list[str]", answers)


def grade_usage(value: float, limit: float) -> str:
    """Return the state for a number that must stay below `limit`: degraded from 80 % of it, unhealthy at it."""
    if value >= limit:
        return "unhealthy"
    return "degraded" if value >= DEGRADED_SHARE * limit else "healthy"


def grade_free_space(free: float, needed: float) -> str:
    """Return the state for free space of which `needed` is required: degraded if that is 80 % of it or more."""
    if free < needed:
        return "unhealthy"
    return "degraded" if needed >= DEGRADED_SHARE * free else "healthy"


class EndpointResponse(msgspec.Struct, frozen=True):
    """The outcome of one request to an endpoint."""

    status: int = 0  # 0: no response in time
    seconds: float = 0.0  # until the response, DNS lookup included
    is_insecure: bool = False  # TLS failed, or the intrusion detection reports it
    allow: str | None = None  # the header Allow
    accept: str | None = None  # the header Accept
    why: str = ""  # the error


def get_endpoint_states(
    answer: EndpointResponse, *, method: str, content_type: str | None, limit: float, is_call: bool = False
) -> list[str]:
    """Return all states that a response indicates; the worst counts.

    Args:
        answer: The response.
        method: The method of the calls that the application makes.
        content_type: Their content type.
        limit: Seconds that they may take.
        is_call: Whether the request was such a call, not an OPTIONS request.
    """
    states: list[str] = []
    status = answer.status
    if answer.is_insecure:
        states.append("insecure")
    refused = {404, 405, 415} if is_call else {404}
    if status in refused or not (
        _lists(answer.allow, method) and (content_type is None or _lists(answer.accept, content_type))
    ):
        states.append("permanently-unavailable")
    if status in (0, 500) or answer.seconds >= limit:
        states.append("unhealthy")
    if not 200 <= status < 300 or answer.seconds >= DEGRADED_SHARE * limit:
        states.append("degraded")
    return states or ["healthy"]


def _lists(header: str | None, wanted: str) -> bool:
    """Return whether a header lists a value. A missing header allows all: many servers send neither."""
    if header is None:
        return True
    listed = [item.partition(";")[0].strip().lower() for item in header.split(",")]
    kind = wanted.partition(";")[0].strip().lower()
    return bool({kind, "*", "*/*", f"{kind.partition('/')[0]}/*"} & set(listed))
