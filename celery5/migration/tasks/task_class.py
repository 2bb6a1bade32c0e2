"""Report what to do with a base class of tasks."""

import ast

from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.tasks.options import TASK_OPTIONS

_OPTION_OF_CLASS = "an option of each task: keep those of the class in a dict, and write @app.task(**OPTIONS)"


def check_class(context: FileContext, node: ast.ClassDef) -> None:
    """Report what to do with a base class of tasks, in one finding: what stays, its methods and its options."""
    if not any(
        context.celery_name(base) == "Task"
        or (isinstance(base, ast.Attribute) and base.attr == "Task" and context.kind_of(base.value) == "app")
        for base in node.bases
    ):
        return
    own: list[str] = []
    parts: dict[str, list[str]] = {}  # the members for each advice
    for member in node.body:
        names = [member.name] if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) else []
        targets = [*getattr(member, "targets", ()), getattr(member, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            if find_equivalent("task class", name):
                advice = find_equivalent("task class", name)
                left_out = f"leave it out{advice.removeprefix('nothing')}"
                parts.setdefault(left_out if advice.startswith("nothing") else advice, []).append(name)
            elif isinstance(member, ast.Assign | ast.AnnAssign) and (
                name in TASK_OPTIONS - {"name"} or find_equivalent("option", name)
            ):
                parts.setdefault(_OPTION_OF_CLASS, []).append(name)
            else:
                own.append(name)
    advice = find_equivalent("module", "Task")
    kept = [f"here: {', '.join(own)}"] if own else []
    members = [f"{', '.join(names)}: {what}" for what, names in parts.items()]
    context.by_hand(node, f"class {node.name}(Task)", "; ".join([advice, *kept, *members]))
