"""Map and reduce over a folder, without a model: the most frequent words of its text files.

understudy workflow run understudy.examples.workflows.map_reduce:most_frequent folder=docs most=10
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from understudy import WorkflowContext, tool, workflow


@tool(on_crash="rerun")
def text_files(folder: str) -> list[str]:
    """The text files of a folder, in the order of their names."""
    found = [path for path in Path(folder).rglob("*") if path.suffix in (".md", ".txt") and path.is_file()]
    return sorted(str(path) for path in found)


@tool(on_crash="rerun")
def words_of(path: str) -> dict[str, int]:
    """How often a file has each of its words."""
    return dict(Counter(re.findall(r"[a-z]{4,}", Path(path).read_text(errors="replace").lower())))


@workflow
async def most_frequent(ctx: WorkflowContext, folder: str, most: int = 20, at_once: int = 8) -> dict[str, int]:
    """Count the words of each file, then add up: the sum is plain code, and done again whenever the code is run."""
    files = await ctx.tool(text_files, folder)
    counted = await ctx.foreach(files, lambda path: ctx.tool(words_of, path), limit=at_once)
    total: Counter[str] = Counter()
    for words in counted:
        total.update(words)
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered[:most])
