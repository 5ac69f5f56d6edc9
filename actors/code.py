"""How a user's function reaches a frame: by import path, or by value. The same for tools, hooks and providers."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from understudy.errors import InvalidSpec, ToolError


def fingerprint(item: Any) -> dict[str, str]:
    """The hash of a function's own source, by which a changed one is noticed; nothing where that can't be found."""
    try:
        return {"code": hashlib.sha256(inspect.getsource(inspect.unwrap(item)).encode()).hexdigest()}
    except (OSError, TypeError):
        return {}


def import_reference(item: Any) -> str | None:
    """`module:qualname` if importing that gives this very object in another process too; otherwise None."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if not module or not name or module == "__main__" or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is item else None


def resolve(reference: str) -> Any:
    """The object at `module:qualname`."""
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def packed(
    what: str, item: Any, content: Any, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, str], dict[str, bytes]]:
    """The source of a function that other processes can't import, and the code it needs by its SHA-256.

    Args:
        what: names the function in errors: `tool 'lookup'`.
        content: what `unpacked` returns there.

    Raises:
        InvalidSpec: it can't be serialized, or `pickle` is None.
    """
    if pickle is None:
        raise InvalidSpec(
            f"{what} is defined in {getattr(item, '__module__', None)}, where other processes can't "
            "import it, and sending code by value is switched off: move it to the top level of a module."
        )
    try:
        blob = pickle(content)
    except Exception as error:
        raise InvalidSpec(f"{what} can't be sent by value: {type(error).__name__}: {error}.") from error
    key = hashlib.sha256(blob).hexdigest()
    return {"blob": key}, {key: blob}


def sourced(
    what: str, item: Any, pickle: Callable[[Any], bytes] | None
) -> tuple[dict[str, str], dict[str, bytes]]:  # fmt: skip
    """The source of a function, by reference or by value, and the code it needs by its SHA-256. See `packed`."""
    reference = import_reference(item)
    return ({"import": reference}, {}) if reference is not None else packed(what, item, item, pickle)


def had_from(
    source: dict[str, str], read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None
) -> Any:  # fmt: skip
    """What was `sourced`. Raises whatever keeps it from being had: see `unloadable`."""
    return unpacked(source["blob"], read_blob, unpickle) if "blob" in source else resolve(source["import"])


def unpacked(key: str, read_blob: Callable[[str], bytes], unpickle: Callable[[bytes], Any] | None) -> Any:
    """What was `packed` under this hash.

    Raises:
        ToolError: code by value is switched off here, or the stored code is not what it was.
    """
    if unpickle is None:
        raise ToolError("running code sent by value is switched off")
    blob = read_blob(key)
    if hashlib.sha256(blob).hexdigest() != key:
        raise ToolError("the stored code does not match its hash")
    return unpickle(blob)


def search_also(before: list[str], after: list[str]) -> None:
    """Have this process find modules where a driver does: in directories before its interpreter's libraries, and in
    others after them. A job's are relative to its working_dir, which is the current directory."""
    first, last = ([os.path.abspath(path) for path in paths] for paths in (before, after))
    others = [path for path in sys.path if path not in first]
    sys.path[:] = [*first, *others, *(path for path in last if path not in others)]


def unloadable(what: str, source: dict[str, str], error: Exception) -> ToolError:
    """The error that says why a function can't be had in this process."""
    where = next(f"{kind} {value}" for kind, value in source.items())
    return ToolError(
        f"{what} can't be loaded here ({where}): {type(error).__name__}: {error}. Its module must be "
        "importable in the session's processes: from the directory that its driver imports it from (it must be on this "
        "node, too), from the job's working_dir or py_modules, or installed."
    )
