"""Commands are packed as hiredis packs them, and large words are copied once."""

import hiredis
import pytest

from celery5.broker.call import Word
from celery5.broker.connection.exchange import LARGE, pack_command, pack_commands

BIG = b"\r\n$1" * LARGE

COMMANDS: list[tuple[Word, ...]] = [
    ("PING",),
    ("SET", "k\u00e9y", b"x" * (LARGE - 1)),
    ("SET", "k\u00e9y", BIG, "PX", 5, 1.5),
    (BIG, BIG),
    ("EVALSHA", "sha", 2, BIG, "text " * LARGE, b"", BIG, -1),
]


def hiredis_pack(words: tuple[Word, ...]) -> bytes:
    return bytes(hiredis.pack_command(words))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", COMMANDS)
def test_large_words_are_packed_as_hiredis_packs_them(words: tuple[Word, ...]) -> None:
    assert pack_command(words) == hiredis_pack(words)


def test_several_commands_are_packed_one_after_the_other() -> None:
    assert pack_commands(COMMANDS) == b"".join(map(hiredis_pack, COMMANDS))


def test_unsendable_word_beside_a_large_one_raises_type_error() -> None:
    with pytest.raises(TypeError):
        pack_command(("SET", BIG, None))  # type: ignore[arg-type]
