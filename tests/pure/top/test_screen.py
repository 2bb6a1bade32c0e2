"""What `celery5 top` shows, at any size of the terminal."""

from dataclasses import replace

import msgspec
import pytest
from rich.cells import cell_len

from celery5.cli.top.layout import Line, cut, fit_columns, get_window
from celery5.cli.top.readings import Reading, read_running_jobs
from celery5.cli.top.screen import draw, draw_once, look
from celery5.cli.top.state import Question, Quit, ScreenState, handle_key
from celery5.cli.top.tables import Column, View, make_sparkline
from celery5.observability.metrics import HistoryPoint, TaskNumbers
from celery5.protocol.observability.overview import LostWorker
from tests.pure.top.overviews import NOW, make_dead, make_overview, make_reading

READING = make_reading()
SIZES = [(40, 10), (80, 24), (200, 60), (20, 5), (79, 11)]


def show(
    state: ScreenState | None = None,
    reading: Reading = READING,
    *,
    width: int = 120,
    height: int = 30,
    age: float = 0.0,
) -> str:
    """The screen as text."""
    lines = draw(state or ScreenState(), reading, age=age, width=width, height=height)
    return "\n".join(map(text, lines))


def text(line: Line) -> str:
    """A line without its styles."""
    return "".join(part for part, _ in line).rstrip()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("view", View)
def test_every_view_fits_into_the_terminal(view: View, width: int, height: int) -> None:
    states = [
        ScreenState(view=view),
        ScreenState(view=view, shows_help=True),
        ScreenState(view=view, question=Question("Really? " * 20, Quit())),
        handle_key(ScreenState(view=view), "enter", look(ScreenState(view=view), READING))[0],
    ]
    for state in states:
        lines = draw(state, READING, age=0.0, width=width, height=height)
        assert len(lines) == height
        assert max(sum(cell_len(part) for part, _ in line) for line in lines) <= width


def test_a_small_screen_keeps_what_tells_most() -> None:
    shown = show(width=60, height=12)
    assert "orders" in shown
    assert "12,000" in shown
    assert "grows by 12/s" in shown
    assert "scheduled" not in shown


def test_only_what_needs_a_person_is_red() -> None:
    for view in (View.QUEUES, View.TASKS, View.WORKERS):
        lines = draw(ScreenState(view=view, selected={view: "?"}), READING, age=0.0, width=120, height=30)
        red = {part.strip() for line in lines[4:] for part, style in line if style == "bad" and part.strip()}
        assert red <= {"grows by 12/s", "30.0%", "2 min", "not ready"}


def test_the_head_says_what_needs_attention_and_what_comes_next() -> None:
    shown = show()
    assert "needs attention: 1 queue, 1 task, 1 worker   next schedule nightly in 1 min" in shown
    assert "ended 40/s   failed 0.6/s   backlog 12,000   running 4   dead 6   workers 1" in shown


def test_the_head_names_the_alerts_that_fire_and_lost_processes_apart_from_workers() -> None:
    alerts = "stream-lag (group orders:billing)"
    shown = show(reading=make_reading(alerts=alerts))
    assert f"needs attention: 1 queue, 1 task, 1 worker, alerts: {alerts}" in shown
    overview = make_reading().overview
    assert overview is not None
    lost = tuple(
        LostWorker(worker=f"{kind}:x", kind=kind, at=0.0, health="lost")
        for kind in ("worker", "scheduler", "router")
    )
    reading = replace(make_reading(), overview=msgspec.structs.replace(overview, lost=lost))
    assert "1 queue, 1 task, 2 workers, 2 other processes" in show(reading=reading)


def test_an_error_says_how_old_is_what_is_shown() -> None:
    shown = show(reading=make_reading(error="redis://x: refused"), age=95.0)
    assert "shown is what was read 2 min ago: redis://x: refused" in shown
    assert "orders" in shown
    assert "redis://x: refused\n" in show(reading=Reading(error="redis://x: refused"))


def test_a_broker_that_is_unreachable_is_named() -> None:
    shown = show(reading=make_reading(overview=make_overview(unreachable="eu")))
    assert "broker eu cannot be reached, what is there is not shown: refused" in shown


def test_a_filter_without_rows_says_so() -> None:
    assert "no row has 'zzz'" in show(ScreenState(filter_text="zzz"))
    assert "asking the workers" in show(ScreenState(view=View.JOBS), make_reading(jobs=None))
    assert "no dead letters" in show(ScreenState(view=View.DEAD), make_reading(dead=()))


def test_the_selected_row_is_marked_over_the_whole_width_and_not_cut() -> None:
    lines = draw(ScreenState(), READING, age=0.0, width=100, height=20)
    (marked,) = [line for line in lines if line and all(style == "key" for _, style in line)]
    assert sum(cell_len(part) for part, _ in marked) == 100
    assert text(marked).endswith("grows by 12/s")


