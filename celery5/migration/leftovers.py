"""Find comments, variables and settings of a project that are about the visibility timeout of Celery."""

import ast
import re
from collections.abc import Iterator, Sequence

from celery5.migration.files.findings import CeleryUse
from celery5.migration.files.source import SourceFile

_WORDS = re.compile(
    r"(?i)visibility[\s_-]*timeout|\bun-?acked\b|\backs?[\s_-]late\b|\bprefetch[\s_-]multiplier|\bredeliver"
)
"""Words of comments and names about how Celery delivers a job again."""
_COMMENT = re.compile(r"^\s*(?:#|//|;)")
_CODE_COMMENT = re.compile(r"^[ \t]*#")
_VARIABLE = re.compile(r"(?i)^\s*(?:export\s+|-\s+)?[\"']?(\w*visibility_timeout\w*)[\"']?\s*[:=]")
_DOCUMENTS = re.compile(r"(?i)\.(md|rst|txt)$")
_ADVICE = (
    "it can be removed: celery5 has no visibility timeout, no acks_late and no prefetch multiplier; a job runs again "
    "only when its worker has died (celery5 docs from-celery)"
)


def find_leftovers(files: Sequence[SourceFile]) -> Iterator[tuple[str, CeleryUse]]:
    """Yield comments and variables about redelivery, each with the name of its file."""
    for file in files:
        if not _WORDS.search(file.text) or _DOCUMENTS.search(file.name):
            continue
        texts = _find_text_lines(file.tree) if file.tree is not None else set[int]()
        comment = _COMMENT if file.tree is None else _CODE_COMMENT
        for number, line in enumerate(file.text.split("\n"), 1):
            if not _WORDS.search(line) or number in texts:
                continue
            if comment.match(line):
                yield file.name, CeleryUse(number, "decide", "a comment on how Celery delivers", _ADVICE)
            elif file.tree is None and (variable := _VARIABLE.match(line)):
                yield file.name, CeleryUse(number, "decide", variable[1], _ADVICE)
        for node in file.tree.body if file.tree is not None else ():
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]) if _is_timeout_name(name):
                    yield file.name, CeleryUse(node.lineno, "decide", name, _ADVICE)
                case _:
                    pass


def _is_timeout_name(name: str) -> bool:
    return "visibility_timeout" in name.lower()


def _find_text_lines(tree: ast.Module) -> set[int]:
    """Return the lines inside multi-line texts, where `#` begins no comment."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if node.end_lineno != node.lineno
    }
