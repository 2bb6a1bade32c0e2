"""Budget words: budgets in one line of text, as the setting `budgets` says them: `thread=2..8 trio=10..500`.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

import re

from celery5.errors import Misconfigured
from celery5.protocol.budget import Budget, ByLoad, ByMemory, Maximum, check_budgets, fixed_budget

_ONE = re.compile(r"(?P<kind>[^=\s]+)=(?P<minimum>\d{1,9})(?P<range>\.\.(?P<maximum>\S*))?")
_LOAD = re.compile(r"load(?:\*(\d{1,6}(?:\.\d{1,6})?))?")
_MEMORY = re.compile(r"memory/(\d{1,15})([kMG]?)B?")
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_HINT = "write thread=4, thread=2..8, thread=2.., thread=2..load or boxed=1..memory/200MB"


def parse_budgets(text: str) -> dict[str, Budget]:
    """The budgets, by kind: `KIND=SLOTS` or `KIND=MINIMUM..MAXIMUM`, with spaces or commas between them.

    A maximum is a number; nothing; `load` or `load*1.5`, as `ByLoad` with so much per core; `memory/200MB`, as
    `ByMemory` with so much for each job. Raises Misconfigured.
    """
    found: dict[str, Budget] = {}
    for word in text.replace(",", " ").split():
        match = _ONE.fullmatch(word)
        if match is None:
            raise Misconfigured(f"{word!r} is no budget: {_HINT}")
        kind, minimum = match["kind"], int(match["minimum"])
        if kind in found:
            raise Misconfigured(f"there are two budgets for {kind!r}")
        ranged = match["range"] is not None
        found[kind] = (
            Budget(minimum=minimum, maximum=_maximum(word, match["maximum"]))
            if ranged
            else fixed_budget(minimum)
        )
    return check_budgets(found)


def _maximum(word: str, text: str) -> int | Maximum | None:
    if not text:
        return None
    if text.isdecimal() and len(text) < 10:
        return int(text)
    if match := _LOAD.fullmatch(text):
        return ByLoad(per_core=float(match[1] or 1))
    if match := _MEMORY.fullmatch(text):
        return ByMemory(per_job=int(match[1]) * _TIMES[match[2]])
    raise Misconfigured(f"{word!r} is no budget: {_HINT}")
