"""The import table: which folder may import which, and what session actors must never load."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import understudy

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "core": set(),
    "store": {"core", "store/db", "store/operations"},
    "store/db": {"core"},
    "store/operations": {"core", "store", "store/db"},
    "store/reads": {"core", "store", "store/db", "store/operations"},
    "store/check": {"core", "store", "store/db", "store/operations"},
    "store/upkeep": {"core", "store", "store/db", "store/operations", "store/reads", "store/check"},
    "observability": {"core"},
    "gateway": {"core"},
    "tool_host": {"core"},
    "actors": {"core"},
    "supervisor": {"core"},
    "node": {"core", "store", "store/db", "store/operations", "store/reads", "observability", "supervisor"},
    "cluster": {"cluster/cli"},
    "cluster/client": {"core", "actors", "observability", "node", "cluster/ray"},
    "cluster/local": {"core", "actors", "gateway", "node", "supervisor", "tool_host", "cluster/client"},
    "cluster/certify": {"core", "actors", "gateway", "node", "cluster/client"},
    "cluster/console": {"core", "observability", "cluster/client"},
    "cluster/ray": {
        "core", "actors", "gateway", "node", "supervisor", "tool_host", "cluster/client", "cluster/console",
    },
    "cluster/cli": {
        "core", "store", "store/db", "store/operations", "store/reads", "store/check", "store/upkeep", "observability",
        "examples", "cluster/client", "cluster/certify", "cluster/console", "cluster/ray",
    },
    "examples": {"core", "actors", "cluster/cli", "cluster/client", "cluster/ray"},
}  # fmt: skip
"""Folder → folders of ours that it may import, besides itself."""

HEAVY = {"openai", "sqlmodel", "sqlalchemy", "psycopg", "pydantic", "ray", "prometheus_client", "opentelemetry", "mcp"}
"""What makes a process big or slow to start: not for frames, nor for `import understudy`."""

FACADES = {Path("core/__init__.py"), Path("core/testing/__init__.py")}
"""What users import from: they name other folders, and load them when a name is first asked for."""


AS_USERS_WRITE = (("examples", "jobs"), ("examples", "loops"), ("examples", "workflows"))


def module_name(path: Path) -> str:
    """The module that a file, given relative to the repository, becomes: `core/` is `understudy` itself."""
    parts = list(path.with_suffix("").parts)
    parts[:1] = ["understudy"] if parts[0] == "core" else ["understudy", parts[0]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path.relative_to(ROOT)): path.relative_to(ROOT)
    for folder in MAY_IMPORT
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] not in AS_USERS_WRITE
}


def folder_of(parts: Sequence[str]) -> str:
    """The folder of the table that a module or file belongs to, by the parts of its path in the repository."""
    inner = "/".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


def folder_of_module(module: str) -> str:
    """The same by a module's name."""
    parts = module.split(".")[1:]
    return folder_of(parts) if parts and parts[0] in MAY_IMPORT else "core"


