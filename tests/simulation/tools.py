"""The tools of simulated agents: each has an effect on the simulated world, which remembers who had it and when."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from understudy.actors.tools import ToolContext, describe, tool
from understudy.attachments import Image
from understudy.errors import ToolError

if TYPE_CHECKING:
    from .world import World

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8 + (320).to_bytes(4, "big") * 2
Returned = str | list[str | Image]

WORLD: list[World] = []
"""The one that runs."""


def _world() -> World:
    return WORLD[-1]


def _result(name: str) -> Returned:
    """What a call returns: for one of four names with an image."""
    known = hashlib.sha256(name.encode()).digest()
    return [f"did {name}", Image(PNG + known, f"{name}.png")] if known[0] % 4 == 0 else f"did {name}"


async def _perform(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    _world().effect(name, context)
    _world().report(context, 0.0)
    if _world().effects_of(context.call_key) <= kills:
        await _world().die()
    if seconds:
        await asyncio.sleep(seconds)
        _world().goes_on(context)
    _world().report(context, 1.0)
    if fails:
        raise ToolError(f"{name} failed")
    return _result(name)


def _perform_in_thread(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    world = _world()
    world.effect(name, context)
    world.report(context, 0.0)
    if world.effects_of(context.call_key) <= kills:
        world.die_in_thread()
    if seconds:
        world.sleep_in_thread(seconds)
        world.goes_on(context)
    world.report(context, 1.0)
    if fails:
        raise ToolError(f"{name} failed")
    return _result(name)


@tool
async def act(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """Act on the world, once."""
    return await _perform(name, seconds, fails, kills, context)


@tool
def act_in_thread(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """The same without await."""
    return _perform_in_thread(name, seconds, fails, kills, context)


@tool(on_crash="rerun")
async def look(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """Look at the world."""
    return await _perform(name, seconds, fails, kills, context)


@tool(on_crash="rerun")
def look_in_thread(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """The same without await."""
    return _perform_in_thread(name, seconds, fails, kills, context)


@tool(on_crash="ask")
async def doubt(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """Act on the world; a person decides what becomes of it after a crash."""
    return await _perform(name, seconds, fails, kills, context)


@tool
async def block(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """Act on the world, and let nothing else on the event loop have its turn meanwhile."""
    _world().block(seconds)
    return await _perform(name, 0.001, fails, kills, context)


async def _find_out(context: ToolContext) -> str:
    return f"found {_world().effects_of(context.call_key)}"


def _find_out_in_thread(context: ToolContext) -> str:
    return f"found {_world().effects_of(context.call_key)}"


@tool(on_crash=_find_out)
async def careful(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """Act on the world, with a way to find out."""
    return await _perform(name, seconds, fails, kills, context)


@tool(on_crash=_find_out_in_thread)
def careful_in_thread(name: str, seconds: float, fails: bool, kills: int, context: ToolContext) -> Returned:
    """The same without await."""
    return _perform_in_thread(name, seconds, fails, kills, context)


@tool(on_crash="rerun")
async def keep_file(name: str, context: ToolContext) -> str:
    """Leave a file in the working directory, beside those that are there."""
    _world().effect(name, context)
    return f"kept {name}" + (" beside others" if _world().invariants.files.keep(context.session_id) else "")


KEEP_FILE = "keep_file"

BY_VALUE = ("act_by_value", "look_by_value")
"""Tools whose code a process must ask its node service for before it can run them."""

BY_POLICY: dict[str, tuple[str, ...]] = {
    "report": ("act", "act_in_thread", "act_by_value"),
    "rerun": ("look", "look_in_thread", "look_by_value"),
    "ask": ("doubt",),
    "reconcile": ("careful", "careful_in_thread"),
}

POLICY_OF = {
    "block": "report", KEEP_FILE: "rerun",
    **{name: policy for policy, names in BY_POLICY.items() for name in names},
}  # fmt: skip

_FUNCTIONS: tuple[Any, ...] = (
    act, act_in_thread, block, look, look_in_thread, doubt, careful, careful_in_thread, keep_file,
)  # fmt: skip

_BUILT_IN = (
    "request_user_input", "wait", "spawn_agent", "agents", "jobs", "schedule_wakeup", "notes", "board", "commands",
    "workflows",
)  # fmt: skip

TOOLS: dict[str, dict[str, Any]] = {
    entry["name"]: entry for item in (*_FUNCTIONS, *_BUILT_IN) for entry in describe(item, pickle=None)[0]
}
"""Their compiled descriptions, by name."""

BLOBS: dict[str, bytes] = {}
"""The code that travels by value, by its digest."""

OF_VALUE: dict[str, Any] = {"act_by_value": (act, {}), "look_by_value": (look, {})}
"""What it is of, by that code."""

for _name in BY_VALUE:
    _digest = hashlib.sha256(_name.encode()).hexdigest()
    TOOLS[_name] = {**TOOLS[_name.removesuffix("_by_value")], "name": _name, "source": {"blob": _digest}}
    BLOBS[_digest] = _name.encode()


def unpickle(data: bytes) -> Any:
    """What is behind a blob: of a tool its function, and which of its parameters are converted."""
    return OF_VALUE[data.decode()]
