"""Keys: every key and channel of celery5 is made here, and nowhere else.

All keys of a queue share one hash tag, and each script uses the keys of one. So a Redis Cluster can run each script on
one node. The table of types, owners and lifetimes is `docs/reference/keys.md`.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec

from celery5.protocol.job.states import ADMITTED, HIGH, LOW, NORMAL

GROUP = "workers"
"""The one consumer group of every queue."""
EVENTS = "{events}"
"""The queue of an application's events, which Routers consume. No task's queue can be named so."""
VIRTUAL_TIME = "celery5:virtual-time"
"""STRING  the time in ms since 1970 that a test has set on its server, while `celery5.testing.virtual_time` lasts."""


ANY_APPLICATION_KEY = "celery5:{*"
"""The pattern for SCAN that matches the keys of all applications."""


def get_application_name(key: str) -> str:
    """Return the name of the application that owns a key; '' if none does."""
    match = re.match(r"celery5:\{([^:}]+)[:}]", key)
    return match[1] if match else ""


def get_absent_key(key: str) -> str:
    """Return a key that never exists, with the hash tag of another one, and in the patterns of the same users."""
    return f"{key[: key.find('}') + 1]}:absent"


def is_broadcast(channel: bytes) -> bool:
    """Return whether messages on a channel go to all nodes of a cluster: only the channel of changed schedules does.

    Its messages are published by scripts on the schedule's queue, in another slot. They are rare: people send them.
    """
    return channel.endswith(b"}:schedule-news")


EXPIRES = "has a time to live, or is a channel, which holds nothing"
Expiring = Annotated[str, EXPIRES]
"""The type of such a key. Every other key stays until what it tells of is gone.

`find_lifetime` reads the types of the three classes below, so a new key is known to it, and stays, unless it says so.
"""
KeyLifetime = Literal["stays", "expires"]


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue, on one of its lanes: `stream` is that of the lane, all others are the same on each.

    `Keys.for_queue` returns them on the normal lane. They are made once for a queue: string work is slow.
    """

    queue: str
    stream: str
    normal: str
    high: str
    low: str
    handed: str
    jobs: str
    due: str
    waiting: str
    dead: str
    dead_causes: Expiring
    worker_deaths: Expiring
    job_deaths_prefix: Expiring
    lost_workers: Expiring
    lost_work: Expiring
    leases: str
    consumers_checked: Expiring
    idle_leases: Expiring
    steady_since: Expiring
    unique: str
    wake: Expiring
    revoke: Expiring
    replication_mark: Expiring
    documents: str
    slots: str
    slot_counts: str
    limited_counts: str
    slots_freed: Expiring
    waiting_list_prefix: str
    result_prefix: Expiring
    window_prefix: Expiring
    run_records: str
    run_prefix: str
    plan_prefix: str
    run_outbox: str
    live_runs: str
    past_runs: Expiring
    undoing_runs: Expiring
    revoked_jobs: Expiring
    revoked_documents: Expiring
    idle_runs: str
    code_versions: Expiring
    foreign_jobs: Expiring
    flow: Expiring
    progress_prefix: Expiring
    lane: str = NORMAL
    _lanes: "dict[str, QueueKeys]" = field(
        default_factory=dict["str", "QueueKeys"], compare=False, repr=False
    )

    def on_lane(self, lane: str) -> "QueueKeys":
        """Return the keys on the lane of that letter; made once."""
        if lane == self.lane:
            return self
        keys = self._lanes.get(lane)
        if keys is None:
            stream = {NORMAL: self.normal, HIGH: self.high, LOW: self.low, ADMITTED: self.handed}[lane]
            keys = self._lanes[lane] = replace(self, stream=stream, lane=lane)
        return keys

    @property
    def streams(self) -> tuple[str, str, str, str]:
        """The streams of all lanes: normal, high, low, handed."""
        return (self.normal, self.high, self.low, self.handed)

    @property
    def other_streams(self) -> tuple[str, str, str]:
        """The streams of the lanes beside the normal one: high, low, handed."""
        return (self.high, self.low, self.handed)

    def unique_window(self, lock: str) -> Expiring:
        """STRING  the last job of a task and key, for as long as `unique_for` says."""
        return self.window_prefix + lock

    def result(self, job_id: str) -> Expiring:
        """STRING  the job's document, with a time to live; the channel of the same name announces it."""
        return self.result_prefix + job_id

    def job_deaths(self, job_id: str) -> Expiring:
        """LIST    the last workers that a job took down, with a time to live."""
        return self.job_deaths_prefix + job_id

    def progress(self, job_id: str) -> Expiring:
        """HASH    what a running job has reported of its progress, with a time to live."""
        return self.progress_prefix + job_id

    def code_version(self, version: str) -> Expiring:
        """HASH    the tasks of a version of code, each with the digest of its signature, with a time to live."""
        return f"{self.code_versions}:{version}"

    def foreign_list(self, name: str) -> Expiring:
        """ZSET    the ids of jobs that are kept for other code, by priority and time, with a time to live."""
        return f"{self.foreign_jobs}:{name}"

    def run(self, run_id: str) -> str:
        """HASH    a run of a workflow that is not idle: its state, and that of its nodes."""
        return self.run_prefix + run_id

    def plan(self, digest: str) -> str:
        """HASH    the nodes of a compiled workflow, until the last run of it has expired."""
        return self.plan_prefix + digest

    def run_items(self, run_id: str, node: int) -> str:
        """LIST    the items of a map of a run."""
        return f"{self.run_prefix}{run_id}:{node}:items"

    def run_arguments(self, run_id: str) -> str:
        """HASH    the arguments of the calls of a run, when they are many or long."""
        return f"{self.run_prefix}{run_id}:args"

    def documents_for(self, sink: str) -> str:
        """STREAM  the documents for a Data Sink."""
        return f"{self.documents}:{sink}"

    def claimed_documents(self, sink: str) -> str:
        """ZSET    documents that a Router has, or to be retried, by when another Router may take them, in ms."""
        return f"{self.documents}-taken:{sink}"

    def document_progress(self, sink: str) -> str:
        """HASH    the last document that was taken, and how often each has failed."""
        return f"{self.documents}-progress:{sink}"


