"""Who may look, and who may act.

Without a token the page only reads, and is for this machine. With one, everything but the page's own files needs it: in
an `Authorization: Bearer` header, or once in the login form, for a cookie that stands for it until the console ends.
A proxy that logs people in says who they are in a header, and shows with a secret that it is the proxy: an address
would not do, since agents' commands may run on the same machine.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from understudy.errors import InvalidConfiguration, InvalidInput
from understudy.identifiers import check_identity

LEAST_TOKEN = 16
COOKIE_SECONDS = 12 * 3600
COOKIES = 1_000
SAME_ORIGIN = ("same-origin", "none")
FOREIGN = "this request comes from another site's page"
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]", "::1"}

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
"""Of every answer."""


PROXY_SECRET = "x-understudy-proxy-secret"
"""The header by which a proxy shows that it is one. What else is said of a request's way counts only with it."""


class AccessDenied(Exception):
    """A request that is refused, and the HTTP status that says so."""

    def __init__(self, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def token_digest(token: str) -> str:
    """What the server keeps of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Person:
    """Whom events name, and whether they may act, or only look."""

    name: str
    acts: bool = True


@dataclass(frozen=True)
class Binding:
    """Where the console listens, and for whom.

    Attributes:
        tokens: whose each is, by its `token_digest`.
        readers: people that the proxy knows who only look.
        proxy: `token_digest` of what the proxy sends as `PROXY_SECRET`; None: no request comes from a proxy.
        identity_header: in which the proxy says who somebody is; empty: it does not.
        prefix: of the path at which the page is (`/understudy`); empty for none.
    """

    host: str
    port: int
    tokens: Mapping[str, Person] = field(default_factory=dict)
    readers: frozenset[str] = frozenset()
    proxy: str | None = None
    identity_header: str = ""
    prefix: str = ""

    @property
    def knows_people(self) -> bool:
        """Whether a request must say whose it is."""
        return bool(self.tokens or self.identity_header)

    def check(self) -> None:
        """Raises `InvalidConfiguration` where others than this machine could read unknown, or act by a header that
        anybody can send."""
        if not self.knows_people and (self.proxy is not None or not is_loopback(self.host)):
            where = "behind a proxy" if self.proxy is not None else f"on {self.host!r}"
            raise InvalidConfiguration(
                f"the console shows whole conversations: it listens {where} only with a token. Name a file of "
                "one with --token-file, or set UNDERSTUDY_CONSOLE_TOKEN; or leave --host away and use a tunnel."
            )
        if self.identity_header and self.proxy is None:
            raise InvalidConfiguration(
                f"anybody can send {self.identity_header!r}: have the proxy send a secret as {PROXY_SECRET}, and name "
                "a file of it with --proxy-secret-file"
            )
        if self.identity_header.lower() in ("authorization", "cookie", PROXY_SECRET):
            raise InvalidConfiguration(f"{self.identity_header!r} holds a secret, and no name")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.prefix):
            raise InvalidConfiguration(f"{self.prefix!r} is no prefix of a path: it is as /understudy, or /a/b")


class Access:
    """The rules for requests to one console."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._cookies: dict[str, tuple[Person, float]] = {}

    @property
    def has_token(self) -> bool:
        """Whether people are known, so that somebody may act."""
        return self._binding.knows_people

    def check_host(self, request: Request) -> None:
        """Another name than this machine's own: a web page elsewhere has its name resolve to here (DNS rebinding).

        Where the console listens for others it has a token, which such a page does not have; nor a proxy's secret.
        """
        if not is_loopback(self._binding.host) or self._is_from_proxy(request):
            return
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:
            name = None
        if name not in LOOPBACK_NAMES and name != self._binding.host:
            raise AccessDenied("this console is for requests to localhost", 421)

    def check_read(self, request: Request) -> None:
        """Raises `AccessDenied` unless the request may read.

        Another site's page could not read the answer, but keep the cluster busy and all the pages taken.
        """
        if request.headers.get("sec-fetch-site", "none") not in SAME_ORIGIN:
            raise AccessDenied(FOREIGN)
        if not self.may_read(request):
            raise AccessDenied("log in with the console's token", 401)

    def check_act(self, request: Request) -> None:
        """Raises `AccessDenied` unless the request may change something, and comes from the page itself."""
        if not self.has_token:
            raise AccessDenied("this console only reads: it was started without a token")
        self.check_origin(request)
        self.check_read(request)
        if not self.may_act(request):
            raise AccessDenied("you may look, and not act: your identity is one that only reads")

    def check_origin(self, request: Request) -> None:
        """What another site's page has a browser send is refused: its form sends no JSON, and the browser says of its
        script where that is from. Origin counts only for browsers that don't compare it with the address they know:
        behind a proxy, the address that we know is another.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise AccessDenied("send JSON", 415)
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        if site is not None:
            own = site in SAME_ORIGIN
        else:
            own = origin is None or origin.partition("://")[2] == request.headers.get("host")
        if not own:
            raise AccessDenied(FOREIGN)

    def log_in(self, token: str) -> str | None:
        """A new cookie's value, if this is somebody's token."""
        person = self._whose(token)
        if person is None:
            return None
        now = time.monotonic()
        self._cookies = {value: kept for value, kept in self._cookies.items() if kept[1] > now}
        while len(self._cookies) >= COOKIES:
            del self._cookies[min(self._cookies, key=lambda value: self._cookies[value][1])]
        value = secrets.token_urlsafe(32)
        self._cookies[value] = person, now + COOKIE_SECONDS
        return value

    def log_out(self, request: Request) -> None:
        """The request's cookie is worth nothing any more."""
        self._cookies.pop(request.cookies.get(self.cookie(request)["key"], ""), None)

    def cookie(self, request: Request) -> dict[str, Any]:
        """Name and attributes of the cookie, by how the request came. Over TLS a browser takes one of this name from
        nobody but this host (RFC 6265bis §4.1.3)."""
        path = f"{self._binding.prefix}/"
        secure = request.url.scheme == "https"
        if self._is_from_proxy(request):
            secure = secure or request.headers.get("x-forwarded-proto") == "https"
        kind = ("__Host-" if path == "/" else "__Secure-") if secure else ""
        name = f"{kind}understudy_console_{self._binding.port}"
        return {"key": name, "path": path, "secure": secure, "httponly": True, "samesite": "strict"}

    def may_read(self, request: Request) -> bool:
        """Whether the request may read; later on too, since its cookie may have ended."""
        return not self.has_token or self.person(request) is not None

    def may_act(self, request: Request) -> bool:
        """Whether to offer the request's page something to do."""
        person = self.person(request)
        return person is not None and person.acts

    def person(self, request: Request) -> Person | None:
        """Whose request it is; None: nobody's who is known."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        found = self._whose(token.strip()) if scheme.lower() == "bearer" else None
        if found is not None:  # else it may be a token of the proxy's own
            return found
        # 256 random bits as a key: how long a look-up takes tells nothing.
        person, until = self._cookies.get(request.cookies.get(self.cookie(request)["key"], ""), (None, 0.0))
        return person if until > time.monotonic() else self._named_by_proxy(request)

    def _whose(self, token: str) -> Person | None:
        """Takes as long whatever is wrong with the token: what is compared is its hash."""
        digest, found = token_digest(token), None
        for known, person in self._binding.tokens.items():
            found = person if hmac.compare_digest(digest, known) else found
        return found

    def _named_by_proxy(self, request: Request) -> Person | None:
        header = self._binding.identity_header
        names = request.headers.getlist(header) if header and self._is_from_proxy(request) else []
        name = names[0].strip() if len(names) == 1 else ""  # of two, one may be what a person sent
        try:
            return Person(name, name not in self._binding.readers) if check_identity(name) else None
        except InvalidInput:
            return None

    def _is_from_proxy(self, request: Request) -> bool:
        secret = request.headers.get(PROXY_SECRET, "")
        return self._binding.proxy is not None and hmac.compare_digest(token_digest(secret), self._binding.proxy)
