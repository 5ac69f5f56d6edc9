"""The console: who is who, who may act, what a proxy may say, and whose name is in the events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from understudy.actors.tools import tool
from understudy.cluster.console.access import PROXY_SECRET, Binding, Person, token_digest
from understudy.cluster.console.users import read_users
from understudy.cluster.ray.console_actor import listen
from understudy.errors import InvalidConfiguration, InvalidInput
from understudy.events import Event
from understudy.store.operations import activation

from ..console_stage import KernelSource, served
from . import kernel as k

SECRET = "what-only-the-proxy-knows"
WHO = "X-Forwarded-Email"
BEHIND: dict[str, Any] = {"proxy": token_digest(SECRET), "identity_header": WHO}
PROXIED = {PROXY_SECRET: SECRET, WHO: "ann@example.org"}


@asynccontextmanager
async def console(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[k.Kernel, httpx2.AsyncClient]]:
    """A kernel with a session `s`, and a client of the console on it."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.spawn("s", k.spec(""))
        async with (
            served(KernelSource(kernel), **options) as url,
            httpx2.AsyncClient(base_url=url, timeout=20.0) as client,
        ):
            yield kernel, client


async def said_by(kernel: k.Kernel, kind: str, session_id: str = "s") -> list[str]:
    """Whom the session's events of this type name."""
    found = await kernel.ask("events", session_id, 0)
    return [event["data"]["by"] for event in found if event["type"] == kind]


async def test_an_event_names_whose_token_it_was_and_a_repetition_does_not_change_that(tmp_path: Path) -> None:
    """Of two people with a token each, the one who closed the session is in the event; the second finds it closed."""
    tokens = {token_digest("a" * 20): Person("ann"), token_digest("b" * 20): Person("bob")}
    async with console(tmp_path, tokens=tokens) as (kernel, client):
        for token, done in (("b" * 20, True), ("a" * 20, False)):
            closed = await client.post(
                "/api/sessions/s/close", json={}, headers={"authorization": f"Bearer {token}"}
            )  # fmt: skip
            assert closed.json() == {"done": done}
        assert await said_by(kernel, "session_closed") == ["bob"]


async def test_a_cookie_stands_for_the_person_who_logged_in(tmp_path: Path) -> None:
    """The page receives the name, and events hold it."""
    async with console(tmp_path, tokens={token_digest("a" * 20): Person("ann")}) as (kernel, client):
        assert (await client.post("/api/login", json={"token": "a" * 20})).status_code == 200
        assert (await client.get("/api/me")).json()["name"] == "ann"
        await client.post("/api/sessions/s/close", json={})
        assert await said_by(kernel, "session_closed") == ["ann"]


async def test_who_only_reads_can_look_and_not_act(tmp_path: Path) -> None:
    """By a token and by the proxy alike: reading is answered, an action refused and not done."""
    options = {**BEHIND, "tokens": {token_digest("a" * 20): Person("ann", False)}, "readers": frozenset({"eve"})}
    async with console(tmp_path, **options) as (kernel, client):
        for headers in ({"authorization": "Bearer " + "a" * 20}, {**PROXIED, WHO: "eve"}):
            assert (await client.get("/api/sessions/s", headers=headers)).status_code == 200
            me = (await client.get("/api/me", headers=headers)).json()
            assert (me["may_act"], me["locked"]) == (False, False)
            refused = await client.post("/api/sessions/s/close", json={}, headers=headers)
            assert refused.status_code == 403
        assert await said_by(kernel, "session_closed") == []


async def test_the_proxys_header_says_who_acts(tmp_path: Path) -> None:
    """With the proxy's secret its header is the identity, under any host name, and beside a bearer token of its own."""
    async with console(tmp_path, **BEHIND) as (kernel, client):
        headers = {**PROXIED, "host": "agents.example.org", "authorization": "Bearer of-the-proxy"}
        assert (await client.post("/api/sessions/s/close", json={}, headers=headers)).json() == {"done": True}
        assert await said_by(kernel, "session_closed") == ["ann@example.org"]


@pytest.mark.parametrize(
    "headers",
    [
        [(WHO, "ann@example.org")],
        [(WHO, "ann@example.org"), (PROXY_SECRET, "guessed")],
        [(WHO, "ann@example.org"), (PROXY_SECRET, "")],
        [(PROXY_SECRET, SECRET)],
        [(PROXY_SECRET, SECRET), (WHO, "")],
        [(PROXY_SECRET, SECRET), (WHO, "ann@example.org"), (WHO, "eve@example.org")],
        [(PROXY_SECRET, SECRET), (WHO, "a" * 201)],
        [(PROXY_SECRET, SECRET), ("X-Forwarded-User", "ann@example.org")],
    ],
)
async def test_a_forged_identity_is_nobodys(tmp_path: Path, headers: list[tuple[str, str]]) -> None:
    """Without the secret, with a wrong one, with no name, two, too long a one, or in another header: 401."""
    async with console(tmp_path, **BEHIND) as (kernel, client):
        assert (await client.get("/api/sessions/s", headers=headers)).status_code == 401
        assert (await client.post("/api/sessions/s/close", json={}, headers=headers)).status_code == 401
        assert await said_by(kernel, "session_closed") == []


