"""The Protocols between the parts, so that each can be tested without the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .commands import CommandEnd, CommandOutput, CommandProcess, StartCommand
from .config import ModelProfile
from .protocol import Attached, CallOrigin, Exit, Growth, Judged, StepCall, Work
from .rates import RateReport, RateShares
from .reads import Note
from .records import Ack, ActivationId, Batch, KeptResponse, ModelAnswer, ModelRequest
from .tool_hosting import HostAttached, ServerAnswer, ServerCall, ServerConfiguration, ServerTools
from .tool_tasks import ReadBlob, Reporting, TaskNews, TaskResult, ToolTask


class Node(Protocol):
    """The node service, as a frame sees it. Every call may be repeated.

    A frame says who it is, and learns of no session but the one that it holds: `Fenced` otherwise.
    """

    async def step(self, call: StepCall) -> Work | Exit:
        """Commit a batch, start or attach to its model call, and return the frame's next work when there is some.

        A request may leave out what one before it had (`ModelRequest.left_out`), unless it is without a batch: that one
        may be asked for because something was left out.

        Raises:
            Fenced: the activation is over; ask for other work with a call that names no session. So it is if the frame
                has made a later call: this one was on the way too long.
        """

    async def commit(self, frame_id: str, batch: Batch) -> Ack:
        """Commit a batch and keep the frame. Raises `Fenced` as `step` does."""

    async def reload(self, frame_id: str, activation: ActivationId) -> Work:
        """The whole work of an activation, for a frame that no longer has the session's earlier messages."""

    async def interrupted(self, frame_id: str, activation: ActivationId, run_id: str, round_number: int) -> str:
        """Return when this run is asked to end (its reason), or interrupted at this round (`INTERRUPTED_BY_STEER`).
        Raises `Fenced` when the activation, the run or the round is over."""

    async def judge(self, frame_id: str, verdict: Judged) -> None:
        """Say what the hooks beside a model call make of it: a call whose answer they refuse is aborted. Returns when
        the call is over, or the frame has called in for more: until then a service that takes this one's place must
        receive it as well. Raises `Fenced` when another frame has the session."""

    async def specification(self, frame_id: str, activation: ActivationId) -> dict[str, Any]:
        """The session's compiled specification."""

    async def memory(self, frame_id: str, activation: ActivationId) -> list[Note]:
        """The notes that the session's memory shows, the most important one first."""

    async def blob(self, digest: str) -> bytes:
        """Code that travels by value."""

    async def task_service(self, frame_id: str) -> str:
        """The name of this service, which only it has: a call that was begun in a process of its own is known by the
        service that began it, and by no other."""

    async def task(
        self, frame_id: str, activation: ActivationId, task: ToolTask, service: str, after: int | None
    ) -> TaskNews | None:
        """Have a tool call executed in a process of its own, unless it is under way, or has ended, here. Returns once
        there is something new of it: reports, its result, or both. A caller asks until it has the result.

        Args:
            service: that may begin it.
            after: the caller has the reports up to this number (`TaskNews.last`); None if it has none: then it gets
                all that are not committed.

        Returns:
            None: it was begun and nobody knows what became of it; or this is another service, or it was not to begin.

        Raises `Fenced` as `step` does, and where the call has its result.
        """

    async def end_task(self, frame_id: str, activation: ActivationId, call_id: str) -> None:
        """End what executes a call. Raises `Fenced` as `step` does."""

    async def start_command(self, frame_id: str, activation: ActivationId, wanted: StartCommand) -> str:
        """Start a command in the background, once for each call id; returns its job id.

        Raises:
            InvalidInput: the session may have no more, the frame is on another node than the service, or the command
                can't be started; the text says which.
            Fenced: the activation is over.
        """

    async def read_command(
        self, frame_id: str, activation: ActivationId, job: str, after: int | None, wait: float
    ) -> CommandOutput:
        """What a command of the session has written.

        Args:
            after: bytes of its output that are known; None for the end of it.
            wait: seconds to wait for more, if there is none and the command has not ended.

        Raises:
            InvalidInput: the session has no such command.
            Fenced: the activation is over.
        """

    async def server_tools(self, frame_id: str, activation: ActivationId, server: str) -> ServerTools:
        """The tools of an MCP server of the session's agent, as the server has them now; it is started for that."""

    async def tool_host(self, frame_id: str, activation: ActivationId) -> str:
        """Which tool host makes calls of MCP servers now."""

    async def call_server(self, frame_id: str, activation: ActivationId, call: ServerCall) -> ServerAnswer:
        """Have an MCP server called, once, however often and by whichever frame that is asked for."""

    async def cancel_server_call(self, frame_id: str, activation: ActivationId, key: str, attempt: int) -> None:
        """Have a call given up that nobody waits for any more."""


