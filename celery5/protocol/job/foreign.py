"""Decide what becomes of a *foreign* job: one whose task, or whose arguments, the code of a worker does not know.

While a new version is rolled out, workers with old and with new code read the same queue. A foreign job goes to those
whose code can run it. Where no live worker has such code it waits a grace period for one, and then it is dead.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.job.messages import Refusal
from celery5.protocol.limits import escape_word
from celery5.similar_names import join_names

MAX_SIGNATURES = 16
"""The most signatures that are noted in a job: a job that this many could not read waits for no other."""
RECHECK_INTERVAL = 30.0
"""Seconds after which a job that waits for live workers is looked at again: they may have gone."""
MAX_TASKS = 10_000
"""The most tasks that a worker announces."""
_DIGEST_LENGTH = 12


class CodeVersion(msgspec.Struct, frozen=True):
    """What the code of a worker knows. Workers of the same code have the same version."""

    version: str
    # The digest of the signature of each task, by name.
    signatures: Mapping[str, str]


class HandOverPlan(msgspec.Struct, frozen=True):
    """A job is kept for workers with other code."""

    refusal: Refusal
    # Seconds after which it is looked at again.
    delay: float


def make_code_version(signatures: Mapping[str, str]) -> CodeVersion:
    """Return the version of code with these tasks, each with the digest of its signature."""
    announced = dict(sorted(signatures.items())[:MAX_TASKS])
    return CodeVersion(sha256(msgspec.json.encode(announced)).hexdigest()[:_DIGEST_LENGTH], announced)


LACKS = "!"
"""The end of a signature of code that knows a task and runs where something is missing that its jobs take."""


def mark_lacking(digest: str, *, lacks: bool) -> str:
    """Return the signature of a task, which says whether its jobs take what this worker does not have."""
    return digest + LACKS if lacks else digest


def is_lacking(signatures: Iterable[str]) -> bool:
    """Return whether a job was kept since a worker lacks what it takes."""
    return any(signature.endswith(LACKS) for signature in signatures)


def add_signature(refusal: Refusal | None, signature: str) -> Refusal:
    """Return what is noted in a job that code with this signature of its task, '' for none, could not run."""
    refusal = refusal or Refusal()
    if not signature or signature in refusal.by:
        return refusal
    return Refusal(by=(*refusal.by, signature)[-MAX_SIGNATURES:], since=refusal.since)


def plan_hand_over(refusal: Refusal, *, is_known: bool, now: float, grace: float) -> HandOverPlan | None:
    """Return how a foreign job is kept; None when it is given up. One that lacks resources never is.

    Args:
        refusal: What is noted in the job, with the signature of the code that could not run it just now.
        is_known: Whether a live worker has other code for its task.
        now: The time by the clock of Redis, in seconds since 1970.
        grace: Seconds that it waits while no live worker has.
    """
    if is_known and len(refusal.by) < MAX_SIGNATURES:
        return HandOverPlan(Refusal(by=refusal.by), RECHECK_INTERVAL)
    if is_lacking(refusal.by):
        return HandOverPlan(Refusal(by=refusal.by), RECHECK_INTERVAL)  # it waits for a worker that has it
    since = min(refusal.since, now) if refusal.since > 0 else now
    left = since + grace - now
    return HandOverPlan(Refusal(by=refusal.by, since=since), left) if left > 0 else None


def describe_awaited(unknown: Mapping[str, int], unfit: Mapping[str, int]) -> str:
    """Return which jobs wait for a worker with other code, in words; '' for none.

    Args:
        unknown: How many wait for one whose code has their task, by task.
        unfit: How many wait for one whose code takes their arguments, by task.
    """
    texts = [
        f"{format_count(count, 'job waits', 'jobs wait')} for {describe_code(task, is_unfit=is_unfit)}"
        for counts, is_unfit in ((unknown, False), (unfit, True))
        for task, count in counts.items()
    ]
    return join_names(texts, separator="; ")


def describe_code(task: str, *, is_unfit: bool) -> str:
    """Return for which worker a foreign job of a task waits, in words.

    Args:
        task: Its name.
        is_unfit: Whether other workers have the task, with parameters that the job's arguments do not fit.
    """
    other = " with other parameters, which the arguments fit" if is_unfit else ""
    return f"a worker whose code has task {task}{other}"


def format_foreign_list(task: str, refusal: Refusal) -> str:
    """Return the list in which a foreign job waits, in two words: its task, and which signatures could not read it."""
    return f"{escape_word(task)} {','.join(sorted(map(escape_word, refusal.by))) or '-'}"
