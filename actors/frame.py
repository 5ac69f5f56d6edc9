"""The frame: a process that holds one session at a time, and what it may carry from one to the next."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from msgspec.structs import replace

from understudy.errors import Fenced, ToolError, UnderstudyError, UnknownSession
from understudy.logs import about
from understudy.placement import is_isolated
from understudy.ports import Node
from understudy.protocol import Exit, FrameIdentity, StepCall, Work
from understudy.records import CACHED_WINDOWS
from understudy.workflows import WORKFLOW

from .execution import THREAD_PREFIX
from .guards import Guards, guarded
from .hooks import LoadedHook, load_hook
from .providers import LoadedProvider, load_provider
from .session import Activation
from .tools import LoadedTool, load
from .window import Window
from .workflow import LoadedWorkflow, load_workflow
from .workflow_session import WorkflowActivation

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded", LoadedTool, LoadedHook, LoadedProvider, LoadedWorkflow)
Result = TypeVar("Result")

BEAT_SECONDS = 0.5


class Frame:
    """Takes work from the node service, one session at a time, until told to exit.

    Args:
        unpickle: restores code that came by value.
        alone: the process is the frame's own: what a session's code did to its directory and environment is undone.

    Attributes:
        last_beat: monotonic time when the event loop was last seen turning; a probe on another thread reads it.
    """

    def __init__(
        self,
        node: Node,
        frame_id: str,
        node_id: str,
        placement: str,
        *,
        unpickle: Callable[[bytes], Any] | None = None,
        alone: bool = True,
    ) -> None:
        self.node = node
        self._unpickle = unpickle or _unpickle
        self._alone = alone
        self.frame_id = frame_id
        self.identity = FrameIdentity(frame_id, os.getpid(), node_id, placement)
        self.last_beat = time.monotonic()
        self.activation: Activation | WorkflowActivation | None = None
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._functions: dict[str, Any] = {}
        self._home = (os.getcwd(), dict(os.environ))
        self._soiled = False
        self._stuck = False  # a tool that was cancelled goes on: this process must not serve another session
        self._code: dict[str, str] = {}
        self._read: dict[str, int] = {}
        self._since = time.time_ns()

    async def run(self) -> None:
        """Work until the node service says `exit`, or this process must not be used any more."""
        beat = asyncio.create_task(self._beat())
        call, guards = StepCall(self.identity), None
        try:
            for number in itertools.count(1):
                try:
                    call = replace(call, number=number)
                    work = await (self.node.step(call) if guards is None else guarded(self.node, call, guards))
                    if isinstance(work, Exit):
                        return
                    call, guards = await self._work(work)
                except (Fenced, UnknownSession) as over:  # by another activation, or retention has removed the session
                    log.info("left a session: %s", over)
                    if is_isolated(self.identity.placement) or self._stuck or self._has_stuck_tool():
                        return
                    call, guards = StepCall(self.identity), None
        finally:
            beat.cancel()

    async def _work(self, work: Work) -> tuple[StepCall, Guards | None]:
        session_id = work.session_id
        window = self._windows.get(session_id)
        if window is not None and window.incarnation != work.incarnation:
            window = None  # of another session of this id, of an earlier specification, or of the agent before
        if window is None or window.epoch != work.epoch:
            self._clean()
        if window is None:
            window = Window(session_id, work.spec or await self.node.specification(self.frame_id, work.activation))
            self._windows[session_id] = window
            while len(self._windows) > CACHED_WINDOWS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(session_id)
        if not window.apply(work):
            window.apply(await self.node.reload(self.frame_id, work.activation))
        activation = self._activation(window)
        step = await self._at(activation, activation.advance)
        cancelled = window.cancel is not None
        call = StepCall(
            self.identity, activation=window.activation, root_id=work.root_id, known_seq=window.known_seq,
            batch=step.batch, request=step.request,
            leave=step.leave or self._stuck or (cancelled and self._has_stuck_tool()),
        )  # fmt: skip
        # A process that leaves with this call has its session's next one call the hooks.
        return call, partial(self._at, activation, step.guards) if step.guards and not call.leave else None

    def _activation(self, window: Window) -> Activation | WorkflowActivation:
        """The session in this process: its loop is a model's, or a workflow's code."""
        if window.spec.get("kind") == WORKFLOW:
            return WorkflowActivation(
                window, self.node, self._load, self._load_hook, self._load_workflow, self.identity
            )  # fmt: skip
        return Activation(window, self.node, self._load, self._load_hook, self._load_provider, self.identity)

    async def _at(self, activation: Activation | WorkflowActivation, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do some of the work of an activation."""
        window, self.activation = activation.window, activation
        try:
            with about(session_id=window.session_id, run_id=window.run_id or "", trace_id=window.trace_id):
                return await work()
        finally:
            self._stuck = self._stuck or activation.stuck
            self.activation = None

    async def _load(self, spec: dict[str, Any]) -> LoadedTool:
        """The tool of a specification, loaded once per process."""
        return await self._loaded(spec, load)

    async def _load_hook(self, spec: dict[str, Any]) -> LoadedHook:
        """The hook of a specification, loaded once per process."""
        return await self._loaded(spec, load_hook)

    async def _load_provider(self, spec: dict[str, Any]) -> LoadedProvider:
        """The memory provider of a specification, made once per process."""
        return await self._loaded(spec, load_provider)

    async def _load_workflow(self, spec: dict[str, Any]) -> LoadedWorkflow:
        """The workflow of a specification, as its file is now: code that asks for other steps than the log may have
        been mended since."""
        name = spec["source"].get("import", "").partition(":")[0]
        module = sys.modules.get(name)
        if self._alone and module is not None and _written(module) > self._read.get(name, self._since):
            self._functions.pop(_key(spec, load_workflow), None)
        return await self._loaded(spec, load_workflow)

    async def _loaded(self, spec: dict[str, Any], load: Callable[..., Loaded]) -> Loaded:
        self._soiled = self._soiled or "builtin" not in spec["source"]
        key = _key(spec, load)
        if key not in self._functions:
            blobs: dict[str, bytes] = {}
            digest = spec["source"].get("blob")
            if digest:
                with self.activation.patience.waiting() if self.activation else nullcontext():
                    blobs[digest] = await self.node.blob(digest)
            self._forget_older(spec["source"].get("import", ""), spec.get("code", ""))
            self._functions[key] = load(spec, blobs.__getitem__, self._unpickle)
        found: Loaded = self._functions[key]
        return found

    def _forget_older(self, reference: str, code: str) -> None:
        """Read a function's module again if this process has it from before the function's source changed, or came to
        be: the function may be new to this process, and its module not."""
        name = reference.partition(":")[0]
        module, now = sys.modules.get(name), time.time_ns()
        known = self._code.setdefault(reference, code)
        if module is not None:
            newer = self._alone and _written(module) > self._read.get(name, self._since)
            if known == code and not newer:
                return
            self._code[reference] = code
            try:
                importlib.reload(module)
            except Exception as error:  # its file is being written, perhaps
                message = f"module {name} can't be read again: {type(error).__name__}: {error}"
                raise ToolError(message) from error
        self._read[name] = now

    def _has_stuck_tool(self) -> bool:
        """Whether a synchronous tool that was cancelled still runs: its process must not serve another session."""
        return self._alone and any(t.name.startswith(THREAD_PREFIX) and t.is_alive() for t in threading.enumerate())

    def _clean(self) -> None:
        """Undo what the last session's code did to this process: directory and environment. Ours does nothing."""
        if not self._soiled or not self._alone:
            return
        self._soiled = False
        directory, environment = self._home
        if os.getcwd() != directory:
            os.chdir(directory)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    def health(self) -> dict[str, float]:
        """Seconds since the event loop turned; by how many a tool is past its deadline; 1 if one is within it."""
        now = time.monotonic()
        activation = self.activation
        deadline = activation.patience.deadline if activation is not None else None
        return {
            "silent": now - self.last_beat,
            "overdue": activation.patience.overdue(now) if activation is not None else 0.0,
            "busy": 1.0 if deadline and now < deadline else 0.0,
        }


def _key(spec: dict[str, Any], load: Callable[..., Any]) -> str:
    """What a loaded function is known by in this process."""
    parts = (spec.get(name) for name in ("parameters", "code", "definition"))
    return repr((load.__name__, spec["name"], spec["source"], *parts))


def _unpickle(data: bytes) -> Any:
    try:
        pickle = importlib.import_module("ray.cloudpickle" if "ray" in sys.modules else "cloudpickle")
    except ImportError as error:
        raise UnderstudyError(f"code by value can't be loaded here: {error}") from error
    return pickle.loads(data)


def _written(module: ModuleType) -> int:
    """When a module's file was written, in nanoseconds since 1970; 0 where it has none."""
    try:
        return os.stat(module.__file__ or "").st_mtime_ns
    except OSError:
        return 0
