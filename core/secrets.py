"""What is secret in the settings of the services, apart from the rest of them.

Ray keeps the arguments of actors, to start them again: in the memory of its head, and in Redis where it has one. So
the services are started with settings without secrets, and tell these each other (`cluster/ray/keeping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .config import Settings, has_credentials, is_secret_name, without_password

STORE = "UNDERSTUDY_STORE"


@dataclass(frozen=True)
class Secrets:
    """Lives in memory of the services only.

    Attributes:
        store: the DSN, if there is a password in it.
        telemetry: variables with credentials of a collector.
    """

    store: str = ""
    telemetry: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return "Secrets(***)"


def part(settings: Settings) -> tuple[Settings, Secrets]:
    """The settings without secrets, whose `withheld` names what they are without; and the secrets."""
    store = settings.store if without_password(settings.store) != settings.store else ""
    secret = {name: text for name, text in settings.telemetry.items() if is_secret_name(name) or has_credentials(text)}
    names = {*settings.withheld, *secret, *([STORE] if store else [])}
    rest = {name: text for name, text in settings.telemetry.items() if name not in secret}
    shown = replace(
        settings, store=without_password(settings.store), telemetry=rest, withheld=tuple(sorted(names))
    )  # fmt: skip
    return shown, Secrets(store, secret)


def complete(settings: Settings, secrets: Secrets) -> Settings:
    """Settings with secrets that they were without. Those that they were not without stay away."""
    restored = {name: text for name, text in secrets.telemetry.items() if name in settings.withheld}
    known = {*restored, *([STORE] if secrets.store else [])}
    return replace(
        settings,
        store=secrets.store if secrets.store and STORE in settings.withheld else settings.store,
        telemetry={**settings.telemetry, **restored},
        withheld=tuple(name for name in settings.withheld if name not in known),
    )
