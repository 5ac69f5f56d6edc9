"""Who has a session: conditions of what an activation says."""

from __future__ import annotations

from understudy.errors import Fenced
from understudy.records import ActivationId

from ..db.session_row import SessionRow


def require_current(row: SessionRow, activation: ActivationId, frame_id: str) -> None:
    """Refuse what another activation says, or another frame in the name of this one, as code of a user's may. Raises
    `Fenced`."""
    if row.activation != activation:
        message = f"epoch {activation.epoch} is fenced: the store has epoch {row.epoch}"
        if row.incarnation != activation.incarnation:
            message = f"epoch {activation.epoch} is fenced: it was of another incarnation of this session"
        raise Fenced(message, session_id=activation.session_id)
    if row.frame_id not in (None, frame_id):
        raise Fenced(f"the session is not in frame {frame_id}", session_id=activation.session_id)


def require_held(row: SessionRow, activation: ActivationId, frame_id: str) -> None:
    """Refuse as well what an activation says after its session left its frame: a death was noted, after which its calls
    may have been given up, or a predecessor of its node service committed late that the frame ends. Raises `Fenced`."""
    require_current(row, activation, frame_id)
    if row.frame_id is None:
        raise Fenced("the session has left its frame", session_id=row.session_id)
