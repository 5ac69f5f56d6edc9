"""Which addresses of the web a tool may fetch: the rules of a session's agent; and what is said with the process that
fetches one. Imports little."""

from __future__ import annotations

import ipaddress
from urllib.parse import quote, urlsplit

import msgspec

from understudy.errors import ToolError

PORTS = {"http": 80, "https": 443}

TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""The network of NAT64 (RFC 6052): an address in it stands for the IPv4 address in its last 32 bits."""

GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is assigned of the public IPv6 network. Python counts others as public, too: site-local addresses
(fec0::/10), and those of NAT64 within a site (64:ff9b:1::/48), of which only the site knows for what they stand."""


class Target(msgspec.Struct, frozen=True):
    """A URL that may be fetched, if its host's address may.

    Attributes:
        path: with the query, as it is asked for.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """As a `Host` header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class WebRules(msgspec.Struct, frozen=True):
    """`AgentSpec.web`, compiled."""

    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    private: bool = False

    def target(self, url: str) -> Target:
        """What a URL asks for.

        Raises:
            ToolError: it is no URL that may be fetched; the message says why.
        """
        if len(url) > 8_000 or any(character.isspace() or character == "\\" for character in url):
            raise ToolError("the URL is too long, or has white space or a backslash in it")
        try:
            parts = urlsplit(url)
            port = parts.port or PORTS.get(parts.scheme, 0)
            host = (parts.hostname or "").rstrip(".")
            host = host if ":" in host else host.encode("idna").decode()
        except (ValueError, UnicodeError) as error:
            raise ToolError(f"this is no URL: {error}") from None
        if parts.scheme not in PORTS or not host:
            raise ToolError(f"only http and https can be fetched, from a host: {url[:200]!r}")
        if "@" in parts.netloc:
            raise ToolError("a URL with a user or a password in it is not fetched")
        if any(matches(pattern, host) for pattern in self.deny):
            raise ToolError(f"this agent may not fetch from {host}: it is among the hosts that `web.deny` names")
        if not any(matches(pattern, host) for pattern in self.allow):
            raise ToolError(f"this agent may not fetch from {host}: it may from {', '.join(self.allow) or 'none'}")
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        return Target(parts.scheme, host, port, f"{path}?{query}" if query else path)

    def allows_address(self, address: str) -> bool:
        """Whether a connection may be made to an IP address: to one of the public network, unless others may be."""
        return self.private or is_public(address)


class Wanted(msgspec.Struct, frozen=True):
    """What is to be fetched, and by which rules."""

    url: str
    rules: WebRules


class Page(msgspec.Struct, frozen=True):
    """What was fetched.

    Attributes:
        url: behind all redirects.
        data: of an image or a PDF, as base64; then there is no text.
        is_cut: there was more of it.
        problem: why nothing was fetched; then all else is empty.
    """

    url: str = ""
    status: int = 0
    media_type: str = ""
    title: str = ""
    text: str = ""
    data: str = ""
    is_cut: bool = False
    problem: str = ""


def matches(pattern: str, host: str) -> bool:
    """Whether a host is meant: `*` means any, `*.example.org` all below `example.org`, anything else itself."""
    if pattern == "*":
        return True
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def is_public(address: str) -> bool:
    """Whether an IP address is of the public network: not private, shared, of this machine or link, or of a group.

    An IPv6 address that stands for one of IPv4 counts as that.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and found in TRANSLATED:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found not in GLOBAL_UNICAST:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
