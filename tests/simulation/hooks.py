"""The hooks of simulated agents: at every point one that the world remembers; one refuses some of the tool calls."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from understudy.actors.hooks import HookContext, Refuse, describe_hook, hook

from .tools import WORLD

if TYPE_CHECKING:
    from .world import World


def _world() -> World:
    return WORLD[-1]


def refused(call_key: str) -> bool:
    """Whether the hook lets this call not happen: the same in every activation."""
    return zlib.crc32(call_key.encode()) % 9 == 0


@hook("run_start")
async def begin(context: HookContext) -> None:
    """A run begins."""
    _world().hooked(context)


@hook("before_model")
def before_model(context: HookContext) -> None:
    """The model is about to be asked."""
    _world().hooked(context)


@hook("after_model")
async def after_model(context: HookContext) -> None:
    """The model has answered."""
    _world().hooked(context)


@hook("before_tool")
async def before_tool(context: HookContext) -> Refuse | None:
    """A tool is about to be called; some are refused."""
    _world().hooked(context)
    return Refuse("the house does not allow it") if refused(context.call_key) else None


@hook("after_tool")
def after_tool(context: HookContext) -> None:
    """A tool has a result."""
    _world().hooked(context)


@hook("run_end")
async def end(context: HookContext) -> None:
    """A run ends."""
    _world().hooked(context)


HOOKS: list[dict[str, Any]] = [
    describe_hook(item, pickle=None)[0] for item in (begin, before_model, after_model, before_tool, after_tool, end)
]
"""Their compiled descriptions."""
