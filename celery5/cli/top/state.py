"""What the screen shows, and what a key does to it: pure functions, so that no terminal is needed to test them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from celery5.cli.top.tables import Row, TopTable, View
from celery5.protocol.counts import format_count
from celery5.protocol.job.failure_groups import DeadJobGroup

VIEWS = tuple(View)
PAGE = 10
"""Rows of a step with page up and page down."""
STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -PAGE, "page-down": PAGE}
"""By how many rows keys move."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End the command."""


@dataclass(frozen=True, slots=True)
class PauseQueue:
    """Pause a queue, or resume it."""

    queue: str
    resume: bool = False


@dataclass(frozen=True, slots=True)
class CountDead:
    """Count the dead letters of a group, so that the question before a replay can say how many there are."""

    group: DeadJobGroup


@dataclass(frozen=True, slots=True)
class ReplayDead:
    """Replay the dead letters of a group."""

    group: DeadJobGroup


@dataclass(frozen=True, slots=True)
class ReadNow:
    """Read what the screen shows, at once."""


TopAction = Quit | PauseQueue | CountDead | ReplayDead | ReadNow


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked before an action is performed."""

    text: str
    action: TopAction


@dataclass(frozen=True, slots=True)
class ScreenState:
    """What the screen shows."""

    view: View = View.QUEUES
    # The key of the selected row, and the title of the column that it is sorted by, by view.
    selected: Mapping[View, str] = field(default_factory=dict[View, str])
    sorts: Mapping[View, str] = field(default_factory=dict[View, str])
    filter_text: str = ""
    is_typing: bool = False
    # The key of the row whose details are shown; '' for none.
    details: str = ""
    # Lines of the details, or of the help, that are scrolled off.
    scrolled: int = 0
    question: Question | None = None
    shows_help: bool = False
    # What became of the last action.
    notice: str = ""
    is_bad_notice: bool = False


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What a key acts on: the rows as they are shown, and what the selected one stands for."""

    table: TopTable
    # Arranged.
    rows: Sequence[Row]
    paused_queues: frozenset[str] = frozenset()
    groups: Sequence[DeadJobGroup] = ()


KeyResult = tuple[ScreenState, TopAction | None]
"""The state after a key was pressed, and what is to be done."""


def find_selected(state: ScreenState, rows: Sequence[Row]) -> int:
    """Return the number of the selected row; 0 when it is not there any more."""
    key = state.selected.get(state.view, "")
    return next((number for number, row in enumerate(rows) if row.key == key), 0)


def handle_key(state: ScreenState, key: str, seen: SeenRows) -> KeyResult:
    """Return the state after a key was pressed, and what is to be done.

    Args:
        state: The state before.
        key: A character, or the name of a key: `enter`, `up`, `ctrl-c`.
        seen: What was on the screen.
    """
    state = replace(state, notice="", is_bad_notice=False)
    if state.question is not None:
        question = state.question
        state = replace(state, question=None)
        return (
            (state, question.action)
            if key in ("y", "Y")
            else (replace(state, notice="nothing was done"), None)
        )
    if state.is_typing:
        return _type_filter(state, key), None
    if state.shows_help:
        return (state, Quit()) if key == "q" else (_scroll(state, key) or _close(state), None)
    if state.details and (scrolled := _scroll(state, key)) is not None:
        return scrolled, None
    return _handle_plain_key(state, key, seen)


def _type_filter(state: ScreenState, key: str) -> ScreenState:
    match key:
        case "enter":
            return replace(state, is_typing=False)
        case "escape":
            return replace(state, is_typing=False, filter_text="")
        case "backspace":
            return replace(state, filter_text=state.filter_text[:-1])
        case _ if len(key) == 1 and key.isprintable():
            return replace(state, filter_text=(state.filter_text + key)[:100])
        case _:
            return state


def _scroll(state: ScreenState, key: str) -> ScreenState | None:
    """Return the state with a long text scrolled; None for a key that does not scroll."""
    return replace(state, scrolled=max(0, state.scrolled + STEPS[key])) if key in STEPS else None


def _close(state: ScreenState) -> ScreenState:
    return replace(state, details="", shows_help=False, scrolled=0)


def _handle_plain_key(state: ScreenState, key: str, seen: SeenRows) -> KeyResult:
    if (number := _find_row(state, key, seen.rows)) is not None:
        return _select(state, seen.rows, number), None
    if (view := _find_view(state, key)) is not None:
        return _switch(state, view), ReadNow()
    handler = _HANDLERS.get(key)
    return handler(state, seen) if handler else (state, None)


def _find_row(state: ScreenState, key: str, rows: Sequence[Row]) -> int | None:
    """Return the number of the row that a key selects; None for a key that selects none."""
    if key in STEPS:
        return find_selected(state, rows) + STEPS[key]
    return {"home": 0, "g": 0, "end": len(rows) - 1, "G": len(rows) - 1}.get(key)


