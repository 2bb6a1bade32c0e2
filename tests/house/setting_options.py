"""Write `celery5/config/setting_options.py`, the keyword arguments of `App` for type checkers, from `Settings`.

Run `python -m tests.house.setting_options` after a change of the settings.
"""

import ast
import re

from tests.house.sources import HERE

SETTINGS = HERE / "celery5" / "config" / "settings.py"
OPTIONS = SETTINGS.with_name("setting_options.py")
PARAMETERS_OF_APP = ("broker", "budgets", "when_unpublishable")
"""They have their own parameter, of another type."""
WIDER = {"backlog": "int | OwnBacklog", "schedules": "Mapping[str, Any]"}
"""The types in code, where they take more than the environment or a file can hold."""
HEAD = '''"""The settings that `App(...)` takes as keyword arguments, for type checkers.

Written by `python -m tests.house.setting_options` from `Settings`: do not edit.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from celery5.protocol.publisher.own_backlog import OwnBacklog


class SettingOptions(TypedDict, total=False):
    """The settings, except those with their own parameter. None stands for the default."""

'''


def format_options() -> str:
    """Return the module that belongs to the settings of now."""
    (settings,) = (
        node
        for node in ast.parse(SETTINGS.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    lines = [
        f"    {field.target.id}: {WIDER.get(field.target.id) or _format_type(field.annotation)} | None\n"
        for field in settings.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id not in PARAMETERS_OF_APP
    ]
    return HEAD + "".join(lines)


def _format_type(annotation: ast.expr) -> str:
    """Return the type inside `Annotated`, None aside, with Mapping for dict, and timedelta for a span of seconds."""
    is_span = "_SECONDS" in ast.unparse(annotation)
    plain = ast.unparse(_WithoutMeta().visit(annotation)).removesuffix(" | None")
    return re.sub(r"\bdict\b", "Mapping", plain).replace("'", '"') + (" | timedelta" if is_span else "")


class _WithoutMeta(ast.NodeTransformer):
    """Replaces `Annotated[type, Meta(...)]` by `type`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace one."""
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            found: ast.AST = self.visit(node.slice.elts[0])
            return found
        return node


if __name__ == "__main__":
    OPTIONS.write_text(format_options())
