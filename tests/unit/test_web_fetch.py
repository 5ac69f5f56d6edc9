"""`web_fetch`: which addresses it fetches, whatever leads there, and what of a page a model is shown."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from understudy import AgentSpec, InvalidSpec, WebPolicy
from understudy.actors import fetching, web_tool
from understudy.actors.fetching import fetch
from understudy.actors.html_text import html_text
from understudy.actors.tools import ToolContext
from understudy.actors.web_rules import Page, Wanted, WebRules, is_public
from understudy.actors.web_tool import web_fetch
from understudy.attachments import Image
from understudy.cluster.client.compiling import compile_spec
from understudy.errors import ToolError

OPEN = WebRules(private=True)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 30

Answer = tuple[int, dict[str, str], bytes]


class Site:
    """A web server of this machine.

    Attributes:
        pages: what it answers, by path.
        asked: path and `Host` of each request.
    """

    def __init__(self) -> None:
        self.pages: dict[str, Answer | Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[tuple[str, str]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers["Host"]))
                page = site.pages.get(self.path, (404, {"Content-Type": "text/plain"}, b"nothing here"))
                if callable(page):
                    return page(self)
                status, headers, body = page
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.close()


def html(body: str, **headers: str) -> Answer:
    return 200, {"Content-Type": "text/html; charset=utf-8", **headers}, body.encode()


def context_of(rules: WebRules | None = OPEN) -> ToolContext:
    return ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", web=rules)


class TestRules:
    """Which URLs are fetched at all."""

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("file:///etc/passwd", "only http and https"),
            ("ftp://example.org/", "only http and https"),
            ("http:///path", "only http and https"),
            ("javascript:alert(1)", "only http and https"),
            ("http://user:secret@example.org/", "user or a password"),
            ("http://example.org\\@evil.net/", "backslash"),
            ("http://example.org/\r\nX: y", "white space"),
            ("http://example.org:99999/", "no URL"),
            ("http://[::1/", "no URL"),
            ("http://" + "a" * 70 + ".org/", "no URL"),
            ("http://example.org/" + "a" * 9_000, "too long"),
        ],
    )
    def test_what_is_no_url_of_a_page(self, url: str, problem: str) -> None:
        """Other schemes, credentials, and what parsers read differently."""
        with pytest.raises(ToolError, match=problem):
            WebRules().target(url)

    def test_hosts_are_allowed_and_denied(self) -> None:
        """Names are compared whole, in any case and with or without the root's dot; `deny` comes first."""
        rules = WebRules(allow=("docs.example.org", "*.example.net"), deny=("x.example.net", "*.y.example.net"))
        for host in ("docs.example.org", "DOCS.example.org.", "a.example.net", "a.b.example.net", "y.example.net"):
            rules.target(f"https://{host}/")
        for host in ("example.org", "xdocs.example.org", "docs.example.org.evil.net", "example.net", "evilexample.net"):
            with pytest.raises(ToolError, match=r"it may from docs\.example\.org"):
                rules.target(f"https://{host}/")
        for host in ("x.example.net", "a.y.example.net"):
            with pytest.raises(ToolError, match=r"`web\.deny`"):
                rules.target(f"https://{host}/")

    def test_targets_are_encoded(self) -> None:
        """What is not ASCII is encoded as browsers do; what is encoded stays."""
        target = WebRules().target("https://bücher.example:8443/a b/ü%20?q=ü&r=%3D#part".replace(" ", "%20"))
        assert (target.host, target.port) == ("xn--bcher-kva.example", 8443)
        assert target.path == "/a%20b/%C3%BC%20?q=%C3%BC&r=%3D"
        assert target.authority == "xn--bcher-kva.example:8443"

    @pytest.mark.parametrize(
        "address",
        [
            "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
            "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1",
            "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "64:ff9b:1:a00:0:100:808:808", "fec0::1",
            "::a00:1", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1",
        ],
    )  # fmt: skip
    def test_addresses_that_are_not_public(self, address: str) -> None:
        """This machine's, private, shared, link-local, of groups, reserved, and IPv6 addresses that stand for such."""
        assert not is_public(address)

    @pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "64:ff9b::808:808"])
    def test_public_addresses(self, address: str) -> None:
        """What the public network has."""
        assert is_public(address)


class TestSpecification:
    """`AgentSpec.web`."""

    def test_a_fetching_agent_says_from_where(self) -> None:
        """Without `web` the tool is refused when the specification is compiled; with it the rules are in there."""
        with pytest.raises(InvalidSpec, match="web_fetch needs web=WebPolicy"):
            compile_spec(AgentSpec(name="a", tools=["web_fetch"]), model="offline", profile="offline")
        spec = AgentSpec(name="a", tools=["web_fetch"], web=WebPolicy(allow=["*.Bücher.example"]))
        compiled = compile_spec(spec, model="offline", profile="offline").spec
        assert compiled["web"] == {"allow": ("*.xn--bcher-kva.example",), "deny": (), "private": False}

    @pytest.mark.parametrize("pattern", ["example.*", "http://a.org", "a/b", "*.", "**", "*.*", "a b", ".org", ""])
    def test_patterns_that_mean_too_much_or_nothing(self, pattern: str) -> None:
        """A host, a domain with `*.` before it, or `*`."""
        with pytest.raises(InvalidSpec, match=r"allow\.0"):
            WebPolicy(allow=[pattern])


