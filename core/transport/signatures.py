"""What a method takes and returns, as its annotations say, where its caller is another process. No Ray."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidInput
from ..protocol import packed, unpacked


class Signature:
    """Checks what arrives against a method's annotations. What is `Any` there goes as it is."""

    def __init__(self, method: Callable[..., Any]) -> None:
        # As it was written: Ray gives the methods of its actors' classes other signatures, and wraps them.
        function: Any = inspect.unwrap(method)
        code, hints = function.__code__, typing.get_type_hints(function)
        self._name = method.__name__
        self._fixed = [(name, hints[name]) for name in code.co_varnames[1 : code.co_argcount]]
        self._required = len(self._fixed) - len(function.__defaults__ or ())
        self._any_number = bool(code.co_flags & inspect.CO_VARARGS)
        self._returns = hints["return"]

    def arguments(self, arrived: Sequence[Any]) -> list[Any]:
        """The arguments of a call, from what arrived.

        Raises:
            InvalidInput: they are not what the method takes.
        """
        if len(arrived) < self._required or (len(arrived) > len(self._fixed) and not self._any_number):
            raise InvalidInput(f"{self._name} does not take {len(arrived)} arguments")
        given = [
            value if kind is Any else unpacked(value, kind, f"{name} of {self._name}")
            for (name, kind), value in zip(self._fixed, arrived, strict=False)
        ]
        return [*given, *arrived[len(self._fixed) :]]

    def sent(self, result: Any) -> Any:
        """What is sent of a result."""
        return result if self._returns is Any else packed(result)

    def result(self, arrived: Any) -> Any:
        """The result of a call, from what was sent of it.

        Raises:
            InvalidInput: the method returns no such thing.
        """
        return arrived if self._returns is Any else unpacked(arrived, self._returns, f"the result of {self._name}")


signature_of = functools.cache(Signature)
"""The signature of a method, read once."""
