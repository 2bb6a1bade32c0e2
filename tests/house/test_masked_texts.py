"""The masking of passwords leaves what celery5 itself says as it is: the log would lose what to do about it."""

import ast

from celery5.protocol.masking import mask_lines
from tests.house.sources import files, name, nodes

WITH_PLACEHOLDERS = frozenset({"celery5/hints.py", "celery5/protocol/brokers.py"})
"""They have URLs with `user:password@`."""
SHELL = frozenset({"celery5/protocol/cluster/remote_units.py"})


def test_no_text_of_our_own_is_taken_for_one_with_a_password() -> None:
    looked_at, garbled = 0, list[str]()
    for path in files("celery5", "services", "bootsteps"):
        if name(path) in WITH_PLACEHOLDERS | SHELL:
            continue
        skipped = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        skipped |= {
            id(part) for node in nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in nodes(path):
            match node:
                case ast.Constant(value=str(text)):
                    pass
                case ast.JoinedStr(values=parts):
                    text = "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts
                    )
                case _:
                    continue
            if id(node) in skipped or " " not in text:
                continue
            looked_at += 1
            if mask_lines(text) != text:
                garbled.append(f"{name(path)}:{node.lineno} {mask_lines(text)[:200]}")
    assert looked_at > 5000
    assert garbled == []
