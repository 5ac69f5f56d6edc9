"""How endpoints say that a request is longer than the model's context window. There is no standard for it."""

from __future__ import annotations

import re
from typing import Any

CODES = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "exceed_context_size_error",
        "model_max_prompt_tokens_exceeded",
        "request_too_large",
    }
)
"""Error codes of OpenAI and those who took them over, of llama.cpp's server and of Anthropic."""

TEXT = re.compile(
    r"maximum context length|context[ _]length[ _]exceeded|context window|context size|prompt is too long"
    r"|input is too long|input token count .* exceeds|too large for model with|maximum number of tokens allowed"
    r"|max_new_tokens. must be <=|reduce the length of the (messages|prompt|input)",
    re.IGNORECASE,
)
"""OpenAI, vLLM, DeepSeek ("This model's maximum context length is …"), llama.cpp ("available context size"), Anthropic
("prompt is too long: … tokens > … maximum"), Gemini ("input token count (…) exceeds the maximum number of tokens
allowed (…)"), Mistral ("too large for model with … maximum context length"), Text Generation Inference, Groq."""

STATED = (
    r"maximum context length (?:is|of) (\d[\d,]*)",
    r"(\d[\d,]*) maximum context length",
    r"available context size \((\d[\d,]*)",
    r"tokens > (\d[\d,]*) maximum",
    r"maximum number of tokens allowed \((\d[\d,]*)",
    r"context window (?:is|of) (\d[\d,]*)",
    r"max_new_tokens. must be <= (\d[\d,]*)",
)


def is_overflow(message: str, code: Any) -> bool:
    """Whether a refusal says that the request is too long for the model."""
    return code in CODES or bool(TEXT.search(message))


def stated_window(message: str) -> int:
    """The window that a refusal states, in tokens; 0 if it does not."""
    for pattern in STATED:
        found = re.search(pattern, message, re.IGNORECASE)
        if found:
            return int(found[1].replace(",", ""))
    return 0
