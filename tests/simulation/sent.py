"""What models are sent: what is committed, as the agent's specification says, and the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.typed_output import FINAL_ANSWER
from understudy.handoffs import present
from understudy.identifiers import digest
from understudy.json_text import from_json
from understudy.messages import ATTACHMENTS_MARK, attached
from understudy.records import ModelRequest
from understudy.store.db.statements import MESSAGE, SESSION
from understudy.testing.policies import content_text

from .folding import due_to_be_sent, unfolded
from .servers import OFFERED

if TYPE_CHECKING:
    from .world import World

Said = tuple[str, str, int]


class Sent:
    """Compares model calls with what is committed.

    Args:
        violated: called with what is wrong.
    """

    def __init__(self, world: World, violated: Callable[[str], None]) -> None:
        self._world = world
        self._violated = violated
        self._committed: dict[str, list[list[Said]]] = {}
        self._agents: dict[str, set[str]] = {}
        self._made: dict[tuple[str, str], str] = {}

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed: others may have their ids."""
        self._made = {key: made for key, made in self._made.items() if key[0].partition("/")[0] not in session_ids}
        self._agents = {key: found for key, found in self._agents.items() if key.partition("/")[0] not in session_ids}

    def called(self, wait_key: str) -> None:
        """A node service has a model call made: what is committed now is what the model is to be sent. The gateway may
        get it late."""
        session_id = wait_key.partition("/")[0]
        with self._world.store.committed() as connection:
            where = MESSAGE.c.session_id == session_id
            chosen = select(MESSAGE.c.seq, MESSAGE.c.role, MESSAGE.c.body)
            rows = connection.execute(chosen.where(where).order_by(MESSAGE.c.seq)).all()
            agent = connection.execute(select(SESSION.c.agent).where(SESSION.c.session_id == session_id)).scalar()
        due = due_to_be_sent(rows, int(wait_key.rpartition("/")[2]))
        stored = _with_attachments([{"role": row.role, **row.body} for row in due])
        self._committed.setdefault(wait_key, []).append(stored)
        self._agents.setdefault(wait_key, set()).add(agent or "")

    def check(self, request: ModelRequest) -> None:
        """The model is sent what was committed, whoever of frame and gateway wrote which part of it; the same is sent
        to the letter when the call is made again."""
        messages = unfolded(from_json(request.messages))
        sent = [_said(message) for message in messages if message["role"] != "system"]
        stored = self._committed[request.wait_key]
        if self._world.plan.responses:  # an empty answer is no item of a request: it is in no summary of the model's
            sent, stored = _without_empty(sent), [_without_empty(one) for one in stored]
        if sent not in stored:
            self._violated(f"the model call {request.wait_key} was sent {sent}, and the store had {stored[-1]}")
        whole = digest(request.model, request.profile, repr(request.tools), bytes(request.messages).decode())
        if self._made.setdefault((request.wait_key, repr(sent)), whole) != whole:
            self._violated(f"the model call {request.wait_key} is made again, and is another one")
        self._check_agent(request, messages[0])

    def _check_agent(self, request: ModelRequest, first: dict[str, Any]) -> None:
        """It is the model of the agent that the session was under, with its instructions and its tools."""
        where = SESSION.c.session_id == request.wait_key.partition("/")[0]
        with self._world.store.committed() as connection:
            spec = connection.execute(select(SESSION.c.spec).where(where)).scalar()
        if spec is None:
            return
        specs = [present(spec, agent) for agent in sorted(self._agents[request.wait_key])]
        problems = [_other_than(own, request, content_text(first)) for own in specs]
        if all(problems):
            self._violated(f"the model call {request.wait_key} has {problems[-1]}")


def _other_than(spec: dict[str, Any], request: ModelRequest, instructions: str) -> str:
    """What of a request is not an agent's; empty if all is."""
    tools = {tool["function"]["name"] for tool in request.tools} - {FINAL_ANSWER}
    others = tools - {tool["name"] for tool in spec["tools"]} - (OFFERED if "mcp_servers" in spec else set())
    if request.model == spec["model"] and instructions.startswith(spec["instructions"]) and not others:
        return ""
    return f"{request.model}, {instructions[:80]!r}, {sorted(others)} beside its tools"


def _said(message: dict[str, Any]) -> Said:
    """What a message says, without the ids that each side has of its own."""
    attachments = len(attached(message.get("content")))
    if content_text(message).startswith(ATTACHMENTS_MARK):
        return message["role"], ATTACHMENTS_MARK, attachments
    return message["role"], content_text(message), len(message.get("tool_calls") or ())


def _without_empty(messages: list[Said]) -> list[Said]:
    return [said for said in messages if said != ("assistant", "", 0)]


def _with_attachments(messages: list[dict[str, Any]]) -> list[Said]:
    """What committed messages say, and behind the results of each round how many images belong to these."""
    found: list[Said] = []
    waiting = 0
    for message in [*messages, None]:
        if waiting and (message is None or message["role"] != "tool"):
            found.append(("user", ATTACHMENTS_MARK, waiting))
            waiting = 0
        if message is not None:
            found.append(_said(message))
            waiting += len(attached(message["content"])) if message["role"] == "tool" else 0
    return found
