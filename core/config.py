"""Settings from the environment. Unreadable ones fail here, early, and say what to set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from .errors import InvalidConfiguration, InvalidInput
from .identifiers import check_identifier, digest
from .prices import Price, price_table
from .scaling import NODES, Scaling, scaling_of
from .telemetry import telemetry_of, telemetry_problems

OFFLINE_MODEL = "offline"
"""Name of the deterministic model that needs no key and no network."""

SECRET_NAME = re.compile(
    r"(?i)(KEY|SECRET|PASSW|PASSPHRASE|(^|_)PASS($|_)|_PWD$|CREDENTIAL|AUTHORIZATION|(^|_)AUTH(_CONFIG)?$|HEADERS"
    r"|CONNECTION_?STRING|(^|_)TOKENS?($|_)|(^|_)PAT$|_DSN$|^UNDERSTUDY_STORE$|^PGPASS)"
)
"""Environment variables whose values must never reach results, logs, events or the store."""

CREDENTIALS_IN_URL = re.compile(r"(?:://|^)[^/\s:@]*:[^/\s@]+@")

SECRET_PARAMETER = re.compile(r"(?i)password|secret|^scram_.*_key$")
"""Parameters of libpq (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS) that are secrets
themselves; others name files."""

SCHEMA_NAME = r"[a-z_][a-z0-9_]{0,62}"
SCHEMA_POLICIES = ("auto", "verify")

MAX_ACTORS_LIMIT = 1024

HIDDEN = "digest:"
"""Before what stands for a value that is not shown."""


@lru_cache(maxsize=4096)  # for each result of a tool, every variable's name is looked at again
def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name is treated as a secret."""
    return bool(SECRET_NAME.search(name))


def has_credentials(value: str) -> bool:
    """Whether a value is, or contains, a URL with a password."""
    return bool(CREDENTIALS_IN_URL.search(value))


def state_home() -> Path:
    """Where this user's programs keep what they must not lose.

    Raises:
        InvalidConfiguration: the environment names no such place, and the user has no home directory.
    """
    if os.environ.get("XDG_STATE_HOME"):
        return Path(os.environ["XDG_STATE_HOME"])
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        raise InvalidConfiguration("this user has no home directory: set HOME or XDG_STATE_HOME") from None


def default_store() -> str:
    """DSN of the store used when none is named: one SQLite file per user. Raises as `state_home`."""
    return f"sqlite:///{state_home()}/understudy/store.db"


def check_store(dsn: str) -> str:
    """Return the DSN in its canonical form.

    A PostgreSQL DSN is libpq's, several hosts included, and may name a schema for the tables: `?schema=NAME`.

    Raises:
        InvalidConfiguration: it is neither `sqlite:///PATH` nor `postgresql://…`.
    """
    scheme, separator, rest = dsn.partition("://")
    scheme, problem = scheme.split("+", 1)[0], ""
    if scheme == "sqlite" and rest.startswith("/") and rest not in ("/", "/:memory:"):
        with suppress(RuntimeError):
            return f"sqlite:///{Path(rest[1:]).expanduser().absolute()}"
        problem = "it begins with a home directory that is not known"
    if scheme in ("postgresql", "postgres") and separator:
        _, schema = split_schema(dsn)
        if not _is_encoded(rest):
            problem = "special characters in a user's name or password must be percent-encoded, as UTF-8"
        elif not all(port.isdecimal() for port in _ports(rest)):
            problem = "the port must be a number"
        elif schema and not re.fullmatch(SCHEMA_NAME, schema):
            problem = "the schema must be 1 to 63 small letters, digits and underscores"
        else:
            return "postgresql://" + rest
    problem = problem or ("it must be sqlite:///relative.db, sqlite:////absolute/path.db or postgresql://USER@HOST/DB")
    raise InvalidConfiguration(
        f"UNDERSTUDY_STORE={redact(dsn)!r} is not supported: {problem}", details={"setting": "UNDERSTUDY_STORE"}
    )


