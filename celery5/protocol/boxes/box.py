"""Box: what kind of process a boxed task runs in: by which command, with how much memory and CPU (C62)."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.retry_policy import LONGEST

MIN_MEMORY = 1024 * 1024


ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
)
"""Variables that every box has, and those that begin with LC_."""


class Box(msgspec.Struct, frozen=True):
    """The box of a task: `@app.task(boxed=Box(memory=512 * 2**20))`.

    `command` is the program and its words, for a box in any language; without one it is Python, which runs the task's
    function. `memory` is how many bytes of data each of its processes may have, `cpu` how many seconds of processor
    time one job may use. A box with a `command` gets the variables of the environment that its program needs to find
    its files and its language (`ENVIRONMENT`), and those that `environment` names: not the broker's URL, no tokens.
    Tasks whose boxes are equal share them. Raises Misconfigured.
    """

    command: Sequence[str] = ()
    memory: int | None = None
    cpu: float | None = None
    environment: Sequence[str] = ()

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
        if memory is not None and not (type(memory) is int and memory >= MIN_MEMORY):
            raise Misconfigured(
                f"Box(memory={memory!r}): give bytes, {MIN_MEMORY} or more, as in 512 * 2**20"
            )
        cpu: Any = self.cpu
        if cpu is not None and not (type(cpu) in (int, float) and 0 < cpu <= LONGEST):
            raise Misconfigured(f"Box(cpu={cpu!r}): give seconds of processor time, more than 0")
        self._check_environment()

    def _check_environment(self) -> None:
        said: Any = self.environment
        names = cast("tuple[object, ...]", () if isinstance(said, str | bytes) else tuple(said))
        if isinstance(said, str | bytes) or not all(isinstance(each, str) and each for each in names):
            raise Misconfigured(f"Box(environment={said!r}): give names of variables: ['API_TOKEN']")
        if names and self.is_python:
            raise Misconfigured(
                "Box(environment=...) is for a box with a command: one in Python has all variables"
            )
        msgspec.structs.force_setattr(self, "environment", names)

    def get_variables(self, environ: Mapping[str, str]) -> dict[str, str] | None:
        """Return the variables that the box gets of `environ`; None for all, which a box in Python needs to import the
        application as its worker did."""
        if self.is_python:
            return None
        names = {*ENVIRONMENT, *self.environment}
        return {name: value for name, value in environ.items() if name in names or name.startswith("LC_")}

    @property
    def is_python(self) -> bool:
        """Whether it runs the task's own function."""
        return not self.command


def parse_box(said: object, task: str) -> Box | None:
    """What `boxed=` means for a task. Raises Misconfigured for what is neither a Box nor true or false."""
    if said is True:
        return PYTHON_BOX
    if said is False or said is None:
        return None
    if not isinstance(said, Box):
        raise Misconfigured(f"task {task}: boxed is {said!r}: give True, or Box(...)")
    return said


PYTHON_BOX = Box()
"""A box in Python without limits."""
