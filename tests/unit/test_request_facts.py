"""What is recorded of a model request: where it went and how the model was set, never a secret, never what was said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.request_facts import STOP_CHARACTERS, recorded_parameters, server_of


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://api.openai.com/v1", ("api.openai.com", 443)),
        ("http://127.0.0.1:8000/v1", ("127.0.0.1", 8000)),
        ("http://models", ("models", 80)),
        ("https://user:hunter22@models.example:8443/v1?key=hunter22#hunter22", ("models.example", 8443)),
        ("https://[fd00::1]:8443/v1", ("fd00::1", 8443)),
        ("https://models.example:port/v1", ("", 0)),
        ("", ("", 0)),
    ],
)
def test_a_server_is_a_host_and_a_port(url: str, server: tuple[str, int]) -> None:
    """Users, passwords, paths and queries of a base URL are left out; the port is the scheme's if none is named."""
    assert server_of(url) == server


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": ["x" * 200]}, {"stop": ["x" * STOP_CHARACTERS]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"seed": 7, "n": 2, "top_k": 40}, {"seed": 7, "n": 2, "top_k": 40}),
        ({"frequency_penalty": -1, "presence_penalty": 2}, {"frequency_penalty": -1.0, "presence_penalty": 2.0}),
        ({"temperature": "hot", "seed": 1.5, "stop": [1], "reasoning": "much", "top_k": True}, {}),
        ({"temperature": 10**400, "seed": 1 << 63, "stop": "a\0b"}, {"stop": ["a\ufffdb"]}),
        ({"temperature": float("nan"), "user": "me@example.com", "metadata": {"key": "sk-1"}}, {}),
    ],
)
def test_parameters_that_are_recorded(given: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Those that the conventions name, under one name each; what has another type than it should is left out."""
    assert recorded_parameters(given) == recorded


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ["temperature", "max_tokens", "seed", "stop", "reasoning", "reasoning_effort", "output_config", "n", "other"]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_a_hook_asks_for(parameters: dict[str, Any]) -> None:
    """Nothing in a request makes this fail, and what is recorded is numbers and short words."""
    for value in recorded_parameters(parameters).values():
        words = value if isinstance(value, list) else [value]
        assert all(isinstance(word, (int, float)) or len(word) <= STOP_CHARACTERS for word in words)