class StreamKeys(msgspec.Struct, frozen=True):
    """The keys of one stream of records. They share one hash tag, so that a commit is one script."""

    stream: str
    map: str
    groups: str
    relayed: str
    archiving: str
    log_prefix: str
    archive_prefix: str
    sent_prefix: Expiring
    members_prefix: str
    incarnations_prefix: str
    plan_prefix: str
    partition_prefix: str
    state_prefix: str
    outbox_prefix: str
    dead_prefix: str
    parked_prefix: str
    parked_log_prefix: str
    changes_prefix: Expiring

    def log(self, partition: int) -> str:
        """STREAM  the records of a partition."""
        return f"{self.log_prefix}{partition}"

    def archive(self, partition: int) -> str:
        """STREAM  records of a partition that wait for the archive."""
        return f"{self.archive_prefix}{partition}"

    def sent(self, nonce: str) -> Expiring:
        """STRING  the reply to one sending, with a time to live, so that it may be repeated."""
        return f"{self.sent_prefix}{nonce}"

    def members(self, group: str) -> str:
        """ZSET    the members of a group, by the end of their lease in ms."""
        return f"{self.members_prefix}{group}"

    def incarnations(self, group: str) -> str:
        """HASH    the incarnation of each member."""
        return f"{self.incarnations_prefix}{group}"

    def plan(self, group: str) -> str:
        """HASH    the member to which each partition is assigned."""
        return f"{self.plan_prefix}{group}"

    def classes(self, group: str) -> Expiring:
        """HASH    the digest of the class of records of each member, with a time to live."""
        return f"{self.map.removesuffix('map')}classes:{group}"

    def partition(self, group: str, partition: int) -> str:
        """HASH    owner, epoch, cursor and condition of one partition in one group."""
        return f"{self.partition_prefix}{group}:{partition}"

    def state(self, group: str) -> str:
        """HASH    the keyed state of a group."""
        return f"{self.state_prefix}{group}"

    def outbox(self, group: str, partition: int) -> str:
        """STREAM  records and jobs that were committed and are not delivered yet."""
        return f"{self.outbox_prefix}{group}:{partition}"

    def dead(self, group: str) -> str:
        """STREAM  records that a group has given up."""
        return f"{self.dead_prefix}{group}"

    def parked(self, group: str) -> str:
        """HASH    the keys that a group has parked, as `key:<key>`, `tries:<key>`, and how many `records` they have."""
        return f"{self.parked_prefix}{group}"

    def changes(self, group: str) -> Expiring:
        """channel: the members of a group, or what they may read, has changed."""
        return f"{self.changes_prefix}{group}"


