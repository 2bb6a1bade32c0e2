"""Name what there is in errors: a similar name ("did you mean"), or the first names of many and how many more."""

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


def count_rest(left_out: int) -> str:
    """Return what stands behind a list from which so many were left out: ` and 14 more`; '' for none."""
    return f" and {left_out} more" if left_out > 0 else ""


def join_names(names: Iterable[str], most: int = MAX_KNOWN, *, separator: str = ", ") -> str:
    """Return names as one text; of many the first ones, and how many more there are: `cart, order and 14 more`."""
    listed = list(names)
    return separator.join(listed[:most]) + count_rest(len(listed) - most)


def suggest_known(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'cart'?`, or the names that there are when none is similar: `known: order, user`."""
    names = list(known)
    return did_you_mean(name, names, otherwise=f"known: {join_names(names) or 'none'}")
