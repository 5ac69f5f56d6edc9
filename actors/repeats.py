"""Liveness by progress: a model that asks for the same call again and again, and gets the same result, is made aware.

A pure function of the run's messages, so the verdict about a round is the same in every activation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from understudy.errors import NoProgress
from understudy.messages import Message, ToolCall
from understudy.records import CallState

REPEATED = (
    "not executed: you asked for the same call with the same arguments in each of your last turns, and its result "
    "above was the same each time. Go on with it, try something else, or give your final answer."
)


NO_PROGRESS = {
    "code": NoProgress.code,
    "message": "the model asked for the same call in round after round, although it was told that it has the result",
}
"""How a run ends whose model does not listen."""


def judge(
    messages: Sequence[Message], calls: Sequence[CallState], limit: int, waits: Collection[str] = ()
) -> tuple[set[str], bool]:
    """The calls of a round that are not executed once more, and whether the run shall end for lack of progress.

    Args:
        messages: of the session, in order; the last answer is the round's.
        limit: rounds in a row of which the last is not executed; 0 for none.
        waits: tools that wait: what is asked for again after a time may be asked for again.
    """
    if not limit or any(call.tool in waits for call in calls):
        return set(), False
    counts = {call.call_id: repeats(messages, call.call_id, waits) for call in calls}
    return {name for name, count in counts.items() if count >= limit}, any(n >= 2 * limit for n in counts.values())


def repeats(messages: Sequence[Message], call_id: str, waits: Collection[str] = ()) -> int:
    """In how many rounds in a row, the last included, the model asked for what this call of the last round asks for.

    Earlier rounds of the run count as long as their results are the same, and none of them waited: a result that
    differs is progress.
    """
    wanted, known, count = None, None, 0
    results: dict[str | None, str] = {}  # of the round that is being looked at
    for message in reversed(messages):
        if message.run_id != messages[-1].run_id:
            break
        if message.role == "tool":
            results[message.tool_call_id] = message.text
        if message.role != "assistant" or message.origin:
            continue
        if wanted is None:
            wanted = next(_signature(call) for call in message.tool_calls if call.call_id == call_id)
        else:
            same = next((call for call in message.tool_calls if _signature(call) == wanted), None)
            result = results.get(same.call_id) if same is not None else None
            if same is None or (result != REPEATED and known not in (None, result)):
                break
            known = known if result == REPEATED else result
            if any(call.name in waits for call in message.tool_calls):
                break
        results = {}
        count += 1
    return count


def _signature(call: ToolCall) -> tuple[str, str]:
    """A call's tool and arguments; how its JSON is written makes no difference."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments
