"""Problems, as `{"field", "problem"}`, in the words of an error. Imports nothing: session actors use it as well."""

from __future__ import annotations


def listed(problems: list[dict[str, str]]) -> str:
    """What is wrong, each with the field that it is about."""
    return "; ".join(f"{item['field']}: {item['problem']}" for item in problems)


def described(what: str, problems: list[dict[str, str]]) -> str:
    """That something has so many problems, and which."""
    return f"{what} has {len(problems)} problem{'s' if len(problems) != 1 else ''}: {listed(problems)}."
