"""Who may look, and who may act.

Without a token the page only reads, and is for this machine. With one, everything but the page's own files needs it: in
an `Authorization: Bearer` header, or once in the login form, for a cookie that stands for it until the console ends.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from understudy.errors import InvalidConfiguration

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
class Binding:
    """Where the console listens, and for whom.

    Attributes:
        digest: of the token (`token_digest`); None: there is none.
    """

    host: str
    port: int
    digest: str | None = None

    def check(self) -> None:
        """Raises `InvalidConfiguration` where others than this machine could read without a token."""
        if self.digest is None and not is_loopback(self.host):
            raise InvalidConfiguration(
                f"the console shows whole conversations: it listens on {self.host!r} only with a token. Name a file of "
                "one with --token-file, or set UNDERSTUDY_CONSOLE_TOKEN; or leave --host away and use a tunnel."
            )


class Access:
    """The rules for requests to one console."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._cookies: dict[str, float] = {}
        self.cookie = f"understudy_console_{binding.port}"

    @property
    def has_token(self) -> bool:
        """Whether there is a token, so that somebody may act."""
        return self._binding.digest is not None

    def check_host(self, request: Request) -> None:
        """Another name than this machine's own: a web page elsewhere has its name resolve to here (DNS rebinding).

        Where the console listens for others it has a token, which such a page does not have.
        """
        if not is_loopback(self._binding.host):
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

    def accepts(self, token: str) -> bool:
        """Whether this is the token; takes as long whatever is wrong with it."""
        return hmac.compare_digest(token_digest(token), self._binding.digest or "")

    def log_in(self, token: str) -> str | None:
        """A new cookie's value, if this is the token."""
        if not self.has_token or not self.accepts(token):
            return None
        now = time.monotonic()
        self._cookies = {value: until for value, until in self._cookies.items() if until > now}
        while len(self._cookies) >= COOKIES:
            del self._cookies[min(self._cookies, key=self._cookies.__getitem__)]
        value = secrets.token_urlsafe(32)
        self._cookies[value] = now + COOKIE_SECONDS
        return value

    def log_out(self, request: Request) -> None:
        """The request's cookie is worth nothing any more."""
        self._cookies.pop(request.cookies.get(self.cookie, ""), None)

    def may_read(self, request: Request) -> bool:
        """Whether the request may read; later on too, since its cookie may have ended."""
        return not self.has_token or self._is_known(request)

    def may_act(self, request: Request) -> bool:
        """Whether to offer the request's page something to do."""
        return self.has_token and self._is_known(request)

    def _is_known(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.accepts(token.strip())
        # 256 random bits as a key: how long a look-up takes tells nothing.
        return self._cookies.get(request.cookies.get(self.cookie, ""), 0.0) > time.monotonic()
