"""Context windows of well-known models, by their names: what a window is when neither a specification nor the endpoint
has said it. A wrong one does no harm: one that is too large is corrected by the endpoint's first refusal.

Sources: the providers' own lists (OpenAI "Models", Anthropic "Models overview", Google "Gemini models").
"""

from __future__ import annotations

WINDOWS = {
    "claude-": 200_000,
    "gemini-1.5-pro": 2_097_152,
    "gemini-": 1_048_576,
    "gpt-3.5-turbo": 16_385,
    "gpt-4": 8_192,
    "gpt-4-turbo": 128_000,
    "gpt-4.1": 1_047_576,
    "gpt-4o": 128_000,
    "gpt-5": 400_000,
    "o1": 200_000,
    "o3": 200_000,
    "o4-mini": 200_000,
}
"""Tokens, by the beginning of a model's name."""


def known_window(model: str) -> int | None:
    """The context window of a model in tokens; None if its name says nothing.

    Args:
        model: perhaps with its provider (`openai/gpt-4o`), or fine-tuned (`ft:gpt-4o:…`).
    """
    name = model.rpartition("/")[2].removeprefix("ft:")
    beginnings = [beginning for beginning in WINDOWS if name.startswith(beginning)]
    return WINDOWS[max(beginnings, key=len)] if beginnings else None
