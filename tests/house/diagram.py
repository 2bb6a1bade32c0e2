"""Diagram: the picture and the table of a job's states in the documentation, made from the table in the code.

Only where a state stands is said here. What leads where is the table's; a move that all states of a job that has not
ended share is drawn once, from the frame around them. The picture needs no script and no other server.
"""

import re
from itertools import groupby
from math import hypot

from celery5.protocol.job.states import FINISHED, TRANSITIONS, JobState, Move
from tests.house.sources import HERE

PAGE = HERE / "docs" / "reference" / "states.md"
PICTURE = HERE / "docs" / "reference" / "states.svg"

WIDTH, HEIGHT = 900, 440
BOX = (112, 36)
FRAME = (96, 24, 640, 416)
"""Around the states of a job that has not ended: left, top, right, bottom."""

_S = JobState
WHERE = {
    _S.UNKNOWN: (36, 220),
    _S.SCHEDULED: (190, 80),
    _S.SENT: (190, 220),
    _S.HELD: (190, 360),
    _S.RETRY: (530, 80),
    _S.EXECUTING: (530, 220),
    _S.SUCCESS: (800, 60),
    _S.REJECTED: (800, 135),
    _S.EXPIRED: (800, 210),
    _S.DEAD: (800, 285),
    _S.REVOKED: (800, 380),
}
BENDS = {
    (_S.EXECUTING, _S.SENT): 12,
    (_S.SENT, _S.EXECUTING): 12,
    (_S.HELD, _S.SENT): 15,
    (_S.DEAD, _S.SENT): -62,
}
"""How far the middle of a line lies to its right."""

STYLE = (
    "text{font:13px Helvetica,Arial,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#1f2933}"
    ".state{font-weight:600;font-size:13px}"
    ".move{font-size:12px;paint-order:stroke;stroke:#fff;stroke-width:7px;stroke-linejoin:round}"
    "path{fill:none;stroke:#52606d;stroke-width:1.3}"
    "rect.box{fill:#eef2f7;stroke:#52606d}rect.end{fill:#e3efe3}"
    "rect.frame{fill:none;stroke:#9aa5b1;stroke-dasharray:5 4}"
)

Point = tuple[float, float]


def shared() -> dict[Move, JobState]:
    """The moves that lead from every state of a job that has not ended to one and the same state."""
    rows = [TRANSITIONS[state] for state in living()]
    return {move: after for move, after in rows[0].items() if all(row.get(move) is after for row in rows)}


def living() -> list[JobState]:
    """The states of a job that has not ended."""
    return [state for state in JobState if state not in FINISHED and state is not _S.UNKNOWN]


def lines() -> dict[tuple[JobState, JobState], list[Move]]:
    """The moves between each two states, but those that are drawn from the frame."""
    found: dict[tuple[JobState, JobState], list[Move]] = {}
    for state, row in TRANSITIONS.items():
        for move, after in row.items():
            if not (state in living() and shared().get(move) is after):
                found.setdefault((state, after), []).append(move)
    return found


def edge(centre: Point, towards: Point, half: Point) -> Point:
    """Where a line from a box's centre leaves the box."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    share = min(half[0] / abs(dx) if dx else 9e9, half[1] / abs(dy) if dy else 9e9)
    return centre[0] + dx * share, centre[1] + dy * share


def half(state: JobState) -> Point:
    """Half the size of a state's box."""
    return (9, 9) if state is _S.UNKNOWN else (BOX[0] / 2 + 2, BOX[1] / 2 + 2)


def line(start: JobState, end: JobState, moves: list[Move]) -> list[str]:
    """The line from one state to another, and its words."""
    a, b, bend = WHERE[start], WHERE[end], BENDS.get((start, end), 0)
    dx, dy = b[0] - a[0], b[1] - a[1]
    length = hypot(dx, dy)
    middle = ((a[0] + b[0]) / 2 - dy / length * bend * 2, (a[1] + b[1]) / 2 + dx / length * bend * 2)
    first, last = edge(a, middle, half(start)), edge(b, middle, half(end))
    words = [(p + 2 * q + r) / 4 for p, q, r in zip(first, middle, last, strict=True)]
    return [*curve(first, middle, last), said((words[0], words[1]), ", ".join(moves))]


def curve(first: Point, middle: Point, last: Point) -> list[str]:
    """A curve with an arrow at its end."""
    at = [f"{x:.0f} {y:.0f}" for x, y in (first, middle, last)]
    return [f'<path d="M{at[0]} Q{at[1]} {at[2]}" marker-end="url(#arrow)"/>']


def said(at: Point, words: str) -> str:
    """The words of a line."""
    return f'<text class="move" x="{at[0]:.0f}" y="{at[1]:.0f}">{words}</text>'


def box(state: JobState) -> list[str]:
    """A state."""
    x, y = WHERE[state]
    if state is _S.UNKNOWN:
        return [f'<circle cx="{x}" cy="{y}" r="7" fill="#52606d"/>', said((x, y + 22), state.value)]
    kind = "box end" if state in FINISHED else "box"
    left, top = x - BOX[0] / 2, y - BOX[1] / 2
    return [
        f'<rect class="{kind}" x="{left:.0f}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="8"/>',
        f'<text class="state" x="{x}" y="{y}">{state.value}</text>',
    ]


def frame() -> list[str]:
    """The frame around the states of a job that has not ended, and the moves that all of them have."""
    left, top, right, bottom = FRAME
    drawn = [
        f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" rx="14"/>',
        said(((left + right) / 2, bottom), "not ended"),
    ]
    for move, after in shared().items():
        x, y = WHERE[after][0] - half(after)[0], WHERE[after][1]
        drawn += [*curve((right, y), ((right + x) / 2, y), (x, y)), said(((right + x) / 2, y), move)]
    return drawn


def picture() -> str:
    """The picture, as SVG."""
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The states of a job, and what leads where</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L10 5 L0 10 z" style="fill:#52606d;stroke:none"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>',
        *frame(),
        *(element for (start, end), moves in lines().items() for element in line(start, end, moves)),
        *(element for state in JobState for element in box(state)),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def table() -> str:
    """The table in words: what leads where."""
    rows = ["| from | what happens | to |", "|---|---|---|"]
    for state, row in TRANSITIONS.items():
        for after, moves in groupby(row.items(), key=lambda item: item[1]):
            names = ", ".join(move.value for move, _ in moves)
            rows.append(f"| `{state.value}` | {names} | `{after.value}` |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page `text` with today's table in its place."""
    start, end = "<!-- transitions:start -->\n", "\n<!-- transitions:end -->"
    return re.sub(f"(?s){start}.*?{end}", f"{start}{table()}{end}", text)


if __name__ == "__main__":
    PICTURE.write_text(picture())
    PAGE.write_text(page(PAGE.read_text()))
