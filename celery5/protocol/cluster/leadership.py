"""Elect the Controller that acts. Each decides from its own clock alone.

Redis keeps one record: the leader, its epoch, and a counter (`beat`) that grows with each renewal. A standby replaces a
leader whose record it has read unchanged for LEASE seconds. A leader trusts its lease for a little less,
counted from before the trip that renewed it. Clocks are never compared with each other, so neither their time
nor a change of Redis' clock matters; they only must run about equally fast (within LEASE_MARGIN). An epoch has
one leader, and the next one has a greater number.

While Redis does not answer, no standby sees the record, and the leader cannot renew it. So seconds count only
while answers come: after OUTAGE_GAP they start again, and without a recent answer no standby takes over.
Otherwise a call that was sent to a frozen Redis would depose a healthy leader as soon as Redis resumes.
"""

import math
from enum import Enum

import msgspec

LEASE = 3.0
"""Seconds without a renewal after which another Controller may lead."""
LEASE_MARGIN = 0.3
"""Seconds before the end of the lease at which the leader stops acting: clocks may differ by as much in one
lease.
"""
RENEW_PERIOD = 1.0
"""Seconds between two renewals."""
POLL_PERIOD = 0.5
"""The most seconds between two reads by a standby."""
OUTAGE_GAP = 1.5
"""Seconds without an answer that count as an outage.

A healthy leader renews its record within RENEW_PERIOD + OUTAGE_GAP seconds, which is less than LEASE. Two reads
are never so far apart while Redis answers.
"""
MIN_POLL_DELAY = 0.02
"""The least seconds between two reads."""
EPOCH_VARIABLE = "CELERY5_CONTROLLER_EPOCH"
"""The environment variable with the epoch in which a process was started."""
NO_RECORD = "0 0"
"""The version of a record that does not exist."""


class LeaderRecord(msgspec.Struct, frozen=True):
    """The record in Redis."""

    epoch: int = 0
    beat: int = 0
    leader: str = ""  # '' for none: the last one resigned, or there never was one
    since: float = 0.0  # seconds since 1970, by Redis

    @property
    def version(self) -> str:
        """Return the text that identifies this version of the record, as in the script."""
        return f"{self.epoch} {self.beat}"


class LeadershipChange(Enum):
    """What a read of the record has changed."""

    NONE = "nothing"
    ACQUIRED = "it leads, in its own epoch"
    LOST = "it led, and another one does"
    NEW_LEADER = "it stands by, for a leader that it did not know"


class LeadershipState(msgspec.Struct, frozen=True, kw_only=True):
    """The standing of one Controller. Times are seconds of its own clock."""

    name: str  # of the Controller
    epoch: int = 0  # in which it leads; 0: it stands by
    valid_until: float = -math.inf
    last_record: LeaderRecord | None = None
    unchanged_since: float = -math.inf
    last_reply_at: float = -math.inf

    def has_valid_lease(self, now: float) -> bool:
        """Return whether it may act."""
        return self.epoch != 0 and now < self.valid_until

    def get_replaceable_version(self, now: float) -> str:
        """Return the version of the record that it may replace now; '' when it has to wait.

        A Controller that never saw a record may lead at once if there is none. When Redis has lost the record
        of its own lease, the leader may write it again, since nobody else can have waited long enough.
        """
        if self.last_record is None or self.has_valid_lease(now):
            return NO_RECORD
        if now - self.last_reply_at > OUTAGE_GAP:
            return ""
        return self.last_record.version if now - self.unchanged_since >= LEASE else ""

    def apply_record(
        self, record: LeaderRecord, *, asked_at: float, now: float
    ) -> tuple["LeadershipState", LeadershipChange]:
        """Return its standing after an answer of Redis that arrived `now`, to a request sent at `asked_at`."""
        before = self.last_record
        unchanged = record == before and now - self.last_reply_at <= OUTAGE_GAP
        stands = msgspec.structs.replace(
            self,
            last_record=record,
            unchanged_since=self.unchanged_since if unchanged else now,
            last_reply_at=now,
        )
        if record.leader == self.name:
            until = asked_at + LEASE - LEASE_MARGIN
            if record.epoch == self.epoch:
                return msgspec.structs.replace(
                    stands, valid_until=max(self.valid_until, until)
                ), LeadershipChange.NONE
            return msgspec.structs.replace(
                stands, epoch=record.epoch, valid_until=until
            ), LeadershipChange.ACQUIRED
        if not record.leader:
            # nobody leads, so nobody has replaced it: it waits, and goes on if it can
            return stands, LeadershipChange.NONE
        news = (
            LeadershipChange.NEW_LEADER
            if before is None or before.leader != record.leader
            else LeadershipChange.NONE
        )
        gone = msgspec.structs.replace(stands, epoch=0, valid_until=-math.inf)
        return gone, LeadershipChange.LOST if self.epoch else news

    def get_poll_delay(self, now: float) -> float:
        """Return the seconds until the next read after one that was answered."""
        if self.epoch:
            return RENEW_PERIOD
        return min(POLL_PERIOD, max(self.unchanged_since + LEASE - now, MIN_POLL_DELAY))


def is_superseded(epoch: int, record: LeaderRecord) -> bool:
    """Return whether a process started in this epoch must give way to those of a newer one."""
    return record.epoch > epoch
