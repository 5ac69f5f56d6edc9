"""What the image installs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import NormalizedName, canonicalize_name

PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?==(?P<version>[^ ;\\]+)(?P<rest>.*)")


@dataclass(frozen=True)
class Locked:
    """One distribution of a lock.

    Attributes:
        hashes: SHA-256 of each file that may be installed.
    """

    version: str
    hashes: tuple[str, ...]


def read(path: Path) -> dict[NormalizedName, Locked]:
    """The distributions of a requirements file, as `scripts/lock` writes it.

    Raises:
        ValueError: A line names no version.
    """
    lines = re.sub(r"\s*#.*", "", path.read_text()).replace("\\\n", " ").splitlines()
    found = {}
    for line in filter(None, map(str.strip, lines)):
        pin = PIN.fullmatch(line)
        if pin is None:
            raise ValueError(f"{path}: {line[:80]}: no version")
        found[canonicalize_name(pin["name"])] = Locked(
            pin["version"], tuple(re.findall(r"--hash=sha256:([0-9a-f]+)", pin["rest"]))
        )
    return found
