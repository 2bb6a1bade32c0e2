"""What a worker is to the groups of the processors that it runs."""

import msgspec

from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.suspect_turn import SuspectTurn


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """This worker as a member of groups."""

    # The name that keeps its share through a restart, or that of the incarnation.
    name: str
    incarnation: str
    # Seconds after which a silent member counts as dead.
    lease: float
    # Whether the name is its own, so that its share may be kept when it leaves.
    is_named: bool
    grace_period: float
    # How many deaths of workers a record may cause.
    max_deliveries: int
    # Seconds for which a record that no member can read waits for one that can.
    unknown_record_grace: float = 0.0
    # How this worker ends.
    incarnation_end: IncarnationEnd = msgspec.field(default_factory=IncarnationEnd)
    # Whose turn it is among what may have killed workers.
    suspect_turn: SuspectTurn = msgspec.field(default_factory=SuspectTurn)
