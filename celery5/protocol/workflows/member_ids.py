"""The ids of jobs that are members of a run of a workflow.

`<run>~<node>`, then `.<generation>` when the node was started again, `~<number>` for a member of a map, and `@<home>`,
the queue where the run lives, when the outbox of that sends it: to another queue, with a key or at a time. So a job
says what it belongs to without any index, whatever the graph is.
"""

import re
from typing import NamedTuple

from celery5.errors import Misconfigured

MAX_RUN_ID = 64
"""Characters of a run's id: its members' ids are longer, and must stay short."""

_MEMBER = re.compile(r"([^~]+)~(\d{1,9})(?:\.(\d{1,9}))?(?:~(\d{1,9}))?(?:@(.+))?", re.DOTALL)
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class MemberId(NamedTuple):
    """The parts of the id of a job that belongs to a run."""

    run: str
    # The number of the node in the plan.
    node: int
    # How often the node was started again.
    generation: int = 0
    # The number in a map, from 0; None for any other node.
    member: int | None = None
    # The queue where the run lives; '' for the job's own.
    home: str = ""

    def __str__(self) -> str:
        generation = f".{self.generation}" if self.generation else ""
        member = "" if self.member is None else f"~{self.member}"
        return f"{self.run}~{self.node}{generation}{member}{'@' if self.home else ''}{self.home}"

    @property
    def frame(self) -> str:
        """The id of the node of the run, without the number in a map."""
        return f"{self.run}~{self.node}{f'.{self.generation}' if self.generation else ''}"


def parse_member_id(job_id: str) -> MemberId | None:
    """Return the parts of the id of a member; None for any other job."""
    if "~" not in job_id:
        return None
    match = _MEMBER.fullmatch(job_id)
    if match is None:
        return None
    run, node, generation, member, home = match.groups()
    return MemberId(run, int(node), int(generation or 0), None if member is None else int(member), home or "")


def get_run_id(job_id: str) -> str:
    """Return the id of the run that a job belongs to; "" for none. It costs nearly nothing."""
    return job_id.partition("~")[0] if "~" in job_id else ""


def check_run_id(run_id: object) -> str:
    """Return the id of a run. Raises Misconfigured when it cannot be one."""
    if not isinstance(run_id, str) or not _RUN.fullmatch(run_id):
        raise Misconfigured(
            f"id is {run_id!r}: the id of a run is 1 to {MAX_RUN_ID} letters, digits, and . _ or - between them"
        )
    return run_id
