"""What processes have in their environment. Those that run tools: what any program needs, and what was named for tools.

A list of what to hide would miss the next name that somebody gives to a password; so nothing else is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

from .config import has_credentials, is_secret_name
from .errors import InvalidConfiguration

NEEDED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|HOSTNAME|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TMPDIR|TMP|TEMP|XDG_\w+"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|LD_LIBRARY_PATH"
    # How the network is reached, and whom to believe there.
    r"|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    # What Ray reads itself, and sets for the resources that an actor holds. What it says of jobs has their variables.
    r"|RAY_(?!JOB_CONFIG|RUNTIME_ENV)\w+|\w+_NUM_THREADS|\w+_VISIBLE_(DEVICES|CORES|CHIPS|MODULES)"
    r"|ONEAPI_DEVICE_SELECTOR"
)
"""Variables that tools get without being asked; not if such a one looks like a secret."""

HINT = (
    "Start Ray on each node (or `understudy certify`) with them, or take them out of the spec's `environment`. A Ray "
    "that Understudy has started has none of them: end it by `understudy down`, and start one by `ray start --head`."
)


def for_tools(environ: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The part of an environment that tools get.

    Args:
        named: variables that are for the tools, whatever they are called.

    Raises:
        InvalidConfiguration: some of those are not there.
    """
    missing = sorted(set(named) - environ.keys())
    if missing:
        raise InvalidConfiguration(
            f"the agent's tools need {', '.join(missing)}, which the environment of their process does not have",
            details={"hint": HINT},
        )
    return {name: value for name, value in environ.items() if name in named or _is_needed(name, value)}


def _is_needed(name: str, value: str) -> bool:
    return bool(NEEDED.fullmatch(name)) and not is_secret_name(name) and not has_credentials(value)


def keep_for_tools(named: Collection[str]) -> None:
    """Take everything else out of this process's environment. Raises as `for_tools`.

    `/proc/PID/environ` still shows the first state to processes of the same user: the sandbox is the boundary.
    """
    kept = for_tools(os.environ, named)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]


def for_services() -> dict[str, str]:
    """The environment for daemons and services: no secrets, and nothing of the job that happens to start them."""
    kept = {
        name: value for name, value in os.environ.items() if not is_secret_name(name) or name.startswith("RAY_AUTH")
    }
    for name in list(kept):
        if name.startswith(("RAY_JOB", "RAY_RUNTIME_ENV", "RAY_ADDRESS")) or name == "PYTHONPATH":
            del kept[name]
    kept["PYTHONUNBUFFERED"] = "1"
    return kept
