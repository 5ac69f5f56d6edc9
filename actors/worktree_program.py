"""What is done about a worktree, as a program of its own: it makes one, and merges, keeps or removes it at the end.

The program runs in the agent's sandbox, since git executes what a repository's configuration says. It uses the standard
library alone (`python -I -S worktree_program.py`), reads a request as JSON and writes the answer as JSON.

All is done under one lock for the repository, which a process holds for as long as it, or a git that it has started,
lives (`flock(2)`). Whoever gets the lock first mends what one that died has left. Each request can be repeated, with
the same result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

PLAIN = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.quotePath=false", "gc.auto=0", "maintenance.auto=false",
    "commit.gpgSign=false", "advice.addEmbeddedRepo=false", "merge.verifySignatures=false",
)  # fmt: skip
"""Settings of each git: nothing of the repository's is executed or asked on the way, nobody's key signs."""

LOOKED_THROUGH = 200
"""So many commits of the parent's branch are looked through for a merge that was done before."""


class Failed(Exception):
    """What was asked for can't be done; nothing is lost."""


class Git:
    """git in one worktree of a repository.

    Args:
        request: says where the repository is, and who makes commits.
        worktree: path of the worktree; None where none is needed.
        name: of the worktree in the repository; None for the main one.
    """

    def __init__(self, request: dict[str, Any], worktree: str | None = None, name: str | None = None) -> None:
        self.common: str = request["common"]
        self.directory = os.path.join(self.common, "worktrees", name) if name else self.common
        self.worktree = worktree
        kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        self._environment = {
            **kept, **request["identity"], **({"GIT_WORK_TREE": worktree} if worktree else {}),
            "GIT_DIR": self.directory, "GIT_COMMON_DIR": self.common, "GIT_LITERAL_PATHSPECS": "1",
            "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C",
        }  # fmt: skip
        if name and os.path.isdir(self.directory):
            self._trust_nobody()
        self._options = [part for setting in PLAIN for part in ("-c", setting)]

    def _trust_nobody(self) -> None:
        """An agent may write to its worktree's directory in the repository: its files there must not say where the
        repository's own settings and references are, nor what more there is."""
        for name in ("config.worktree", "commondir"):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))
        with open(os.path.join(self.directory, "commondir"), "x") as file:
            file.write("../..\n")

    def run(self, *arguments: str, sent: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of git, whatever its exit code. It holds the lock as long as it lives."""
        try:
            return subprocess.run(
                ["git", *self._options, *arguments], env=self._environment, cwd=self.worktree or self.common,
                input=sent, capture_output=True, encoding="utf-8", errors="surrogateescape", pass_fds=LOCKS,
                check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise Failed("git is not installed on this node (Debian, Ubuntu: apt-get install git)") from None

    def __call__(self, *arguments: str, sent: str = "") -> str:
        """What a command of git writes. Raises `Failed` if it fails."""
        done = self.run(*arguments, sent=sent)
        if done.returncode:
            self.refuse(arguments[0], done)
        return done.stdout.strip("\n")

    @staticmethod
    def refuse(what: str, done: subprocess.CompletedProcess[str]) -> NoReturn:
        """Say that a command failed."""
        said = (done.stderr or done.stdout).strip()[-500:] or f"exit code {done.returncode}"
        raise Failed(f"git {what} failed: {said}")

    def find(self, revision: str) -> str | None:
        """The commit that a name stands for; None if there is none."""
        done = self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        return done.stdout.strip() or None

    def has(self, commit: str, within: str) -> bool:
        """Whether a commit is a part of another one's history."""
        return self.run("merge-base", "--is-ancestor", commit, within).returncode == 0

    def changed(self, before: str, after: str) -> list[str]:
        """The files that differ between two commits or trees."""
        found = self("diff", "--name-only", "--no-renames", "-z", before, after)
        return [name for name in found.split("\0") if name]

    def save(self, message: str) -> None:
        """Commit whatever has changed in the worktree."""
        self("add", "--all")
        staged = self("diff", "--cached", "--raw", "--no-renames", "-z").split("\0")
        inner = [name for entry, name in zip(staged[::2], staged[1::2], strict=False) if entry[1:14] == "000000 160000"]
        if inner:  # a commit would have its name, and nothing of it
            self.run("reset", "--quiet", "--", *inner)
            raise Failed(f"there are git repositories within {self.worktree}: {', '.join(inner)}")
        if any(staged):
            self("commit", "--quiet", "--no-verify", "-m", message)


LOCKS: list[int] = []
"""Descriptors of the locks that are held."""


@contextmanager
def locked(request: dict[str, Any], into: str | None = None) -> Iterator[None]:
    """Nobody else makes or merges worktrees of this repository meanwhile.

    Args:
        into: directory in which the file tools of its agent change nothing meanwhile, either.
    """
    own = os.path.join(request["common"], "understudy")
    os.makedirs(own, exist_ok=True)
    try:
        LOCKS.append(os.open(os.path.join(own, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        fcntl.flock(LOCKS[-1], fcntl.LOCK_EX)
        if into is not None and os.path.isdir(into):
            LOCKS.append(os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX)
        mend(request)
        yield
    finally:
        while LOCKS:
            os.close(LOCKS.pop())


def create(request: dict[str, Any]) -> dict[str, Any]:
    """Make the worktree, unless it is there; one that was not made to its end is made again."""
    with locked(request):
        if is_ready(request):
            return {"created": False}
        clear(request)
        git = Git(request)
        if git.find(f"refs/heads/{request['branch']}") is None:
            base = base_of(request)
            git("update-ref", base_reference(request), base)
            git("update-ref", f"refs/heads/{request['branch']}", base, "")
        git("worktree", "add", "--quiet", request["path"], request["branch"])
        _write(marker(request), {"session": request["session"]})
        return {"created": True}


def base_of(request: dict[str, Any]) -> str:
    """The commit that the worktree begins with: its parent's last one, for which a worktree of ours is committed."""
    parent = parent_of(request)
    if request["into_name"]:
        parent.save(f"Changes before session {request['session']} begins")
    wanted = request["base"] or "HEAD"
    found = parent.find(wanted)
    if found is None:
        missing = "the repository has no commit yet" if wanted == "HEAD" else f"there is no commit {wanted!r}"
        raise Failed(f"{request['into']}: {missing}")
    return found


def parent_of(request: dict[str, Any]) -> Git:
    """git in the workspace that the worktree is made of and merged into."""
    git = Git(request, request["into"], request["into_name"])
    if not os.path.isdir(request["into"]) or not os.path.isdir(git.directory):
        raise Failed(f"{request['into']}, which the worktree belongs to, is not there any more")
    return git


def end(request: dict[str, Any]) -> dict[str, Any]:
    """Commit what is not committed, and merge, keep or remove the worktree."""
    with locked(request, request["into"]):
        git, branch = Git(request), f"refs/heads/{request['branch']}"
        tip = git.find(branch)
        if tip is None:
            return merged_before(request) or {"outcome": "none"}
        if is_ready(request):
            tip = saved(request, tip)
        if not request["completed"] or request["on_end"] == "keep":
            return {"outcome": "kept", "files": git.changed(git.find(base_reference(request)) or tip, tip)}
        if request["on_end"] == "merge":
            found = merge(request, tip)
            if found["outcome"] == "conflict":
                return found
        else:
            found = {"outcome": "removed"}
        clear(request)
        git("update-ref", "--stdin", sent=f"delete {branch}\ndelete {base_reference(request)}\n")
        return found


def saved(request: dict[str, Any], tip: str) -> str:
    """Commit what has changed in the worktree; its last commit, which is its branch's then."""
    own = Git(request, request["path"], request["name"])
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(own.directory, "index.lock"))  # of a command that was killed: none is at work any more
    own.save(f"Changes of {request['agent']} (session {request['session']})")
    head = own.find("HEAD")
    if head is None or not own.has(tip, head):
        raise Failed(f"the worktree is at a commit that does not follow from its branch {request['branch']}")
    if head != tip:  # it was on another branch, or on none
        own("update-ref", f"refs/heads/{request['branch']}", head)
    return head


def merge(request: dict[str, Any], tip: str) -> dict[str, Any]:
    """Merge a commit into the parent's workspace: all of it, or nothing where something conflicts."""
    parent = parent_of(request)
    if os.path.exists(os.path.join(parent.directory, "MERGE_HEAD")):
        raise Failed(f"{request['into']} is in the middle of another merge")
    if request["into_name"]:
        parent.save(f"Changes before session {request['session']} is merged")
    head = parent.find("HEAD")
    if head is None:
        raise Failed(f"{request['into']} has no commit any more")
    if parent.has(tip, head):
        return merged_before(request) or {"outcome": "unchanged"}
    # The merge is tried beside the workspace, which only ever goes from one whole commit to another one.
    tried = parent.run("merge-tree", "--write-tree", "--name-only", "--no-messages", "-z", head, tip)
    if tried.returncode not in (0, 1) or not tried.stdout:
        if "usage:" in tried.stderr or "unknown option" in tried.stderr:
            raise Failed("git 2.38 or newer is needed to merge worktrees")
        parent.refuse("merge-tree", tried)
    tree, *conflicting = [part for part in tried.stdout.split("\0") if part]
    if tried.returncode:
        return {"outcome": "conflict", "reason": "conflict", "files": sorted(set(conflicting))}
    said = (
        f"Merge {request['agent']} (session {request['session']})\n\nUnderstudy-Run: {request['session']}/"
        f"{request['run']}\n"
    )
    commit = parent("commit-tree", tree, "-p", head, "-p", tip, "-m", said)
    _write(note(request), {"into": request["into"], "name": request["into_name"], "from": head, "to": commit})
    done = parent.run("merge", "--ff-only", "--quiet", "--no-autostash", commit)
    os.unlink(note(request))
    if done.returncode:
        overwritten = [line.strip() for line in done.stderr.splitlines() if line.startswith("\t")]
        if not overwritten:
            parent.refuse("merge", done)
        return {"outcome": "conflict", "reason": "uncommitted", "files": sorted(set(overwritten))}
    return {"outcome": "merged", "files": parent.changed(head, commit), "commit": commit}


def merged_before(request: dict[str, Any]) -> dict[str, Any] | None:
    """The merge that this run has done before it died."""
    if not os.path.isdir(request["into"]):
        return None
    parent = parent_of(request)
    shown = parent.run(
        "log", "--first-parent", f"--max-count={LOOKED_THROUGH}",
        "--format=%H %P %(trailers:key=Understudy-Run,valueonly,separator=%x2C)",
    )  # fmt: skip
    for line in shown.stdout.splitlines():
        commit, *rest = line.split()
        if len(rest) == 3 and rest[-1] == f"{request['session']}/{request['run']}":
            return {"outcome": "merged", "files": parent.changed(f"{commit}^1", commit), "commit": commit}
    return None


def mend(request: dict[str, Any]) -> None:
    """Undo a merge in the midst of which its process died: what it has written, and nothing else."""
    try:
        with open(note(request)) as file:
            left = json.load(file)
    except FileNotFoundError:
        return
    git = Git(request, left["into"], left["name"])
    if os.path.isdir(left["into"]) and os.path.isdir(git.directory):
        for path in _locks(git):
            with suppress(FileNotFoundError):
                os.unlink(path)
        if git.find("HEAD") == left["from"]:
            _undo(git, left["from"], left["to"])
    os.unlink(note(request))


def _locks(git: Git) -> Iterator[str]:
    """Locks of git's that a merge takes: whoever held them is dead."""
    for name in ("index", "HEAD", "ORIG_HEAD"):
        yield os.path.join(git.directory, f"{name}.lock")
    branch = git.run("symbolic-ref", "--quiet", "HEAD").stdout.strip()
    if branch:
        yield os.path.join(git.common, f"{branch}.lock")


def _undo(git: Git, before: str, after: str) -> None:
    """Give files that a merge has written the content that they had; one that somebody changed since stays."""
    old, new = _contents(git, before, after), _contents(git, after, before)
    restored = [name for name in old.keys() | new.keys() if _is_written(git, name, old.get(name), new.get(name))]
    if old or new:
        names = "\0".join(sorted(old.keys() | new.keys()))
        git("reset", "--quiet", before, "--pathspec-from-file=-", "--pathspec-file-nul", sent=names)
    for name in restored:
        if name not in old:
            os.unlink(os.path.join(git.worktree or "", name))
    kept = "\0".join(name for name in restored if name in old)
    if kept:
        git("checkout-index", "--force", "-z", "--stdin", sent=kept)


def _contents(git: Git, of: str, other: str) -> dict[str, str]:
    """The files of a commit that another one has differently, with the names of their contents."""
    found: dict[str, str] = {}
    for entry in git("diff-tree", "-r", "--no-renames", "-z", "--name-only", other, of).split("\0"):
        if entry:
            blob = git.run("rev-parse", "--verify", "--quiet", f"{of}:{entry}").stdout.strip()
            found |= {entry: blob} if blob else {}
    return found


def _is_written(git: Git, name: str, old: str | None, new: str | None) -> bool:
    """Whether a file is as a merge left it: done, half done, or taken away for what was to come."""
    path = os.path.join(git.worktree or "", name)
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return old is not None
    if not stat.S_ISREG(mode):
        return stat.S_ISLNK(mode) and new == git("hash-object", "--stdin", sent=os.readlink(path))
    present = git("hash-object", "--path", name, path)
    if present in (old, new) or new is None:
        return present == new
    size, whole = os.path.getsize(path), int(git("cat-file", "-s", new))
    if size >= whole:
        return False
    with open(path, "rb") as file:
        written = file.read()
    return git("cat-file", "blob", new).encode(errors="surrogateescape").startswith(written)


def clear(request: dict[str, Any]) -> None:
    """Remove the worktree's directory, then what the repository knows of it: in this order, so that a directory which
    the repository does not know is somebody else's."""
    path, admin = request["path"], Git(request, name=request["name"]).directory
    known = _known_path(admin)
    if known is not None and known != os.path.join(path, ".git"):
        raise Failed(f"the repository has another worktree of the name {request['name']}: {os.path.dirname(known)}")
    if known is None and not os.path.isdir(admin) and os.path.lexists(path) and os.listdir(path):
        raise Failed(f"{path} is there, and is no worktree of {os.path.dirname(request['common'])}: move it away")
    for directory in (path, admin):
        if os.path.lexists(directory):
            _remove(directory)


def _known_path(admin: str) -> str | None:
    """Where a worktree is, as the repository knows it."""
    try:
        with open(os.path.join(admin, "gitdir")) as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None


def _remove(directory: str) -> None:
    for found, names, _ in os.walk(directory):  # what is in a directory that its owner may not write can't be removed
        for name in names:
            path = os.path.join(found, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(directory)


def is_ready(request: dict[str, Any]) -> bool:
    """Whether the worktree was made to its end, and is there."""
    return os.path.exists(marker(request)) and os.path.exists(os.path.join(request["path"], ".git"))


def marker(request: dict[str, Any]) -> str:
    """A file that says that the worktree was made to its end."""
    return os.path.join(request["common"], "worktrees", request["name"], "understudy")


def note(request: dict[str, Any]) -> str:
    """A file that says which merge is being done."""
    return os.path.join(request["common"], "understudy", "merging")


def base_reference(request: dict[str, Any]) -> str:
    """The reference that keeps the commit which the worktree began with; `understudy/NAME` must mean the branch."""
    return f"refs/understudy-bases/{request['name']}"


def _write(path: str, content: dict[str, Any]) -> None:
    """Write a file, all or nothing."""
    with open(f"{path}.new", "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for; `{"problem": …}` if it can't be done."""
    try:
        found = {"create": create, "end": end}[request["do"]](request)
        if "files" in found:  # a name may be no text
            names = [name.encode(errors="surrogateescape").decode(errors="replace") for name in found["files"]]
            found |= {"files": names[: request["most_files"]], "count": len(names)}
        return found
    except Failed as failed:
        return {"problem": str(failed)}
    except OSError as error:
        return {"problem": f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
