"""`understudy worktrees`: what sessions with git worktrees have left in a repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.errors import UnknownSession, WorktreeFailed
from understudy.json_text import jsonable

from .command import Json, Store, command, connected, counted, errors, print_json

if TYPE_CHECKING:
    from ..client.client import Cluster
    from ..client.worktree_listing import WorktreeInfo

app = typer.Typer(help="What sessions with git worktrees have left in a repository.", no_args_is_help=True)

SHOWN = 3
"""So many files are named in a list."""


def _names(context: typer.Context) -> list[str]:
    """Names of worktrees, for the shell's completion."""
    from ..client.worktree_listing import repository_of, worktrees_of

    return [one.name for one in worktrees_of(repository_of(context.params.get("repository") or Path.cwd()))]


Repository = Annotated[
    Path,
    typer.Option("--repository", metavar="DIR", help="A directory in the repository.", exists=True, file_okay=False),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, session or branch.", autocompletion=_names)]


@app.callback()
def worktrees() -> None:
    """What sessions with git worktrees have left in a repository."""


@app.command("list")
@command
def list_(repository: Repository = Path(), json: Json = False) -> int:
    """List the worktrees of sessions: of those at work, and of those that were merged nowhere. Needs git alone."""
    from ..client.worktree_listing import repository_of, worktrees_of

    found = worktrees_of(repository_of(repository))
    if json:
        print_json({"worktrees": [_wire(one) for one in found]})
        return 0
    if not found:
        errors.print("no worktrees of sessions")
        return 0
    table = Table("name", "changes", "state", "directory", box=None, header_style="bold", pad_edge=False)
    for one in found:
        table.add_row(*map(escape, (one.name, _changes(one), _state(one), one.path or "none: a branch is left")))
    Console(highlight=False).print(table)
    return 0


@app.command()
@command
def show(name: Name, repository: Repository = Path(), json: Json = False) -> int:
    """Show a worktree: its session, its files, and how it is merged."""
    from ..client.worktree_listing import repository_of, worktree_of

    top = repository_of(repository)
    found = worktree_of(top, name)
    if json:
        print_json(_wire(found))
        return 0
    console = Console(highlight=False)
    details = {
        "worktree": found.name, "session": found.session_id or "not known any more", "branch": found.branch,
        "directory": found.path or "none: a branch is left", "state": _state(found),
    }  # fmt: skip
    for what, text in details.items():
        console.print(f"[bold]{what:<10}[/bold] {escape(text)}", soft_wrap=True)
    for what, files in (("changed", found.files), ("not committed", found.uncommitted)):
        for file in files:
            console.print(f"  {what}: {escape(file)}", soft_wrap=True)
    if not found.merged:
        errors.print(f"[dim]merge it: git -C {escape(str(top))} merge {escape(found.branch)}[/dim]", soft_wrap=True)
    return 0


@app.command()
@command
def remove(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also with changes that are merged nowhere.")] = False,
    repository: Repository = Path(),
    store: Store = None,
    json: Json = False,
) -> int:
    """Remove a worktree and its branch: not while its session is at work, nor what is merged nowhere."""
    from ..client.worktree_listing import remove_worktree, repository_of, worktree_of

    top = repository_of(repository)
    found = worktree_of(top, name)
    with connected(store, start=False) as cluster:
        if _is_at_work(cluster, found):
            raise WorktreeFailed(f"session {found.session_id} is at work in it: `understudy cancel` it first")
        remove_worktree(top, found, force=force)
    print_json({"removed": found.name}) if json else print(f"removed {found.name}")
    return 0


@app.command()
@command
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    repository: Repository = Path(),
    store: Store = None,
    json: Json = False,
) -> int:
    """Remove all with which nothing is lost: their changes are merged, and their sessions not at work."""
    from ..client.worktree_listing import remove_worktree, repository_of, worktrees_of

    top = repository_of(repository)
    removed, left = list[str](), dict[str, str]()
    with connected(store, start=False) as cluster:
        for name in [one.name for one in worktrees_of(top)]:
            # What was removed before may have been what had its commits.
            now = next(one for one in worktrees_of(top, removed) if one.name == name)
            if _is_at_work(cluster, now):
                left[now.name] = f"session {now.session_id} is at work"
            elif not now.is_needless:
                left[now.name] = _state(now)
            else:
                if not dry_run:
                    remove_worktree(top, now)
                removed.append(now.name)
    if json:
        print_json({"dry_run": dry_run, "removed": removed, "left": left})
        return 0
    for name, why in left.items():
        errors.print(f"[dim]left: {escape(name)}: {escape(why)}[/dim]", soft_wrap=True)
    print(f"{'would remove' if dry_run else 'removed'} {counted(len(removed), 'worktree')}", *removed)
    return 0


def _is_at_work(cluster: Cluster, found: WorktreeInfo) -> bool:
    """Whether the session of a worktree has a run that has not ended. One that this store does not know is another
    store's, or was removed."""
    if not found.session_id:
        return False
    try:
        session = cluster.session(found.session_id)
        return any(not run.finished_at for run in session.runs())
    except UnknownSession:
        return False


def _changes(found: WorktreeInfo) -> str:
    files = found.files[:SHOWN]
    more = f" and {len(found.files) - SHOWN} more" if len(found.files) > SHOWN else ""
    return f"{', '.join(files)}{more}" or "none"


def _state(found: WorktreeInfo) -> str:
    if found.uncommitted:
        return f"{counted(len(found.uncommitted), 'file')} not committed"
    return "merged" if found.merged else "not merged"


def _wire(found: WorktreeInfo) -> dict[str, Any]:
    return {**jsonable(found), "needless": found.is_needless}