def test_rows_are_sorted_by_a_column() -> None:
    shown = show(ScreenState(sorts={View.QUEUES: "queue"}))
    assert shown.index("mail") < shown.index("orders") < shown.index("slow")
    assert "queue↓" in shown


def history(*numbers: int) -> list[HistoryPoint]:
    """Minutes up to now in which so many attempts ended, half of which failed."""
    begin = int(NOW) // 60 * 60 - 60 * (len(numbers) - 1)
    return [
        HistoryPoint(
            at=begin + 60 * minute,
            seconds=60,
            tasks=[
                TaskNumbers(
                    task="shop.charge", counts={"SUCCESS": number, "DEAD": number}, run=None, wait=None
                )
            ],
            depth=float(number),
        )
        for minute, number in enumerate(numbers)
    ]


def test_the_details_of_a_task_say_since_when_it_fails_and_why() -> None:
    reading = make_reading(
        histories={"orders": history(10, 20, 40)}, failures=[make_dead(5)], details_of="shop.charge"
    )
    shown = show(ScreenState(view=View.TASKS, details="shop.charge"), reading)
    assert "(2 min ago)" in shown
    assert "ValueError: no money" in shown
    assert "▂▄█  80/min, most 80/min" in shown
    assert "▂▄█  40/min, most 40/min" in shown
    assert "5 s ago  ValueError: no money  job5" in shown


def test_the_details_of_a_queue_show_its_depth_and_whether_it_catches_up() -> None:
    reading = make_reading(histories={"orders": history(10, 20, 40)}, details_of="orders")
    shown = show(ScreenState(details="orders"), reading)
    assert "verdict       grows by 12/s" in shown
    assert "jobs          52/s in, 40/s out" in shown
    assert "▂▄█  40, most 40" in shown


def test_the_details_of_a_worker_show_what_runs() -> None:
    shown = show(ScreenState(view=View.WORKERS, details="web1"))
    assert "slots         trio 2 of 4 (up to 100)" in shown
    assert "12 s  shop.charge  order=7  j1" in shown


def test_the_details_of_dead_letters_show_the_newest_and_a_traceback() -> None:
    state, _ = handle_key(ScreenState(view=View.DEAD), "enter", look(ScreenState(view=View.DEAD), READING))
    shown = show(state)
    assert "2 dead letters of shop.charge" in shown
    assert "job1" in shown
    assert "traceback of the newest" in shown


def test_details_of_a_row_that_is_gone_say_so() -> None:
    assert "it is not there any more" in show(ScreenState(details="gone"))


def test_control_characters_of_others_are_never_drawn() -> None:
    bad = "\x1b]52;c;QUJD\x07\x9b31m\u202e\nnext"
    reading = make_reading(
        dead=(), jobs=read_running_jobs(bad, [{"task": bad, "arguments": bad, "id": bad}]), error=bad
    )
    for state in (ScreenState(view=View.JOBS), ScreenState(view=View.JOBS, details=bad)):
        assert not set(show(state, reading).replace("\n", "")) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_one_screen_has_all_tables() -> None:
    shown = "\n".join(map(text, draw_once(READING, 100)))
    for word in ("queues", "grows by 12/s", "tasks", "shop.charge", "workers", "not ready"):
        assert word in shown


def test_columns_are_left_out_before_names_are_cut() -> None:
    columns = [
        Column("name", may_shrink=True),
        Column("count", 1),
        Column("text", 2, may_shrink=True),
        Column("id", 3),
    ]
    assert fit_columns(columns, [20, 5, 40, 10], 81) == [20, 5, 40, 10]
    assert fit_columns(columns, [20, 5, 40, 10], 60) == [20, 5, 19, 10]
    assert fit_columns(columns, [20, 5, 40, 10], 50) == [20, 5, 21, 0]
    assert fit_columns(columns, [20, 5, 40, 10], 30) == [20, 5, 0, 0]
    assert fit_columns(columns, [20, 5, 40, 10], 15) == [15, 0, 0, 0]


def test_a_sparkline_keeps_peaks_and_gaps() -> None:
    assert make_sparkline([0, 1, 8, None, 4], 10) == "▁▁█ ▄"
    assert make_sparkline([0, 8, 0, 0], 2) == "█▁"
    assert make_sparkline([], 10) == ""


def test_long_texts_are_cut_and_lists_follow_the_selection() -> None:
    assert [cut("abcdef", width) for width in (6, 4, 1, 0)] == ["abcdef", "abc…", "…", ""]
    assert get_window(100, 50, 10) == (45, 55)
    assert get_window(100, 99, 10) == (90, 100)
    assert get_window(3, 2, 10) == (0, 3)
