"""Routes: which broker a queue is on, and which queue a task's jobs go to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App, Misconfigured
from celery5.broker.call import Call
from celery5.broker.calls import cluster, commands, jobs, limits, queues, scheduling
from celery5.broker.calls.scheduling import register_schedule_queue
from celery5.broker.keys import EVENTS, Keys
from celery5.broker.routing.broker_router import BrokerMap
from celery5.config.settings import read_settings
from celery5.connections.brokers import MAX_CHECKED_NAMES
from celery5.errors import BadBrokerURL
from celery5.protocol.brokers import DEFAULT_BROKER, TaskRoute, make_routes
from celery5.protocol.limits import LimitOverride, Suspension

BROKERS = ("mails", "far")


def home(queue: str, rules: dict[str, str] | None = None, *tasks: TaskRoute) -> str:
    """Where a queue is."""
    return make_routes(BROKERS, rules or {}, "default", tasks).get_broker(queue)


def test_the_first_route_that_fits_a_queue_says_its_broker() -> None:
    rules = {"post": "far", "po*": "mails", "*": "far"}
    assert [home(name, rules) for name in ("post", "poll", "else", "default")] == [
        "far",
        "mails",
        "far",
        "far",
    ]


def test_unrouted_queue_is_on_the_default_broker_or_its_namesake() -> None:
    assert home("post") == home("default") == DEFAULT_BROKER
    assert home("mails") == "mails"
    assert home("mails", {"mails": DEFAULT_BROKER}) == DEFAULT_BROKER


def test_a_task_puts_its_own_queue_on_its_broker() -> None:
    assert home("post", {}, TaskRoute("shop.send", "post", "mails")) == "mails"
    assert home("post", {"shop.*": "far"}, TaskRoute("shop.send", "post")) == "far"


def test_a_task_without_a_queue_goes_to_the_one_that_is_named_as_its_broker() -> None:
    routes = make_routes(BROKERS, {"shop.*": "far", "default": DEFAULT_BROKER}, "default", [])
    assert routes.get_queue(TaskRoute("a.b")) == "default"
    assert routes.get_queue(TaskRoute("a.b", None, "mails")) == "mails"
    assert routes.get_queue(TaskRoute("shop.send")) == "far"
    assert routes.get_queue(TaskRoute("shop.send", "post")) == "post"  # a queue that is said is that queue
    everything = make_routes(BROKERS, {"default": "mails"}, "default", [])
    assert everything.get_queue(TaskRoute("a.b", None, "mails")) == "default"


def test_all_contradictions_are_told_at_once() -> None:
    tasks = [
        TaskRoute("a", "post", "mails"),
        TaskRoute("b", "post", "far"),
        TaskRoute("c", "routed", "far"),
        TaskRoute("d", None, "mial"),
    ]
    with pytest.raises(Misconfigured) as caught:
        make_routes(BROKERS, {"routed": "mails"}, "default", tasks)
    lines = str(caught.value).split("; ")
    assert any(
        "queue 'post' would be on two brokers: task a puts it on 'mails', task b on 'far'" in line
        for line in lines
    )
    assert any(
        "task c is to go to broker 'far', but its queue 'routed' is on broker 'mails'" in line
        for line in lines
    )
    assert any("no broker is named 'mial'" in line for line in lines)
    assert "did you mean 'mails'?" in str(caught.value)


def test_all_faults_of_routes_are_reported_at_once() -> None:
    said = {
        "brokers": {"default": "redis://a", "no name": "redis://b", "mails": "http://c"},
        "routes": {"post": "mial", "nothing-fits-this": "mails", "": "mails"},
    }
    with pytest.raises(Misconfigured) as caught:
        read_settings(said, {})
    for part in (
        "'default' is the one",
        "'no name'",
        "mails: give a URL",
        "'post': no broker",
        "a pattern is empty",
    ):
        assert part in str(caught.value)
    assert "nothing-fits-this" not in str(caught.value)


def test_the_environment_says_brokers_and_routes_as_json() -> None:
    environ = {
        "CELERY5_BROKERS": '{"mails": "redis://there/0"}',
        "CELERY5_ROUTES": '{"post": "mails", "p*": "default"}',
    }
    found = read_settings({}, environ)
    assert found.brokers == {"mails": "redis://there/0"}
    assert list(found.routes) == ["post", "p*"]


def test_call_may_name_queue_or_broker_that_do_not_contradict() -> None:
    app = App("routes", brokers={"mails": "redis://127.0.0.1:1/0"}, routes={"post": "mails"})

    @app.task(name="send", queue="post")
    def send() -> None: ...

    @app.task(name="near")
    def near() -> None: ...

    assert app.brokers.broker_of_queue("post") == "mails"
    assert send.job().queue == "post"
    assert send.options(queue="other").job().queue == "other"
    assert near.options(broker="mails").job().queue == "mails"
    assert send.options(broker="default").job().queue == "default"
    with pytest.raises(Misconfigured, match="its queue 'post' is on broker 'mails'"):
        near.options(broker="default", queue="post").job()
    with pytest.raises(Misconfigured, match="no broker is named 'mial'; did you mean 'mails'"):
        near.options(broker="mial").job()


def test_one_broker_has_everything_and_no_other_is_known() -> None:
    app = App("one")

    @app.task(name="near", queue="post")
    def near() -> None: ...

    assert app.brokers.names == (DEFAULT_BROKER,)
    assert app.brokers.broker_of_queue("post") == DEFAULT_BROKER
    with pytest.raises(Misconfigured, match="no broker is named 'mails'"):
        near.options(broker="mails").job()
    with pytest.raises(Misconfigured, match="no broker is named 'mails'"):
        app.brokers.get("mails")


CHART = BrokerMap(
    (DEFAULT_BROKER, "mails"), lambda queue: "mails" if queue in ("post", "mails") else DEFAULT_BROKER, "shop"
)
KEYS = Keys("shop")


def test_each_trip_goes_to_the_broker_of_its_queue() -> None:
    post, near = KEYS.for_queue("post"), KEYS.for_queue("near")
    assert CHART.find_broker_of_call(jobs.publish(post, [("id", b"job")])) == "mails"
    assert CHART.find_broker_of_call(jobs.publish(near, [("id", b"job")])) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(jobs.locate_job(post, "id")) == "mails"
    assert CHART.find_broker_of_call(jobs.delete_results(post, ["id"])) == "mails"
    assert CHART.find_broker_of_call(queues.get_queue_state(KEYS.for_queue(EVENTS))) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(jobs.PING) == DEFAULT_BROKER
    assert (
        CHART.find_broker_of_call(jobs.publish(Keys("other").for_queue("post"), [("id", b"job")]))
        == DEFAULT_BROKER
    )


def test_settings_of_queues_are_read_from_every_broker() -> None:
    assert CHART.find_broker_of_call(queues.list_queues(KEYS)) is None
    assert CHART.find_broker_of_call(commands.list_paused_queues(KEYS)) is None
    assert CHART.find_broker_of_call(limits.list_overrides(KEYS)) is None
    assert CHART.find_broker_of_call(limits.set_override(KEYS, "task", LimitOverride(limit=1))) is None
    assert CHART.find_broker_of_call(cluster.list_live_processes(KEYS, "scheduler")) is None
    assert CHART.find_broker_of_call(cluster.list_live_processes(KEYS, "controller")) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(cluster.list_live_processes(KEYS, "publisher")) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(queues.register_queue(KEYS, "post")) == "mails"
    assert CHART.find_broker_of_call(commands.pause_queue(KEYS, "post")) == "mails"
    assert CHART.find_broker_of_call(commands.resume_queue(KEYS, "near")) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(register_schedule_queue(KEYS, "post")) == "mails"


def test_a_command_goes_to_the_broker_that_the_inbox_names() -> None:
    assert CHART.find_broker_of_call(commands.send_command(KEYS, "web1", "id", b"")) == DEFAULT_BROKER
    assert CHART.find_broker_of_call(commands.send_command(KEYS, "web1@mails", "id@mails", b"")) == "mails"
    assert CHART.find_broker_of_call(commands.send_command(KEYS, "celery@web1", "id", b"")) == DEFAULT_BROKER
    assert CHART.find_broker_of_key(KEYS.reply("id@mails")) == "mails"


@given(st.lists(st.lists(st.text("ab", max_size=3)), min_size=1, max_size=4))
def test_what_several_list_is_all_that_any_of_them_lists(answers: list[list[str]]) -> None:
    merge = queues.list_queues(KEYS).merge
    assert merge is not None
    assert merge(answers) == sorted({queue for answer in answers for queue in answer})


OVERRIDE = limits.StoredOverrides({"a": LimitOverride(limit=1)}, {})
MERGED = limits.StoredOverrides({"a": LimitOverride(limit=1), "b": LimitOverride(limit=2)}, {})
OTHERS = limits.StoredOverrides({"a": LimitOverride(limit=3), "b": LimitOverride(limit=2)}, {})


@pytest.mark.parametrize(
    ("call", "replies", "merged"),
    [
        (limits.set_override(KEYS, "a", None), [True, False], True),
        (limits.suspend_task(KEYS, "a", Suspension()), [False, False], False),
        (limits.resume_task(KEYS, "a"), [False, True], True),
        (commands.list_paused_queues(KEYS), [{"a"}, {"b"}], {"a", "b"}),
        (cluster.list_live_processes(KEYS, "scheduler"), [("b",), ("a",)], ("a", "b")),
        (cluster.renew_presence(KEYS, "scheduler", "x", lease=1), [("x",), ("x", "a")], ("a", "x")),
        (scheduling.list_schedule_queues(KEYS), [("b",), ("a",)], ("a", "b")),
        (limits.list_overrides(KEYS), [OVERRIDE, OTHERS], MERGED),
    ],
)
def test_a_call_that_goes_to_all_brokers_says_how_their_replies_merge(
    call: Call[Any], replies: list[Any], merged: object
) -> None:
    assert CHART.find_broker_of_call(call) is None
    assert call.merge is not None
    assert call.merge(replies) == merged


def test_every_process_is_told_what_is_wrong_before_it_starts() -> None:
    with pytest.raises(BadBrokerURL, match="the database after the slash must be a number"):
        App("told", brokers={"mails": "redis://there/x"})
    other = App("told", brokers={"mails": "redis://there/0"})

    @other.task(queue="post", broker="mials")
    def send() -> None: ...

    with pytest.raises(Misconfigured, match="no broker is named 'mials'"):
        other.brokers.check()


def test_first_matching_route_gives_a_queue_to_tasks_without_one() -> None:
    routed = App("routed", queue_routes={"media.mail.*": "mail", "media.*": "media"}, default_queue="rest")

    @routed.task(name="media.mail.send")
    def send() -> None: ...

    @routed.task(name="media.cut")
    def cut() -> None: ...

    @routed.task(name="media.mail.urgent", queue="urgent")
    def urgent() -> None: ...

    @routed.task(name="shop.pay")
    def pay() -> None: ...

    assert [task.queue for task in (send, cut, urgent, pay)] == ["mail", "media", "urgent", "rest"]
    assert [task.job().queue for task in (send, cut, urgent, pay)] == ["mail", "media", "urgent", "rest"]
    assert send.options(queue="slow").job().queue == "slow"  # what a call says comes first
    routed.configure(queue_routes={"*": "all"})
    assert send.job().queue == "all"


def test_a_queue_route_and_a_broker_route_work_together() -> None:
    both = App(
        "both",
        brokers={"far": "redis://127.0.0.1:1/0"},
        routes={"mail": "far"},
        queue_routes={"post.*": "mail"},
    )

    @both.task(name="post.send")
    def send() -> None: ...

    assert (send.queue, both.brokers.broker_of_queue(send.queue)) == ("mail", "far")
    with pytest.raises(Misconfigured, match="its queue 'mail' is on broker 'far'"):
        _ = send.options(broker=DEFAULT_BROKER).queue


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"a.*": "two words"}, "'a.[*]': 'two words' is not the name of a queue: use 1 to 200 characters"),
        ({"a.*": ""}, "'a.[*]': '' is not the name of a queue"),
        ({"": "mail"}, "a pattern is empty"),
        ({"a.*": {"queue": "mail"}}, "Expected `str`, got `object`"),
        ('{"a.*": 7}', "Expected `str`, got `int`"),
    ],
)
def test_a_queue_route_that_makes_no_sense_is_refused_where_the_app_is_made(said: Any, wrong: str) -> None:
    with pytest.raises(Misconfigured, match=f"setting queue_routes=.*: {wrong}"):
        App("routed", queue_routes=said)


def test_whoever_takes_routes_for_queue_routes_is_told() -> None:
    with pytest.raises(Misconfigured, match=r"no broker is named 'mail'.*queue_routes choose a queue"):
        App("routed", routes={"media.mail.*": "mail"})
    with pytest.raises(Misconfigured) as caught:
        App("routed", task_routes={"media.mail.*": {"queue": "mail"}})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert "for Celery's task_routes there is queue_routes=" in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.fixture
def photos() -> App:
    app = App("photos", queue_routes={"photos.mail.*": "letters"})

    @app.task(name="photos.charge", queue="images")
    def charge() -> None: ...

    @app.task(name="photos.shard", queue="shard-1")
    def shard() -> None: ...

    return app


def test_a_misspelt_queue_of_a_call_is_warned_of_once_and_sent_to_all_the_same(
    photos: App, caplog: pytest.LogCaptureFixture
) -> None:
    charge = photos.tasks["photos.charge"]
    with caplog.at_level("WARNING", logger="celery5"):
        assert [charge.options(queue="imges").job().queue for _ in range(3)] == ["imges"] * 3
        charge.options(queue="leters").job()
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("queue:not-declared  task=photos.charge  queue=imges  hint=no task, queue route")
    assert "did you mean 'images'?" in first
    assert "did you mean 'letters'?" in second


@pytest.mark.parametrize("queue", ["images", "letters", "default", "shard-2", "shard-1", "elsewhere"])
def test_a_queue_that_is_no_mistake_is_not_warned_of(
    photos: App, caplog: pytest.LogCaptureFixture, queue: str
) -> None:
    photos.tasks["photos.charge"].options(queue=queue).job()
    assert caplog.records == []


def test_however_many_queues_are_named_few_are_remembered(photos: App) -> None:
    charge = photos.tasks["photos.charge"]
    for n in range(200):
        charge.options(queue=f"tenant-{n}").job()
    assert len(photos.brokers._doubted) == MAX_CHECKED_NAMES