class TestAddresses:
    """To which addresses connections are made."""

    @pytest.fixture
    def names(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
        """Names and their addresses; a connection to a public one leads to the site. What a name is resolved to is used
        up, but for the last."""
        found: dict[str, list[str]] = {}

        def getaddrinfo(host: str, port: int, *_arguments: Any, **_more: Any) -> list[Any]:
            addresses = found.get(host, [host])
            address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        class Led(socket.socket):
            def connect(self, address: Any) -> None:
                assert is_public(address[0])
                super().connect(("127.0.0.1", site.port))

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(socket, "socket", Led)
        return found

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0"])
    def test_this_machine_is_not_public(self, host: str, site: Site) -> None:
        """By whatever name or spelling of its address."""
        with pytest.raises((ToolError, OSError), match=r"no address of the public network|Name or service|not known"):
            fetch(f"http://{host}:{site.port}/", WebRules())
        assert not site.asked

    def test_a_name_is_resolved_once(self, site: Site, names: dict[str, list[str]]) -> None:
        """A name that has a private address when it is asked again is connected to by the address that was checked."""
        site.pages["/"] = html("fine")
        names["rebinding.example"] = ["93.184.216.34", "127.0.0.1"]
        assert fetch("http://rebinding.example/", WebRules()).text == "fine"
        assert site.asked == [("/", "rebinding.example")]
        with pytest.raises(ToolError, match="no address of the public network"):
            fetch("http://rebinding.example/", WebRules())

    @pytest.mark.parametrize(
        ("location", "problem"),
        [
            ("http://inner.example/", "no address of the public network"),
            ("http://169.254.169.254/latest/", "no address of the public network"),
            ("http://other.example/", "may from"),
            ("file:///etc/passwd", "only http"),
            ("//inner.example/x", "no address"),
            ("/again", "more than 5 times"),
        ],
    )
    def test_each_redirect_is_checked(
        self, location: str, problem: str, site: Site, names: dict[str, list[str]]
    ) -> None:
        """As the first URL is."""
        names.update({"start.example": ["93.184.216.34"], "inner.example": ["10.0.0.1"]})
        for path in ("/", "/again"):
            site.pages[path] = 302, {"Location": location}, b""
        rules = WebRules(allow=("start.example", "inner.example", "169.254.169.254"))
        with pytest.raises(ToolError, match=problem):
            fetch("http://start.example/", rules)


class TestPages:
    """What a model is shown of a page."""

    def test_a_redirect_to_what_is_no_url(self, site: Site) -> None:
        """It is a problem of the page that is reported, not a failure of the process."""
        site.pages["/"] = (302, {"Location": "http://[nowhere"}, b"")
        page = msgspec.json.decode(fetching.answer(msgspec.json.encode(Wanted(site.url, OPEN))), type=Page)
        assert page.problem.startswith("it could not be fetched")

    def test_html_becomes_text(self) -> None:
        """With headings, lists, tables and links; without scripts, styles and what is not shown."""
        title, text = html_text(
            "<!doctype html><html><head><title>A\n  page</title><style>x{}</style></head><body>"
            "<h1>Head</h1><p>One\n two<br>three <a href='/a?b=1'>link</a> <a href='#x'>here</a><script>evil()</script>"
            "<ul><li>first<li><b>second</b></ul><pre>  a\n   b</pre><table><tr><td>1</td><td>2</td></tr></table>"
            "<img alt='a cat' src=x><a href='javascript:x'>no</a>&amp;&#228;",
            "http://example.org/dir/",
        )
        assert title == "A page"
        assert text.split("\n") == [
            "# Head", "", "One two", "three [link](http://example.org/a?b=1) here", "", "- first", "- second", "",
            "  a", "   b", "", " | 1 | 2", "", "[image: a cat]no&ä",
        ]  # fmt: skip

    async def test_a_page_and_where_it_came_from(self, site: Site) -> None:
        """The text follows a line with the URL, the status and the type; a page that is not there says so."""
        site.pages["/old"] = 301, {"Location": "/new"}, b""
        site.pages["/new"] = html("<title>T</title><p>Hello <b>you</b>")
        said = await web_fetch(f"{site.url}/old", context_of())
        assert said == f"{site.url}/old (redirected to {site.url}/new): HTTP 200, text/html\n# T\n\nHello you"
        assert await web_fetch(f"{site.url}/x", context_of()) == f"{site.url}/x: HTTP 404, text/plain\nnothing here"

    async def test_long_pages_are_read_in_parts(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each part says where to go on."""
        monkeypatch.setattr(web_tool, "MAX_CHARACTERS", 4)
        site.pages["/"] = 200, {"Content-Type": "text/plain"}, b"abcdefg"
        url = f"{site.url}/"
        head = f"{url}: HTTP 200, text/plain\n"
        assert await web_fetch(url, context_of()) == f"{head}abcd\n[more follows: continue with offset=4]"
        assert await web_fetch(url, context_of(), offset=4) == f"{head}efg"
        assert await web_fetch(url, context_of(), offset=7) == f"{head}[the text has fewer characters than offset]"

    async def test_images_are_shown(self, site: Site) -> None:
        """As attachments; what claims to be one and is none is an error."""
        site.pages["/a.png"] = 200, {"Content-Type": "image/png"}, PNG
        site.pages["/b.png"] = 200, {"Content-Type": "image/png"}, b"text"
        found = await web_fetch(f"{site.url}/a.png", context_of())
        assert found == [f"{site.url}/a.png: HTTP 200, image/png", Image(PNG, "a.png")]
        with pytest.raises(ToolError, match="no PNG"):
            await web_fetch(f"{site.url}/b.png", context_of())

    def test_other_content_is_refused(self, site: Site) -> None:
        """Programs, archives, and what is packed in a way that was not asked for."""
        site.pages["/a"] = 200, {"Content-Type": "application/zip"}, b"PK"
        site.pages["/b"] = 200, {"Content-Type": "text/plain", "Content-Encoding": "br"}, b"x"
        for path, problem in {"/a": "application/zip", "/b": "br"}.items():
            with pytest.raises(ToolError, match=problem):
                fetch(site.url + path, OPEN)

    def test_sizes_are_bounded(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of what is read, and of what that unpacks to."""
        monkeypatch.setattr(fetching, "MAX_BYTES", 1_000)
        plain = {"Content-Type": "text/plain"}
        site.pages["/long"] = 200, plain, b"x" * 100_000
        site.pages["/bomb"] = 200, {**plain, "Content-Encoding": "gzip"}, gzip.compress(b"x" * 200_000)
        site.pages["/packed"] = 200, {**plain, "Content-Encoding": "gzip"}, gzip.compress(b"short")
        for path in ("/long", "/bomb"):
            page = fetch(site.url + path, OPEN)
            assert (len(page.text), page.is_cut) == (1_000, True)
        assert fetch(f"{site.url}/packed", OPEN).text == "short"

    @pytest.mark.parametrize(
        ("charset", "meta"), [("; charset=latin-1", ""), ("", '<meta charset="iso-8859-1">'), ("; charset=zlib", "")]
    )
    def test_texts_are_decoded(self, charset: str, meta: str, site: Site) -> None:
        """As the header says, or the page; as UTF-8 where neither makes sense."""
        site.pages["/"] = 200, {"Content-Type": f"text/html{charset}"}, f"{meta}<p>Grüße".encode("latin-1")
        assert fetch(f"{site.url}/", OPEN).text == ("Gr\ufffd\ufffde" if "zlib" in charset else "Grüße")


class TestProcess:
    """The process that fetches."""

    async def test_it_ends_in_time(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that goes on for ever: the kernel ends the process."""

        monkeypatch.setattr(web_tool, "_PROGRAM", web_tool._PROGRAM.replace("signal.alarm(40)", "signal.alarm(1)"))
        monkeypatch.setattr(web_tool, "FETCH_SECONDS", 1)
        slow = threading.Event()

        def hang(handler: BaseHTTPRequestHandler) -> None:
            slow.wait()

        site.pages["/"] = hang
        try:
            with pytest.raises(ToolError, match="longer than 1 s"):
                await web_fetch(f"{site.url}/", context_of())
        finally:
            slow.set()

    async def test_it_has_no_secrets(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing of the frame's environment but what finds programs and certificates."""
        monkeypatch.setenv("SOME_SECRET", "x")
        program = "import json, os, sys\nsys.stdin.read()\nprint(json.dumps({'text': ' '.join(os.environ)}))"
        monkeypatch.setattr(web_tool, "_PROGRAM", program)
        said = await web_fetch(f"{site.url}/", context_of())
        assert {*str(said).partition("\n")[2].split()} - {"LC_CTYPE"} <= {*web_tool.KEPT_VARIABLES}

    async def test_what_is_refused_starts_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hosts that are not allowed, and agents without rules."""
        monkeypatch.setattr(web_tool, "_PROGRAM", "raise SystemExit(3)")
        with pytest.raises(ToolError, match="it may from b"):
            await web_fetch("http://a/", context_of(WebRules(allow=("b",))))
        with pytest.raises(ToolError, match="set `web`"):
            await web_fetch("http://a/", context_of(None))

    def test_the_frame_loads_little(self) -> None:
        """Neither HTTP nor HTML is loaded by the tool's module."""
        code = "import sys, understudy.actors.web_tool\nprint({'http.client', 'html.parser'} & {*sys.modules})"
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"
