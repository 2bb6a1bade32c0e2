"""Show a blocking twin, `@blocking(aget)`, like its coroutine in the reference. `mkdocs.yml` names this file."""

import ast
from typing import Any

import griffe


class BlockingTwins(griffe.Extension):
    """Replaces the stub by a function with the parameters and the docstring of its coroutine."""

    def on_class_members(self, *, node: ast.AST | griffe.ObjectNode, cls: griffe.Class, **_: Any) -> None:
        """Show the twins of a class."""
        _show_twins(cls)

    def on_module_members(self, *, node: ast.AST | griffe.ObjectNode, mod: griffe.Module, **_: Any) -> None:
        """Show the twins of a module."""
        _show_twins(mod)


def _show_twins(owner: griffe.Class | griffe.Module) -> None:
    for name, member in list(owner.members.items()):
        if not isinstance(member, griffe.Function) or not member.decorators:
            continue
        decorator = str(member.decorators[0].value)
        if not decorator.startswith("blocking("):
            continue
        coroutine = owner.members[decorator.removeprefix("blocking(").removesuffix(")")]
        if not isinstance(coroutine, griffe.Function) or coroutine.docstring is None:
            continue
        twin = griffe.Function(
            name,
            parameters=coroutine.parameters,
            returns=coroutine.returns,
            lineno=member.lineno,
            endlineno=member.endlineno,
            docstring=griffe.Docstring(
                f"{coroutine.docstring.value}\n\nFor plain Python: in Trio or asyncio, await `{coroutine.name}`.",
                lineno=coroutine.docstring.lineno,
                endlineno=coroutine.docstring.endlineno,
            ),
        )
        owner.set_member(name, twin)
