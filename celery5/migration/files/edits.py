"""Change spans of a source text, and leave all else as its authors wrote it."""

import ast
import bisect
import difflib
import io
import re
from dataclasses import dataclass

Located = ast.expr | ast.stmt | ast.keyword | ast.alias | ast.arg
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of the source become `text`."""

    start: int
    end: int
    text: str


class EditableSource:
    """A source text with changes to it. A change of a span replaces those inside of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._bytes = text.encode("utf-8", "surrogatepass")
        self._lines = [0, *(match.end() for match in _LINE_END.finditer(self._bytes))]
        self.edits: list[Edit] = []

    def start_of(self, node: Located) -> int:
        """Return the offset at which a node begins."""
        return self._lines[node.lineno - 1] + node.col_offset

    def whole_start_of(self, statement: ast.stmt) -> int:
        """Return the offset at which a statement begins, with its decorators if it has some."""
        nodes: list[Located] = [statement, *getattr(statement, "decorator_list", [])]
        return min(map(self.start_of, nodes))

    def end_of(self, node: Located) -> int:
        """Return the offset behind a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def render(self, start: int, end: int) -> str:
        """Return a span with the changes inside of it."""
        parts: list[str] = []
        position = start
        for edit in sorted(self.edits, key=lambda edit: (edit.start, edit.end)):
            if start <= edit.start and edit.end <= end and edit.start >= position:
                parts += [self.decode(position, edit.start), edit.text]
                position = edit.end
        return "".join([*parts, self.decode(position, end)])

    def render_node(self, node: Located) -> str:
        """Return the source of a node with the changes inside of it."""
        return self.render(self.start_of(node), self.end_of(node))

    def decode(self, start: int, end: int) -> str:
        """Return a span as it was."""
        return self._bytes[start:end].decode("utf-8", "surrogatepass")

    def replace(self, start: int, end: int, text: str) -> None:
        """Change a span. Changes inside of it are dropped: who wants them keeps them by `render`."""
        self.edits = [edit for edit in self.edits if not (start <= edit.start and edit.end <= end)]
        self.edits.append(Edit(start, end, text))

    def replace_node(self, node: Located, text: str) -> None:
        """Change a node."""
        self.replace(self.start_of(node), self.end_of(node), text)

    def skip_space(self, offset: int, *, skipped: bytes = b" \t\r\n\\") -> int:
        """Return the first offset from this one on that has something else than white space."""
        while offset < len(self._bytes) and self._bytes[offset : offset + 1] in [
            bytes([byte]) for byte in skipped
        ]:
            offset += 1
        return offset

    def indentation_at(self, offset: int) -> str:
        """Return the white space with which the line of an offset begins."""
        start = self.line_start(offset)
        return self.decode(start, self.skip_space(start, skipped=b" \t"))

    def line_start(self, offset: int) -> int:
        """Return the offset at which the line of an offset begins."""
        return self._lines[bisect.bisect_right(self._lines, offset) - 1]

    def line_of(self, offset: int) -> int:
        """Return the number of the line of an offset, counted from 1."""
        return bisect.bisect_right(self._lines, offset)

    def line_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of the whole lines of a span, if nothing else is on them but comments; else the span."""
        first = self.line_start(start)
        index = bisect.bisect_right(self._lines, max(end - 1, start))
        last = self._lines[index] if index < len(self._lines) else len(self._bytes)
        if self.decode(first, start).strip() or self.decode(end, last).strip():
            return start, end
        return first, last

    def remove_lines(self, start: int, end: int) -> None:
        """Remove a span with its lines. Of the empty lines around it, the greater number stays."""
        first, last = self.line_span(start, end)
        above, below = first, last
        if self.line_start(first) == first and last in (self.line_start(last), len(self._bytes)):
            while above and self._is_empty(self.line_start(above - 1), above):
                above = self.line_start(above - 1)
            while below < len(self._bytes) and self._is_empty(below, self._line_end(below)):
                below = self._line_end(below)
        is_at_top = above == 0
        empty_above, empty_below = self._count_lines(above, first), self._count_lines(last, below)
        span = (first, below) if is_at_top or empty_above > empty_below else (above, last)
        overlaps = any(edit.start < span[1] and span[0] < edit.end for edit in self._outside(first, last))
        self.replace(*((first, last) if overlaps else span), "")

    def _outside(self, start: int, end: int) -> list[Edit]:
        """Return the changes that are not inside of a span."""
        return [edit for edit in self.edits if not (start <= edit.start and edit.end <= end)]

    def _line_end(self, offset: int) -> int:
        """Return the offset behind the line of an offset."""
        index = bisect.bisect_right(self._lines, offset)
        return self._lines[index] if index < len(self._lines) else len(self._bytes)

    def _is_empty(self, start: int, end: int) -> bool:
        return not self._bytes[start:end].strip()

    def _count_lines(self, start: int, end: int) -> int:
        return self.decode(start, end).count("\n")

    @property
    def result(self) -> str:
        """The text with all changes."""
        return self.render(0, len(self._bytes))

    def new_line(self, line: int) -> int:
        """Return the number that a line has after all changes."""
        offset = self._lines[min(line, len(self._lines)) - 1]
        moved = sum(
            edit.text.count("\n") - self.decode(edit.start, edit.end).count("\n")
            for edit in self.edits
            if edit.end <= offset
        )
        return max(1, line + moved)


def make_diff(name: str, before: str, after: str) -> str:
    """Return a unified diff that `patch -p1` and `git apply` take; '' when there is nothing to change."""
    lines = list(
        difflib.unified_diff(
            [*io.StringIO(before, newline="\n")],
            [*io.StringIO(after, newline="\n")],
            f"a/{name}",
            f"b/{name}",
        )
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
