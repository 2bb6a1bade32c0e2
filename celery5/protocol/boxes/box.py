"""The declaration of a box: the command, memory and processor time of the process that a boxed task runs in."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.retry_policy import LONGEST

MIN_MEMORY = 1024 * 1024
"""Bytes that a box has at least."""


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
"""Environment variables that every box gets, as well as those that begin with LC_."""


class Box(msgspec.Struct, frozen=True):
    """The box of a task: `@app.task(boxed=Box(memory=512 * 2**20))`.

    Tasks whose boxes are equal share them. Raises Misconfigured.
    """

    command: Sequence[str] = ()
    """The program and its arguments, in any language. Without one the box is Python and runs the task's function."""
    memory: int | None = None
    """Bytes of data that each of its processes may have."""
    cpu: float | None = None
    """Seconds of processor time that one job may use."""
    environment: Sequence[str] = ()
    """Variables that a box with a command gets, beside `ENVIRONMENT`. It gets no others, such as the broker's URL."""

    def __post_init__(self) -> None:
        command: Any = self.command
        if isinstance(command, str | bytes):
            raise Misconfigured(
                f"Box(command={command!r}): give a list of words: Box({str(command).split()})"
            )
        words = cast("tuple[object, ...]", tuple(command))
        if not all(isinstance(text, str) and text and "\0" not in text for text in words):
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
        environment: Any = self.environment
        names = cast("tuple[object, ...]", () if isinstance(environment, str | bytes) else tuple(environment))
        if isinstance(environment, str | bytes) or not all(isinstance(name, str) and name for name in names):
            raise Misconfigured(f"Box(environment={environment!r}): give names of variables: ['API_TOKEN']")
        if names and self.is_python:
            raise Misconfigured(
                "Box(environment=...) is for a box with a command: one in Python has all variables"
            )
        msgspec.structs.force_setattr(self, "environment", names)

    def get_variables(self, environ: Mapping[str, str], devices: Sequence[str] = ()) -> dict[str, str] | None:
        """Return the variables of `environ` that the box gets, and one that shows it only these devices.

        None for all: a box in Python needs them to import the application as its worker did.
        """
        if self.is_python and not devices:
            return None
        names = {*ENVIRONMENT, *self.environment}
        variables = {
            name: value
            for name, value in environ.items()
            if self.is_python or name in names or name.startswith("LC_")
        }
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else variables

    @property
    def is_python(self) -> bool:
        """Whether it runs the task's own function."""
        return not self.command


def parse_box(option: object, task: str) -> Box | None:
    """Return the box that the option `boxed` of a task means. Raises Misconfigured for neither a Box nor a bool."""
    if option is True:
        return PYTHON_BOX
    if option is False or option is None:
        return None
    if not isinstance(option, Box):
        raise Misconfigured(f"task {task}: boxed is {option!r}: give True, or Box(...)")
    return option


PYTHON_BOX = Box()
"""A box in Python without limits."""
