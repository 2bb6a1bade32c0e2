"""Compose calls of tasks to workflows: chains, groups, chords, maps and forks.

A `Workflow` has all that it needs and can be started. A `Partial` lacks the value of the step before it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, cast, overload

from celery5.errors import Misconfigured
from celery5.hints import make_attribute_error
from celery5.workflows.tree import (
    Call,
    Chain,
    Group,
    GroupOptions,
    Link,
    Map,
    OnError,
    Tree,
    get_first_call,
    join_chain,
    link,
    takes_input,
    with_group_options,
)

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


class Composed:
    """What workflows and partials share: the tree that they are made of."""

    __slots__ = ()

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("signature", self, name)


class Workflow(Composed, Generic[R_co]):
    """Calls of tasks that can be started; `R` is the type of the result.

    `a | b` passes the value of `a` to `b`; `a >> b` only orders them.
    """

    __slots__ = ()

    def __or__(self, after: "Partial[R_co, S]") -> "Workflow[S]":
        """Return a workflow in which `after` gets the value of this one."""
        return ComposedWorkflow(link(self.tree, check_partial(after).tree, "pass"))

    def __rshift__(self, after: "Workflow[S]") -> "Workflow[S]":
        """Return a workflow in which `after` begins when this one has ended, without its value."""
        return ComposedWorkflow(link(self.tree, check_workflow(after).tree, "order"))

    def start(self, id: str | None = None, **options: Any) -> Any:  # noqa: A002
        """Start a run. For plain Python."""
        return self._workflows.start(self, id=id, **options)

    async def astart(self, id: str | None = None, **options: Any) -> Any:  # noqa: A002
        """`start`, from Trio or asyncio."""
        return await self._workflows.astart(self, id=id, **options)

    @property
    def _workflows(self) -> Any:
        first = get_first_call(self.tree)
        if first is None:
            raise Misconfigured("this workflow has no task: start it with app.workflows.start(...)")
        return first.task.app.workflows


class Partial(Composed, Generic[A_contra, R_co]):
    """Calls of tasks that lack the value of the step before them, of type `A`."""

    __slots__ = ()

    def __or__(self, after: "Partial[R_co, S]") -> "Partial[A_contra, S]":
        """Return a partial in which `after` gets the value of this one."""
        return ComposedPartial(link(self.tree, check_partial(after).tree, "pass"))

    def __rshift__(self, after: "Workflow[S]") -> "Partial[A_contra, S]":
        """Return a partial in which `after` begins when this one has ended, without its value."""
        return ComposedPartial(link(self.tree, check_workflow(after).tree, "order"))


class ComposedWorkflow(Workflow[R_co]):
    """A workflow of more than one call."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        return self._tree


class ComposedPartial(Partial[A_contra, R_co]):
    """A partial of one call or more."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        return self._tree


def check_workflow(step: object) -> "Workflow[Any]":
    """Return a workflow. Raises Misconfigured for anything else."""
    if isinstance(step, Workflow):
        return cast("Workflow[Any]", step)
    if isinstance(step, Partial):
        raise Misconfigured(
            f"{step!r} lacks an argument: give it, or write a | b, which passes the value of a to b"
        )
    raise Misconfigured(f"a workflow is composed of task.s(...), got {step!r}")


def check_partial(step: object) -> "Partial[Any, Any]":
    """Return a partial. Raises Misconfigured for anything else."""
    if isinstance(step, Partial):
        return cast("Partial[Any, Any]", step)
    if isinstance(step, Workflow):
        raise Misconfigured(
            f"{step!r} has all its arguments: leave the first one out, or write a >> b, which passes no value"
        )
    raise Misconfigured(f"a workflow is composed of task.s(...), got {step!r}")
