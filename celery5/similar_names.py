"""Suggest similar names in the errors for unknown names ("did you mean")."""

from collections.abc import Iterable


def find_similar(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name that is most similar to `name`, '' when none is.

    Args:
        name: The name that is not known.
        known: The names that are.
        cutoff: The least similarity, from 0 to 1.
    """
    from difflib import get_close_matches  # when a name is wrong, and not at each start

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return `did you mean 'cart'?`, or `otherwise` when no known name is similar to `name`."""
    similar = find_similar(name, known, cutoff=cutoff)
    return f"did you mean {similar!r}?" if similar else otherwise


MAX_KNOWN = 20
"""The most names that an error lists."""


def suggest_known(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'cart'?`, or the names that there are when none is similar: `known: order, user`."""
    names = list(known)
    return did_you_mean(name, names, otherwise=f"known: {', '.join(names[:MAX_KNOWN]) or 'none'}")
