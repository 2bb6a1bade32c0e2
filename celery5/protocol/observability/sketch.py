"""Count durations in buckets, so that percentiles of any set of processes can be derived within 5 %."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from math import ceil, log2
from typing import Any, Self, cast

PER_OCTAVE = 8
"""Buckets from one power of two to the next: each is 9 % wider than the one before."""
LOWEST = -20 * PER_OCTAVE
"""The lowest bucket: all that is shorter than a microsecond."""
HIGHEST = 30 * PER_OCTAVE
"""The highest bucket: all that is longer than 34 years."""
MAX_COUNT = 2**53
"""The largest count that is read from others."""
FEW = 40
"""Values of which all are kept when a sketch is reduced."""
BATCH = 512
"""Values that are put into buckets at once."""


class Sketch:
    """How often values fell into each bucket, and their sum.

    Bucket `i` holds what is greater than 2^((i-1)/8) and at most 2^(i/8). Two sketches are merged by adding their
    counts, so it does not matter which process has counted what.

    A value is only appended to a list, which is sorted now and then: then there is one search for each bucket, and not
    a logarithm for each value. That takes a third of the time.

    Source: Prometheus' native histograms (schema 3), which are OpenTelemetry's exponential histograms of scale 3.
    """

    __slots__ = ("_counts", "_new", "_total")

    def __init__(self) -> None:
        # A cluster has tens of thousands of sketches. A plain dict of numbers is nothing to the garbage collector.
        self._counts: dict[int, int] = {}
        self._total = 0.0
        # None until a value is added: a sketch of sums never has any.
        self._new: list[float] | None = None

    def add(self, value: float) -> None:
        """Count a value of at least 0."""
        new = self._new
        if new is None:
            new = self._new = []
        new.append(value)
        if len(new) >= BATCH:
            self._sort()

    def _sort(self) -> None:
        """Put the new values into their buckets."""
        values, self._new = self._new or [], None
        values.sort()
        self._total += sum(values)
        start = 0
        while start < len(values):
            bucket = _bucket_of(values[start])
            end = max(bisect_right(values, 2.0 ** (bucket / PER_OCTAVE), start), start + 1)
            self._counts[bucket] = self._counts.get(bucket, 0) + end - start
            start = end

    @property
    def counts(self) -> Mapping[int, int]:
        """How many values each bucket has."""
        if self._new:
            self._sort()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of all values."""
        if self._new:
            self._sort()
        return self._total

    def add_all(self, other: "Sketch") -> None:
        """Count all that another sketch has counted."""
        counts = self._counts
        for bucket, count in list(other.counts.items()):
            counts[bucket] = counts.get(bucket, 0) + count
        self._total += other.total

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(list(self.counts.values()))

    def copy(self) -> "Sketch":
        """Return a sketch of the same values, which stays as it is."""
        copy = Sketch()
        copy.add_all(self)
        return copy

    def since(self, earlier: "Sketch | None") -> "Sketch":
        """Return what was counted after `earlier`, a copy of this sketch, was made."""
        difference = Sketch()
        before: Mapping[int, int] = {} if earlier is None else earlier.counts
        for bucket, count in list(self.counts.items()):
            if new := count - before.get(bucket, 0):
                difference._counts[bucket] = new
        difference._total = self.total - (0.0 if earlier is None else earlier.total)
        return difference

    def quantile(self, fraction: float) -> float | None:
        """Return the value that this fraction of all values does not exceed, within 5 %; None when there are none.

        Args:
            fraction: From 0 to 1, such as 0.95.
        """
        left = fraction * self.count
        bucket = None
        for bucket, count in sorted(self.counts.items()):  # noqa: B007  the last one counts
            left -= count
            if left <= 0:
                break
        if bucket is None:
            return None
        if bucket <= LOWEST:
            return 0.0
        upper: float = 2.0 ** (bucket / PER_OCTAVE)
        lower: float = 2.0 ** ((bucket - 1) / PER_OCTAVE)
        return 2 * lower * upper / (lower + upper)  # off by the same share at both ends of the bucket: 4.4 %

    def count_up_to(self, exponents: range) -> Iterator[int]:
        """Yield how many values are at most 2^n, for each n of `exponents`, which ascend."""
        waiting = sorted(self.counts.items(), reverse=True)
        below = 0
        for exponent in exponents:
            while waiting and waiting[-1][0] <= exponent * PER_OCTAVE:
                below += waiting.pop()[1]
            yield below

    def reduce(self) -> "Sketch":
        """Return a sketch with no more buckets than those of p50, p95 and p99, which are the same in it.

        The sum of its values is not known.
        """
        reduced, counts, total = Sketch(), sorted(self.counts.items()), self.count
        if total < FEW:
            return self.copy()
        taken = 0
        # Each bucket gets more than the share up to its percentile, so that rounding does not change which is found.
        for fraction, upto in ((0.5, 0.7), (0.95, 0.97), (0.99, 1.0)):
            rank, below = ceil(fraction * total), 0
            for bucket, count in counts:
                below += count
                if below >= rank:
                    reduced._counts[bucket] = reduced._counts.get(bucket, 0) + ceil(upto * total) - taken
                    break
            taken = ceil(upto * total)
        return reduced

    def to_bytes(self) -> bytes:
        """Return the counts in few bytes, each within 6 %, which moves no percentile by more than a bucket.

        The lowest bucket (2 bytes), the power of two by which all counts are divided (1 byte), then a byte for the
        lowest bucket and each one above it.
        """
        counts = {bucket: count for bucket, count in self.counts.items() if count > 0}
        if not counts:
            return b""
        lowest, highest = min(counts), max(counts)
        shift = max(max(counts.values()).bit_length() - MOST.bit_length() + 1, 0)
        numbers = [_to_byte(counts.get(bucket, 0) >> shift) for bucket in range(lowest, highest + 1)]
        return lowest.to_bytes(2, "big", signed=True) + bytes((shift, *numbers))

    @classmethod
    def from_bytes(cls, packed: bytes) -> Self:
        """Return the sketch of what `to_bytes` has returned; the sum of its values is not known."""
        sketch = cls()
        if len(packed) < 3:
            return sketch
        lowest, shift = int.from_bytes(packed[:2], "big", signed=True), min(packed[2], 22)
        for offset, byte in enumerate(packed[3 : 3 + HIGHEST - LOWEST]):
            if byte:
                bucket = min(max(lowest + offset, LOWEST), HIGHEST)
                sketch._counts[bucket] = sketch._counts.get(bucket, 0) + (_from_byte(byte) << shift)
        return sketch

    def to_wire(self) -> list[float | int]:
        """Return the sum, then each bucket and its count. Nothing is lost."""
        words: list[float | int] = [round(self.total, 6)]
        for bucket, count in sorted(self.counts.items()):
            words += (bucket, count)
        return words

    @classmethod
    def from_wire(cls, words: Any) -> Self:
        """Return the sketch of what `to_wire` or `to_bytes` has returned; what cannot be one is left out."""
        if isinstance(words, bytes):
            return cls.from_bytes(words)
        sketch = cls()
        if not isinstance(words, list | tuple) or not words:
            return sketch
        rest = iter(cast("list[Any]", words))
        total = next(rest)
        # The quickest of several ways: 10,000 workers send 100,000 pairs in a second.
        sketch._counts = {
            bucket: count
            for bucket, count in zip(rest, rest, strict=False)
            if type(bucket) is int is type(count) and LOWEST <= bucket <= HIGHEST and 0 < count <= MAX_COUNT
        }
        if sketch._counts:
            sketch._total = _to_total(total)
        return sketch


def _bucket_of(value: float) -> int:
    """Return the bucket of a value. Rounding may take the lower one of two for a value at their border."""
    if value <= 2.0 ** (LOWEST / PER_OCTAVE):
        return LOWEST
    return min(ceil(log2(value) * PER_OCTAVE), HIGHEST)


MOST = 15 << 29
"""The largest count that fits into a byte."""


def _to_total(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0.0


def _to_byte(count: int) -> int:
    """Return a count of at most MOST as a byte: exact up to 15, then with three bits, as in a small float."""
    if count < 8:
        return count
    exponent = count.bit_length() - 4
    return min(exponent * 8 + round(count / (1 << exponent)), 255)


def _from_byte(byte: int) -> int:
    if byte < 8:
        return byte
    shift = byte // 8 - 1
    return (byte % 8 + 8) << shift