async def test_another_sites_page_cannot_use_that_the_proxy_knows_somebody(tmp_path: Path) -> None:
    """The proxy's cookie goes with what another site has the browser send: it is refused all the same."""
    async with console(tmp_path, **BEHIND) as (kernel, client):
        for more in ({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://evil.org"}):
            refused = await client.post("/api/sessions/s/close", json={}, headers={**PROXIED, **more})
            assert refused.status_code == 403
        form = await client.post("/api/sessions/s/close", data={"a": "b"}, headers=PROXIED)
        assert form.status_code == 415
        assert await said_by(kernel, "session_closed") == []


@pytest.mark.parametrize(
    ("prefix", "headers", "name"),
    [
        ("", {PROXY_SECRET: SECRET, "x-forwarded-proto": "https"}, "__Host-understudy_console"),
        ("/understudy", {PROXY_SECRET: SECRET, "x-forwarded-proto": "https"}, "__Secure-understudy_console"),
        ("", {"x-forwarded-proto": "https"}, "understudy_console"),
        ("", {PROXY_SECRET: SECRET, "x-forwarded-proto": "http"}, "understudy_console"),
    ],
)
async def test_behind_tls_the_cookie_is_secure(
    tmp_path: Path, prefix: str, headers: dict[str, str], name: str
) -> None:  # fmt: skip
    """If the proxy says that the request came over TLS: `Secure`, with the name that browsers guard; else it isn't."""
    async with console(tmp_path, token="a" * 20, proxy=token_digest(SECRET), prefix=prefix) as (_, client):
        answer = await client.post(f"{prefix}/api/login", json={"token": "a" * 20}, headers=headers)
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{name}_")
        words = cookie.lower().split("; ")
        assert ("secure" in words) == name.startswith("__")
        assert {"httponly", "samesite=strict", f"path={prefix}/"} <= set(words)
        sent = {**headers, "cookie": cookie.partition(";")[0]}
        client.cookies.clear()
        assert (await client.get(f"{prefix}/api/sessions/s", headers=sent)).status_code == 200
        await client.post(f"{prefix}/api/logout", json={}, headers=sent)
        assert (await client.get(f"{prefix}/api/sessions/s", headers=sent)).status_code == 401


@asynccontextmanager
async def reverse_proxy(target: str, prefix: str, *, strips: bool) -> AsyncIterator[str]:
    """A proxy in front of a console, below a prefix; it logs everybody in as Ann. Its URL without the prefix."""

    async def passed_on(request: Request) -> StreamingResponse:
        path = request.url.path.removeprefix(prefix) if strips else request.url.path
        kept = {name: request.headers[name] for name in ("content-type", "cookie") if name in request.headers}
        out = client.build_request(
            request.method, path, params=request.query_params, headers={**kept, **PROXIED}, content=await request.body()
        )  # fmt: skip
        answer = await client.send(out, stream=True)
        headers = {name: answer.headers[name] for name in ("content-type", "location") if name in answer.headers}
        return StreamingResponse(answer.aiter_bytes(), answer.status_code, headers)

    listening = listen(Binding("127.0.0.1", 0))
    async with httpx2.AsyncClient(base_url=target, timeout=20.0) as client:
        app = Starlette(routes=[Route(f"{prefix}{{rest:path}}", passed_on, methods=["GET", "POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.parametrize("strips", [True, False])
async def test_the_page_works_below_a_prefix_of_a_proxy(tmp_path: Path, strips: bool) -> None:
    """Page, files, requests, streams and actions, whether the proxy takes the prefix off or not."""
    async with (
        k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel,
        served(KernelSource(kernel), prefix="/understudy", **BEHIND) as url,
        reverse_proxy(url, "/understudy", strips=strips) as outside,
        httpx2.AsyncClient(base_url=f"{outside}/understudy/", timeout=20.0, follow_redirects=True) as client,
    ):
        await kernel.spawn("s", k.spec(""))
        page = (await client.get("")).text
        assert '"static/main.js"' in page
        assert '"/' not in page
        assert (await client.get("static/main.js")).status_code == 200
        assert (await client.get("api/me")).json()["name"] == "ann@example.org"
        async with client.stream("GET", "api/sessions/s/stream") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                assert line
                break
        assert (await client.post("api/sessions/s/close", json={})).json() == {"done": True}
        assert await said_by(kernel, "session_closed") == ["ann@example.org"]
        if not strips:
            bare = await client.get(f"{outside}/understudy", follow_redirects=False)
            assert bare.headers["location"] == "/understudy/"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"identity_header": WHO}, "anybody can send"),
        ({"proxy": token_digest(SECRET)}, "only with a token"),
        ({**BEHIND, "identity_header": "Authorization"}, "holds a secret"),
        ({"prefix": "understudy"}, "no prefix"),
        ({"prefix": "/a/../b c"}, "no prefix"),
        ({"prefix": "//evil.org"}, "no prefix"),
    ],
)
def test_a_binding_that_would_let_anybody_in_is_refused(options: dict[str, Any], problem: str) -> None:
    """A header without a secret, a proxy that shows the page to all, a prefix that is none: nothing listens."""
    with pytest.raises(InvalidConfiguration, match=problem):
        Binding("127.0.0.1", 1, **options).check()


def test_the_file_of_users(tmp_path: Path) -> None:
    """Names with rights and tokens; a line that is wrong is named, and nobody is let in."""
    file, ann = tmp_path / "users", token_digest("a" * 20)
    file.write_text(f"# people\n\nann act {ann}\neve read -\n")
    assert read_users(file) == ({ann: Person("ann")}, frozenset({"eve"}))
    for wrong in ("ann", "ann may-act -", "ann act secret", f"ann act {ann}\nbob read {ann}", "ann act -\nann read -"):
        file.write_text(wrong + "\n")
        with pytest.raises(InvalidConfiguration, match=r"line \d"):
            read_users(file)
    with pytest.raises(InvalidConfiguration, match="can't be read"):
        read_users(tmp_path / "none")


QUESTION = ("request_user_input", {"prompt": "Which colour?"})


@tool(approve=True)
async def pay() -> str:
    """Have an effect that nobody may have without approval."""
    return "paid"


async def test_all_that_people_ask_for_names_them(tmp_path: Path) -> None:
    """Sending, answering, approving, rejecting, giving up, interrupting, cancelling, closing; who says nothing, and
    what nobody asked for, has no name."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        rounds = k.script(*[[("pay", {})]] * 2, *[[QUESTION]] * 3, "done")
        await kernel.spawn("s", k.spec(rounds, [pay, "request_user_input"]))
        await kernel.ask("send", "s", {"run_id": "r", "content": "go"}, "1", "ann")
        for number, decision in enumerate(("approve", "reject"), 2):
            [question] = await kernel.paused("s")
            said = {"call_id": question["call_id"], "asked": 1, "decision": decision}
            await kernel.ask("decide", "s", [said], str(number), f"who {decision}s")
        [question] = await kernel.paused("s")
        await kernel.ask("answer", "s", question["call_id"], "ok", "red", 1, "4", "eve")
        await kernel.paused("s")
        await kernel.ask("abort_pending", "s", None, "5", "gil")
        await kernel.paused("s")
        await kernel.ask("steer", "s", {"content": "blue", "interrupt": True}, "6", "ida")
        await kernel.ask("cancel", "s", "r", "", "7", "ned")
        await kernel.end("s")
        await kernel.send("s", run_id="r2")
        assert await said_by(kernel, "run_accepted") == ["ann", ""]
        received = ["who approves", "who rejects", "eve", "gil", "ida"]
        assert await said_by(kernel, "input_received") == received
        await kernel.ask("close", "s", "", "8", "joe")
        await kernel.end("s", "r2")
        assert await said_by(kernel, "cancel_requested") == ["ned", "joe"]
        assert await said_by(kernel, "session_closed") == ["joe"]


async def test_a_request_that_is_repeated_keeps_the_first_name(tmp_path: Path) -> None:
    """Sent, cancelled and resumed again by somebody else, with the same id or as a request of their own: there is one
    event, of whoever was first; an identity that can't be one is refused, and changes nothing."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.spawn("s", k.spec(k.script([QUESTION], "done"), ["request_user_input"]))
        for request_id, by in (("1", "ann"), ("1", "bob"), ("2", "bob")):
            await kernel.ask("send", "s", {"run_id": "r", "content": "go"}, request_id, by)
        await kernel.paused("s")
        with pytest.raises(InvalidInput, match="identity"):
            await kernel.ask("cancel", "s", "r", "", "3", "a\nb")
        for request_id, by in (("3", "eve"), ("3", "bob"), ("4", "bob")):
            await kernel.ask("cancel", "s", "r", "", request_id, by)
        await kernel.end("s")
        await kernel.service.journal.submit(
            lambda tx: activation.quarantine(tx, tx.session("s"), "stuck", "it dies each time"), "s"
        )
        for request_id, by in (("5", "gil"), ("5", "bob"), ("6", "bob")):
            await kernel.ask("resume", "s", request_id, by)
        for kind, name in (("run_accepted", "ann"), ("cancel_requested", "eve"), ("session_resumed", "gil")):
            assert await said_by(kernel, kind) == [name]


async def test_of_what_is_committed_together_each_has_its_own_name(tmp_path: Path) -> None:
    """Of many requests at once, which share transactions, each event has the name of its own request, or none."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        names = {f"s{number}": f"person {number}" if number % 2 else "" for number in range(20)}
        for session_id in names:
            await kernel.spawn(session_id, k.spec(""))
        await asyncio.gather(*(kernel.ask("close", one, "", f"of {one}", name) for one, name in names.items()))
        for session_id, name in names.items():
            assert await said_by(kernel, "session_closed", session_id) == [name]


def test_an_event_that_was_written_without_a_name_is_read() -> None:
    """Its `by` is empty."""
    old = {"type": "session_closed", "seq": 1, "session_id": "s", "data": {"reason": "done"}}
    assert Event.from_wire(old).body() == {"reason": "done", "by": "", "last_run": ""}
