"""Functions as their code and what that refers to, as Ray pickles them."""

from typing import Any

from ray import cloudpickle


def dumps(item: Any) -> bytes:
    """A function by value."""
    data: bytes = cloudpickle.dumps(item)
    return data
