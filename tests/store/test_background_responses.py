"""Responses that the endpoint makes in the background and keeps: whoever takes a call over fetches them by their id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.messages import Usage
from understudy.protocol import CallOrigin
from understudy.records import KeptResponse, ModelAnswer
from understudy.store.check.check import check
from understudy.store.operations import model_calls
from understudy.store.operations.model_calls import AnswerResult, Issued

from .test_store import FRAME, Store, opened

pytestmark = pytest.mark.conformance


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    """A store that this test owns, and a session in it that waits for its model."""
    async with opened(store) as made:
        await made.asking()
        yield made
        with made.database.read() as connection:
            assert check(connection, made.namespace) == []


def kept(response_id: str, profile: str = "p") -> KeptResponse:
    return KeptResponse(response_id, profile, "m")


async def identify(
    db: Store, response_id: str, attempt: int = 1, run_id: str = "r", round_number: int = 1, profile: str = "p"
) -> bool:
    incarnation = db.held("s", 0).incarnation
    response = kept(response_id, profile)
    noted: bool = await db.do(model_calls.identify, "s", incarnation, run_id, round_number, attempt, response)
    return noted


async def reissue(db: Store) -> Issued:
    issued: Issued = await db.do(model_calls.reissue, db.held("s", 1), FRAME.frame_id, "another", "m")
    return issued


async def answer(db: Store, response_id: str, attempt: int, fetched: bool = False, **more: Any) -> AnswerResult:
    got = ModelAnswer(content="hi", usage=Usage(10, 5), response_id=response_id, background=True, **more)
    result: AnswerResult = await db.do(
        model_calls.answer, "s", "r", 1, attempt, "m", got, incarnation=db.held("s", 0).incarnation, fetched=fetched
    )
    return result


def tokens(db: Store) -> tuple[int, int]:
    row = db.session()
    return row["tokens_used"], row["tokens_redone"]


async def test_a_call_that_is_lost_is_fetched_by_its_id(db: Store) -> None:
    """Given a call whose response has an id, when its gateway is lost, then the next attempt has that id, and the
    answer is paid once."""
    assert await identify(db, "resp-1")
    assert await reissue(db) == Issued(2, 0, kept("resp-1"))
    assert (await answer(db, "resp-1", 2, fetched=True)).won
    assert tokens(db) == (15, 0)
    assert db.session()["response_id"] == "resp-1"


async def test_one_response_is_counted_once(db: Store) -> None:
    """Given a gateway that was only cut off, when the answers of both attempts arrive, which are the same response,
    then it is counted once; another response of the lost attempt would be counted too."""
    await identify(db, "resp-1")
    await reissue(db)
    assert (await answer(db, "resp-1", 2, fetched=True)).won
    before = db.dump()
    again = await answer(db, "resp-1", 1)
    assert (again.won, again.repeated) == (False, True)
    assert db.dump() == before
    assert not (await answer(db, "resp-0", 1)).repeated
    assert tokens(db) == (30, 0)


async def test_two_endpoints_may_give_one_id(db: Store) -> None:
    """Given a fallback's response, when the lost attempt brings one of another endpoint that has the same id, then both
    are counted."""
    await identify(db, "resp-1", profile="q")
    assert await reissue(db) == Issued(2, 0, kept("resp-1", "q"))
    assert (await answer(db, "resp-1", 2, fetched=True, profile="q", model="m")).won
    assert (await answer(db, "resp-1", 1, profile="q", model="m")).repeated
    assert not (await answer(db, "resp-1", 1)).repeated
    assert tokens(db) == (30, 0)


def test_what_is_fetched() -> None:
    """An answer is what was fetched if it is of the same endpoint and has the same id."""
    of = CallOrigin("s", 1, "r", 1, 2, "", "s", "p", "m", response=kept("resp-1", "q"))
    assert of.is_fetched(ModelAnswer(response_id="resp-1", profile="q", model="m"))
    assert not of.is_fetched(ModelAnswer(response_id="resp-1"))
    assert not of.is_fetched(ModelAnswer(response_id="resp-2", profile="q", model="m"))
    own = replace(of, response=kept("resp-1"))
    assert own.is_fetched(ModelAnswer(response_id="resp-1"))
    assert not replace(of, response=None).is_fetched(ModelAnswer(response_id="resp-1"))


async def test_the_lost_attempts_answer_may_win(db: Store) -> None:
    """Given an attempt that was given up, when its answer is committed first, then what the next one fetches is the
    same response, and adds nothing."""
    await identify(db, "resp-1")
    await reissue(db)
    assert (await answer(db, "resp-1", 1)).won
    assert (await answer(db, "resp-1", 2, fetched=True)).repeated
    assert tokens(db) == (15, 0)


async def test_a_response_that_the_endpoint_has_lost_is_paid_again(db: Store) -> None:
    """Given a response that could not be fetched any more, when another one was made, then that has its own id, and its
    tokens are counted as paid again."""
    await identify(db, "resp-1")
    await reissue(db)
    assert await identify(db, "resp-2", attempt=2)
    assert await reissue(db) == Issued(3, 0, kept("resp-2"))
    assert (await answer(db, "resp-3", 3)).won
    assert tokens(db) == (15, 15)


async def test_an_id_that_arrives_late_is_not_noted(db: Store) -> None:
    """Given a call that went out again, was answered, or is of another run, when the id of the first attempt arrives,
    then nothing is changed: another response is waited for by now, or none."""
    await reissue(db)
    before = db.dump()
    assert not await identify(db, "resp-1")
    assert not await identify(db, "resp-1", attempt=2, run_id="q")
    assert not await identify(db, "resp-1", attempt=2, round_number=2)
    assert db.dump() == before
    await answer(db, "resp-2", 2)
    before = db.dump()
    assert not await identify(db, "resp-2", attempt=2)
    assert db.dump() == before


async def test_the_next_call_has_no_id_yet(db: Store) -> None:
    """Given a session whose call was answered, when it asks again, then nothing is left of the last response."""
    await identify(db, "resp-1")
    await answer(db, "resp-1", 1)
    await db.ask("s", number=2, round_number=2)
    assert db.session()["response_id"] == ""
    assert await reissue(db) == Issued(2, 0)
