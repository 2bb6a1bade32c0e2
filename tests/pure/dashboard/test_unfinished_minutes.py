"""The minute or hour that is under way is in no chart: its numbers still grow, and it would be drawn as a fall."""

from celery5.dashboard.pages.overview import align_depths
from celery5.dashboard.pages.tasks import sum_task
from celery5.observability.metrics import HistoryPoint, TaskNumbers


def make_history(step: int) -> list[HistoryPoint]:
    def make(number: int, *, ended: int, is_over: bool) -> HistoryPoint:
        numbers = TaskNumbers(task="pay", counts={"SUCCESS": ended}, run=None, wait=None)
        return HistoryPoint(
            at=number * step, seconds=step, tasks=[numbers], depth=float(ended), is_over=is_over
        )

    return [
        make(1, ended=60, is_over=True),
        make(2, ended=60, is_over=True),
        make(3, ended=4, is_over=False),
    ]


def test_charts_of_tasks_and_queues_leave_out_what_is_under_way() -> None:
    for step in (60, 3600):
        history = make_history(step)
        assert [point.ended for point in sum_task("pay", [history, history])] == [120, 120]
        assert align_depths({"money": history}).series == [("money", [60.0, 60.0])]
