"""Leadership: which of several Controllers acts, decided by each of them from its own clock alone.

Redis keeps one record: who leads, in which epoch, and a beat that grows each time the leader says so. Whoever stands by
takes the place of a leader whose record it has seen unchanged for LEASE seconds; a leader is sure of its lease for a
little less than that, counted from before the trip that renewed it. No clock is compared with another one, so it does
not matter what time it is anywhere, or that Redis' clock was set; only that all run about equally fast (by MARGIN).
An epoch has one leader, and the next one has a greater number.

While Redis does not answer, no standby sees the record, and the leader cannot renew it either. So the seconds count
only while answers come: after a GAP they start again, and without a recent answer no standby takes over. Otherwise a
call that was sent to a frozen Redis would depose a healthy leader as soon as Redis goes on.
"""

import math
from enum import Enum

import msgspec

LEASE = 3.0
"""Seconds without a word from the leader after which another one leads."""
LEASE_MARGIN = 0.3
"""Seconds before that from which on the leader acts no more: clocks may differ by as much in one lease."""
RENEW_PERIOD = 1.0
"""Seconds between two renewals."""
POLL_PERIOD = 0.5
"""Seconds between two looks of one that stands by, at most."""
OUTAGE_GAP = 1.5
"""Seconds without an answer that count as an outage. A healthy leader renews its record within RENEW + GAP seconds,
which is less than LEASE; two looks are never so far apart when Redis answers."""
MIN_POLL_DELAY = 0.02
"""Seconds between two looks, at least."""
EPOCH_VARIABLE = "CELERY5_CONTROLLER_EPOCH"
"""The variable by which a process knows in which epoch it was started."""
NO_RECORD = "0 0"
"""The words of a record that is not there."""


class LeaderRecord(msgspec.Struct, frozen=True):
    """What Redis knows: the `leader` ('' for none: it has ended in order, or there never was one), its `epoch`, the
    `beat`, and `since` when it leads (seconds since 1970, by Redis)."""

    epoch: int = 0
    beat: int = 0
    leader: str = ""
    since: float = 0.0

    @property
    def version(self) -> str:
        """What tells it from every other record, as the script has it."""
        return f"{self.epoch} {self.beat}"


class LeadershipChange(Enum):
    """What a look at the record has changed."""

    NONE = "nothing"
    ACQUIRED = "it leads, in an epoch of its own"
    LOST = "it led, and another one does"
    NEW_LEADER = "it stands by, for a leader that it did not know"


class LeadershipState(msgspec.Struct, frozen=True, kw_only=True):
    """Where the Controller `name` stands: the `epoch` in which it leads (0: it stands by), the time by its own clock
    `until` which that is sure, and the record that was `seen`, as it has been since `seen_at`, when the last answer
    came at `heard_at`."""

    name: str
    epoch: int = 0
    valid_until: float = -math.inf
    last_record: LeaderRecord | None = None
    unchanged_since: float = -math.inf
    last_reply_at: float = -math.inf

    def has_valid_lease(self, now: float) -> bool:
        """Whether it may act."""
        return self.epoch != 0 and now < self.valid_until

    def get_replaceable_version(self, now: float) -> str:
        """The words of the record that it may replace by now; '' when it has to wait.

        Who never saw one may lead at once if there is none. Who sees that the record of its own lease is gone, because
        Redis has lost it, may write it again, for nobody else can have waited long enough.
        """
        if self.last_record is None or self.has_valid_lease(now):
            return NO_RECORD
        if now - self.last_reply_at > OUTAGE_GAP:
            return ""
        return self.last_record.version if now - self.unchanged_since >= LEASE else ""

    def apply_record(
        self, record: LeaderRecord, *, asked_at: float, now: float
    ) -> tuple["LeadershipState", LeadershipChange]:
        """Redis' answer, which is here `now`, to what was `asked` then: where it stands from here on."""
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
            # Nobody leads, so nobody has taken its place: it waits, and goes on if it can.
            return stands, LeadershipChange.NONE
        news = (
            LeadershipChange.NEW_LEADER
            if before is None or before.leader != record.leader
            else LeadershipChange.NONE
        )
        gone = msgspec.structs.replace(stands, epoch=0, valid_until=-math.inf)
        return gone, LeadershipChange.LOST if self.epoch else news

    def get_poll_delay(self, now: float) -> float:
        """Seconds until the next look after one that was answered."""
        if self.epoch:
            return RENEW_PERIOD
        return min(POLL_PERIOD, max(self.unchanged_since + LEASE - now, MIN_POLL_DELAY))


def is_superseded(epoch: int, record: LeaderRecord) -> bool:
    """Whether a process that was started in this epoch has to leave the field to those of a newer one."""
    return record.epoch > epoch
