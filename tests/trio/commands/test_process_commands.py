"""Commands of every process: the answers of a process without jobs."""

import trio

from celery5.logs.log import NullLog
from celery5.services.commands.process_commands import ProcessCommands
from celery5.services.process.step_status import StepStatus


async def test_a_process_without_jobs_says_that_it_stops_warm_whatever_it_was_told() -> None:
    stop_requested = trio.Event()
    commands = ProcessCommands(
        kind="scheduler",
        worker="s1",
        stop_requested=stop_requested,
        command_counts={},
        step_status=StepStatus(),
        log=NullLog(),
    )
    answer = await commands.handlers["shutdown"]({"how": "cold"})
    assert answer == {"how": "warm"}
    assert stop_requested.is_set()
