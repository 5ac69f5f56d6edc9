"""`understudy up` on what runs: which services it ends, and which it leaves alone. Ray is played."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy.cluster.cli.main import app
from understudy.cluster.client import client
from understudy.cluster.ray import connection as connecting
from understudy.cluster.ray import replacing
from understudy.cluster.ray.connection import Connection
from understudy.cluster.ray.names import node_name, supervisor_name
from understudy.cluster.ray.versions import VERSION
from understudy.config import Settings
from understudy.errors import Conflict, ServiceGone
from understudy.store.db.engine import Database

KEEPER = "elsewhere, pid 7"


class Actor:
    """A supervisor's actor, or a node service's."""

    def __init__(self, number: int, settings: dict[str, str] | None = None, keepers: tuple[str, ...] = ()) -> None:
        self._actor_id = number
        self.on_stop: Callable[[], None] = lambda: None
        answers = {"version": VERSION, "settings": settings or {}, "kept_by": list(keepers), "stop": None}
        for method, answer in answers.items():
            setattr(self, method, SimpleNamespace(remote=lambda method=method, answer=answer: self._do(method, answer)))

    async def _do(self, method: str, answer: Any) -> Any:
        if method == "stop":
            self.on_stop()
        return answer


class Ray:
    """What Ray knows of actors, by their names, and which of them it was asked to end."""

    def __init__(self, settings: Settings) -> None:
        self.names = supervisor_name(settings.instance), node_name(settings.instance, "n1")
        self.actors: dict[str, Actor] = {}
        self.ended: list[int] = []

    def start(self, number: int, **options: Any) -> Actor:
        """Services, in place of those before."""
        self.actors = {name: Actor(number + at, **options) for at, name in enumerate(self.names)}
        return self.actors[self.names[0]]

    def kill(self, actor: Actor) -> None:
        self.ended.append(actor._actor_id)
        self.actors = {name: found for name, found in self.actors.items() if found is not actor}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment({}, store=f"sqlite:///{tmp_path}/s.db")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Ray:
    found = Ray(settings)

    async def result_of(call: Awaitable[Any]) -> Any:
        return await call

    async def nobody(_self: Connection, _timeout: float) -> None:
        raise ServiceGone("there is no drain here")

    async def no_versions(_names: list[str]) -> list[str]:
        return []

    for module in (connecting, replacing):
        monkeypatch.setattr(module, "actor_names", lambda: list(found.actors))
    monkeypatch.setattr(connecting, "ray", found)
    monkeypatch.setattr(connecting, "find_actor", lambda name: found.actors.get(name))
    monkeypatch.setattr(connecting, "supervisor_handle", lambda _settings: found.actors.get(found.names[0]))
    monkeypatch.setattr(connecting, "result_of", result_of)
    monkeypatch.setattr(connecting, "submitted", lambda call: call())
    monkeypatch.setattr(Connection, "_directory", nobody)
    monkeypatch.setattr(replacing, "other_versions", no_versions)
    return found


def replace(settings: Settings) -> list[str]:
    """What `up --keep` does with the services that run."""
    return asyncio.run(replacing._replace(Connection(settings, "played"), 5.0, True))


def test_services_with_other_settings_are_ended(ray: Ray, settings: Settings) -> None:
    """Given services with other settings that nobody keeps, then they are ended; with the same ones they are not."""
    ray.start(1, settings=settings.of_services())
    assert replace(settings) == []
    assert ray.ended == []
    ray.start(1, settings={"UNDERSTUDY_MAX_ACTORS": "7"})
    assert any("UNDERSTUDY_MAX_ACTORS=7" in reason for reason in replace(settings))
    assert ray.ended == [1, 2]


def test_services_that_somebody_keeps_are_not_replaced(ray: Ray, settings: Settings) -> None:
    """Given services with other settings that another `up --keep` keeps, then they are left as they are, and the error
    says who keeps them, what differs, and what to do."""
    ray.start(1, settings={"UNDERSTUDY_MAX_ACTORS": "7"}, keepers=(KEEPER,))
    with pytest.raises(Conflict) as refused:
        replace(settings)
    assert KEEPER in refused.value.message
    assert "UNDERSTUDY_MAX_ACTORS=7" in refused.value.message
    assert "end the other one first" in refused.value.hint
    assert ray.ended == []


def test_services_that_began_meanwhile_are_not_ended(ray: Ray, settings: Settings) -> None:
    """Given services that are to be ended, when somebody else ends them first and starts others, then those go on; an
    explicit shutdown ends what there is then."""
    ray.start(1, settings={"UNDERSTUDY_MAX_ACTORS": "7"}).on_stop = lambda: (ray.start(11), None)[1]
    assert replace(settings)
    assert ray.ended == []
    assert [actor._actor_id for actor in ray.actors.values()] == [11, 12]
    asyncio.run(Connection(settings, "played").shutdown())
    assert ray.ended == [11, 12]


def test_services_that_are_ended_while_they_are_asked_are_not_waited_for(ray: Ray, settings: Settings) -> None:
    """Given services that another `up --keep` ends, and starts again, while this one asks for their settings, then this
    one waits for no answer of theirs, and ends none of the new ones; what it asks from then on, the new ones answer
    only if it is not about to end services."""
    old = ray.start(1, settings={"UNDERSTUDY_MAX_ACTORS": "7"})

    async def ended() -> Any:
        if ray.actors[ray.names[0]] is old:
            ray.start(11, settings={"UNDERSTUDY_MAX_ACTORS": "8"})
        raise ServiceGone("the actor is dead")

    old.settings = SimpleNamespace(remote=ended)
    connection = Connection(settings, "played")
    connection._supervisor = old
    assert any("UNDERSTUDY_MAX_ACTORS=8" in found for found in asyncio.run(connection.different_settings()))
    ray.actors = dict.fromkeys(ray.names, old)
    assert replace(settings) == ["another command was ending them"]
    assert ray.ended == []
    assert [actor._actor_id for actor in ray.actors.values()] == [11, 12]


class Running:
    """A cluster as `up` finds it after its own start."""

    def __init__(self, *different: str) -> None:
        self._connection, self._different = self, different
        self.kept = 0

    def services(self) -> list[Any]:
        return []

    async def different_settings(self) -> list[str]:
        return list(self._different)

    async def renew(self, _timeout: float) -> bool:
        self.kept += 1
        return False

    async def let_go(self) -> None:
        self.kept = -self.kept

    def close(self) -> None:
        pass


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether services were to be replaced that have other settings, each time that `up` looked."""
    looked: list[bool] = []

    def replace_others(_store: str, _timeout: float, *, of_other_settings: bool) -> list[str]:
        looked.append(of_other_settings)
        return []

    monkeypatch.setattr(replacing, "replace_others", replace_others)
    monkeypatch.setattr("understudy.cluster.cli.up_command.GONE_LOOKS", 1)
    monkeypatch.setattr("understudy.cluster.cli.up_command.GONE_SECONDS", 0.0)
    return looked


