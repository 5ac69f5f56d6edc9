"""`understudy store …`: looking after a store, with a cluster at work on it or without. Needs no Ray.

What changes sessions goes through a journal of its own, as the operations of a node service do, so a cluster that works
with the same store is neither disturbed nor bypassed. The store's modules are imported by the commands that need them:
SQLAlchemy and the tables take most of a second, which `--help` and the shell's completion should not have to wait for.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from understudy.config import Settings, split_schema
from understudy.errors import InvalidInput, StoreMissing

from .command import Json, Store, command, counted, errors, print_json
from .durations import duration
from .output import check_target, write
from .pruning import Rules, Totals, operations, planned

if TYPE_CHECKING:
    from understudy.store.db.engine import Database
    from understudy.store.transaction import Transaction
    from understudy.store.upkeep.retention import Removed

app = typer.Typer(help="Maintain a store: schema, archives, retention, backups, checks.", no_args_is_help=True)

Result = TypeVar("Result")
PATIENCE_SECONDS = 15.0
"""How long a command waits for a store that was there when it began."""


@contextmanager
def opened(dsn: str | None, *, create: bool = False, current: bool = True) -> Iterator[tuple[Database, str]]:
    """A store and the namespace.

    Args:
        create: also a SQLite file that is not there yet.
        current: refuse a store whose schema is not that of this version.

    Raises:
        StoreMissing, StoreUnreachable, StoreSchema, StoreVersion: it is not there, or can't be worked with.
    """
    from understudy.store.db.engine import Database

    settings = Settings.from_environment(store=dsn)
    path = settings.store.removeprefix("sqlite:///")
    if settings.store.startswith("sqlite") and not create and not Path(path).exists():
        raise StoreMissing(f"there is no store {path}")
    database = Database(settings.store, unlimited=True)  # somebody looks on, and can interrupt it
    try:
        if current:
            database.prepare("verify")
        yield database, settings.namespace
    finally:
        database.close()


def through_journal(
    database: Database,
    namespace: str,
    work: Iterable[Callable[[Transaction], Result]],
    report: Callable[[Result], None],
) -> None:
    """Commit operations one after the other, and report each one's result."""
    from understudy.store.db.engine import now
    from understudy.store.journal import Journal

    async def run() -> None:
        writer = f"command-{os.getpid()}-{now()}"
        journal = Journal(database, namespace, writer, lambda committed: None, patience=PATIENCE_SECONDS)
        journal.start()
        try:
            for operation in work:
                report(await journal.submit(operation))
        finally:
            await journal.close()

    asyncio.run(run())


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for what takes long, if somebody looks on; call it with how much more is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


@app.command()
@command
def migrate(store: Store = None, json: Json = False) -> int:
    """Bring the schema to this version. Refused: a store of a newer version, and one that a cluster works with."""
    from understudy.store.db import schema

    with opened(store, create=True, current=False) as (database, _):
        applied = database.prepare()
    if json:
        print_json({"applied": applied, "version": schema.newest()})
    else:
        print(f"applied {', '.join(map(str, applied))}" if applied else f"up to date: version {schema.newest()}")
    return 0


@app.command()
@command
def verify(store: Store = None, json: Json = False) -> int:
    """Compare the schema with what this version needs, and print the exact DDL that is missing. Changes nothing."""
    from understudy.store.db import schema

    with opened(store, current=False) as (database, _), database.read() as connection:
        found = schema.differences(connection)
        missing = schema.missing_ddl(connection, database.schema) if found else ""
    if json:
        print_json({"ok": not found, "differences": found, "ddl": missing})
    elif found:
        errors.print("\n".join(found), soft_wrap=True, highlight=False, markup=False)
        print(missing, end="")
    else:
        print(f"as needed: version {schema.newest()}")
    return 1 if found else 0


