"""What a key does to the screen of `celery5 top`, without a terminal."""

import pytest

from celery5.cli.top.readings import Reading
from celery5.cli.top.screen import look
from celery5.cli.top.state import (
    CountDead,
    PauseQueue,
    Quit,
    ReadNow,
    ReplayDead,
    ScreenState,
    TopAction,
    ask_to_replay,
    find_selected,
    handle_key,
)
from celery5.cli.top.tables import View
from celery5.cli.top.terminal import decode_keys
from tests.pure.top.overviews import make_reading

READING = make_reading()


def press(
    *keys: str, state: ScreenState | None = None, reading: Reading = READING
) -> tuple[ScreenState, TopAction | None]:
    """The state after these keys, and what the last one asked for."""
    state, action = state or ScreenState(), None
    for key in keys:
        state, action = handle_key(state, key, look(state, reading))
    return state, action


def selected(state: ScreenState) -> str:
    """The key of the selected row."""
    rows = look(state, READING).rows
    return rows[find_selected(state, rows)].key


@pytest.mark.parametrize(
    ("keys", "view"),
    [
        (["tab"], View.TASKS),
        (["tab"] * 5, View.QUEUES),
        (["back-tab"], View.JOBS),
        (["4"], View.DEAD),
        (["5", "left"], View.DEAD),
    ],
)
def test_tab_and_numbers_switch_views_and_read_at_once(keys: list[str], view: View) -> None:
    state, action = press(*keys)
    assert state.view is view
    assert action == ReadNow()


def test_arrows_and_letters_select_a_row_and_stop_at_the_ends() -> None:
    order = ["orders", "slow", "mail"]  # what needs attention, then what has most jobs
    assert [selected(press(*["down"] * number)[0]) for number in (0, 1, 2, 9)] == [*order, "mail"]
    assert selected(press("j", "j", "k")[0]) == "slow"
    assert selected(press("G")[0]) == "mail"
    assert selected(press("end", "home", "up")[0]) == "orders"


def test_the_selected_row_stays_selected_when_others_come_before_it() -> None:
    state, _ = press("down")
    state, _ = press("s", "s", state=state)
    assert selected(state) == "slow"


def test_enter_opens_the_details_and_closes_them_again() -> None:
    state, action = press("2", "enter")
    assert (state.details, action) == ("shop.charge", ReadNow())
    assert press("enter", state=state)[0].details == ""
    assert press("escape", state=state)[0].details == ""
    assert press("tab", state=state)[0].details == ""
    assert press("down", "down", "up", state=state)[0].scrolled == 1


def test_enter_without_a_row_opens_nothing() -> None:
    assert press("enter", reading=Reading())[0].details == ""


def test_s_sorts_by_each_column_in_turn_and_then_as_before() -> None:
    columns = len(look(ScreenState(), READING).table.columns)
    state, _ = press("s", "s")
    assert state.sorts[View.QUEUES] == "backlog"
    assert state.notice == "sorted by backlog"
    assert press(*["s"] * (columns + 1))[0].sorts[View.QUEUES] == ""


def test_a_filter_is_typed_and_escape_ends_it() -> None:
    state, _ = press("/", "o", "q", "backspace", "r")
    assert (state.filter_text, state.is_typing) == ("or", True)
    assert [row.key for row in look(state, READING).rows] == ["orders"]
    state, _ = press("enter", state=state)
    assert (state.filter_text, state.is_typing) == ("or", False)
    assert press("escape", state=state)[0].filter_text == ""
    assert press("escape", state=press("/", "x")[0])[0] == ScreenState()


def test_a_queue_is_paused_after_a_question_and_only_by_yes() -> None:
    state, action = press("p")
    assert action is None
    assert state.question is not None
    assert state.question.text == "Pause queue orders in all workers? Jobs that were read are run."
    assert press("y", state=state)[1] == PauseQueue("orders")
    for key in ("n", "enter", "escape", "q", "p"):
        after, action = press(key, state=state)
        assert (after.question, after.notice, action) == (None, "nothing was done", None)


def test_a_paused_queue_is_resumed() -> None:
    assert press("down", "p", "y")[1] == PauseQueue("slow", resume=True)


def test_a_replay_counts_first_asks_and_replays_then() -> None:
    group = look(ScreenState(view=View.DEAD), READING).groups[0]
    state, action = press("4", "R")
    assert action == CountDead(group)
    state = ask_to_replay(state, group, 1234)
    assert state.question is not None
    assert state.question.text == "Replay 1,234 dead letters of shop.charge on orders (ValueError)?"
    assert press("y", state=state)[1] == ReplayDead(group)
    assert ask_to_replay(state, group, 0).notice == "this group has no dead letters any more"


def test_keys_that_fit_another_view_say_where_they_do() -> None:
    assert press("2", "p")[0].notice == "p pauses the selected queue: press 1 for the queues"
    assert press("R") == (press("R")[0], None)
    assert press("R")[0].notice == "R replays a group of dead letters: press 4 for them"


def test_help_is_shown_and_any_key_closes_it() -> None:
    state, _ = press("?")
    assert state.shows_help
    assert not press("x", state=state)[0].shows_help
    assert press("q", state=state)[1] == Quit()
    assert press("q")[1] == Quit()


def test_an_unknown_key_changes_nothing() -> None:
    assert press("ä", "~") == (ScreenState(), None)


def test_what_a_terminal_sends_becomes_keys() -> None:
    sent = "\x1b[A\x1bOBj\x1b[6~\r\tä\x7f\x1b[Z\x1b[200~\x1b".encode()
    keys = ["up", "down", "j", "page-down", "enter", "tab", "ä", "backspace", "back-tab", "escape"]
    assert list(decode_keys(sent)) == keys
