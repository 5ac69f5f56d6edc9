"""The console's server: who may do what, what is shown, and that streams have no gap, no repetition and no queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from understudy.cluster.console import application, live
from understudy.cluster.console.access import Binding, Person, is_loopback, token_digest
from understudy.cluster.console.live import Hub, SharedReads, TreeLog, with_totals
from understudy.errors import InvalidConfiguration, StoreUnreachable
from understudy.store.reads import traces

from ..console_stage import KernelSource, served
from ..records import session_record
from . import kernel as k

TOKEN = "correct-horse-battery-staple"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def console(
    tmp_path: Path, token: str | None = None
) -> AsyncIterator[tuple[k.Kernel, KernelSource, httpx2.AsyncClient]]:
    """A kernel, and a client of the console on it."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        source = KernelSource(kernel)
        async with served(source, token) as url, httpx2.AsyncClient(base_url=url, timeout=20.0) as client:
            yield kernel, source, client


class Stream:
    """A reader of server-sent events."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.last = ""

    async def next(self) -> tuple[str, Any]:
        """The next event, as its name and data; a comment has no name."""
        name, data = "", None
        async with asyncio.timeout(20):
            async for line in self._lines:
                if line.startswith("id: "):
                    self.last = line[4:]
                elif line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                elif line.startswith(":"):
                    return "", line
                elif not line and name:
                    return name, data
        raise AssertionError("the stream ended")

    async def end(self) -> None:
        """Wait until the server ends it."""
        async with asyncio.timeout(20):
            async for _ in self._lines:
                pass

    async def until(self, wanted: str) -> Any:
        while True:
            name, data = await self.next()
            if name == wanted:
                return data


@asynccontextmanager
async def stream(client: httpx2.AsyncClient, path: str, **headers: str) -> AsyncIterator[Stream]:
    async with client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response.aiter_lines())


async def test_without_a_token_it_reads_and_never_acts(tmp_path: Path) -> None:
    """Everything can be read; each action is refused, and nothing of it reaches the cluster."""
    async with console(tmp_path) as (kernel, source, client):
        await kernel.run("s", k.spec(""), "hello")
        me = (await client.get("/api/me")).json()
        assert (me["has_token"], me["may_act"], me["locked"]) == (False, False, False)
        for path in ("", "/messages", "/events", "/trace?run=r"):
            assert (await client.get(f"/api/sessions/s{path}")).status_code == 200
        assert [row["session_id"] for row in (await client.get("/api/sessions")).json()["rows"]] == ["s"]
        before = len(source.asked)
        for action in ("cancel", "close", "resume", "abort-pending", "answer"):
            refused = await client.post(f"/api/sessions/s/{action}", json={"call_id": "x", "text": "y"})
            assert refused.status_code == 403
            assert "without a token" in refused.json()["error"]["message"]
        assert (await client.post("/api/login", json={"token": ""})).status_code == 401
        assert len(source.asked) == before


async def test_with_a_token_nothing_is_shown_or_done_without_it(tmp_path: Path) -> None:
    """No header, a wrong one, a wrong cookie: 401 everywhere; the page's own files, the health and `me` need none."""
    async with console(tmp_path, TOKEN) as (kernel, source, client):
        await kernel.spawn("s", k.spec(""))
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"cookie": "x=y"}):
            for path in ("/api/sessions", "/api/sessions/s", "/api/fleet/stream", "/api/sessions/s/stream"):
                assert (await client.get(path, headers=headers)).status_code == 401
            acted = await client.post("/api/sessions/s/close", json={}, headers=headers)
            assert acted.status_code == 401
        assert source.asked == []
        for path in ("/", "/healthz", "/static/main.js", "/api/me"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/api/me")).json() == {"has_token": True, "locked": True, "may_act": False}
        assert (await client.get("/api/sessions/s", headers=BEARER)).status_code == 200


async def test_logging_in_gives_a_cookie_that_is_not_the_token_and_ends_with_logging_out(tmp_path: Path) -> None:
    """The cookie is HttpOnly and SameSite=Strict, says nothing of the token, and is worth nothing after the log-out."""
    async with console(tmp_path, TOKEN) as (kernel, _, client):
        await kernel.spawn("s", k.spec(""))
        wrong = await client.post("/api/login", json={"token": TOKEN + "x"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        right = await client.post("/api/login", json={"token": TOKEN})
        cookie = right.headers["set-cookie"]
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie + right.text
        assert (await client.get("/api/me")).json()["may_act"]
        assert (await client.get("/api/sessions/s")).status_code == 200
        kept = {"cookie": cookie.partition(";")[0]}
        assert (await client.post("/api/logout", json={})).status_code == 200
        client.cookies.clear()
        assert (await client.get("/api/sessions/s", headers=kept)).status_code == 401


async def test_another_sites_page_can_neither_read_nor_act(tmp_path: Path) -> None:
    """A foreign host name, origin or form is refused, cookie or not; answers allow no other origin and no framing."""
    async with console(tmp_path, TOKEN) as (kernel, source, client):
        await kernel.spawn("s", k.spec(""))
        await client.post("/api/login", json={"token": TOKEN})
        rebound = await client.get("/api/sessions/s", headers={"host": "evil.example:8484"})
        assert rebound.status_code == 421
        path = "/api/sessions/s/close"
        assert (await client.post(path, json={}, headers={"origin": "http://evil.example"})).status_code == 403
        assert (await client.post(path, json={}, headers={"sec-fetch-site": "cross-site"})).status_code == 403
        assert (await client.post(path, data={"reason": "x"})).status_code == 415
        assert (await client.post(path, content="{}", headers={"content-type": "text/plain"})).status_code == 415
        assert "close" not in source.asked
        own = {"origin": str(client.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
        assert (await client.post(path, json={}, headers=own)).json() == {"done": True}
        answer = await client.get("/")
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.get("/api/me")).headers["cache-control"] == "no-store"


async def test_a_proxy_with_tls_may_stand_before_it(tmp_path: Path) -> None:
    """The page's own requests come with the proxy's origin and `Host: localhost`: the browser says that they are."""
    async with console(tmp_path, TOKEN) as (_, _, client):
        proxied = {"host": "localhost", "origin": "https://console.example"}
        for site, status in (("same-origin", 200), ("same-site", 403), ("cross-site", 403)):
            headers = {**proxied, "sec-fetch-site": site}
            assert (await client.post("/api/login", json={"token": TOKEN}, headers=headers)).status_code == status
        assert (await client.post("/api/login", json={"token": TOKEN}, headers=proxied)).status_code == 403


async def test_another_sites_page_keeps_nobody_busy(tmp_path: Path) -> None:
    """Without a token, too: what it asks for is neither read nor followed, though it could not see it anyway."""
    async with console(tmp_path) as (kernel, source, client):
        await kernel.spawn("s", k.spec(""))
        for path in ("/api/fleet/stream", "/api/sessions/s/stream", "/api/sessions/s/trace", "/api/sessions"):
            for site in ("cross-site", "same-site"):
                assert (await client.get(path, headers={"sec-fetch-site": site})).status_code == 403
        assert source.asked == []


async def test_a_stream_ends_with_the_cookie_that_it_was_opened_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has logged out receives nothing more, on pages that are still open."""
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.2)
    async with console(tmp_path, TOKEN) as (kernel, _, client):
        await kernel.spawn("s", k.spec(""))
        await client.post("/api/login", json={"token": TOKEN})
        async with stream(client, "/api/sessions/s/stream") as tree, stream(client, "/api/fleet/stream") as fleet:
            await tree.until("state")
            await fleet.until("fleet")
            await client.post("/api/logout", json={})
            await tree.end()
            await fleet.end()


async def test_nonsense_is_refused_and_traces_back_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has no token can send anything: host names, origins and bodies that nothing can read."""
    async with console(tmp_path, TOKEN) as (_, _, client):
        json_type = {"content-type": "application/json"}
        assert (await client.get("/api/me", headers={"host": "["})).status_code == 421
        for origin in ("http://[", "null", "["):
            headers = {**json_type, "origin": origin}
            assert (await client.post("/api/login", content="{}", headers=headers)).status_code == 403
        for body, status in (("[" * 500_000, 400), (b"\xff", 400), ("[]", 400), (r'{"token": "\ud800"}', 401)):
            assert (await client.post("/api/login", content=body, headers=json_type)).status_code == status
        assert (await client.get("/api/sessions?limit=0", headers=BEARER)).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_nobody_expected_is_an_answer_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error of ours is reported by its kind alone, with the headers of every answer; the log has the rest."""
    async with console(tmp_path) as (_, source, client):
        source.problem = KeyError("what the store holds")
        answer = await client.get("/api/sessions")
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "KeyError")
        assert answer.headers["x-frame-options"] == "DENY"
    assert [record for record in caplog.records if record.exc_info]


class Trees:
    """A source of sessions that never end, and that take a while to let go."""

    def __init__(self) -> None:
        self.followed: list[str] = []

    async def read(self, _kind: Any, what: str, session_id: str) -> Any:
        row = session_record(session_id)
        return {"info": row, "tree": [row], "budgets": []}[what]

    async def follow(self, session_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
        self.followed.append(session_id)
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            await asyncio.sleep(0.05)
            self.followed.remove(session_id)


async def test_each_tree_has_one_log_whoever_comes_and_goes_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given trees that nobody looks at any more, when several pages come while these are let go of, then there is one
    log of each tree that is looked at, and in the end none is followed that nobody knows of."""
    monkeypatch.setattr(live, "LINGER_SECONDS", 0.0)
    source = Trees()
    hub = Hub(source)  # type: ignore[arg-type]

    async def look(session_id: str) -> TreeLog:
        found = await hub._tree_of(session_id)
        found.viewers += 1
        async with asyncio.timeout(10):
            while not found.state_message:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    for _ in range(3):
        for tree in [await look(f"old-{number}") for number in range(3)]:
            tree.viewers -= 1
        _, _, *pages = await asyncio.gather(hub._let_go(), hub._let_go(), *(look("new") for _ in range(3)))
        assert len({id(page) for page in pages}) == 1
        assert sorted(source.followed) == ["new"]
        assert sorted(hub._tasks) == ["new"]
        pages[0].viewers = 0
    await hub.close()
    assert source.followed == []


async def test_so_many_trees_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given logs that nobody looks at, when more are begun than are kept, then the oldest go before their time."""
    monkeypatch.setattr(live, "TREES", 4)
    monkeypatch.setattr(live, "LINGER_SECONDS", float("inf"))
    hub = Hub(Trees())  # type: ignore[arg-type]
    for number in range(9):
        (await hub._tree_of(f"s{number}")).unseen_since = number
        assert len(hub._trees) <= 4
    assert sorted(hub._trees) == ["s5", "s6", "s7", "s8"]
    await hub.close()


async def test_what_a_person_can_do_is_done(tmp_path: Path) -> None:
    """With the token in a header: a question is answered, a run cancelled, a session closed; nonsense is refused."""
    async with console(tmp_path, TOKEN) as (kernel, _, client):
        question = [("request_user_input", {"prompt": "Which?", "options": ["red", "blue"]})]
        await kernel.spawn("s", k.spec(k.script(question, "thanks"), ["request_user_input"]))
        await kernel.send("s")
        (asked,) = await kernel.paused("s")

        async def post(action: str, **body: Any) -> httpx2.Response:
            return await client.post(f"/api/sessions/s/{action}", json=body, headers=BEARER)

        call = {"call_id": asked["call_id"], "asked": asked["asked"]}
        for body in (
            {},
            {**call, "decision": "ok", "text": ""},
            {**call, "decision": "rerun", "text": "x"},
            {**call, "text": 3},
            {**call, "decision": "ok", "text": "\0"},
            {**call, "asked": "once", "decision": "ok", "text": "blue"},
            {**call, "asked": None, "decision": "ok", "text": "blue"},
        ):
            assert (await post("answer", **body)).status_code == 400
        assert (await post("answer", **call, decision="ok", text="blue")).json() == {"done": True}
        assert (await kernel.end("s"))["text"] == "thanks"
        assert (await post("answer", **call, decision="ok", text="red")).status_code == 409
        kernel.server.hold()
        await kernel.send("s", "again", "r2")
        await kernel.until("s", "model_call_started", 3)
        assert (await post("cancel", reason="enough")).json() == {"done": True}
        assert (await kernel.end("s", "r2"))["status"] == "cancelled"
        kernel.server.release()
        assert (await post("close")).json() == {"done": True}
        assert (await post("resume")).json() == {"done": False}  # it was not quarantined
        assert (await post("explode")).status_code == 400
        assert (
            await client.post(
                "/api/sessions/s/close", content=b"[", headers={**BEARER, "content-type": "application/json"}
            )
        ).status_code == 400


async def test_approvals_from_the_page(tmp_path: Path) -> None:
    """Several calls are decided at once; what makes no sense, or is said without the token, changes nothing."""
    async with console(tmp_path, TOKEN) as (kernel, _, client):
        calls = [("glob", {"pattern": "*"}), ("glob", {"pattern": "?"})]
        compiled = k.spec(k.script(calls, "thanks"), ["glob"], workspace=str(tmp_path))
        await kernel.spawn("s", {**compiled, "tools": [{**tool, "approve": True} for tool in compiled["tools"]]})
        await kernel.send("s")
        asked = [{"call_id": item["call_id"], "asked": item["asked"]} for item in await kernel.paused("s")]
        decisions = [{**asked[0], "decision": "approve"}, {**asked[1], "decision": "reject", "text": "no"}]

        async def post(body: Any, headers: dict[str, str]) -> httpx2.Response:
            return await client.post("/api/sessions/s/decide", json=body, headers=headers)

        assert (await post({"decisions": decisions}, {})).status_code in (401, 403)
        for wrong in ([], "x", [{}], [{**decisions[0], "text": "{"}], [{**decisions[0], "decision": "ok"}]):
            assert (await post({"decisions": wrong}, BEARER)).status_code == 400
        assert len(await kernel.paused("s")) == 2
        assert (await post({"decisions": decisions}, BEARER)).json() == {"done": ["r/1/0", "r/1/1"]}
        assert (await kernel.end("s"))["text"] == "thanks"
        results = [message["content"] for message in await kernel.messages("s") if message["role"] == "tool"]
        assert results[1] == "not executed: it was not approved: no"


@pytest.mark.thorough
async def test_what_is_not_there_or_makes_no_sense_is_an_error_with_its_reason(tmp_path: Path) -> None:
    """Unknown sessions and runs are 404, numbers that are none 400, a store that is away 503, with the reason."""
    async with console(tmp_path) as (kernel, source, client):
        await kernel.run("s", k.spec(""))
        for path in ("", "/stream", "/messages", "/events", "/trace"):
            assert (await client.get(f"/api/sessions/nobody{path}")).status_code == 404
        assert (await client.get("/api/sessions/s/trace?run=none")).status_code == 404
        for path in ("%00", "%3Cscript%3E", "x" * 200):
            assert (await client.get(f"/api/sessions/{path}")).status_code == 404
        assert (await client.get("/api/sessions?text=%00")).status_code == 200
        for query in ("limit=-1", "limit=9999", "cursor=x,y", "limit=²"):
            assert (await client.get(f"/api/sessions?{query}")).status_code == 400
        assert (await client.get("/static/../../access.py")).status_code == 404
        source.problem = StoreUnreachable("the store is away")
        away = await client.get("/api/sessions/s")
        assert (away.status_code, away.json()["error"]["message"]) == (503, "the store is away")


async def test_a_tree_is_followed_live_with_the_sub_agents_that_come(tmp_path: Path) -> None:
    """A viewer who came before the sub-agent exists gets its events too; a crash and its recovery are among them."""
    async with console(tmp_path) as (kernel, _, client):
        note = [("note", {"path": str(tmp_path / "notes"), "text": "x"})]
        child = k.spec(k.script(note, "seen"), [k.note], name="child")
        spawn = [("spawn_agent", {"agent": "child", "task": "t"})]
        await kernel.spawn("s", k.spec(k.script(spawn, "done"), ["spawn_agent"], agents={"child": child}, name="lead"))

        def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "tool begins" and worker is not None:
                kernel.on_point = None
                kernel.kill(worker)

        kernel.on_point = on_point
        async with stream(client, "/api/sessions/s/stream") as found:
            await found.until("state")
            await kernel.send("s")
            wanted = {("child", kind) for kind in ("session_crashed", "session_activated", "run_finished")}
            wanted.add(("lead", "run_finished"))
            while wanted:
                wanted -= {(event["agent"], event["type"]) for event in await found.until("log")}
        rows = (await client.get("/api/sessions/s/trace?run=r")).json()["spans"]
        assert {"recover child", "crash child", "invoke_agent lead"} <= {span["name"] for span in rows}


@pytest.mark.parametrize(("most", "truncated"), [(3, True), (10_000, False)])
async def test_a_trace_that_is_drawn_in_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, truncated: bool
) -> None:
    """A trace with more events than are drawn is `truncated`; one that is drawn whole is not."""
    monkeypatch.setattr(traces, "TRACE_PAGE", 3)
    monkeypatch.setattr(application, "TRACE_EVENTS", most)
    async with console(tmp_path) as (kernel, _, client):
        await kernel.run("s", k.spec(""))
        found = (await client.get("/api/sessions/s/trace?run=r")).json()
        assert found["truncated"] == truncated
        assert (found["events"] == most) == truncated


async def test_a_viewer_who_was_cut_off_goes_on_without_gap_or_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off after any event: with its id the rest comes, by header or query; with an unknown id all comes again."""
    monkeypatch.setattr(live, "AT_ONCE", 2)
    async with console(tmp_path) as (kernel, _, client):
        await kernel.run("s", k.spec(""))
        wanted = [event["seq"] for event in await kernel.events("s")]
        seen: list[int] = []
        last = ""
        while len(seen) < len(wanted):  # one batch for each connection
            headers = {"last-event-id": last} if len(seen) % 4 else {}
            async with stream(client, f"/api/sessions/s/stream?last={last}", **headers) as found:
                name, data = "", None
                while name != "log":
                    name, data = await found.next()
                    assert name != "reset" or not seen
                assert len(data) <= 2
                seen, last = seen + [event["seq"] for event in data], found.last
        assert seen == wanted
        for unknown in ("elsewhere.3", f"{last.partition('.')[0]}.99999", "nonsense", "."):
            async with stream(client, "/api/sessions/s/stream", **{"last-event-id": unknown}) as found:
                assert (await found.next())[0] == "reset"


async def test_the_log_of_a_tree_is_bounded_and_who_is_behind_it_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that reads nothing holds up nobody; when it reads again, and its place is gone, it gets a reset."""
    monkeypatch.setattr(live, "EVENTS", 20)
    monkeypatch.setattr(live, "AT_ONCE", 5)
    log = TreeLog(source=None, root_id="s")  # type: ignore[arg-type]
    slow = log.stream("")
    assert "event: reset" in await anext(slow)
    for seq in range(100):
        await log._take({"session_id": "s", "seq": seq, "at": seq, "type": "run_started"})
    assert len(log.events) <= 25
    assert "event: reset" in await anext(slow)
    seen: list[int] = []
    while len(seen) < len(log.events):
        seen += [event["seq"] for event in json.loads((await anext(slow)).partition("data: ")[2])]
    assert seen == [event["seq"] for event in log.events]
    await slow.aclose()


@pytest.mark.thorough
async def test_many_viewers_cost_the_store_no_more_than_one(tmp_path: Path) -> None:
    """Eight pages that look at the cluster and at a tree for a while read it about as often as one does."""
    async with console(tmp_path) as (kernel, source, client):
        await kernel.run("s", k.spec(""))

        async def look(path: str, wanted: str, times: int) -> None:
            async with stream(client, path) as found:
                for _ in range(times):
                    await found.until(wanted)

        async def reads(viewers: int) -> int:
            source.asked.clear()
            trees = [look("/api/sessions/s/stream", "state", 1) for _ in range(viewers)]
            details = [client.get("/api/sessions/s") for _ in range(viewers)]
            await asyncio.gather(*(look("/api/fleet/stream", "change", 2) for _ in range(viewers)), *trees, *details)
            return len([what for what in source.asked if what in ("working", "tree", "latest_runs")])

        one = await reads(1)
        assert await reads(8) <= 2 * one


async def test_who_follows_the_cluster_gets_what_has_changed(tmp_path: Path) -> None:
    """The first look has all sessions at work; then come those that changed, and which are left when one has ended."""
    asks = k.spec(k.script([("request_user_input", {"prompt": "?"})], "done"), ["request_user_input"])
    async with console(tmp_path) as (kernel, _, client):
        for name in ("a", "b", "c"):
            await kernel.spawn(name, asks)
            await kernel.send(name)
            await kernel.paused(name)
        async with stream(client, "/api/fleet/stream") as found:
            whole = await found.until("fleet")
            assert [row["session_id"] for row in whole["sessions"]] == ["a", "b", "c"]
            async with asyncio.timeout(20):
                while (change := await found.until("change"))["rows"]:
                    pass
            assert "order" not in change
            assert {"sessions", "incidents"}.isdisjoint(change)
            await kernel.ask("cancel", "b", None, "enough")
            await kernel.end("b")
            while "order" not in (change := await found.until("change")):
                assert {row["session_id"] for row in change["rows"]} <= {"b"}
            assert (change["order"], change["statuses"]) == (["a", "c"], {"waiting_for_input": 2})
        for name in ("a", "c"):
            await kernel.ask("cancel", name, None, "enough")
            await kernel.end(name)


def test_changes_make_a_snapshot_of_the_one_before() -> None:
    """Whatever came, went, moved or changed; who missed one snapshot gets the whole of the next."""
    at_first = {"at": 1, "totals": {"sessions": 2}, "sessions": [{"session_id": "a", "round": 1}, {"session_id": "b"}]}
    later = {"at": 2, "totals": {"sessions": 3}, "sessions": [{"session_id": "c"}, {"session_id": "a", "round": 2}]}
    assert live.changes(at_first, later) == {
        "at": 2, "totals": {"sessions": 3}, "rows": [{"session_id": "c"}, {"session_id": "a", "round": 2}],
        "order": ["c", "a"],
    }  # fmt: skip
    assert live.changes(later, {**later, "at": 3}) == {"at": 3, "rows": []}
    sent = live.FleetSent()
    sent.take(1, at_first)
    sent.take(2, later)
    sent.take(2, later)
    assert [sent.since(version).partition("\n")[0] for version in (0, 1)] == ["event: fleet", "event: change"]
    sent.take(4, later)
    assert sent.since(3).startswith("event: fleet")


async def test_too_many_pages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page more than there may be gets a clear answer, and room is made when one goes."""
    monkeypatch.setattr(live, "VIEWERS", 1)
    async with console(tmp_path) as (_, _, client):
        async with stream(client, "/api/fleet/stream") as found:
            await found.until("fleet")
            refused = await client.get("/api/fleet/stream")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_viewers"
        # That a connection has ended is not noticed at once.
        async with asyncio.timeout(20):
            while (await client.get("/api/sessions/nobody/stream")).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_silence_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing happens a comment comes, so that whatever is in between keeps the connection."""
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.2)
    async with console(tmp_path) as (kernel, _, client):
        await kernel.spawn("s", k.spec(""))
        async with stream(client, "/api/sessions/s/stream") as found:
            while (await found.next())[0]:
                pass


async def test_who_asks_at_the_same_moment_shares_one_read_that_began_afterwards() -> None:
    """Those who come while a read is under way share the next one; an error reaches all of them, and no later one."""
    reads = SharedReads()
    begun, began, let_go = 0, asyncio.Event(), asyncio.Event()

    async def read() -> int:
        nonlocal begun
        begun += 1
        mine = begun
        began.set()
        await let_go.wait()
        if mine == 2:
            raise StoreUnreachable("away")
        return mine

    first = asyncio.create_task(reads.get("key", read))
    async with asyncio.timeout(5):
        await began.wait()
    later = [asyncio.create_task(reads.get("key", read)) for _ in range(5)]
    later[0].cancel()
    let_go.set()
    assert await first == 1
    found = await asyncio.gather(*later, return_exceptions=True)
    assert [type(result) for result in found[1:]] == [StoreUnreachable] * 4
    assert await reads.get("key", read) == 3


def test_totals_of_a_tree_are_those_of_all_below() -> None:
    """Each row has its own tokens and, beside them, those of its whole subtree."""
    rows = [
        session_record(name, parent_id=parent, tokens_used=tokens, cost_used=10 * tokens)
        for name, parent, tokens in (("root", None, 1), ("a", "root", 2), ("b", "root", 4), ("a1", "a", 8))
    ]
    found = {row["session_id"]: row for row in with_totals(rows)}
    assert {name: row["tokens_below"] for name, row in found.items()} == {"root": 15, "a": 10, "b": 4, "a1": 8}
    assert found["root"]["cost_below"] == 150
    assert found["a"]["sessions_below"] == 2
    assert found["a"]["tokens_used"] == 2


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_others_than_this_machine_need_a_token(host: str, loopback: bool) -> None:
    """Without a token the console listens on loopback addresses only; with one, anywhere."""
    assert is_loopback(host) is loopback
    Binding(host, 1, {token_digest(TOKEN): Person("console")}).check()
    if loopback:
        Binding(host, 1).check()
    else:
        with pytest.raises(InvalidConfiguration, match="--token-file"):
            Binding(host, 1).check()
    assert TOKEN not in repr(Binding(host, 1, {token_digest(TOKEN): Person("console")}))
