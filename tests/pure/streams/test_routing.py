"""The test vectors of the docs are what the code does."""

import json
import re
from pathlib import Path
from zlib import crc32

import pytest

from celery5.protocol.streams.routing import canonical_key, find_partition

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "streams.md").read_text()
VECTORS = re.findall(r"^\| `(.+)` \| `(\w*)` \| `(\w{8})` \| (\d+) \|$", PAGE, re.MULTILINE)


def test_there_are_vectors() -> None:
    assert len(VECTORS) == 12


@pytest.mark.parametrize(("shown", "raw", "checksum", "partition"), VECTORS)
def test_a_key_is_routed_as_the_docs_say(shown: str, raw: str, checksum: str, partition: str) -> None:
    key = canonical_key(json.loads(shown))
    assert key.hex() == raw
    assert f"{crc32(key):08x}" == checksum
    assert find_partition(key, 16) == int(partition)
