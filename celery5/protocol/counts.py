"""Write numbers of things as people read them: `1 job`, `12,345 jobs`."""


def format_count(count: int, one: str, many: str = "") -> str:
    """Return a number with the form of its noun: `1 job`, `2 jobs`, `12,345 jobs`.

    Args:
        count: How many.
        one: What one of them is called, with a verb where that changes, too: `job waits`.
        many: What several, and none, are called; default: `one` with an `s`.
    """
    return f"{count:,} {choose_form(count, one, many)}"


def choose_form(count: int, one: str, many: str = "") -> str:
    """Return the form of a word for so many: that of one, or that of several and of none."""
    return one if count == 1 else many or f"{one}s"