def imports(path: Path, source: str) -> Iterator[tuple[int, bool, str]]:
    """Every import as (line, whether relative, absolute name with the imported name as its last part)."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, False, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, node.level > 0, f"{home}.{alias.name}") for alias in node.names)


def violations(path: Path, source: str) -> list[str]:
    """What a file imports against the rules, one line each."""
    folder = folder_of(path.parts)
    found = []
    for line, relative, target in imports(path, source):
        problem = None
        if target.split(".")[0] == "ray" and folder != "cluster/ray":
            problem = "`import ray` belongs into cluster/ray/"
        elif target.split(".")[0] == "understudy":
            other = folder_of_module(target)
            near = other.partition("/")[0] == folder.partition("/")[0]
            facade = target not in MODULES and target.rpartition(".")[0] == "understudy"
            if facade and target != "understudy.__version__":
                problem = "the facade is for users: import the name from its own module"
            elif relative and not near:
                problem = f"across top-level folders write `from {target.rpartition('.')[0]} import …`"
            elif near and not relative:
                problem = "inside a top-level folder imports are relative"
            elif other != folder and other not in MAY_IMPORT[folder] and path not in FACADES:
                problem = f"{folder}/ may not import {other}/"
        if problem:
            found.append(f"{path}:{line}: {target}: {problem}")
    return found


def loaded_by(statements: dict[str, str]) -> dict[str, str]:
    """Run the statements one after another in a fresh interpreter: heavy package → label of what brought it in."""
    script = (
        "import json, sys\n"
        "statements, heavy = json.loads(sys.argv[1]), set(json.loads(sys.argv[2]))\n"
        "found = {}\n"
        "for label, statement in statements.items():\n"
        "    exec(statement, {})\n"
        "    for name in heavy & {module.partition('.')[0] for module in sys.modules}:\n"
        "        found.setdefault(name, label)\n"
        "print(json.dumps(found))\n"
    )
    arguments = [sys.executable, "-c", script, json.dumps(statements), json.dumps(sorted(HEAVY))]
    finished = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, str] = json.loads(finished.stdout)
    return found


def test_every_folder_imports_only_what_the_table_allows() -> None:
    """Folders import downwards only, `import ray` is in cluster/ray/ alone, and imports have one form per distance."""
    found = [line for path in MODULES.values() for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that all lead to each other, imports for type checkers included (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            start = path.index(module)
            if len(path) - start > 1:
                found.append(set(path[start:]))
            del path[start:]

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def test_modules_import_each_other_in_one_direction() -> None:
    """There is no circle, also not of what is imported for its types only."""
    graph = {}
    for module, path in MODULES.items():
        named = [name for _, _, name in imports(path, (ROOT / path).read_text(encoding="utf-8"))]
        known = {name if name in MODULES else name.rpartition(".")[0] for name in named}
        graph[module] = {name for name in known if name in MODULES} - {module}
    assert circles(graph) == []


def test_circles_are_found() -> None:
    """Modules that lead back to where they came from are one; others are none, wherever they lead."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str]()}
    assert circles(graph) == [{"a", "b", "c"}]


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("actors/x.py", "from understudy.errors import Fenced", True),
        ("actors/x.py", "from . import tools\nfrom .tools import tool", True),
        ("actors/x.py", "from understudy import errors, __version__", True),
        ("core/testing/x.py", "from ..errors import Fenced", True),
        ("cluster/ray/x.py", "import ray\nfrom ray.util import state", True),
        ("cluster/cli/x.py", "from ..client.results import SessionInfo", True),
        ("core/__init__.py", "from understudy.cluster.client.client import Cluster", True),
        ("actors/x.py", "from ..errors import Fenced", False),
        ("actors/x.py", "from understudy.actors.tools import tool", False),
        ("actors/x.py", "from understudy.store.reads.queries import apply", False),
        ("actors/x.py", "def late():\n    import understudy.cluster.client.client", False),
        ("core/x.py", "from understudy.actors.tools import tool", False),
        ("core/x.py", "from .actors.tools import tool", False),
        ("store/x.py", "from understudy import tool", False),
        ("store/x.py", "from understudy import observability", False),
        ("supervisor/x.py", "import ray.util", False),
        ("cluster/client/x.py", "import ray", False),
        ("cluster/client/x.py", "from ..cli.main import app", False),
        ("cluster/cli/x.py", "from understudy.cluster.client.results import SessionInfo", False),
        ("node/x.py", "from understudy.actors.window import Window", False),
        ("core/__init__.py", "import ray", False),
    ],
)
def test_the_table_is_enforced(path: str, source: str, allowed: bool) -> None:
    """The check above sees each kind of forbidden import, and only those."""
    assert bool(violations(Path(path), source)) is not allowed


def test_frames_stay_lean() -> None:
    """No module of a session actor, nor what tool modules import from the facade, loads a heavy package."""
    modules = [name for name in MODULES if folder_of_module(name) == "actors"]
    modules += [f"understudy.examples.survey.{name}" for name in ("tools", "policy")]
    statements = {name: f"import {name}" for name in modules}
    statements["facade"] = "from understudy import tool, ToolContext, ToolError"
    assert loaded_by(statements) == {}


def test_the_check_for_lean_frames_can_fail() -> None:
    """A heavy package is found, with the module that brought it in."""
    assert loaded_by({"light": "import json", "spec": "import understudy.spec"}) == {"pydantic": "spec"}


def test_import_understudy_loads_nothing_else_of_ours() -> None:
    """`import understudy` loads no heavy package and no other module of ours."""
    script = "import sys, understudy; print([name for name in sys.modules if name.startswith('understudy.')])"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.strip() == "[]"
    assert loaded_by({"understudy": "import understudy"}) == {}


@pytest.mark.parametrize("name", understudy.__all__)
def test_facade_offers(name: str) -> None:
    """Every public name resolves, is listed by `dir()`, and is the same object each time."""
    assert getattr(understudy, name) is getattr(understudy, name)
    assert name in dir(understudy)


def test_facade_tells_type_checkers_what_it_tells_python() -> None:
    """The names imported for type checkers are those of `__all__`, each from the module that holds it at run time."""
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    homes = {
        alias.name: (node.module or "").removeprefix("understudy.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted([*homes, "__version__"]) == sorted(understudy.__all__)
    assert {name: home for name, home in homes.items() if home != "errors"} == understudy._HOMES


def test_facade_refuses_unknown_names() -> None:
    """A misspelt name is an AttributeError that names it, as in any module."""
    with pytest.raises(AttributeError, match="'understudy' has no attribute 'Clutser'"):
        _ = getattr(understudy, "Clutser")  # noqa: B009 - as an attribute, type checkers refuse it as well