class Keys(msgspec.Struct, frozen=True):
    """The keys of one application."""

    app: str

    @property
    def pattern(self) -> str:
        """What all keys of the application fit, by the rules of SCAN, and some of others."""
        return re.sub(r"([*?\[\]\\])", r"\\\1", f"celery5:{{{self.app}") + "*"

    @property
    def patterns(self) -> tuple[str, str]:
        """What all keys and channels of the application fit, and no others, by the rules of an ACL."""
        head = self.pattern.removesuffix("*")
        return (f"{head}}}:*", f"{head}:*")

    def owns(self, key: str) -> bool:
        """Whether a key is of the application."""
        head = f"celery5:{{{self.app}"
        return key.startswith(head) and key[len(head) : len(head) + 1] in (":", "}")

    @property
    def queues(self) -> str:
        """SET     the names of the application's queues."""
        return f"celery5:{{{self.app}}}:queues"

    @property
    def settings(self) -> str:
        """HASH    settings that all workers share, for whoever sets it; see the guide."""
        return f"celery5:{{{self.app}}}:settings"

    @property
    def audit(self) -> Expiring:
        """STREAM  the last actions of operators, with a time to live."""
        return f"celery5:{{{self.app}}}:audit"

    def signed_out(self, session: str) -> Expiring:
        """STRING  a session of the dashboard that was signed out, until it would be over."""
        return f"celery5:{{{self.app}}}:signed-out:{session}"

    @property
    def audit_entries(self) -> str:
        """ZSET    the entries of the audit trail by person, with a time to live."""
        return f"celery5:{{{self.app}}}:audit:entries"

    @property
    def paused(self) -> str:
        """SET     the queues that no worker is to read."""
        return f"celery5:{{{self.app}}}:paused"

    @property
    def limits(self) -> str:
        """HASH    the overrides of the limits of tasks; the channel of the same name announces changes."""
        return f"celery5:{{{self.app}}}:limits"

    @property
    def suspended(self) -> str:
        """HASH    the tasks that are suspended, and why."""
        return f"celery5:{{{self.app}}}:suspended"

    @property
    def imposed_limits(self) -> Expiring:
        """STRING  the limits that a Scheduler imposes by its rules, with a time to live."""
        return f"celery5:{{{self.app}}}:imposed-limits"

    @property
    def limit_rules_turn(self) -> Expiring:
        """STRING  the Scheduler that imposes limits, with a time to live."""
        return f"celery5:{{{self.app}}}:limit-rules-turn"

    def kind_starts(self, kind: str) -> Expiring:
        """LIST    the last starts under the rate of a kind of task, in ms, with a time to live."""
        return f"celery5:{{{self.app}}}:kind-starts:{kind}"

    def run_home(self, run_id: str) -> Expiring:
        """STRING  the queue where the run with an id of the caller's lives, with a time to live."""
        return f"celery5:{{{self.app}}}:run-home:{run_id}"

    def event_waits(self, index: str) -> Expiring:
        """SET     the nodes of runs that wait for an event with certain values, with a time to live."""
        return f"celery5:{{{self.app}}}:event-waits:{index}"

    def check(self, name: str) -> Expiring:
        """STRING  the state of a shared health check (`name` or `name group`), with a time to live."""
        return f"celery5:{{{self.app}}}:check:{name}"

    def check_turn(self, name: str) -> Expiring:
        """STRING  a worker runs that check for all that share it, until this is gone."""
        return f"celery5:{{{self.app}}}:check-turn:{name}"

    def check_notice(self, name: str) -> Expiring:
        """STRING  set when a Scheduler has notified the workers of that check, with a time to live."""
        return f"celery5:{{{self.app}}}:check-telling:{name}"

    @property
    def schedule_queues(self) -> str:
        """SET     the queues that have, or have had, schedules."""
        return f"celery5:{{{self.app}}}:schedule-queues"

    @property
    def schedule_changes(self) -> Expiring:
        """channel: a schedule was added or changed."""
        return f"celery5:{{{self.app}}}:schedule-news"

    def schedules(self, queue: str) -> str:
        """HASH    the schedules whose jobs go to a queue, by name."""
        return f"celery5:{{{self.app}:{queue}}}:schedules"

    def schedule_times(self, queue: str) -> str:
        """ZSET    when to look at each of them, in ms."""
        return f"celery5:{{{self.app}:{queue}}}:schedule-times"

    def declared_schedules(self, scheduler: str) -> Expiring:
        """STRING  the names of the schedules that a Scheduler's code declares, with a time to live."""
        return f"celery5:{{{self.app}}}:declared:{scheduler}"

    def live_processes(self, kind: str) -> str:
        """ZSET    the Schedulers that live, by the end of their lease in ms."""
        return f"celery5:{{{self.app}}}:living:{kind}"

    def repaired_losses(self, kind: str) -> Expiring:
        """ZSET    the Schedulers that were lost and whose loss is repaired, by when, with a time to live."""
        return f"celery5:{{{self.app}}}:repaired:{kind}"

    @property
    def leader(self) -> Expiring:
        """HASH    the Controller that leads, with a time to live."""
        return f"celery5:{{{self.app}}}:leader"

    def member_end(self, member: str) -> Expiring:
        """STRING  what a Controller knows of the last end of a member's process, with a time to live."""
        return f"celery5:{{{self.app}}}:member-end:{member}"

    @property
    def members_report(self) -> Expiring:
        """STRING  what the leading Controller says of its members, with a time to live."""
        return f"celery5:{{{self.app}}}:members-report"

    @property
    def recycling(self) -> Expiring:
        """STRING  the worker that has the turn to be recycled, until its next process reads jobs; expires."""
        return f"celery5:{{{self.app}}}:recycling"

    def recycling_permit(self, member: str) -> Expiring:
        """STRING  whether a worker may be recycled, as its Controller tells it, with a time to live."""
        return f"celery5:{{{self.app}}}:recycling-permit:{member}"

    def source_lease(self, name: str) -> Expiring:
        """STRING  the Router that runs a Data Source which one at a time may, until this is gone."""
        return f"celery5:{{{self.app}}}:source:{name}"

    @property
    def timer_leader(self) -> Expiring:
        """STRING  the worker process that runs the timers with `on_leader`, until this is gone."""
        return f"celery5:{{{self.app}}}:timer-leader"

    @property
    def timer_candidates(self) -> Expiring:
        """ZSET    the worker processes that would run them, by the time in ms until which that counts."""
        return f"celery5:{{{self.app}}}:timer-candidates"

    @property
    def scaling(self) -> Expiring:
        """STRING  the state of the scaling of the application, with a time to live."""
        return f"celery5:{{{self.app}}}:scaling"

    @property
    def scaling_turn(self) -> Expiring:
        """STRING  the Scheduler that scales the application, until this is gone."""
        return f"celery5:{{{self.app}}}:scaling-turn"

    def report(self, worker: str) -> Expiring:
        """STRING  the report of a worker on its load, with a time to live."""
        return f"celery5:{{{self.app}}}:report:{worker}"

    @property
    def subscriptions(self) -> Expiring:
        """HASH    the subscribers to the application's events, with a time to live."""
        return f"celery5:{{{self.app}}}:subscriptions"

    @property
    def subscription_deadlines(self) -> Expiring:
        """ZSET    until when each subscription is valid, in ms, with a time to live."""
        return f"celery5:{{{self.app}}}:subscribed"

    @property
    def unclaimed_events(self) -> Expiring:
        """HASH    how many events had no subscriber, by event and version, with a time to live."""
        return f"celery5:{{{self.app}}}:unclaimed"

    def kept_events(self, subject: str) -> Expiring:
        """STREAM  events of one version that had no subscriber, with a time to live."""
        return f"celery5:{{{self.app}}}:kept:{subject}"

    def inbox(self, name: str) -> Expiring:
        """STREAM  commands for the process of that name; the channel of the same name wakes it."""
        return f"celery5:{{{self.app}}}:inbox:{name}"

    def nonce(self, command_id: str) -> Expiring:
        """STRING  set when a command is sent, then the process that took it: so it is performed once."""
        return f"celery5:{{{self.app}}}:nonce:{command_id}"

    def reply(self, command_id: str) -> Expiring:
        """STRING  the reply to a command; the channel of the same name announces it."""
        return f"celery5:{{{self.app}}}:answer:{command_id}"

    def parse_result_key(self, result: str) -> tuple[str, str]:
        """Return the queue and the id of the job of a result key."""
        tag, _, job_id = result.partition("}:result:")
        _, _, queue = tag.partition("{")[2].partition(":")
        return queue, job_id

    @property
    def record_streams(self) -> str:
        """SET     the names of the application's streams of records."""
        return f"celery5:{{{self.app}}}:record-streams"

    @property
    def metrics_reports(self) -> Expiring:
        """STREAM  reports of processes on their metrics, with a time to live."""
        return f"celery5:{{{self.app}}}:metrics:reports"

    def metrics_sent(self, process: str) -> Expiring:
        """STRING  the number of the last report of a process, with a time to live."""
        return f"celery5:{{{self.app}}}:metrics:sent:{process}"

    @property
    def metrics_turn(self) -> Expiring:
        """STRING  the process that rolls reports up, until this is gone."""
        return f"celery5:{{{self.app}}}:metrics:turn"

    @property
    def metrics_state(self) -> Expiring:
        """HASH    the totals of each queue, and the minutes and hours that are not packed yet, with a time to live."""
        return f"celery5:{{{self.app}}}:metrics:state"

    @property
    def metrics_minutes_prefix(self) -> Expiring:
        """STREAM  the minutes of a queue, an hour in each entry, with a time to live. What the keys begin with."""
        return f"celery5:{{{self.app}}}:metrics:minutes:"

    @property
    def metrics_hours_prefix(self) -> Expiring:
        """STREAM  the hours of a queue, a day in each entry, with a time to live. What the keys begin with."""
        return f"celery5:{{{self.app}}}:metrics:hours:"

    @property
    def failed_jobs(self) -> Expiring:
        """STREAM  the last attempts of jobs that have failed, with a time to live."""
        return f"celery5:{{{self.app}}}:history:failures"

    @property
    def other_jobs(self) -> Expiring:
        """STREAM  the slowest of the last successes, and samples of the others, with a time to live."""
        return f"celery5:{{{self.app}}}:history:others"

    def history_sent(self, process: str) -> Expiring:
        """STRING  the number of the last batch of records of a process, with a time to live."""
        return f"celery5:{{{self.app}}}:history:sent:{process}"

    @property
    def alerts(self) -> Expiring:
        """HASH    the alerts that are pending or firing, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts"

    @property
    def alert_outbox(self) -> Expiring:
        """STREAM  notifications of alerts that are not sent yet, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts:outbox"

    @property
    def alert_undelivered(self) -> Expiring:
        """HASH    the last notification of each alert that the webhook has not taken, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts:undelivered"

    @property
    def alert_logged(self) -> Expiring:
        """STRING  the last notification of an alert that was logged, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts:logged"

    @property
    def alert_history(self) -> Expiring:
        """STREAM  the last alerts that fired or resolved, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts:history"

    @property
    def alert_silences(self) -> Expiring:
        """HASH    the rules of alerts that are silenced, and until when, with a time to live."""
        return f"celery5:{{{self.app}}}:alerts:silences"

    def bulk_action(self, action_id: str) -> Expiring:
        """HASH    a bulk action and its progress, with a time to live."""
        return f"celery5:{{{self.app}}}:bulk:{action_id}"

    def bulk_lease(self, action_id: str) -> Expiring:
        """STRING  the process that performs a bulk action, with a time to live."""
        return f"celery5:{{{self.app}}}:bulk-lease:{action_id}"

    @property
    def bulk_actions(self) -> Expiring:
        """ZSET    the ids of bulk actions, by when they were asked for, in ms, with a time to live."""
        return f"celery5:{{{self.app}}}:bulk-actions"

    def for_stream(self, stream: str) -> StreamKeys:
        """Return the keys of one stream of records."""
        tag = f"celery5:{{{self.app}:{stream}}}"
        return StreamKeys(
            stream=stream,
            map=f"{tag}:map",  # HASH    the number of partitions, the version of that, and the borders of earlier ones
            groups=f"{tag}:groups",  # HASH    where each group began
            relayed=f"{tag}:relayed",  # HASH    the last that came from each outbox
            archiving=f"{tag}:archiving",  # HASH    who archives which records of each partition
            log_prefix=f"{tag}:log:",
            archive_prefix=f"{tag}:archive:",
            sent_prefix=f"{tag}:sent:",
            members_prefix=f"{tag}:members:",
            incarnations_prefix=f"{tag}:incarnations:",
            plan_prefix=f"{tag}:plan:",
            partition_prefix=f"{tag}:partition:",
            state_prefix=f"{tag}:state:",
            outbox_prefix=f"{tag}:outbox:",
            parked_prefix=f"{tag}:parked-keys:",
            parked_log_prefix=f"{tag}:parked:",
            dead_prefix=f"{tag}:dead-records:",
            changes_prefix=f"{tag}:changes:",
        )

    def for_queue(self, queue: str) -> QueueKeys:
        """Return the keys of one queue, on the normal lane."""
        # An application's name has no colon, so no two applications make the same key.
        tag = f"celery5:{{{self.app}:{queue}}}" if queue != EVENTS else f"celery5:{{{self.app}}}:events"
        return QueueKeys(
            queue=queue,
            stream=f"{tag}:stream",  # STREAM  jobs that may run now, on the normal lane
            normal=f"{tag}:stream",
            high=f"{tag}:high",  # STREAM  jobs of high priority
            low=f"{tag}:low",  # STREAM  jobs of low priority
            handed=f"{tag}:handed",  # STREAM  jobs that a limit has admitted for a worker
            jobs=f"{tag}:jobs",  # HASH    where each unfinished or dead job is
            due=f"{tag}:due",  # ZSET    scheduled jobs, retries and held jobs, by their time in ms
            waiting=f"{tag}:waiting",  # HASH    their Commands
            dead=f"{tag}:dead",  # STREAM  dead-letter queue
            dead_causes=f"{tag}:dead:causes",  # HASH    how many jobs died of each cause, the first and the last
            worker_deaths=f"{tag}:dead:deaths",  # HASH    how many workers died with jobs of each task, and when
            job_deaths_prefix=f"{tag}:dead:job:",
            lost_workers=f"{tag}:dead:lost",  # ZSET    workers that were lost in the last hour, by when, in ms
            lost_work=f"{tag}:dead:lost-work",  # HASH    what they had begun, what became of it, when it was repaired
            leases=f"{tag}:leases",  # ZSET    live workers, by the end of their lease in ms
            consumers_checked=f"{tag}:leases:checked",  # STRING  nothing, after a worker has looked for strays
            idle_leases=f"{tag}:leases:idle",  # ZSET    leases of workers that hold no job
            steady_since=f"{tag}:leases:steady",  # STRING  since when heartbeats come without a gap
            unique=f"{tag}:unique",  # HASH    the live job of each task and key
            wake=f"{tag}:wake",  # channel: a job became due earlier than all others
            revoke=f"{tag}:revoke",  # channel: a job was revoked while a worker had it
            replication_mark=f"{tag}:mark",  # STRING  nothing, for a second: what a producer waits for on its replicas
            documents=f"{tag}:documents",  # HASH    which Data Sinks take which documents; the channel announces more
            slots=f"{tag}:slots",  # HASH    the limit of each job that has a slot
            slot_counts=f"{tag}:counts",  # HASH    how many slots are taken, by limit
            limited_counts=f"{tag}:held",  # HASH    how many jobs wait at limits, by task
            slots_freed=f"{tag}:free",  # channel: a job that waits at a limit may run
            waiting_list_prefix=f"{tag}:room:",
            result_prefix=f"{tag}:result:",
            window_prefix=f"{tag}:unique:",
            run_records=f"{tag}:jobs:ended",  # LIST    what has ended in runs of workflows and is not counted yet
            run_prefix=f"{tag}:run:",
            plan_prefix=f"{tag}:workflow:",
            run_outbox=f"{tag}:jobs:to-send",  # STREAM  what runs send to other queues, and to runs of other queues
            live_runs=f"{tag}:jobs:runs",  # ZSET    live runs, by when to look at them, in ms
            past_runs=f"{tag}:past-runs",  # ZSET    runs that have ended lately, by when, in ms
            undoing_runs=f"{tag}:undoing-runs",  # ZSET    runs that stop or are not undone, by since when, in ms
            revoked_jobs=f"{tag}:revoked",  # ZSET    jobs that were revoked while they waited, by when, in ms
            revoked_documents=f"{tag}:revoked-documents",  # HASH    their documents
            idle_runs=f"{tag}:jobs:idle-runs",  # HASH    live runs without a job that is on a queue or runs, packed
            code_versions=f"{tag}:jobs:code",  # ZSET    versions of the code of live workers
            foreign_jobs=f"{tag}:jobs:foreign",  # HASH    the lists of jobs that are kept for other code, by task
            flow=f"{tag}:jobs:flow",  # HASH    attempts that have ended, and looks at the queue, for its flow
            progress_prefix=f"{tag}:progress:",
        )


def find_lifetime(key: str) -> KeyLifetime | None:
    """Return whether a key stays until what it tells of is gone, or has a time to live; None for an unknown key."""
    for pattern, lifetime in _compile_patterns():
        if pattern.fullmatch(key):
            return lifetime
    return None


def is_owned(key: str) -> bool:
    """Return whether a key without a time to live has an owner."""
    return find_lifetime(key) == "stays"


_APP_SIGN, _QUEUE_SIGN, _PART_SIGN = "\x01", "\x02", "\x03"
"""What stands for the name of an application, that of a queue or a stream, and anything else, in a key."""
_SIGNS = {_APP_SIGN: r"[^:{}]+", _QUEUE_SIGN: r"[^{}]+", _PART_SIGN: r".*"}
_NAMES = ("queue", "stream", "lane", "_lanes", "app", "pattern")
"""Attributes that are no keys, but for the `stream` of a queue, which is there as `normal`, too."""


@cache
def _compile_patterns() -> list[tuple[re.Pattern[str], KeyLifetime]]:
    """Return what the keys of an application look like, from those that the classes make; keys that stay first."""
    shapes: dict[KeyLifetime, set[str]] = {"stays": set(), "expires": set()}
    for _, shape, lifetime in _list_all_shapes():
        shapes[lifetime].add(shape)
    return [
        (re.compile("|".join(map(_to_pattern, sorted(shapes[lifetime]))), re.DOTALL), lifetime)
        for lifetime in ("stays", "expires")
    ]


def list_key_shapes() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the name of each key in the three classes, and what the keys of that name look like."""
    for name, shape, _ in _list_all_shapes():
        yield name, re.compile(_to_pattern(shape), re.DOTALL)