class TaskRunner(Protocol):
    """Executes tool calls in processes of their own."""

    async def run(self, task: ToolTask, read_blob: ReadBlob, reported: Reporting) -> TaskResult | None:
        """Execute a call once, wherever there is what `task.tool["task"]` asks for: how it ended. It waits for that,
        however long. If it is cancelled, so is the call.

        Args:
            reported: is called on the caller's event loop, before the result is returned.

        Returns:
            None: its process is gone, and nobody knows what it did.
        """


class ClusterHead(Protocol):
    """The head of the cluster that a node service is in: what starts its processes, and finds them."""

    def silence(self) -> float:
        """Seconds since it was first asked something that it has not answered; 0 while it answers. Waits for nothing,
        and may be called in any thread."""


class CommandProcesses(Protocol):
    """The commands of a machine, by key. They go on when the node service dies, and are found by the next one, which
    may be that of another node, and by other nodes' services there."""

    def open(self) -> None:
        """Look after them from now on: commands that nobody looks after for long end."""

    def close(self) -> None:
        """Look after them no more."""

    def known(self) -> list[str]:
        """The keys of commands that were started, and not removed."""

    async def start(self, key: str, process: CommandProcess) -> None:
        """Start a command, unless it was started before. Raises `OSError`: it can't be, and was not."""

    async def ended(self, key: str) -> CommandEnd | None:
        """Wait for the end of a command; None at once if it was never started."""

    def stop(self, key: str, *, force: bool) -> None:
        """Send SIGTERM or, with `force`, SIGKILL to the command and what it has started. Nothing if it has ended."""

    def read(self, key: str, after: int | None, limit: int) -> tuple[int, bytes, int]:
        """`(start, data, size)` of the output: see `CommandOutput`; after None: its last `limit` bytes."""

    async def grown(self, key: str, size: int, seconds: float) -> None:
        """Wait until there is more output than `size`, for so many seconds at most."""

    def remove(self, key: str) -> None:
        """Remove what is kept of a command; one that is at work is killed."""


class ModelGateway(Protocol):
    """The gateway, as its node service sees it. Every call may be repeated.

    Every one fails with `ServiceGone` if the gateway is gone, or if its service, or another one, has attached since.
    """

    async def attach(self, service: str, profiles: list[ModelProfile]) -> Attached:
        """Work for the caller from now on, and for nobody else; learn these profiles. Calls in flight go on.

        Args:
            service: the caller's own name: one that another service has replaced is refused, with `ServiceGone`.

        Raises:
            TimeoutError: the gateway is there, and gives no answer.
        """

    async def register(self, number: str, profile: ModelProfile) -> None:
        """Learn a profile."""

    async def call(self, number: str, origin: CallOrigin, request: ModelRequest | None) -> ModelAnswer | None:
        """The answer to a model call, which is made once, however often it is asked for: it is kept until `release`.

        Args:
            request: None for one that the gateway has.

        Returns:
            With `error` if the call failed, whatever the reason. None if the gateway does not have it, and there is no
            request, or one that leaves something out which the gateway does not have either.
        """

    async def growth(self, number: str, key: str, restarts: int, lengths: list[int]) -> Growth:
        """What has come of an answer since it had started over so often, and its parts had so many characters each;
        once there is any.

        Args:
            key: of the call (`CallOrigin.key`). Of one that is not known nothing has come.
        """

    async def response(self, number: str, key: str, known: KeptResponse | None) -> KeptResponse | None:
        """The response that an endpoint keeps of a call, once there is another one than the `known` one; None if the
        call ends without, or is not known."""

    async def cancel(self, number: str, response: KeptResponse) -> None:
        """Have the endpoint end a response that no call waits for any more. Returns at once: what fails about it is
        logged."""

    async def abort(self, number: str, key: str) -> None:
        """Close the connection of a call; what came so far is its answer."""

    async def release(self, number: str, keys: list[str]) -> None:
        """Forget calls: their answers are committed, or nobody wants them. Those in flight end."""

    async def rates(self, number: str, seen: int) -> RateReport:
        """How the rate limits of endpoints are used, once there is something that other nodes should know at once; now
        and then also without.

        Args:
            seen: the version of the report before.
        """

    async def share(self, number: str, shares: RateShares) -> RateReport:
        """Use no more of the limits than this, unless something newer is known; how they are used then."""

    async def heard(self, number: str) -> None:
        """Nothing; its answer says that the gateway is well."""