@app.command()
@command
def ddl(
    backend: Annotated[str, typer.Option(help="sqlite or postgresql; default: that of the store.")] = "",
    since: Annotated[int, typer.Option(help="Only what leads on from this version.", min=0)] = 0,
    store: Store = None,
) -> int:
    """Print the schema as SQL, one transaction, to be run by hand."""
    from understudy.store.db import schema

    settings = Settings.from_environment(store=store)
    if since > schema.newest():
        raise InvalidInput(f"--since {since} is beyond the newest version, {schema.newest()}")
    backend = backend or settings.store.partition(":")[0]
    if backend not in ("sqlite", "postgresql"):
        raise InvalidInput(f"backend {backend!r} must be sqlite or postgresql")
    own = split_schema(settings.store)[1] if backend == "postgresql" else ""
    print(schema.ddl(backend, since, own), end="")
    return 0


@app.command()
@command
def export(
    session: Annotated[str, typer.Argument(metavar="SESSION")],
    tree: Annotated[bool, typer.Option("--tree", help="With all sessions below it.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="File; `-` is stdout. Default: SESSION.json")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Write a session into one JSON file, as it is at this moment."""
    from understudy.store.upkeep import archive

    target = output or f"{session}.json"
    if target == "-" and json:
        raise InvalidInput("--json and an archive can't both go to stdout: name a file with --output")
    if target != "-":
        check_target(target, force=force)
    with opened(store) as (database, namespace), database.snapshot() as connection:
        ids = archive.session_ids(connection, namespace, session, tree=tree)
        total = archive.size(connection, namespace, ids)
        with (
            closing(archive.export(connection, namespace, session, tree=tree)) as lines,  # before the connection is
            progress("export", total, quiet=json or target == "-") as advance,
        ):
            if target == "-":
                sys.stdout.writelines(lines)
            else:
                write(target, lines, advance)
    if json:
        print_json({"file": target, "sessions": len(ids), "entries": total})
    elif target != "-":
        print(f"{target}: {counted(len(ids), 'session')}, {total} messages and events")
    return 0


@app.command("import")
@command
def import_(
    file: Annotated[str, typer.Argument(help="An archive; `-` is stdin.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Unfinished work goes on here, and not where it was.")
    ] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="What it brings may run here: you trust who made it.")
    ] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Take an archive in, all of it or nothing. Doing it twice changes nothing."""
    from understudy.store.upkeep import archive

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{file} can't be read: {error.strerror}") from None
    found = archive.read(data, file)
    imported: list[bool] = []
    with opened(store, create=True, current=False) as (database, namespace):
        database.prepare(Settings.from_environment(store=store).schema_policy)
        load = partial(archive.load, archive=found, resume=resume, trust_code=trust_code)
        through_journal(database, namespace, [load], imported.append)
    result = {"session_id": found.top["session_id"], "sessions": len(found.sessions), "messages": found.messages}
    if json:
        print_json({**result, "imported": imported[0]})
    elif imported[0]:
        held = f"{counted(len(found.sessions), 'session')}, {counted(found.messages, 'message')}"
        print(f"{result['session_id']}: {held}")
    else:
        print(f"{result['session_id']}: it was imported before; nothing changed")
    return 0


@app.command()
@command
def prune(
    trees: Annotated[float | None, duration("Trees in which nothing happened for so long: 90d, 12h, …")] = None,
    events: Annotated[float | None, duration("Events older than this; messages and results stay.")] = None,
    session: Annotated[str, typer.Option(help="The tree of this root, whatever its age.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Remove what is old. Never what has work to do, and never what metrics and spans have not taken yet."""
    from understudy.store.db.engine import now

    if trees is None and events is None and not session:
        raise InvalidInput("nothing to do: name a rule, --trees DURATION, --events DURATION or --session ID")
    at = now()
    trees_before, events_before = (0 if age is None else at - int(age * 1e6) for age in (trees, events))
    rules = Rules(session, trees_before, events_before, at)
    with opened(store) as (database, namespace):
        if not dry_run and not yes and (json or not sys.stdin.isatty()):
            raise InvalidInput("nobody is there to confirm: use --yes, or --dry-run to see what would go")
        if dry_run or not yes:
            with database.snapshot() as connection:
                plan = planned(connection, namespace, rules)
            if dry_run and json:
                print_json({"dry_run": True, **plan.to_wire(), **plan.ids()})
            else:
                print(f"to be removed: {plan}", *plan.lines(), sep="\n", file=sys.stdout if dry_run else sys.stderr)
            if dry_run:
                return 0
            if not typer.confirm("Remove it?", err=True):
                return 1
        removed = _remove(database, namespace, rules, quiet=json)
    print_json(removed.to_wire()) if json else print(f"removed: {removed}")
    return 0


def _remove(database: Database, namespace: str, rules: Rules, *, quiet: bool) -> Totals:
    from understudy.store.upkeep import retention

    with database.snapshot() as connection:
        work = operations(connection, namespace, rules)
    names = iter([name for name, _ in work])
    removed = Totals()

    def count_code(number: int) -> None:
        removed.code += number

    try:
        with progress("prune", len(work), quiet=quiet) as advance:

            def count_removed(result: Removed) -> None:
                removed.add(next(names), result)
                advance(1)

            through_journal(database, namespace, [operation for _, operation in work], count_removed)
        through_journal(database, namespace, [retention.drop_code], count_code)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; removed so far: {removed}") from None
    return removed


@app.command()
@command
def vacuum(store: Store = None, json: Json = False) -> int:
    """Give the space of removed rows back (PostgreSQL: to the tables, and renew the planner's statistics)."""
    from understudy.store.upkeep import maintenance

    with opened(store) as (database, _):
        before, after = maintenance.vacuum(database)
    if json:
        print_json({"before": before, "after": after})
    else:
        print(f"{before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after")
    return 0


@app.command()
@command
def backup(
    file: Annotated[Path, typer.Argument(help="A new file: a database (SQLite), or pg_dump's archive (PostgreSQL).")],
    store: Store = None,
    json: Json = False,
) -> int:
    """Copy the whole store into a new file, while it is in use."""
    from understudy.store.upkeep import maintenance

    with opened(store) as (database, _), progress("backup", None, quiet=json) as advance:
        done = 0

        def report(now_done: int, _total: int) -> None:
            nonlocal done
            advance(now_done - done)
            done = now_done

        size = maintenance.backup(database, file, report)
    print_json({"file": str(file), "bytes": size}) if json else print(f"{file}: {size / 1e6:.1f} MB")
    return 0


@app.command()
@command
def stats(store: Store = None, json: Json = False) -> int:
    """What the store holds, who owns it, how far metrics and spans are."""
    from understudy.store.upkeep import maintenance

    with opened(store) as (database, namespace):
        found = maintenance.statistics(database, namespace)
    if json:
        print_json(found)
        return 0
    owner = found["owner"]
    print(f"{found['store']} ({found['backend']}, schema {found['schema_version']}), namespace {found['namespace']}")
    print(f"size      {found['bytes'] / 1e6:.1f} MB")
    held = (
        f"{owner['holder']}, generation {owner['generation']}, lease {owner['lease_seconds']} s" if owner else "nobody"
    )
    print(f"owner     {held}")
    for name in ("sessions", "runs", "rows"):
        shown = ", ".join(f"{key} {number}" for key, number in found[name].items() if number)
        print(f"{name:9} {shown or 'none'}")
    for writer in found["writers"]:
        print(f"writer    {writer['writer']}: {writer['events']} events, {writer['unmeasured']} not in the metrics' "
              f"checkpoint, {writer['unexported']} not exported")  # fmt: skip
    return 0


@app.command()
@command
def check(
    sessions: Annotated[list[str] | None, typer.Argument(metavar="[SESSION]...", help="Default: all.")] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Check the tables against each other: nothing missing, doubled or left over. Exit code 1 if something is."""
    from understudy.store.check.check import check as find_violations
    from understudy.store.upkeep import archive, maintenance

    with opened(store) as (database, namespace), database.snapshot() as connection:
        for session_id in sessions or ():
            archive.session_ids(connection, namespace, session_id, tree=False)
        found = find_violations(connection, namespace, sessions or None)
        number = len(sessions) if sessions else maintenance.session_count(connection, namespace)
    if json:
        wire = [{"session_id": item.session_id, "rule": item.rule, "text": item.text} for item in found]
        print_json({"ok": not found, "sessions": number, "violations": wire})
    else:
        for item in found:
            print(f"{item.session_id}: {item.rule}: {item.text}")
        print(f"{counted(number, 'session')} checked, {counted(len(found), 'violation')}")
    return 1 if found else 0