def _find_view(state: ScreenState, key: str) -> View | None:
    """Return the view that a key switches to; None for a key that switches to none."""
    number = VIEWS.index(state.view)
    if key in ("tab", "right"):
        return VIEWS[(number + 1) % len(VIEWS)]
    if key in ("back-tab", "left"):
        return VIEWS[number - 1]
    return VIEWS[int(key) - 1] if key in ("1", "2", "3", "4", "5") else None


def _switch(state: ScreenState, view: View) -> ScreenState:
    return replace(_close(state), view=view, filter_text="")


def _quit(state: ScreenState, _seen: SeenRows) -> KeyResult:
    return state, Quit()


def _read(state: ScreenState, _seen: SeenRows) -> KeyResult:
    return state, ReadNow()


def _show_help(state: ScreenState, _seen: SeenRows) -> KeyResult:
    return replace(_close(state), shows_help=True), None


def _go_back(state: ScreenState, _seen: SeenRows) -> KeyResult:
    return (_close(state) if state.details else replace(state, filter_text="")), None


def _begin_filter(state: ScreenState, _seen: SeenRows) -> KeyResult:
    return replace(_close(state), is_typing=True), None


def _open_details(state: ScreenState, seen: SeenRows) -> KeyResult:
    if state.details or not seen.rows:
        return _close(state), None
    number = find_selected(state, seen.rows)
    key = seen.rows[number].key
    return replace(_select(state, seen.rows, number), details=key, scrolled=0), ReadNow()


def _select(state: ScreenState, rows: Sequence[Row], number: int) -> ScreenState:
    if not rows:
        return state
    row = rows[min(max(number, 0), len(rows) - 1)]
    return replace(state, selected={**state.selected, state.view: row.key})


def _sort_by_next(state: ScreenState, seen: SeenRows) -> KeyResult:
    titles = ["", *(column.title for column in seen.table.columns)]
    sort = state.sorts.get(state.view, "")
    following = titles[(titles.index(sort) + 1) % len(titles)] if sort in titles else ""
    notice = f"sorted by {following}" if following else "sorted by what needs attention"
    return replace(state, sorts={**state.sorts, state.view: following}, notice=notice), None


def _ask_to_pause(state: ScreenState, seen: SeenRows) -> KeyResult:
    if state.view is not View.QUEUES or not seen.rows:
        return replace(state, notice="p pauses the selected queue: press 1 for the queues"), None
    queue = state.details or seen.rows[find_selected(state, seen.rows)].key
    if queue in seen.paused_queues:
        question = Question(f"Resume queue {queue}?", PauseQueue(queue, resume=True))
    else:
        text = f"Pause queue {queue} in all workers? Jobs that were read are run."
        question = Question(text, PauseQueue(queue))
    return replace(state, question=question), None


def _begin_replay(state: ScreenState, seen: SeenRows) -> KeyResult:
    key = state.details or (seen.rows[find_selected(state, seen.rows)].key if seen.rows else "")
    group = next((group for group in seen.groups if group.id == key), None)
    if state.view is not View.DEAD or group is None:
        return replace(state, notice="R replays a group of dead letters: press 4 for them"), None
    return state, CountDead(group)


_HANDLERS: Mapping[str, Callable[[ScreenState, SeenRows], KeyResult]] = {
    "q": _quit,
    "?": _show_help,
    "h": _show_help,
    "escape": _go_back,
    "backspace": _go_back,
    "enter": _open_details,
    "/": _begin_filter,
    "s": _sort_by_next,
    "p": _ask_to_pause,
    "R": _begin_replay,
    "r": _read,
}


def ask_to_replay(state: ScreenState, group: DeadJobGroup, count: int) -> ScreenState:
    """Return the state that asks whether this many dead letters are to be replayed."""
    if not count:
        return replace(state, notice="this group has no dead letters any more")
    jobs = format_count(count, "dead letter")
    where = ", ".join(group.queues)
    text = f"Replay {jobs} of {group.task or 'unknown tasks'} on {where} ({group.type or 'no error'})?"
    return replace(state, question=Question(text, ReplayDead(group)), notice="")


def show_notice(state: ScreenState, text: str, *, is_bad: bool = False) -> ScreenState:
    """Return the state that says what became of an action."""
    return replace(state, notice=text, is_bad_notice=is_bad)


def describe_action(action: TopAction) -> str:
    """Return what an action that takes a while does, for the screen."""
    match action:
        case PauseQueue(queue, resume):
            return f"{'resuming' if resume else 'pausing'} {queue}"
        case CountDead():
            return "counting the dead letters of this group"
        case ReplayDead(group):
            return f"replaying dead letters of {group.task}"
        case Quit() | ReadNow():
            return ""
        case _:
            assert_never(action)