class ToolHost(Protocol):
    """The process that holds the MCP servers of a node, as its node service sees it. Every call may be repeated.

    Every one fails with `ServiceGone` if the host is gone, or if its service, or another one, has attached since.
    """

    async def attach(self, service: str) -> HostAttached:
        """Work for the caller from now on, and for nobody else. Calls in flight go on.

        Args:
            service: the caller's own name: one that another service has replaced is refused, with `ServiceGone`.
        """

    async def tools(self, number: str, server: ServerConfiguration) -> ServerTools:
        """The tools of a server, which is started if it does not run. A server that can't be used has an `error`."""

    async def call(self, number: str, key: str, server: ServerConfiguration, call: ServerCall) -> ServerAnswer:
        """The answer to a call, which is made once, however often it is asked for: it is kept until `release`, or for
        a bounded time.

        Args:
            key: names the call, and no other one of any session, and no other attempt.
        """

    async def cancel(self, number: str, key: str) -> None:
        """Give a call up: its server is notified, and it has an answer."""

    async def release(self, number: str, keys: list[str]) -> None:
        """Forget calls: their answers are committed."""

    async def heard(self, number: str) -> None:
        """Nothing; its answer says that the host is well."""


@dataclass(frozen=True)
class Death:
    """The facts of a death, for the restart decision.

    Attributes:
        deaths: times of earlier counted deaths, microseconds UTC.
        stuck: earlier deaths in a row without progress.
        waiting: the session only waited: nothing of its own can have caused it.
        progress: answers or tool results were committed since the last death.
        open_calls: tool calls of the current round that this process had to execute and that have no result.
        aborted: such calls were given up before in this run.
        session_id, number: whose death it is, and how many it had before; the backoff's jitter depends on nothing else.
    """

    at: int
    deaths: tuple[int, ...]
    stuck: int
    waiting: bool
    progress: bool
    policy: dict[str, Any]
    open_calls: int = 0
    aborted: bool = False
    session_id: str = ""
    number: int = 0


@dataclass(frozen=True)
class Verdict:
    """What to do about a death: `resume` after `delay` microseconds, or `quarantine` for `reason`, which `rule` names.

    `abort` gives the open tool calls up, for `reason`, and resumes at once.
    """

    action: str
    delay: int = 0
    rule: str = ""
    reason: str = ""
    deaths: tuple[int, ...] = ()
    stuck: int = 0


Decide = Callable[[Death], Verdict]


@dataclass(frozen=True)
class Member:
    """A sub-agent of a group: of a run that does not have its result yet.

    Attributes:
        order: of its start within the group.
        restart: its restart type: `permanent`, `transient` or `temporary`.
        ended: the status of its task's run; None while it is at work.
        asked: somebody outside the group asked it to end: it is not started again.
    """

    child_id: str
    order: int
    restart: str
    ended: str | None = None
    asked: bool = False


@dataclass(frozen=True)
class Plan:
    """A restart or an escalation under way.

    Attributes:
        stop: who must end first, in turn; the first one has been asked to.
        start: who is started again then, in this order, after `delay` microseconds.
        escalate: why the supervising run fails then; empty if it does not.
    """

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    delay: int = 0
    escalate: str = ""


@dataclass(frozen=True)
class GroupState:
    """What a run remembers of its group: times of the restarts (microseconds UTC), how far the pauses have grown."""

    restarts: tuple[int, ...] = ()
    level: int = 0
    plan: Plan | None = None


@dataclass(frozen=True)
class GroupDecision:
    """What to do now, in this order: note `state`, deliver results, start again, escalate, ask one to stop."""

    state: GroupState
    deliver: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    delay: int = 0
    escalate: str = ""
    stop: str = ""


DecideEnd = Callable[[dict[str, Any], GroupState, list[Member], str, int, str], GroupDecision]
