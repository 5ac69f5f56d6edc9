"""One page of the web, fetched within limits and rules. Runs in a short process of its own: see `web_tool`."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import zlib
from urllib.parse import urljoin

import msgspec

from understudy.attachments import MAX_BYTES as MAX_ATTACHED
from understudy.errors import ToolError

from .html_text import html_text
from .web_rules import Page, Target, Wanted, WebRules

MAX_BYTES = 5_000_000
"""So much of a page is read, and so much of it unpacked."""

MAX_REDIRECTS = 5
CONNECT_SECONDS, READ_SECONDS = 10.0, 15.0

REDIRECTS = frozenset({301, 302, 303, 307, 308})
HEADERS = {
    "User-Agent": "understudy",
    "Accept": "text/html, text/plain;q=0.9, application/json;q=0.9, */*;q=0.5",
    "Accept-Encoding": "gzip",
    "Connection": "close",
}
TEXTS = re.compile(r"text/.*|application/(json|xml|javascript|yaml|x-yaml|toml|.*\+(json|xml))")
ATTACHED = re.compile(r"image/(png|jpeg|gif|webp)|application/pdf")


def answer(request: bytes) -> bytes:
    """The process's output for its input."""
    wanted = msgspec.json.decode(request, type=Wanted)
    try:
        page = fetch(wanted.url, wanted.rules)
    except ToolError as error:
        page = Page(problem=error.message)
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last of a redirect to what is no URL, say
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        page = Page(problem=f"it could not be fetched: {text[:300]}")
    return msgspec.json.encode(page)


def fetch(url: str, rules: WebRules) -> Page:
    """Fetch a URL, and what it is redirected to. Each of them is checked, its name is resolved once, and the connection
    is made to an address that was checked.

    Raises:
        ToolError: it may not be fetched, or it is nothing that a model can read.
        OSError, HTTPException: it could not be.
    """
    for _ in range(MAX_REDIRECTS + 1):
        target = rules.target(url)
        connection = http.client.HTTPConnection(target.host, target.port, timeout=READ_SECONDS)
        connection.sock = _connected(target, rules)
        try:
            connection.request("GET", target.path, headers={"Host": target.authority, **HEADERS})
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status not in REDIRECTS or not location:
                return _page(url, response)
            url = urljoin(url, location)
        finally:
            connection.close()
    raise ToolError(f"it was redirected more than {MAX_REDIRECTS} times, at last to {url[:300]}")


def _connected(target: Target, rules: WebRules) -> socket.socket:
    """A connection to the first of the host's addresses that may be connected to and can be."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    allowed = [entry for entry in found if rules.allows_address(str(entry[4][0]))]
    if not allowed:
        raise ToolError(
            f"{target.host} has no address of the public network, and this agent may connect to no other one "
            "(`web.private`)"
        )
    problem: OSError | None = None
    for family, kind, protocol, _, address in allowed:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(address)
            connection.settimeout(READ_SECONDS)
            if target.scheme == "https":
                return ssl.create_default_context().wrap_socket(connection, server_hostname=target.host)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    assert problem is not None
    raise problem


def _page(url: str, response: http.client.HTTPResponse) -> Page:
    media_type = response.headers.get_content_type()
    is_attached = ATTACHED.fullmatch(media_type) is not None
    if not is_attached and TEXTS.fullmatch(media_type) is None and media_type != "application/xhtml+xml":
        raise ToolError(f"what is there is no text, image or PDF, but {media_type[:100]}")
    limit = MAX_ATTACHED if is_attached else MAX_BYTES
    content = response.read(limit + 1)
    content = _unpacked(content, response.headers.get("Content-Encoding", ""), limit + 1)
    is_cut, content = len(content) > limit, content[:limit]
    if is_attached:
        if is_cut:
            raise ToolError(f"it is larger than {limit} bytes, which is too large to be shown")
        return Page(url, response.status, media_type, data=base64.b64encode(content).decode())
    text, title = _decoded(content, response.headers.get_content_charset()), ""
    if media_type in ("text/html", "application/xhtml+xml"):
        title, text = html_text(text, url)
    return Page(url, response.status, media_type, title, text, is_cut=is_cut)


def _unpacked(content: bytes, encoding: str, limit: int) -> bytes:
    """The content of a response, of which no more than `limit` bytes are unpacked."""
    if encoding.strip().lower() in ("", "identity"):
        return content
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        raise ToolError(f"it is packed in a way that was not asked for: {encoding[:100]}")
    try:
        return zlib.decompressobj(wbits=47).decompress(content, limit)  # the end may be missing: it was cut
    except zlib.error:
        raise ToolError("it is packed, and can't be unpacked") from None


def _decoded(content: bytes, charset: str | None) -> str:
    named = charset or next(
        iter(re.findall(rb"<meta[^>]{0,200}charset=[\"']?([\w-]{1,40})", content[:2_048])), b"utf-8"
    )
    try:
        return content.decode(named if isinstance(named, str) else named.decode(), errors="replace")
    except (LookupError, ValueError):
        return content.decode(errors="replace")
