"""Names: what examples are called, the same in every process: addresses in memory are left out."""

import re


def steady(value: object) -> str:
    """`value` as text, for `ids=`: several processes that share the tests must find the same ones."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
