"""Declare three tasks whose jobs run in boxes; two of the boxes run no Python."""

from pathlib import Path

from celery5 import App
from celery5.tasks import Box

HERE = Path(__file__).parent

app = App("boxes")


@app.task(boxed=Box(["sh", str(HERE / "words.sh")]))
def words(path: str) -> int:
    """Return the number of words in a file."""
    raise NotImplementedError  # words.sh does it


@app.task(boxed=Box(["node", str(HERE / "slug.js")]), soft_time_limit=5)
def slug(title: str, longest: int = 40) -> str:
    """Return a title in a form for use in a URL."""
    raise NotImplementedError  # slug.js does it


@app.task(boxed=Box(memory=512 * 2**20, cpu=10))
def primes(below: int) -> int:
    """Return the number of primes below a bound, with limits to memory and CPU time."""
    sieve = bytearray([1]) * below
    sieve[:2] = b"\0" * len(sieve[:2])
    for n in range(2, int(below**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, below, n)))
    return sum(sieve)
