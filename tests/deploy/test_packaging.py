"""The wheel is complete: every folder, every module, the type marker, the declared dependencies."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

import understudy
from understudy.cluster.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIRS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
PART_OF = {"pydantic-core": "pydantic", "mcp-types": "mcp"}
"""Distributions that another one pins to exactly one version: declaring that one is right."""

NOT_PACKAGED = {"benchmarks", "docs", "examples/jobs", "k8s", "scripts", "tests", "build", "dist"}


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The distribution that a requirement names."""
    return normalized(re.split(r"[<>=!~\[; ]", requirement)[0])


def product_files() -> list[Path]:
    """Every file of the product, relative to the repository."""
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in NOT_PACKAGED and not path.name.startswith(".")
    ]
    found = [path for folder in folders if folder.suffix != ".egg-info" for path in folder.rglob("*") if path.is_file()]
    files = (path.relative_to(ROOT) for path in found if path.suffix != ".pyc" and not path.name.startswith("."))
    return sorted(path for path in files if not any(path.is_relative_to(folder) for folder in NOT_PACKAGED))


def sources() -> list[Path]:
    """The Python files among them."""
    return [path for path in product_files() if path.suffix == ".py"]


def inside_the_wheel(path: Path) -> str:
    """Where a file of the product is in the wheel: the longest of the declared folders that holds it decides."""
    folder, package = max(
        ((Path(folder), package) for package, folder in PACKAGE_DIRS.items() if path.is_relative_to(folder)),
        key=lambda pair: len(pair[0].parts),
    )
    return str(Path(*package.split("."), path.relative_to(folder)))


@pytest.fixture(scope="session")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a wheel holds that is built from a copy of this checkout, by way of an sdist."""
    place = tmp_path_factory.mktemp("packaging")
    hidden = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, place / "checkout", ignore=hidden)
    command = [sys.executable, "-m", "build", "--outdir", str(place), str(place / "checkout")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = place.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_folder_with_modules_is_a_declared_package() -> None:
    """pyproject.toml lists every folder that has Python files; a forgotten one would leave the wheel silently."""
    folders = {str(path.parent) for path in sources()}
    assert folders == set(PACKAGE_DIRS.values())
    assert sorted(PACKAGE_DIRS) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_wheel_has_every_file_and_nothing_else(wheel_files: set[str]) -> None:
    """The wheel has all modules, the data files beside them and `py.typed`, and nothing from outside the product."""
    expected = {inside_the_wheel(path) for path in product_files()}
    assert "understudy/py.typed" in expected
    assert {name for name in wheel_files if ".dist-info/" not in name} == expected


def test_wheel_has_licence_and_command(wheel_files: set[str]) -> None:
    """The wheel carries its licence and installs the `understudy` command."""
    suffixes = {name.partition(".dist-info/")[2] for name in wheel_files}
    assert {"licenses/LICENSE", "entry_points.txt"} <= suffixes
    assert PROJECT["project"]["scripts"] == {"understudy": "understudy.cluster.__main__:main"}


@pytest.mark.thorough
def test_every_imported_package_is_a_declared_dependency() -> None:
    """What the product imports is declared in pyproject.toml, not merely present because something else needs it."""
    declared = {name_of(line) for line in PROJECT["project"]["dependencies"]}
    extra = {name_of(line) for line in PROJECT["project"]["optional-dependencies"]["mcp"]}
    providers = packages_distributions()
    missing = set()
    for path in sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = [node.module or ""]
            else:
                continue
            for top in {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"understudy"}:
                names = {normalized(name) for name in providers.get(top, [])}
                sdk = path.parts[0] == "tool_host" or path.name.startswith("mcp_")
                allowed = declared | extra if sdk else declared
                if not allowed & {PART_OF.get(name, name) for name in names}:
                    missing.add(f"{path}: {top}")
    assert sorted(missing) == []


def test_the_command_prints_its_version() -> None:
    """`understudy --version` prints the version of the distribution, and nothing else."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{understudy.__version__}\n")