def _is_encoded(rest: str) -> bool:
    """Whether libpq finds user, password and hosts where they were meant: to it the first `@` ends the password, and
    the first `/` the hosts. Only parameters may have an `@` of their own. What is encoded must be UTF-8."""
    try:
        unquote(rest, errors="strict")
    except UnicodeDecodeError:
        return False
    credentials, _, hosts = rest.partition("@")
    if "/" not in credentials:
        return "@" not in hosts.partition("?")[0]
    address, _, parameters = rest.partition("?")
    return "@" not in address and ("@" not in parameters or all(port.isdecimal() for port in _ports(address)))


def _ports(rest: str) -> list[str]:
    """The ports of a DSN's hosts, of which there may be several: `user:password@h1:5432,[::1]:5433/db`."""
    hosts = re.split(r"[/?]", rest.rpartition("@")[2], maxsplit=1)[0]
    return [found.group(1) for host in hosts.split(",") if (found := re.search(r"(?<!:):([^:\]]*)$", host))]


def split_schema(dsn: str) -> tuple[str, str]:
    """A PostgreSQL DSN without our own parameter `schema`, and that parameter; libpq would refuse it."""
    base, _, query = dsn.partition("?")
    parameters = query.split("&") if query else []
    schema = next((item[7:] for item in parameters if item.startswith("schema=")), "")
    others = "&".join(item for item in parameters if not item.startswith("schema="))
    return base + (f"?{others}" if others else ""), schema


def redact(dsn: str) -> str:
    """The DSN without its password, for messages and logs; not parsed, so that a malformed one hides it too."""
    # From the first colon to the last @: a user's name may have an @ that was not encoded. A file's may have both.
    without = re.sub(r"(?<!sqlite)://([^:]*):.*@", r"://\1:***@", dsn, flags=re.DOTALL)
    without = re.sub(r"(?i)(password=).*", r"\1***", without, flags=re.DOTALL)
    # Without an @, what follows the first colon is a port, or a password that was not encoded.
    return re.sub(r"://([^:/@?#]*):(?!\*\*\*@|\d+([/?,]|$)).*", r"://\1:***", without, flags=re.DOTALL)


def without_password(dsn: str) -> str:
    """A DSN that `check_store` has returned, without what is secret in it: the password, and parameters that hold one,
    whose names libpq decodes."""
    scheme, _, rest = dsn.partition("://")
    if scheme != "postgresql":
        return dsn
    address, _, query = rest.partition("?")
    user, at, hosts = address.partition("@")
    if at and "/" not in user:
        address = user.partition(":")[0] + at + hosts
    kept = "&".join(item for item in query.split("&") if not SECRET_PARAMETER.search(unquote(item.partition("=")[0])))
    return f"postgresql://{address}" + (f"?{kept}" if kept else "")


@dataclass(frozen=True)
class Capabilities:
    """What a model can do, as far as a profile declares it. A request that needs what is missing fails before it is
    sent.

    Attributes:
        images, files: it takes images, and files such as PDF, in messages.
        tools: it calls tools.
        response_format: its answers fit a JSON Schema where a response format asks for it. Without it an agent's output
            is asked for as a tool's arguments.
        reasoning: it takes parameters about its reasoning.
    """

    images: bool = True
    files: bool = True
    tools: bool = True
    response_format: bool = True
    reasoning: bool = True


FALLBACK_CAUSES = ("unavailable", "overflow", "refused")
"""What a fallback can be for: every try failed; the request is too long for the model; any other refusal."""


@dataclass(frozen=True)
class Fallback:
    """Who is asked when a profile's own endpoint gives no answer.

    Attributes:
        profile: that the services know, by name.
        model: that is asked for there; empty for the same.
        on: the causes, of `FALLBACK_CAUSES`.
    """

    profile: str
    model: str = ""
    on: tuple[str, ...] = ("unavailable",)


PROTOCOLS = ("chat", "responses", "anthropic")
PROTOCOL_NAMES = "chat, responses or anthropic"


