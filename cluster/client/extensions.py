"""What other packages offer: tools, hooks, memory providers, model profiles and skills, by names of the form
`DISTRIBUTION:NAME`. They are entry points of the groups `understudy.tools`, `understudy.hooks` and so on.

Nothing of a package is imported before somebody names it, or asks what there is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from understudy.actors.tools import tool_name_problem
from understudy.config import ModelProfile
from understudy.errors import InvalidInput, InvalidSpec
from understudy.suggestions import did_you_mean

logger = logging.getLogger(__name__)

Kind = Literal["tools", "hooks", "memory", "models", "skills"]

DECORATORS: dict[Kind, str] = {"tools": "tool", "hooks": "hook", "memory": "memory"}
"""What a function is decorated with that is one; in its mark's name."""

DECORATED = {"tool": "@tool", "hook": "@hook", "memory": "@memory_provider"}


@dataclass(frozen=True)
class Extension:
    """What a package offers.

    Attributes:
        name: `DISTRIBUTION:NAME`.
        entry_point: where it is.
    """

    name: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def origin(self) -> str:
        """The distribution and its version."""
        found = self.entry_point.dist
        return f"{found.name} {found.version}" if found is not None else "unknown"

    def load(self) -> Any:
        """Import it.

        Raises:
            InvalidInput: its package is broken; the message says which, and why.
        """
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as error:  # whatever a module does when it is imported
            where = f"{self.name!r} ({self.entry_point.value})"
            raise InvalidInput(f"{where} can't be imported: {type(error).__name__}: {error}") from None


def extensions(kind: Kind) -> dict[str, Extension]:
    """What installed packages offer of a kind, by name. Nothing is imported."""
    found: dict[str, Extension] = {}
    for entry_point in importlib.metadata.entry_points(group=f"understudy.{kind}"):
        if entry_point.dist is None:
            continue
        name = f"{normalized(entry_point.dist.name)}:{entry_point.name}"
        found.setdefault(name, Extension(name, entry_point))  # of an earlier entry of `sys.path`, as for modules
    return dict(sorted(found.items()))


def normalized(distribution: str) -> str:
    """A distribution's name as all its spellings are written."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def extension(kind: Kind, name: str) -> Extension | None:
    """What a package offers under a name; None if none does."""
    distribution, _, own = name.partition(":")
    return extensions(kind).get(f"{normalized(distribution)}:{own}") if own else None


def find_tool(name: str) -> Any:
    """The tool of a name: a function of a package, or at an import path; the name of a tool that comes with Understudy,
    or of a group, as it is. Those names can't be taken by packages.

    Raises:
        InvalidInput: there is none, it can't be imported, or the function is no tool.
    """
    if ":" in name:
        return _function(name, "tools")
    problem = tool_name_problem(name)
    if problem is None:
        return name
    offered = [other for other in extensions("tools") if other.partition(":")[2] == name]
    hint = f"; installed packages have: {', '.join(offered)}" if offered else ""
    raise InvalidInput(f"{problem}{hint}; your own: module:function")


def had(kind: Kind, item: Any) -> Any:
    """An entry of a specification's tools, hooks or memory providers, found where it is given by name.

    Raises:
        InvalidSpec: it can't be found, see `find_tool`.
    """
    finders = {"tools": find_tool, "hooks": find_hook, "memory": find_provider}
    try:
        return finders[kind](item) if isinstance(item, str) else item
    except InvalidInput as error:
        raise InvalidSpec(f"{error.message}.") from None


def find_hook(name: str) -> Any:
    """The hook of a package, or at an import path. Raises `InvalidInput`, see `find_tool`."""
    return _function(name, "hooks")


def find_provider(name: str) -> Any:
    """The memory provider of a package, or at an import path. Raises `InvalidInput`, see `find_tool`."""
    return _function(name, "memory")


def find_skills(name: str) -> Path | None:
    """The directory of the skills that a package offers under a name; None if none does.

    The entry point is a package with the folder, or a path.

    Raises:
        InvalidInput: it can't be imported, or is neither.
    """
    offered = extension("skills", name)
    if offered is None:
        return None
    found = offered.load()
    if isinstance(found, ModuleType) and found.__file__ is not None:
        return Path(found.__file__).parent
    if isinstance(found, ModuleType) and getattr(found, "__path__", None):
        return Path(next(iter(found.__path__)))
    if isinstance(found, (str, Path)):
        return Path(found)
    raise InvalidInput(f"{name!r} is {found!r}, and must be a package with a directory of skills, or a path")


def profile_named(offered: Extension) -> ModelProfile:
    """The model profile of a package, under the name by which specifications have it.

    The entry point is a `ModelProfile`, or a function that returns one.

    Raises:
        InvalidInput: it can't be had.
    """
    found = offered.load()
    try:
        made = found if isinstance(found, ModelProfile) else found()
    except Exception as error:
        raise InvalidInput(f"{offered.name!r} gives no model profile: {type(error).__name__}: {error}") from None
    if not isinstance(made, ModelProfile):
        raise InvalidInput(f"{offered.name!r} gives {type(made).__name__}, not a ModelProfile")
    return replace(made, name=offered.name)


def offered_profiles() -> list[ModelProfile]:
    """The model profiles of all installed packages; one that can't be had is logged and left out."""
    found = []
    for offered in extensions("models").values():
        try:
            found.append(profile_named(offered))
        except InvalidInput as error:
            logger.warning("%s", error.message)
    return found


def imported(name: str) -> Any:
    """What is at an import path, `module:name`.

    Raises:
        InvalidInput: it can't be imported.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise InvalidInput(f"{name!r} can't be imported: {type(error).__name__}: {error}") from None
    return found


def _function(name: str, kind: Kind) -> Any:
    """A function of a package, or else the one at an import path."""
    offered = extension(kind, name)
    found = offered.load() if offered is not None else _at_path(name, kind)
    mark = DECORATORS[kind]
    if not hasattr(found, f"__understudy_{mark}__"):
        raise InvalidInput(f"{name!r} is no function decorated with {DECORATED[mark]}")
    return found


def _at_path(name: str, kind: Kind) -> Any:
    """What is at an import path; of a distribution without such a name, what it has is said."""
    distribution = normalized(name.partition(":")[0])
    others = [other for other in extensions(kind) if other.partition(":")[0] == distribution]
    try:
        return imported(name)
    except InvalidInput as error:
        hint = f"{did_you_mean(name, others)}; the package has: {', '.join(others)}" if others else ""
        raise InvalidInput(f"{error.message}{hint}") from None
