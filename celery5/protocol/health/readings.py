"""Health: the states of a health check, which of them counts, and what an answer over HTTP says of an endpoint."""

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from celery5.errors import Misconfigured

CHECK_STATES = ("unhealthy", "degraded", "healthy")
"""The states of a check that declares none: the worst first, the good one last."""
HTTP_STATES = ("insecure", "permanently-unavailable", "unhealthy", "degraded", "healthy")
"""The states of an HTTP endpoint in the order in which they are looked for."""
DEGRADED_SHARE = 0.8
"""The share of a limit from which on it is almost reached."""
UNKNOWN_STATE = "unknown"
"""The state of a check that has not been seen yet."""


class CheckReading(msgspec.Struct, frozen=True):
    """What is known of one check. `at` is when its state was last seen, in seconds since 1970 (0: never); `is_good`
    whether that is the last of its states; `is_stale` whether it was too long ago to be believed; `why` is a word on
    it."""

    check: str
    state: str
    is_good: bool
    at: float = 0.0
    is_stale: bool = False
    why: str = ""
    scope: str = "local"


def validate_states(states: Sequence[str], name: str) -> tuple[str, ...]:
    """The states of the check `name`. Raises Misconfigured."""
    if isinstance(states, str) or len(set(states)) != len(states) or len(states) < 2 or not all(states):
        raise Misconfigured(
            f"health check {name}: states are {states!r}: give two or more words, the worst first, the good one last"
        )
    return tuple(states)


def get_worst_state(seen: Iterable[str], states: Sequence[str]) -> str | None:
    """The one of those seen that counts: the first by precedence; None when nothing was seen."""
    ranks = [states.index(each) for each in seen]
    return states[min(ranks)] if ranks else None


def parse_states(answer: object, states: Sequence[str]) -> list[str]:
    """What a check's function says: a state, several of which the worst counts, True or None for the good one, False
    for the worst. Raises ValueError for a state that the check does not have."""
    if answer is None or answer is True:
        return [states[-1]]
    if answer is False:
        return [states[0]]
    several = isinstance(answer, list | tuple | set | frozenset)
    found = list(cast("Iterable[object]", answer) if several else (answer,))
    if not found or not all(isinstance(each, str) and each in states for each in found):
        raise ValueError(f"{answer!r} is none of its states: {', '.join(states)}")
    return cast("list[str]", found)


def grade_usage(value: float, limit: float) -> str:
    """A number that must stay below `limit`: degraded from 80 % of it on, unhealthy from the limit on."""
    if value >= limit:
        return "unhealthy"
    return "degraded" if value >= DEGRADED_SHARE * limit else "healthy"


def grade_free_space(free: float, needed: float) -> str:
    """A room that must not be smaller than `needed`: degraded when four fifths of it would be taken."""
    if free < needed:
        return "unhealthy"
    return "degraded" if needed >= DEGRADED_SHARE * free else "healthy"


class EndpointResponse(msgspec.Struct, frozen=True):
    """What came of one request. `status` is 0 when there was no answer, in time or at all; `seconds` is how long it
    took, the lookup of the name included; `is_insecure`: TLS failed, or the intrusion detection says so; `allow` and
    `accept` are the headers of that name, None when they are not there; `why` says what went wrong."""

    status: int = 0
    seconds: float = 0.0
    is_insecure: bool = False
    allow: str | None = None
    accept: str | None = None
    why: str = ""


def get_endpoint_states(
    answer: EndpointResponse, *, method: str, content_type: str | None, limit: float, is_call: bool = False
) -> list[str]:
    """All states that an answer speaks for; the worst counts. `method` and `content_type` are those of the
    calls to come, `limit` the seconds they may take; `is_call`: it was such a call itself, not an OPTIONS
    request."""
    found: list[str] = []
    status = answer.status
    if answer.is_insecure:
        found.append("insecure")
    refused = {404, 405, 415} if is_call else {404}
    if status in refused or not (
        _lists(answer.allow, method) and (content_type is None or _lists(answer.accept, content_type))
    ):
        found.append("permanently-unavailable")
    if status in (0, 500) or answer.seconds >= limit:
        found.append("unhealthy")
    if not 200 <= status < 300 or answer.seconds >= DEGRADED_SHARE * limit:
        found.append("degraded")
    return found or ["healthy"]


def _lists(header: str | None, wanted: str) -> bool:
    """Whether a header lists something. One that is not there forbids nothing: many servers leave both out."""
    if header is None:
        return True
    listed = [each.partition(";")[0].strip().lower() for each in header.split(",")]
    kind = wanted.partition(";")[0].strip().lower()
    return bool({kind, "*", "*/*", f"{kind.partition('/')[0]}/*"} & set(listed))
