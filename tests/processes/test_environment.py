"""What tools get of an environment, by name; and that values which look like secrets are hidden nevertheless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.execution import presentable
from understudy.config import is_secret_name
from understudy.environment import for_tools
from understudy.errors import InvalidConfiguration
from understudy.redaction import secret_values

PASSWORDS = (
    "DB_PASS", "SMTP_PASS", "REDIS_PASS", "MYSQL_PWD", "BASIC_AUTH", "DOCKER_AUTH_CONFIG",
    "AZURE_STORAGE_CONNECTION_STRING",
)  # fmt: skip
"""Variables that hold credentials, by names in which neither a key nor a token nor a secret is spoken of."""

NAMES = st.from_regex(r"[A-Z_]{1,12}", fullmatch=True)


def test_programs_get_what_any_program_needs() -> None:
    """Places, languages, proxies, certificates, and what Ray's worker and the libraries on its devices read."""
    needed = (
        "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "TERM", "SHELL", "XDG_STATE_HOME", "PYTHONPATH",
        "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "RAY_NODE_ID", "RAY_AUTH_MODE", "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    environ = dict.fromkeys(needed, "x")
    assert for_tools(environ, ()) == environ


@pytest.mark.parametrize("name", [*PASSWORDS, "OPENAI_API_KEY", "DATABASE_URL", "LEDGER", "RAY_AUTH_TOKEN", "PATHS"])
def test_other_variables_are_for_those_who_name_them(name: str) -> None:
    """What an application's variable holds is nobody's business but of an agent that names it."""
    environ = {"PATH": "/bin", name: "hunter2"}
    assert for_tools(environ, ()) == {"PATH": "/bin"}
    assert for_tools(environ, (name,)) == environ


def test_what_looks_like_a_secret_is_not_needed() -> None:
    """A proxy's password, and variables of Ray's that hold those of a job, are left out under whatever name."""
    environ = {
        "https_proxy": "http://me:hunter2@proxy",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"A": "b"}}}',
        "XDG_API_KEY": "x",
    }
    assert for_tools(environ, ()) == {}
    assert for_tools(environ, environ) == environ


@given(st.dictionaries(NAMES, st.text(max_size=3)), st.sets(NAMES))
def test_tools_get_nothing_else(environ: dict[str, str], named: set[str]) -> None:
    """Whatever there is: what was named is there or reported as missing, and the rest does not depend on it."""
    if not named <= environ.keys():
        with pytest.raises(InvalidConfiguration) as caught:
            for_tools(environ, named)
        assert all(name in caught.value.message for name in named - environ.keys())
        return
    own = {name: environ[name] for name in named}
    assert for_tools(environ, named) == {**for_tools(environ, ()), **own}


def test_the_passwords_names_are_secrets() -> None:
    """Also where names decide: in results, logs, the environment of services, and what is stored of a job's."""
    assert [name for name in PASSWORDS if not is_secret_name(name)] == []


def test_what_an_agent_named_is_hidden_in_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that a tool needs, and has, is not shown: by its variable's name, or as a URL's password, alone too."""
    for name in PASSWORDS:
        monkeypatch.setenv(name, f"hunter2-of-{name}")
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:correct%20horse@db/shop")
    monkeypatch.setenv("REGION", "eu-central-1")
    for name in PASSWORDS:
        assert presentable(f"it is hunter2-of-{name}.") == "it is ***."
    assert presentable("postgresql://me:correct%20horse@db/shop, that is correct horse") == "***, that is ***"
    assert presentable("in eu-central-1") == "in eu-central-1"


def test_a_secret_is_known_whole_and_by_its_password() -> None:
    """A URL's password is a secret by itself, as it is written and as it is meant."""
    values = secret_values({"DATABASE_URL": "mysql://me:a%40b@db/x", "API_KEY": "k", "PATH": "/bin"})
    assert values == {"mysql://me:a%40b@db/x", "a%40b", "a@b", "k"}