def _list_all_shapes() -> Iterator[tuple[str, str, KeyLifetime]]:
    app = Keys(_APP_SIGN)
    for owner in (app, app.for_queue(_QUEUE_SIGN), app.for_queue(EVENTS), app.for_stream(_QUEUE_SIGN)):
        yield from _list_shapes(owner)


def _list_shapes(owner: Any) -> Iterator[tuple[str, str, KeyLifetime]]:
    """Yield the name of each key that an object of keys has or makes, the key, and its lifetime.

    Signs stand in the key in place of the names of applications, queues and streams, and of anything else.
    """
    kind = cast("type[object]", type(owner))
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in _NAMES:
            yield name, _as_shape(getattr(owner, name)), _get_lifetime(hint)
    for name, member in vars(kind).items():
        getter = member.fget if isinstance(member, property) else member
        if name.startswith("_") or name in _NAMES or not inspect.isfunction(getter):
            continue
        hint = get_type_hints(getter, include_extras=True).get("return")
        if hint not in (str, Expiring):
            continue
        parameters = list(inspect.signature(getter).parameters)[1:]
        sign = _QUEUE_SIGN if parameters == ["queue"] else _PART_SIGN
        key = (
            getattr(owner, name) if isinstance(member, property) else getter(owner, *[sign] * len(parameters))
        )
        yield name, _as_shape(cast("str", key)), _get_lifetime(hint)


def _get_lifetime(hint: Any) -> KeyLifetime:
    return "expires" if hint == Expiring else "stays"


def _as_shape(key: str) -> str:
    """Return a key; one that is only the beginning of keys gets a sign for the rest."""
    return key + _PART_SIGN if key.endswith(":") else key


def _to_pattern(shape: str) -> str:
    pattern = re.escape(shape)
    for sign, words in _SIGNS.items():
        pattern = pattern.replace(re.escape(sign), words)
    return pattern
