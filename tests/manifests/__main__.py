"""`scripts/manifests`: render what people apply, and check it as the tests do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from .generated import PATH, generated
from .objects import RENDERED, render
from .rules import PROVIDED, check_manifests


def main() -> int:
    """Exit codes: 0 nothing found, 1 findings."""
    parser = argparse.ArgumentParser(prog="scripts/manifests", description=__doc__)
    parser.add_argument("names", nargs="*", default=RENDERED, help=f"some of: {', '.join(RENDERED)}")
    parser.add_argument("--write", action="store_true", help="first generate the manifest of the alert rules again")
    parser.add_argument("--out", type=Path, help="keep what was rendered in this folder")
    arguments = parser.parse_args()
    if arguments.write:
        PATH.write_text(generated())
    found = 0
    for name in arguments.names:
        documents = render(name)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{name.replace('/', '-')}.yaml").write_text(
                yaml.safe_dump_all(documents, sort_keys=False)
            )
        problems = check_manifests(documents, PROVIDED)
        found += len(problems)
        print(f"{name}: {len(documents)} objects, {len(problems) or 'no'} findings")
        for problem in problems:
            print(f"  {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
