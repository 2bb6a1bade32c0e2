"""Derived: the id of a job that follows from something else, so that making it twice makes it once.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from base64 import urlsafe_b64encode
from hashlib import sha256

DEDUPLICATION_WINDOW = 7 * 86400.0
"""Seconds for which it is remembered that such a job was sent (`unique_for`), while whatever it follows from may still
come again."""
DEDUPLICATION_GRACE = 600.0
"""Seconds for which it is remembered once that cannot come again: longer than any trip is under way."""


def derive_job_id(*parts: str) -> str:
    """The id of the job that follows from `parts`: always the same for the same ones, in their order. 22 url-safe
    characters, as any job's id, and it never begins with `-`."""
    text = "".join(f"{len(part)}:{part}" for part in parts)  # so that ("a", "bc") is not ("ab", "c")
    made = urlsafe_b64encode(sha256(text.encode()).digest()[:16])[:22].decode()
    return made if made[0] != "-" else f"_{made[1:]}"
