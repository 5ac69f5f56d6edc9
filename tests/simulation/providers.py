"""The memory providers of simulated agents: what each of their calls does is the same in every activation; what they
recall is not."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from typing import TYPE_CHECKING, Any

from understudy.actors.providers import RECALL, REMEMBER, MemoryContext, describe_provider, memory_provider

from .tools import BLOBS, OF_VALUE, WORLD

if TYPE_CHECKING:
    from .recalling import Call

TIMEOUT = 5.0
"""Seconds that providers have."""

TOO_LONG = 12.0
ALWAYS_THE_SAME = "as ever"

HOW = {
    RECALL: ("news",) * 8 + ("same", "same", "nothing", "blank", "long", "half", "raises", "wrong", "slow", "kills"),
    REMEMBER: ("news",) * 6 + ("raises", "slow", "kills"),
}
"""What calls do."""

FAILING = ("raises", "wrong", "slow")


def how(provider: str, does: str, call_key: str) -> str:
    """What a provider does when it is called so."""
    return HOW[does][zlib.crc32(f"{provider}/{does}/{call_key}".encode()) % len(HOW[does])]


async def _act(provider: str, does: str, context: MemoryContext, *, stubborn: bool = False) -> Any:
    call = WORLD[-1].invariants.recalled.begin(provider, does, context)
    if call.how == "kills" and call.number == 1:
        await WORLD[-1].die()
    try:
        await asyncio.sleep(TOO_LONG if call.how == "slow" else call.seconds)
    except asyncio.CancelledError:
        if not stubborn:
            raise
        await asyncio.sleep(TOO_LONG)
    return _end(call)


def _act_in_thread(provider: str, does: str, context: MemoryContext) -> Any:
    call = WORLD[-1].invariants.recalled.begin(provider, does, context)
    if call.how == "kills" and call.number == 1:
        WORLD[-1].die_in_thread()
    if seconds := TOO_LONG if call.how == "slow" else call.seconds:
        WORLD[-1].sleep_in_thread(seconds)
    return _end(call)


def _end(call: Call) -> Any:
    if call.how == "raises":
        raise ValueError("it does not know")
    texts: dict[str, Any] = {
        "same": ALWAYS_THE_SAME, "nothing": None, "blank": " \n", "long": f"{call.text} {'x' * 4_000}", "wrong": 5,
        "half": f"{call.text} \ud83d",
    }  # fmt: skip
    return WORLD[-1].invariants.recalled.end(call, texts.get(call.how, call.text))


@memory_provider
async def archive(context: MemoryContext) -> Any:
    """Recalls."""
    return await _act("archive", RECALL, context)


@memory_provider
def archive_in_thread(context: MemoryContext) -> Any:
    """The same without await."""
    return _act_in_thread("archive_in_thread", RECALL, context)


@memory_provider
class Diary:
    """Recalls and remembers, and does not let itself be cancelled."""

    async def recall(self, context: MemoryContext) -> Any:
        """What there is."""
        return await _act("Diary", RECALL, context, stubborn=True)

    async def remember(self, context: MemoryContext) -> None:
        """What became of it."""
        await _act("Diary", REMEMBER, context, stubborn=True)


@memory_provider
class Ledger:
    """Remembers, in a thread."""

    def remember(self, context: MemoryContext) -> None:
        """What became of it."""
        _act_in_thread("Ledger", REMEMBER, context)


@memory_provider(name="by_value")
class ByValue:
    """Its code must be asked for."""

    async def recall(self, context: MemoryContext) -> Any:
        """What there is."""
        return await _act("by_value", RECALL, context)

    async def remember(self, context: MemoryContext) -> None:
        """What became of it."""
        await _act("by_value", REMEMBER, context)


PROVIDERS: dict[str, dict[str, Any]] = {
    entry["name"]: entry
    for item in (archive, archive_in_thread, Diary, Ledger, ByValue)
    for entry in (describe_provider(item, pickle=None)[0],)
}
"""Their compiled descriptions, by name."""

_DIGEST = hashlib.sha256(b"by_value").hexdigest()
PROVIDERS["by_value"]["source"] = {"blob": _DIGEST}
BLOBS[_DIGEST] = b"by_value"
OF_VALUE["by_value"] = ByValue