def up(monkeypatch: pytest.MonkeyPatch, cluster: Running, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what it prints."""
    monkeypatch.setattr(client, "Cluster", SimpleNamespace(connect=lambda *_others, **_options: cluster))
    done = CliRunner().invoke(app, ["up", "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def test_up_that_finds_others_services_does_not_keep_them(
    monkeypatch: pytest.MonkeyPatch, replaced: list[bool], settings: Settings
) -> None:
    """Given services that somebody has started with other settings after `up --keep` began, then it fails and says so;
    without `--keep` it names the difference; with the same settings it keeps them until they are gone."""
    store = ("--store", settings.store)
    cluster = Running("UNDERSTUDY_MAX_ACTORS=7")
    code, output = up(monkeypatch, cluster, "--keep", *store)
    assert (code, output["error"]["code"], cluster.kept) == (1, "conflict", 0)
    assert "started them meanwhile" in output["error"]["message"]
    assert replaced == [True]
    code, output = up(monkeypatch, cluster, *store)
    assert (code, output["different_settings"]) == (0, ["UNDERSTUDY_MAX_ACTORS=7"])
    cluster = Running()
    assert up(monkeypatch, cluster, "--keep", *store)[0] == 0
    assert cluster.kept == -1


@pytest.mark.parametrize(
    ("change", "policy", "code"),
    [
        ("INSERT INTO schema_migration VALUES (9999, 1)", "auto", "store_version"),
        ("DROP TABLE event", "verify", "store_schema"),
    ],
)
def test_nothing_is_ended_for_a_store_that_can_not_be_used(
    monkeypatch: pytest.MonkeyPatch, replaced: list[bool], tmp_path: Path, change: str, policy: str, code: str
) -> None:
    """Given a store of a newer version, or one that lacks something and may not be changed, then `up` fails before it
    looks at the services."""
    path = tmp_path / "s.db"
    monkeypatch.setenv("UNDERSTUDY_SCHEMA_POLICY", policy)
    database = Database(f"sqlite:///{path}")
    database.prepare()
    database.close()
    store = ("--store", f"sqlite:///{path}")
    assert up(monkeypatch, Running(), *store)[0] == 0
    assert replaced == [False]
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    found, output = up(monkeypatch, Running(), *store)
    assert (found, output["error"]["code"]) == (1, code)
    assert replaced == [False]
