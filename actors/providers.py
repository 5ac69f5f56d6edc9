"""Memory providers: code of the user's that recalls and remembers for an agent, beside its notes.

`@memory_provider` marks a function (it recalls), or a class with methods `recall` and `remember`, or one of them. It
travels to the frame as tools do (`code.py`). `docs/memory.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from understudy.errors import InvalidSpec, ToolError

from .code import fingerprint, had_from, sourced, unloadable

RECALL, REMEMBER = "recall", "remember"

Marked = TypeVar("Marked", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class MemoryContext:
    """What a memory provider receives.

    Attributes:
        call_key: `session/run`: the same in every activation, so it is an idempotency key for `remember`.
        text: the run's input (`recall`), all of it where inputs were merged; or its answer (`remember`).
        status: with which the run ends (`remember`); empty for `recall`.
        max_tokens: of the whole memory.
        redone: this may be a repetition: a process that died or was cut off may have called the provider before.
    """

    session_id: str
    run_id: str
    agent: str
    call_key: str
    text: str
    status: str = ""
    max_tokens: int = 0
    redone: bool = False


@dataclass(frozen=True)
class ProviderDefinition:
    """What `@memory_provider` knows about a function or a class."""

    name: str
    item: Any = field(repr=False)


@dataclass(frozen=True, eq=False)
class LoadedProvider:
    """A provider in a frame; None for what it does not do."""

    name: str
    recall: Callable[..., Any] | None
    remember: Callable[..., Any] | None


@overload
def memory_provider(item: Marked, /) -> Marked: ...


@overload
def memory_provider(*, name: str | None = None) -> Callable[[Marked], Marked]: ...


def memory_provider(item: Any = None, /, *, name: str | None = None) -> Any:
    """Mark a function or a class as a memory provider. It stays what it is.

    A function takes a `MemoryContext` and returns a text, or None: it recalls. A class is made once in a process,
    without arguments, and has methods of that form: `recall`, `remember` (whose result is ignored), or both. All may be
    plain or async.

    Args:
        name: the function's or class's name by default.

    Raises:
        InvalidSpec: it can't be marked, or the class has neither method.
    """

    def mark(target: Any) -> Any:
        chosen = name or str(getattr(target, "__name__", "")) or type(target).__name__
        if isinstance(target, type) and not any(callable(getattr(target, does, None)) for does in (RECALL, REMEMBER)):
            raise InvalidSpec(f"memory provider {chosen!r} has no method named {RECALL} or {REMEMBER}.")
        try:
            target.__understudy_memory__ = ProviderDefinition(chosen, target)
        except AttributeError:
            raise InvalidSpec(f"{target!r} can't be a memory provider itself: wrap it in a function.") from None
        return target

    return mark if item is None else mark(item)


def describe_provider(
    item: Any, *, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, Any], dict[str, bytes]]:  # fmt: skip
    """Turn one entry of `Memory.providers` into its specification, and the code it needs by its SHA-256.

    Raises:
        InvalidSpec: the entry is no provider, or it must travel by value and can't.
    """
    definition = getattr(item, "__understudy_memory__", None)
    if not isinstance(definition, ProviderDefinition):
        raise InvalidSpec(f"{item!r} is not decorated with @memory_provider.")
    source, blobs = sourced(f"memory provider {definition.name!r}", item, pickle)
    does = [RECALL, REMEMBER] if isinstance(item, type) else [RECALL]
    does = [what for what in does if not isinstance(item, type) or callable(getattr(item, what, None))]
    return {"name": definition.name, "does": does, "source": source} | fingerprint(item), blobs


def load_provider(
    spec: dict[str, Any], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> LoadedProvider:
    """Make a specified provider callable in this process.

    Raises:
        ToolError: the code can't be imported or read, is no provider any more, or its class can't be made.
    """
    source = spec["source"]
    try:
        item = had_from(source, read_blob, unpickle)
        made = item() if isinstance(item, type) else item
    except Exception as error:
        raise unloadable(f"memory provider {spec['name']!r}", source, error) from error
    if not isinstance(getattr(item, "__understudy_memory__", None), ProviderDefinition):
        raise ToolError(f"memory provider {spec['name']!r} can't be loaded here: it is not decorated any more.")
    if not isinstance(item, type):
        return LoadedProvider(spec["name"], made, None)
    return LoadedProvider(spec["name"], getattr(made, RECALL, None), getattr(made, REMEMBER, None))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function is to be awaited."""
    return inspect.iscoroutinefunction(function)
