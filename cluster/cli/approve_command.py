"""`understudy approve` and `understudy reject`: decide about tool calls that wait for an approval."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from understudy.errors import InvalidInput

from ..client.people import Remember
from .command import Json, SessionId, Store, command, connected, print_json

CallIds = Annotated[list[str] | None, typer.Argument(metavar="[CALL]…", help="`understudy show` lists them.")]
All = Annotated[bool, typer.Option("--all", help="All that wait in the session, and below it.")]
Remembered = Annotated[
    bool, typer.Option("--remember", help="Decide in the same way about all later calls of the tool in this session.")
]
RememberedArguments = Annotated[
    bool, typer.Option("--remember-arguments", help="The same, about calls with the same arguments only.")
]


@command
def approve(
    session: SessionId,
    calls: CallIds = None,
    everything: All = False,
    arguments: Annotated[
        str, typer.Option(metavar="JSON", help="Execute the call with these arguments instead of the model's.")
    ] = "",
    remember: Remembered = False,
    remember_arguments: RememberedArguments = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Approve tool calls that wait for a person: they are executed."""
    chosen, kept = _chosen(calls, everything), _kept(remember, remember_arguments)
    edited = _arguments(arguments)
    with connected(store, start=False) as cluster:
        new = cluster.session(session).approve(chosen, arguments=edited, remember=kept)
    return _print_result(new, "approved", json)


@command
def reject(
    session: SessionId,
    calls: CallIds = None,
    everything: All = False,
    reason: Annotated[str, typer.Option(help="Why; the model reads it.")] = "",
    remember: Remembered = False,
    remember_arguments: RememberedArguments = False,
    store: Store = None,
    json: Json = False,
) -> int:
    """Reject tool calls that wait for a person: they are not executed."""
    chosen, kept = _chosen(calls, everything), _kept(remember, remember_arguments)
    with connected(store, start=False) as cluster:
        new = cluster.session(session).reject(chosen, reason, remember=kept)
    return _print_result(new, "rejected", json)


def _chosen(calls: list[str] | None, everything: bool) -> list[str] | None:
    if bool(calls) == everything:
        raise InvalidInput("name the calls, or give --all")
    return calls or None


def _kept(tool: bool, arguments: bool) -> Remember:
    return "arguments" if arguments else tool


def _arguments(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"--arguments is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput("--arguments must be a JSON object")
    return found


def _print_result(new: list[str], word: str, as_json: bool) -> int:
    print_json({word: new}) if as_json else print(f"{word}: {', '.join(new) or 'nothing that was not before'}")
    return 0
