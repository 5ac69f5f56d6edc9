"""Methods of the client: each can be called, and each can be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from . import background

Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Method(Generic[Given, Result]):
    """A method of an object: `method(…)` blocks its thread until there is a result, `await method.aio(…)` does not.

    Both do the same, with the same arguments, results and errors. What is awaited can be cancelled; the request may
    have had its effect then.
    """

    __slots__ = ("_awaited", "_blocking")

    def __init__(self, blocking: Callable[Given, Result], awaited: Callable[Given, Awaitable[Result]]) -> None:
        self._blocking = blocking
        self._awaited = awaited

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self._blocking(*args, **kwargs)

    async def aio(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """The same for asynchronous programs: their event loop turns on meanwhile."""
        return await self._awaited(*args, **kwargs)


class client_method(Generic[Owner, Given, Result]):
    """Makes a `Method` of a coroutine function, which runs on the client's event loop, in its caller's context."""

    def __init__(self, function: Callable[Concatenate[Owner, Given], Coroutine[Any, Any, Result]]) -> None:
        self._function = function
        update_wrapper(cast("Any", self), function)

    @overload
    def __get__(self, instance: None, owner: type[Owner]) -> Self: ...

    @overload
    def __get__(self, instance: Owner, owner: type[Owner]) -> Method[Given, Result]: ...

    def __get__(self, instance: Owner | None, owner: type[Owner]) -> Self | Method[Given, Result]:
        if instance is None:
            return self
        here = instance

        def blocking(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            return background.wait(self._function(here, *args, **kwargs))

        def awaited(*args: Given.args, **kwargs: Given.kwargs) -> Awaitable[Result]:
            return asyncio.wrap_future(background.submit(self._function(here, *args, **kwargs)))

        return Method(blocking, awaited)


class constructor(Generic[Owner, Given, Result]):
    """Makes a `Method` of a class of a function that blocks. That is called where its caller is: Ray sets its signal
    handlers only in the main thread. Who awaits it has it called in another one."""

    def __init__(self, function: Callable[Concatenate[type[Owner], Given], Result]) -> None:
        self._function = function
        update_wrapper(cast("Any", self), function)

    def __get__(self, instance: object, owner: type[Owner]) -> Method[Given, Result]:
        def blocking(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            return self._function(owner, *args, **kwargs)

        def awaited(*args: Given.args, **kwargs: Given.kwargs) -> Awaitable[Result]:
            return asyncio.to_thread(self._function, owner, *args, **kwargs)

        return Method(blocking, awaited)
