"""Methods of the client: each can be called, and each can be awaited."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from . import background

Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")
Returned = TypeVar("Returned", covariant=True)


class Method(Protocol[Given, Returned]):
    """`method(…)` blocks its thread until there is a result; `await method.aio(…)` does not.

    Both do the same, with the same arguments, results and errors. What is awaited can be cancelled; the request may
    have had its effect then.
    """

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Returned: ...

    async def aio(self, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        """The same for asynchronous programs: their event loop keeps running meanwhile."""


def _method(function: Any, blocking: Any, awaited: Any) -> Any:
    """A function that can be awaited as well; whoever looks at it finds the name, the documentation and the parameters
    of another one."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return blocking(*args, **kwargs)

    @wraps(function)
    async def aio(*args: Any, **kwargs: Any) -> Any:
        return await awaited(*args, **kwargs)

    vars(call)["aio"] = aio
    return call


class client_method(Generic[Owner, Given, Result]):
    """Makes a `Method` of a function whose result is a coroutine: that runs on the client's event loop, in its caller's
    context. Usually it is a coroutine function; one that has work to do in its caller's thread is a plain function."""

    def __init__(self, function: Callable[Concatenate[Owner, Given], Coroutine[Any, Any, Result]]) -> None:
        self._function = function
        self._here = not inspect.iscoroutinefunction(function)
        self._unbound = self._wrapped(function)
        self.__doc__ = function.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Owner]) -> Callable[Concatenate[Owner, Given], Result]: ...

    @overload
    def __get__(self, instance: Owner, owner: type[Owner]) -> Method[Given, Result]: ...

    def __get__(self, instance: Owner | None, owner: type[Owner]) -> Any:
        if instance is None:
            return self._unbound
        bound = self._wrapped(self._function.__get__(instance))
        return vars(instance).setdefault(self._name, bound)  # found there from now on: the same one each time

    def _wrapped(self, function: Callable[..., Coroutine[Any, Any, Result]]) -> Any:
        return _method(function, partial(_blocking, function), partial(self._awaited, function))

    async def _awaited(self, function: Callable[..., Coroutine[Any, Any, Result]], *args: Any, **kwargs: Any) -> Result:
        begin = partial(function, *args, **kwargs)
        coroutine = await asyncio.to_thread(begin) if self._here else begin()
        return await asyncio.wrap_future(background.submit(coroutine))


def _blocking(function: Callable[..., Coroutine[Any, Any, Result]], *args: Any, **kwargs: Any) -> Result:
    return background.wait(function(*args, **kwargs))


class Closable(Protocol):
    """What can be closed, by blocking."""

    @property
    def close(self) -> Callable[[], Any]:
        """Close it."""


Made = TypeVar("Made", bound=Closable)


class constructor(Generic[Made, Given]):
    """Makes a `Method` of a class of a function that blocks. That is called where its caller is: Ray sets its signal
    handlers only in the main thread. Who awaits it has it called in another thread; what is made after the wait was
    cancelled is closed."""

    def __init__(self, function: Callable[Concatenate[type[Made], Given], Made]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, _instance: object, owner: type[Made]) -> Method[Given, Made]:
        function: Callable[Given, Made] = self._function.__get__(owner)
        return cast("Method[Given, Made]", _method(function, function, partial(_make_elsewhere, function)))


async def _make_elsewhere(function: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
    made: Future[Made] = Future()
    made.set_running_or_notify_cancel()  # from now on it can't be cancelled: its thread goes on
    work = partial(copy_context().run, function, *args, **kwargs)
    threading.Thread(target=_make, args=(work, made), name="understudy-connect", daemon=True).start()
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        made.add_done_callback(_close)
        raise


def _make(work: Callable[[], Made], made: Future[Made]) -> None:
    try:
        made.set_result(work())
    except BaseException as error:
        made.set_exception(error)


def _close(made: Future[Any]) -> None:
    if made.exception() is None:
        threading.Thread(target=made.result().close, name="understudy-close", daemon=True).start()
