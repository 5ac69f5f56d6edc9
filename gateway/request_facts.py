"""What is recorded of a request beyond its model, in events and so in spans: where it went, and the parameters that
the GenAI conventions name. Numbers and short words; nothing of what was said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from understudy.messages import storable

FRACTIONS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
WHOLE = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"), "top_k": ("top_k",), "seed": ("seed",),
    "n": ("n",),
}  # fmt: skip
"""By the name that is recorded: those under which endpoints know it, the one that counts first."""

STOPS, STOP_CHARACTERS, EFFORT_CHARACTERS = 8, 64, 32
"""So many stop sequences are recorded, and so much of each, and of the reasoning's effort."""

LARGEST = 1 << 63
"""Of whole numbers in messages and spans."""

PORTS = {"https": 443, "http": 80}


def server_of(base_url: str) -> tuple[str, int]:
    """Host and port of an endpoint: what stands before them in the URL can be a password, behind them a key."""
    try:
        parts = urlsplit(base_url)
        return parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", 0


def recorded_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a request's parameters that are recorded, under the names of chat completions, as far as they are of
    the type that they should be."""
    recorded: dict[str, Any] = {name: float(parameters[name]) for name in FRACTIONS if _is_number(parameters.get(name))}
    for name, names in WHOLE.items():
        given = next((parameters[one] for one in names if parameters.get(one) is not None), None)
        if _is_number(given) and isinstance(given, int):
            recorded[name] = given
    stop = parameters.get("stop", parameters.get("stop_sequences"))
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, (list, tuple)) and stops and all(isinstance(one, str) for one in stops):
        recorded["stop"] = [storable(one)[:STOP_CHARACTERS] for one in stops[:STOPS]]
    effort = parameters.get("reasoning_effort") or _effort(parameters.get("reasoning", parameters.get("output_config")))
    if effort and isinstance(effort, str):
        recorded["reasoning_effort"] = storable(effort)[:EFFORT_CHARACTERS]
    return recorded


def _effort(value: Any) -> Any:
    return value.get("effort") if isinstance(value, dict) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and -LARGEST <= value < LARGEST
    return isinstance(value, float) and math.isfinite(value)