@dataclass(frozen=True)
class ModelProfile:
    """An endpoint and its credentials. Lives in memory of the services only; never in the store.

    Attributes:
        name: what sessions refer to.
        base_url: None for the openai package's default.
        max_concurrency: model calls at once per node; more wait in order.
        requests_per_minute, tokens_per_minute: of all nodes together (docs/rate-limits.md). With neither, the limits
            that the endpoint states are kept to, if it states any.
        prices: what its models cost, by name; others cost what the services' own table says.
        protocol: that the endpoint speaks: `chat` (chat completions), `responses` or `anthropic` (messages).
        background: the endpoint makes responses in background mode and keeps them, so that no loss of a connection or a
            process has a call paid twice; of `responses` only.
        capabilities: of its models, by name, or `*` for all others; what is not declared is taken to be there.
        fallbacks: who is asked instead, in this order, when a call has failed for one of their causes.

    Raises:
        InvalidConfiguration: there is no such protocol, or background mode is of another one than `responses`.
    """

    name: str
    api_key: str
    base_url: str | None = None
    max_concurrency: int = 1024
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict, hash=False)
    protocol: str = "chat"
    background: bool = False
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict, hash=False)
    fallbacks: tuple[Fallback, ...] = ()

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise InvalidConfiguration(f"profile {self.name!r}: {self.protocol!r} must be {PROTOCOL_NAMES}")
        if self.background and self.protocol != "responses":
            raise InvalidConfiguration(f"profile {self.name!r}: background mode needs protocol='responses'")

    def after(self, known: ModelProfile | None) -> ModelProfile:
        """This profile in place of the one before it; it keeps prices that it lacks: budgets depend on them."""
        return replace(self, prices={**known.prices, **self.prices}) if known is not None else self

    def __repr__(self) -> str:
        return f"ModelProfile(name={self.name!r}, base_url={self.base_url!r}, api_key=***)"


