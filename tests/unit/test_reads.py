"""What is read of the store is typed on its way."""

from __future__ import annotations

import re
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy import messages, reads
from understudy.cluster.client.client_connection import ClientConnection
from understudy.errors import InvalidInput
from understudy.event_wire import EventWire
from understudy.node.requests import READS
from understudy.protocol import Watched, packed, unpacked

from ..records import run_record, session_record

ROOT = Path(__file__).resolve().parents[2]

REPLIES = {name: typing.get_type_hints(read)["return"] for name, read in READS.items()}

ASKED = re.compile(r"(?:\.read|\._asked)[(,]\s*(?P<kind>[\w\[\], ]+?), \"(?P<what>\w+)\"")


def parts(kind: Any) -> list[Any]:
    """The classes that a type is made of."""
    inner = typing.get_args(kind)
    return [part for each in inner for part in parts(each)] if inner else [kind]


@pytest.mark.parametrize("what", READS)
def test_what_is_read_has_a_type_that_is_sent(what: str) -> None:
    """Given anything that can be read, then its function says which records, texts and numbers it returns, and a reply
    that is none of it is refused."""
    for part in parts(REPLIES[what]):
        record = is_dataclass(part) or issubclass(part, msgspec.Struct) or typing.is_typeddict(part)
        assert record or part in (str, int, type(None)), part
    with pytest.raises(InvalidInput, match="not understood"):
        unpacked({1: object()}, REPLIES[what], what)


def test_clients_expect_what_the_store_makes() -> None:
    """Given each place where something is read, then it expects the type that is made, or a part of its fields."""
    names = {**vars(reads), "Message": messages.Message, "EventWire": EventWire}
    expected = {
        (found["what"], found["kind"])
        for path in sorted((ROOT / "cluster").rglob("*.py"))
        for found in ASKED.finditer(path.read_text(encoding="utf-8"))
    }
    assert {what for what, _ in expected} >= READS.keys() - {"owner", "homes"}  # of which others speak
    for what, kind in expected:
        wanted, made = eval(kind, names), REPLIES[what]
        alike = typing.get_origin(wanted) is typing.get_origin(made)
        part_of = alike and wanted != made and all(map(issubclass, parts(made), parts(wanted)))
        assert wanted == made or part_of, f"{what}: {kind} is expected, {made} is made"


class Homes:
    """A node service that answers with whatever it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def request(self, _session_id: str | None, _method: str, *_arguments: Any, turn: int = 0) -> Any:
        return self.answer


def client(answer: Any) -> Any:
    found: Any = object.__new__(
        type("Client", (ClientConnection,), dict.fromkeys(ClientConnection.__abstractmethods__))
    )
    found._homes = Homes(answer)
    return found


async def test_a_reply_of_another_shape_is_refused_with_its_place() -> None:
    """Given replies in which one field is wrong, or is missing, when a client reads them, then the error names it."""
    good = packed(run_record())
    assert await client(good).read(reads.RunRecord, "run", "s", "r") == run_record()
    with pytest.raises(InvalidInput, match=r"result of read run is not understood: Expected `int`.*`\$\.rounds`"):
        await client({**good, "rounds": "many"}).read(reads.RunRecord, "run", "s", "r")
    session = packed(session_record(pending=[]))
    del session["epoch"]
    with pytest.raises(InvalidInput, match=r"`epoch` - at `\$\[1\]`"):
        await client([packed(session_record()), session]).read(list[reads.SessionRecord], "tree", "s")
    with pytest.raises(InvalidInput, match=r"the result of events is not understood.*`\$\[0\]`"):
        await client([{"type": "run_started"}]).events("s", 0)
    with pytest.raises(InvalidInput, match=r"`\$\.runs\[\.\.\.\]`"):
        unpacked({"runs": {"s/r": {"status": "completed"}}}, Watched, "the result of watch")


async def test_what_nobody_looked_at_is_not_sent() -> None:
    """Given a session that asks nobody, and of no tree, then these fields are not sent; what is empty is."""
    assert not {"pending", "tools"} & packed(session_record()).keys()
    assert packed(session_record(pending=[], tools=[])).items() >= {"pending": [], "tools": []}.items()
    newer = {**packed(session_record()), "novelty": 1}
    assert unpacked(newer, reads.SessionAtWork, "a session") == session_record()
