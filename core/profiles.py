"""The model profiles that a process knows: which can be used, and what their models cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import urlsplit

from .config import FALLBACK_CAUSES, ModelProfile
from .errors import InvalidConfiguration
from .prices import Price

OPENAI = "https://api.openai.com/v1"
DEFAULT_BASE_URLS = {"chat": OPENAI, "responses": OPENAI, "anthropic": "https://api.anthropic.com"}
"""Where a profile without a base URL is called, by protocol."""


class Profiles:
    """Profiles by name, in the memory of one process.

    Args:
        prices: of models, for profiles that have none of their own for them.
    """

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})
        self._known: dict[str, ModelProfile] = {}

    def learn(self, profile: ModelProfile) -> ModelProfile:
        """Take in a profile, in the place of one of the same name; what is known of it from then on.

        Raises:
            InvalidConfiguration: see `check`; nothing changes.
        """
        check(profile)
        profile = self._known[profile.name] = profile.after(self._known.get(profile.name))
        return profile

    def knows(self, name: str) -> bool:
        """Whether there is one of this name."""
        return name in self._known

    def keeps_responses(self, name: str) -> bool:
        """Whether its endpoint, or that of one of its fallbacks, makes responses in the background, and keeps them."""
        known = self._known.get(name)
        if known is None:
            return False
        asked = [known, *(self._known.get(fallback.profile) for fallback in known.fallbacks)]
        return any(profile is not None and profile.background for profile in asked)

    def all(self) -> list[ModelProfile]:
        """All of them, with their keys."""
        return list(self._known.values())

    def price(self, profile: str, model: str) -> Price | None:
        """What a model costs under a profile; None if nobody has said."""
        known = self._known.get(profile)
        own = known.prices.get(model) if known is not None else None
        return own or self._prices.get(model)


def check(profile: ModelProfile) -> None:
    """Refuse a profile that no endpoint can be made of: whoever keeps one could not pass it on, or start with it.

    Raises:
        InvalidConfiguration: its key can't be sent in a header, its base URL is none, or holds credentials, or one of
            its limits lets nothing through.
    """
    limits = {name: getattr(profile, name) for name in ("max_concurrency", "requests_per_minute", "tokens_per_minute")}
    wrong = [f"{name} is {limit}" for name, limit in limits.items() if limit is not None and not 0 < limit < math.inf]
    if wrong:
        raise InvalidConfiguration(
            f"model profile {profile.name!r} allows no calls, or any number: {', '.join(wrong)}. A limit must be above "
            "0; without one leave it out"
        )
    if profile.protocol not in DEFAULT_BASE_URLS:
        raise InvalidConfiguration(
            f"model profile {profile.name!r} has the unknown protocol {profile.protocol!r}. "
            f"It must be one of {', '.join(DEFAULT_BASE_URLS)}"
        )
    if profile.background and profile.protocol != "responses":
        raise InvalidConfiguration(
            f"model profile {profile.name!r} has background=True, which only the protocol responses knows. "
            "Set protocol='responses', or leave background out"
        )
    strange = sorted({cause for fallback in profile.fallbacks for cause in fallback.on} - set(FALLBACK_CAUSES))
    if strange or any(fallback.profile == profile.name for fallback in profile.fallbacks):
        raise InvalidConfiguration(
            f"model profile {profile.name!r} has a fallback to itself, or for {', '.join(strange) or 'no cause'}. "
            f"Name another profile, and causes of {', '.join(FALLBACK_CAUSES)}"
        )
    if not profile.api_key.isascii() or not profile.api_key.isprintable() or not profile.api_key.strip():
        raise InvalidConfiguration(
            f"the key of model profile {profile.name!r} is empty or has characters that no header may have. "
            "Set OPENAI_API_KEY to the bare key",
            details={"setting": "OPENAI_API_KEY"},
        )
    import httpx2  # only where a profile arrives: session actors, which know prices only, do without

    url, reason = profile.base_url or DEFAULT_BASE_URLS[profile.protocol], ""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and "@" not in parts.netloc
        httpx2.URL(url)  # what the gateway's client makes of it
    except (ValueError, httpx2.InvalidURL) as error:
        usable, reason = False, f": {error}"
    if not usable:
        shown = "" if "@" in url else f" ({url.partition('?')[0]}){reason}"  # there may be a password before it
        raise InvalidConfiguration(
            f"the base URL of model profile {profile.name!r} can't be used{shown}. "
            "Set OPENAI_BASE_URL to http(s)://HOST[:PORT]/PATH, without user and password",
            details={"setting": "OPENAI_BASE_URL"},
        )
