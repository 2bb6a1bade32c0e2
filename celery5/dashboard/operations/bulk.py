"""See actions on many jobs, how far they are, and stop them."""

import msgspec

from celery5.app import App
from celery5.dashboard.bulk_actions import BulkAction, get_bulk_actions
from celery5.dashboard.operation import Changed, NotFound, Nothing, Operation, Text


class OneBulkAction(msgspec.Struct, frozen=True):
    """A bulk action."""

    id: Text


async def list_bulk_actions(app: App, _: Nothing) -> list[BulkAction]:
    """Show the actions on many jobs that this dashboard performs or has performed, the last one first."""
    return get_bulk_actions(app).list()


async def show_bulk_action(app: App, asked: OneBulkAction) -> BulkAction:
    """Show how far an action on many jobs is."""
    action = get_bulk_actions(app).get(asked.id)
    if action is None:
        raise NotFound(f"there is no bulk action {asked.id!r}: it may be of another process")
    return action


async def stop_bulk_action(app: App, asked: OneBulkAction) -> Changed:
    """Stop an action on many jobs; what it has not come to stays as it is."""
    action = await show_bulk_action(app, asked)
    done = await get_bulk_actions(app).astop(asked.id)
    return Changed(
        summary=f"{action.action} stops" if done else f"{action.action} had ended before", count=int(done)
    )


BULK_OPERATIONS = (
    Operation("bulk:list", list_bulk_actions),
    Operation("bulk:show", show_bulk_action),
    Operation("bulk:stop", stop_bulk_action, "operator", "change"),
)
"""The operations on bulk actions."""
