"""Box: what kind of process a boxed task runs in: by which command, with how much memory and CPU (C62).

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.retry import LONGEST

LEAST_MEMORY = 1024 * 1024


class Box(msgspec.Struct, frozen=True):
    """The box of a task: `@app.task(boxed=Box(memory=512 * 2**20))`.

    `command` is the program and its words, for a box in any language; without one it is Python, which runs the task's
    function. `memory` is how many bytes of data each of its processes may have, `cpu` how many seconds of processor
    time one job may use. Tasks whose boxes are equal share them. Raises Misconfigured.
    """

    command: Sequence[str] = ()
    memory: int | None = None
    cpu: float | None = None

    def __post_init__(self) -> None:
        command: Any = self.command
        if isinstance(command, str | bytes):
            raise Misconfigured(
                f"Box(command={command!r}): give a list of words: Box({str(command).split()})"
            )
        words = cast("tuple[object, ...]", tuple(command))
        if not all(isinstance(each, str) and each and "\0" not in each for each in words):
            raise Misconfigured(f"Box(command={command!r}): give the program and its words, as texts")
        msgspec.structs.force_setattr(self, "command", words)
        memory: Any = self.memory
        if memory is not None and not (type(memory) is int and memory >= LEAST_MEMORY):
            raise Misconfigured(
                f"Box(memory={memory!r}): give bytes, {LEAST_MEMORY} or more, as in 512 * 2**20"
            )
        cpu: Any = self.cpu
        if cpu is not None and not (type(cpu) in (int, float) and 0 < cpu <= LONGEST):
            raise Misconfigured(f"Box(cpu={cpu!r}): give seconds of processor time, more than 0")

    @property
    def is_python(self) -> bool:
        """Whether it runs the task's own function."""
        return not self.command


def box_of(said: object, task: str) -> Box | None:
    """What `boxed=` means for a task. Raises Misconfigured for what is neither a Box nor true or false."""
    if said is True:
        return PYTHON
    if said is False or said is None:
        return None
    if not isinstance(said, Box):
        raise Misconfigured(f"task {task}: boxed is {said!r}: give True, or Box(...)")
    return said


PYTHON = Box()
"""A box in Python without limits."""
