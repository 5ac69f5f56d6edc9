"""What a gateway keeps of the texts that it was sent."""

from __future__ import annotations

import pytest
from msgspec import structs

from understudy.gateway import histories
from understudy.gateway.histories import Histories
from understudy.protocol import CallOrigin
from understudy.records import ModelRequest

ORIGIN = CallOrigin("s", 1, "r", 1, 1, "", "s", "p", "m")
WHOLE = ModelRequest("s/r/1", "p", "m", b"[one,two]", text="t", lasting=4)
NEXT = ModelRequest("s/r/2", "p", "m", b",two,three]", text="t", lasting=8, left_out=4)


def test_a_request_goes_on_from_the_one_before() -> None:
    """What was left out is put before what was brought, as often as the request is repeated, and from then on the next
    one may leave out more."""
    kept = Histories()
    assert kept.completed(ORIGIN, WHOLE) == WHOLE
    for _ in range(2):
        completed = kept.completed(ORIGIN, NEXT)
        assert completed is not None
        assert (completed.messages, completed.left_out) == (b"[one,two,three]", 0)
    last = kept.completed(ORIGIN, structs.replace(NEXT, messages=b"]", left_out=8))
    assert last is not None
    assert last.messages == b"[one,two]"


@pytest.mark.parametrize(
    ("origin", "request_"),
    [
        (structs.replace(ORIGIN, session_id="other"), NEXT),
        (structs.replace(ORIGIN, incarnation=2), NEXT),
        (ORIGIN, structs.replace(NEXT, text="another frame's")),
        (ORIGIN, structs.replace(NEXT, left_out=5)),
    ],
)
def test_nothing_else_goes_on_from_it(origin: CallOrigin, request_: ModelRequest) -> None:
    """Another session's request, also one of the same id that was made again, one of another text, and one that leaves
    out what was not said to last, are asked for all."""
    kept = Histories()
    kept.completed(ORIGIN, WHOLE)
    assert kept.completed(origin, request_) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sessions that asked longest ago nothing is kept once the texts are too long together; a text that does not
    last, or is too long alone, is not kept."""
    monkeypatch.setattr(histories, "KEPT_BYTES", 20)
    kept = Histories()
    origins = [structs.replace(ORIGIN, session_id=name) for name in ("a", "b", "c")]
    for origin in (*origins[:2], origins[0], origins[2]):
        kept.completed(origin, WHOLE)
    assert [kept.completed(origin, NEXT) is not None for origin in origins] == [True, False, False]
    kept.completed(ORIGIN, structs.replace(WHOLE, messages=b"[" + b"x" * 20))
    kept.completed(origins[1], structs.replace(WHOLE, lasting=0))
    assert [kept.completed(origin, NEXT) for origin in (ORIGIN, origins[1])] == [None, None]
