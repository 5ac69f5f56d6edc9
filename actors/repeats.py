"""Liveness by progress: a model that asks for the same call again and again, and gets the same result, is told so.

A pure function of the run's messages, so the verdict about a round is the same in every activation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from understudy.messages import Message

REPEATED = (
    "not executed: you asked for the same call with the same arguments in each of your last turns, and you have its "
    "result above. It does not change. Go on with it, try something else, or give your final answer."
)


def repeats(messages: Sequence[Message], call_id: str) -> int:
    """In how many rounds in a row, the last included, the model asked for what the call asks for.

    Earlier rounds count as long as their results are the same: one that differs is progress.

    Args:
        messages: of the current run, in order.
        call_id: a call of the last round.
    """
    rounds = [message for message in messages if message.role == "assistant"]
    results = {message.tool_call_id: message.text for message in messages if message.role == "tool"}
    wanted = next(_signature(call.name, call.arguments) for call in rounds[-1].tool_calls if call.call_id == call_id)
    count, known = 1, None
    for message in reversed(rounds[:-1]):
        same = [call for call in message.tool_calls if _signature(call.name, call.arguments) == wanted]
        if not same:
            break
        result = results.get(same[0].call_id)
        if result != REPEATED:
            if known is not None and result != known:
                break
            known = result
        count += 1
    return count


def _signature(name: str, arguments: str) -> tuple[str, str]:
    """A call's tool and arguments; how its JSON is written makes no difference."""
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return name, arguments
