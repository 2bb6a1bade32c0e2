"""The list of actions is held against all methods of the API: a new one is an action, or is listed as none."""

from celery5 import App
from celery5.protocol.audit import ACTIONS, is_action
from tests.redis.audit.actions import CALLS, NO_ACTIONS, methods, owners, prepare


def test_every_method_of_the_api_is_an_action_or_is_known_to_be_none() -> None:
    app = prepare(App("shop"))
    acting = {(type(call.owner(app)).__name__, call.method) for call in CALLS}
    harmless = {(owner, name) for owner, names in NO_ACTIONS.items() for name in names.split()}
    found = {(owner.__name__, name) for owner in owners() for name in methods(owner)}
    assert found == acting | harmless
    assert not acting & harmless


def test_each_action_of_the_vocabulary_is_one_of_a_method() -> None:
    by_services = {"bulk:resume"}  # what performs bulk actions records it
    assert {call.action for call in CALLS if call.action in ACTIONS} | by_services == set(ACTIONS)
    assert all(is_action(call.action) for call in CALLS)
    assert not is_action("queue:explode")
