"""Full memory: which scripts run when Redis has no memory left, and how.

With `maxmemory` reached and the policy `noeviction`, Redis refuses the first write of a script if it may take memory.
It refuses no later one, so no script is stopped in the middle. A script whose first write takes no memory runs as a
whole, on every server from Redis 6.2 on. (The flag `allow-oom` of scripts exists from Redis 7.0 on only.)

Scripts that drain queues run, and so do those that show that a process is alive or that let an operator act. Scripts
that add work are refused. Those that run add little: a result, with a time to live, replaces the message of its job.
"""

from collections.abc import Mapping

_ON_STREAM = "redis.call('XDEL', KEYS[1], '0-0')\n"
_ON_SORTED_SET = "redis.call('ZREM', KEYS[1], '')\n"
_ON_HASH = "redis.call('HDEL', KEYS[1], '')\n"
_ITS_OWN = ""

FIRST_WRITES: Mapping[str, str] = {
    # Workers start, renew their leases and stop.
    "announce_code": _ON_HASH,
    "join": _ON_SORTED_SET,
    "leave": _ON_SORTED_SET,
    "renew_lease": _ITS_OWN,
    "renew_presence": _ITS_OWN,
    # Jobs end. Except for results, what is added to one key is removed from another.
    "admit": _ON_STREAM,
    "admit_waiting": _ON_STREAM,
    "promote": _ON_SORTED_SET,
    "recover": _ON_STREAM,
    "settle": _ITS_OWN,
    "settle_limited": _ITS_OWN,
    "take_foreign": _ON_STREAM,
    "take_starts": _ITS_OWN,
    # Notes on running jobs, of a bounded size.
    "count_ended": _ON_HASH,
    "record_progress": _ON_SORTED_SET,
    # Runs of workflows go on by what has ended, which this takes off a list. What a caller asks for is refused.
    "advance": _ITS_OWN,
    # Operators reach processes, take jobs back and remove dead ones. An inbox and the audit trail are bounded.
    "purge": _ON_STREAM,
    "record_action": _ON_STREAM,
    "reply_to_command": _ON_STREAM,
    "revoke": _ON_STREAM,
    "send_command": _ON_STREAM,
    "take_command": _ITS_OWN,
    # Events reach their end, and documents their sinks.
    "claim_documents": _ON_STREAM,
    "dead_letter_document": _ON_STREAM,
    "declare_recipients": _ON_HASH,
    "declare_subscriptions": _ITS_OWN,
    "defer_documents": _ON_STREAM,
    "finish_events": _ITS_OWN,
    "get_subscribers": _ITS_OWN,
    # Members keep their partitions, and records are moved to the archive. A commit waits, since it only adds outputs.
    "claim_archived": _ON_HASH,
    "release_partitions": _ON_HASH,
    "renew_member_lease": _ON_SORTED_SET,
    "renew_membership": _ON_HASH,
    "settle_archived": _ON_HASH,
    # What one process does for all goes on: the Controller that leads keeps its processes.
    "acquire_lease": _ITS_OWN,
    "claim_leadership": _ON_HASH,
}
"""By the name of a script that runs when memory is full, the write that it begins with: one that changes nothing, since
no entry, member or field has that name. '' for a script whose own first write takes no memory. All others are refused.
"""