@dataclass(frozen=True)
class Settings:
    """What Understudy reads from the environment (docs/settings.md lists the variables)."""

    store: str
    model: str
    namespace: str = "default"
    standby: int = 2
    max_actors: int | None = None
    metrics_port: int = 0
    offline_latency: float = 0.05
    schema_policy: str = "auto"
    prices: Mapping[str, Price] = field(default_factory=dict, hash=False)
    scaling: Scaling | None = None
    """None: the number of nodes does not follow the load."""

    telemetry: Mapping[str, str] = field(default_factory=dict, hash=False)
    """`OTEL_…` and `UNDERSTUDY_…` variables of `telemetry.py`, for the services; some are secrets."""
    withheld: tuple[str, ...] = ()
    """The variables whose secrets these settings are without (`secrets.part`)."""

    def __repr__(self) -> str:
        return f"Settings(store={redact(self.store)!r}, model={self.model!r}, namespace={self.namespace!r})"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, *, store: str | None = None) -> Settings:
        """Read and check all settings at once.

        Args:
            store: instead of UNDERSTUDY_STORE; an empty one is an error, where an empty variable is none.

        Raises:
            InvalidConfiguration: naming every variable that can't be used and what it must be.
        """
        env = os.environ if environ is None else environ
        problems: list[str] = []

        def number(name: str, default: int | None, low: int, high: int) -> int | None:
            text = env.get(name, "")
            if text == "":
                return default
            if not text.isdecimal() or not low <= int(text) <= high:
                problems.append(f"{name}={text!r} must be a whole number from {low} to {high}")
                return default
            return int(text)

        standby = number("UNDERSTUDY_STANDBY", 2, 0, 64)
        max_actors = number("UNDERSTUDY_MAX_ACTORS", None, 1, MAX_ACTORS_LIMIT)
        metrics_port = number("UNDERSTUDY_METRICS_PORT", 0, 0, 65535)
        try:
            latency = float(env.get("UNDERSTUDY_OFFLINE_LATENCY") or 0.05)
        except ValueError:
            latency = 0.05
            problems.append(f"UNDERSTUDY_OFFLINE_LATENCY={env['UNDERSTUDY_OFFLINE_LATENCY']!r} must be seconds")
        namespace = env.get("UNDERSTUDY_NAMESPACE") or "default"
        dsn = store if store is not None else env.get("UNDERSTUDY_STORE") or default_store()
        checks: list[Callable[[], str]] = [
            lambda: check_identifier(namespace, "UNDERSTUDY_NAMESPACE"),
            lambda: check_store(dsn),
        ]
        for check in checks:
            try:
                check()
            except InvalidInput as error:
                problems.append(error.message)
        policy = env.get("UNDERSTUDY_SCHEMA_POLICY") or "auto"
        if policy not in SCHEMA_POLICIES:
            problems.append(f"UNDERSTUDY_SCHEMA_POLICY={policy!r} must be one of {', '.join(SCHEMA_POLICIES)}")
        prices: dict[str, Price] = {}
        try:
            prices = price_table(env["UNDERSTUDY_PRICES"]) if env.get("UNDERSTUDY_PRICES") else {}
        except InvalidConfiguration as error:
            problems.append(f"UNDERSTUDY_PRICES: {error.message}")
        scaling, wrong = scaling_of(env)
        problems += wrong
        if scaling is not None and dsn.startswith("sqlite"):
            problems.append(f"{NODES} needs PostgreSQL: a SQLite store has one node")
        telemetry = telemetry_of(env)
        problems += telemetry_problems(telemetry)
        if problems:
            raise InvalidConfiguration("; ".join(problems), details={"problems": problems})
        return cls(
            store=check_store(dsn),
            model=env.get("UNDERSTUDY_MODEL") or _default_model(env),
            namespace=namespace,
            standby=standby if standby is not None else 2,
            max_actors=max_actors,
            metrics_port=metrics_port or 0,
            offline_latency=latency,
            schema_policy=policy,
            prices=prices,
            scaling=scaling,
            telemetry=telemetry,
        )

    @property
    def instance(self) -> str:
        """Name of this cluster's services: one set per namespace and store. Ray shows it, so no password is in it."""
        return f"{self.namespace}-{digest(without_password(self.store), size=4)}"

    def of_services(self) -> dict[str, str]:
        """What services take from the connect that starts them, by variable; of what may be secret or long a digest.

        Of the store there is only its password: another store or namespace means other services. The model is not in
        it: clients choose it.
        """
        shown = {
            "UNDERSTUDY_STANDBY": str(self.standby),
            "UNDERSTUDY_MAX_ACTORS": str(self.max_actors or ""),
            "UNDERSTUDY_METRICS_PORT": str(self.metrics_port),
            "UNDERSTUDY_OFFLINE_LATENCY": f"{self.offline_latency:g}",
            "UNDERSTUDY_SCHEMA_POLICY": self.schema_policy,
            NODES: str(self.scaling or ""),
        }
        hidden = dict(self.telemetry)
        if self.store != without_password(self.store):
            hidden["UNDERSTUDY_STORE"] = self.store
        if self.prices:
            hidden["UNDERSTUDY_PRICES"] = repr(sorted(self.prices.items()))
        return {**shown, **{name: HIDDEN + digest(name, value, size=6) for name, value in hidden.items()}}


