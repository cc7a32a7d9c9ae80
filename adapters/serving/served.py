"""What serves a request: a method's session, and the counts of what it does."""

from __future__ import annotations

from attrs import frozen

from ..session.session import Session
from .tally import Tally


@frozen(eq=False)
class Served:
    """session: runs the calls of layers and records them. tally: tells the metrics and the summary."""

    session: Session
    tally: Tally