def differences(running: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What running services have that this environment says otherwise (`Settings.of_services` of each), in words."""
    found = []
    for name in sorted({*running, *here}):
        theirs, ours = running.get(name, ""), here.get(name, "")
        if theirs == ours:
            continue
        if (theirs or ours).startswith(HIDDEN):
            theirs, ours = theirs and "…", "otherwise" if theirs and ours else ours and "…"
        has = f"{name}={theirs}" if theirs else f"no {name}"
        found.append(f"{has} (this environment says {ours or 'none'})")
    return found


KEPT_SETTINGS = "they keep theirs until `understudy down` and the next start, or `understudy up --keep`"
"""How services come to other settings."""


def kept_settings(different: Sequence[str]) -> str:
    """A sentence about these differences."""
    return f"running services have {', '.join(different)}; {KEPT_SETTINGS}"


def model_profile_from_environment(environ: Mapping[str, str] | None = None) -> ModelProfile | None:
    """The first of `model_profiles_from_environment`; None without a key. Raises as that."""
    return next(iter(model_profiles_from_environment(environ)), None)


def model_profiles_from_environment(environ: Mapping[str, str] | None = None) -> list[ModelProfile]:
    """The profiles of `OPENAI_API_KEY` and `OPENAI_BASE_URL`, and of `ANTHROPIC_API_KEY` and `ANTHROPIC_BASE_URL`; the
    one that `UNDERSTUDY_PROTOCOL` names comes first. Instead of a key there may be a file that has it, in
    `OPENAI_API_KEY_FILE` and `ANTHROPIC_API_KEY_FILE`.

    Their names are derived from all of it, so jobs with different keys have different profiles and one never pays for
    another.

    Raises:
        InvalidConfiguration: a file can't be read, or is empty; a setting is none of those that there are, or names
            the protocol of a provider without a key.
    """
    env = os.environ if environ is None else environ
    protocol, background = env.get("UNDERSTUDY_PROTOCOL") or "", env.get("UNDERSTUDY_BACKGROUND") or "0"
    if protocol not in ("", *PROTOCOLS):
        raise InvalidConfiguration(f"UNDERSTUDY_PROTOCOL={protocol!r} must be {PROTOCOL_NAMES}")
    if background not in ("0", "1") or (background == "1" and protocol != "responses"):
        raise InvalidConfiguration(
            f"UNDERSTUDY_BACKGROUND={background!r} must be 0, or 1 together with UNDERSTUDY_PROTOCOL=responses"
        )
    found = []
    if _has_key(env):
        own = protocol if protocol == "responses" else "chat"
        found.append(_profile_of(env, "OPENAI", own, background=background == "1"))
    if _has_key(env, "ANTHROPIC"):
        found.append(_profile_of(env, "ANTHROPIC", "anthropic"))
    elif protocol == "anthropic":
        raise InvalidConfiguration("UNDERSTUDY_PROTOCOL='anthropic' needs ANTHROPIC_API_KEY or ANTHROPIC_API_KEY_FILE")
    return sorted(found, key=lambda profile: profile.protocol != protocol)


def _profile_of(env: Mapping[str, str], provider: str, protocol: str, *, background: bool = False) -> ModelProfile:
    key = env.get(f"{provider}_API_KEY") or _key_in(f"{provider}_API_KEY_FILE", env[f"{provider}_API_KEY_FILE"])
    base_url = env.get(f"{provider}_BASE_URL") or None
    more = () if protocol == "chat" else (protocol, str(background))
    name = f"{provider.lower()}-{digest(base_url or '', key, *more, size=6)}"
    return ModelProfile(name=name, api_key=key, base_url=base_url, protocol=protocol, background=background)


def _has_key(env: Mapping[str, str], provider: str = "OPENAI") -> bool:
    return bool(env.get(f"{provider}_API_KEY") or env.get(f"{provider}_API_KEY_FILE"))


def _default_model(env: Mapping[str, str]) -> str:
    openai, anthropic = _has_key(env), _has_key(env, "ANTHROPIC")
    if anthropic and (not openai or env.get("UNDERSTUDY_PROTOCOL") == "anthropic"):
        return "claude-haiku-4-5"
    return "gpt-4o-mini" if openai else OFFLINE_MODEL


def _key_in(setting: str, path: str) -> str:
    """A key from a file: where the environment is shown to others, as that of a Ray job is."""
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidConfiguration(f"{setting}={path!r} can't be read: {reason}") from None
    if not key:
        raise InvalidConfiguration(f"{setting}={path!r} is empty")
    return key
