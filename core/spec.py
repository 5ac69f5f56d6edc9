"""`AgentSpec`: what an agent is. Strict: unknown fields are refused, and all problems are reported together."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from .access import Sandbox, WebPolicy, Worktree
from .errors import InvalidSpec
from .mcp_servers import McpServer, twice
from .prices import MILLION
from .strict import AGENT, BY_NAME, DIRECTORY, ONE, SEVERAL, WORKTREE, Strict, Variable
from .worktrees import OWN_WORKTREE

NAME = r"^[A-Za-z0-9._-]{1,64}$"

A_PATH = "a name of the form module:function or DISTRIBUTION:NAME"


def _is_path(item: Any) -> bool:
    """Whether an entry names a function, or what a package offers."""
    return isinstance(item, str) and all(item.partition(":"))


class Budget(Strict):
    """Limits of what a session may use; at least one. Exact rules: docs/budgets.md.

    Attributes:
        scope: `tree`: the session and all below it, over its life; `session`: the session alone, over its life; `run`:
            each run of the session alone.
        tokens: input and output together.
        cost: money in the price table's currency; every model in the scope must have a price.
        rounds: model calls that were answered.
        children: sub-agents started.
        depth: levels of sub-agents below the session; with the scope `tree` only.
        seconds: time since the scope's first run began, whatever was done in it.
    """

    scope: Literal["tree", "session", "run"] = "tree"
    tokens: int | None = Field(None, ge=1, le=10**15)
    cost: Decimal | None = Field(None, gt=0, le=10**9, decimal_places=6)
    rounds: int | None = Field(None, ge=1, le=10**9)
    children: int | None = Field(None, ge=0, le=10**9)
    depth: int | None = Field(None, ge=0, le=16)
    seconds: float | None = Field(None, ge=0.001, le=10**9)

    @model_validator(mode="after")
    def _limits(self) -> Budget:
        if not self.limits():
            raise ValueError(f"needs at least one of {', '.join(RESOURCES)}")
        if self.depth is not None and self.scope != "tree":
            raise ValueError("depth needs the scope 'tree'")
        return self

    def limits(self) -> dict[str, int]:
        """The limits by resource, in whole units: cost in millionths, time in microseconds."""
        found = {name: getattr(self, name) for name in RESOURCES}
        scale = {"cost": MILLION, "seconds": MILLION}
        return {name: round(limit * scale.get(name, 1)) for name, limit in found.items() if limit is not None}


RESOURCES = ("tokens", "cost", "rounds", "children", "depth", "seconds")
"""What a budget can limit."""


def each(budget: Budget | tuple[Budget, ...] | None) -> tuple[Budget, ...]:
    """Budgets, however many there are."""
    if budget is None:
        return ()
    return budget if isinstance(budget, tuple) else (budget,)


def _once_each(value: Budget | tuple[Budget, ...]) -> Budget | tuple[Budget, ...]:
    scopes = [budget.scope for budget in each(value)]
    twice = sorted({scope for scope in scopes if scopes.count(scope) > 1})
    if twice:
        raise ValueError(f"there can be one budget for each scope; there are several for {', '.join(twice)}")
    return value


Budgets = Annotated[
    Annotated[Budget, Tag(ONE)] | Annotated[tuple[Budget, ...], Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, (list, tuple)) else ONE),
    AfterValidator(_once_each),
]


class RestartPolicy(Strict):
    """When a crashed session is resumed and when it is given up.

    Attributes:
        max_restarts: counted deaths within `period` seconds before the session is quarantined (OTP's intensity).
        stuck_after: deaths in a row without progress (an answer or a tool result) before its open tool calls are
            given up (once in a run), or it is quarantined.
        backoff: first delay in seconds after a death without progress; doubles up to `backoff_max`.
        jitter: by which fraction of itself a delay may be shorter, so that sessions that died together don't come back
            together.
        reset_after: seconds without a counted death after which delays begin with `backoff` again; None for `period`.
    """

    max_restarts: int = Field(20, ge=0, le=10_000)
    period: float = Field(60.0, gt=0, le=86_400)
    stuck_after: int = Field(3, ge=1, le=1_000)
    backoff: float = Field(0.1, ge=0, le=60)
    backoff_max: float = Field(10.0, ge=0, le=3_600)
    jitter: float = Field(0.2, ge=0, le=1)
    reset_after: float | None = Field(None, gt=0, le=86_400)


class Supervision(Strict):
    """What an agent's run does about its sub-agents that end badly, as OTP's supervisors do (`docs/supervision.md`).

    Attributes:
        strategy: who is started again with one that failed: it alone, all of them, or those started after it.
        max_restarts: restarts within `period` seconds; one more and `exceeded` applies (OTP's intensity).
        backoff: pause in seconds before the first restart; doubles up to `backoff_max`, and starts over when there was
            no restart for `reset_after` seconds.
        jitter: up to this fraction is added to a pause, so that those which failed together don't return together.
        exceeded: `escalate` ends the run as failed, which its own parent's rules then deal with, up to the root;
            `report` tells the model how the sub-agent failed, and goes on.
    """

    strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = "one_for_one"
    max_restarts: int = Field(2, ge=0, le=10_000)
    period: float = Field(3600.0, gt=0, le=31_536_000)
    backoff: float = Field(1.0, ge=0, le=3_600)
    backoff_max: float = Field(60.0, ge=0, le=86_400)
    jitter: float = Field(0.2, ge=0, le=1)
    reset_after: float = Field(600.0, gt=0, le=31_536_000)
    exceeded: Literal["escalate", "report"] = "escalate"


class Context(Strict):
    """How much of a long history a model is sent (docs/context.md). The log always has all of it.

    Attributes:
        window: tokens that the model can read and write in one call. None: as known for the model's name
            (`understudy.windows`), and otherwise learned when the endpoint refuses a request as too long.
        representation: `terse` shortens older results of tools once the context is nearly full; `full` never does.
        fold: what is done next with older messages: a summary by the model takes their place (`summarise`), or notes
            under headings (`notes`), or nothing does (`drop`). `none` leaves them where they are.
        fold_at: the share of the window from which on that is done.
        keep: the share of the window that the latest messages have, which stay as they are.
        elide: characters that older results keep under `terse`, by tool; `*` for all others.
        longest_result: characters of a tool's result that the model is ever shown; `read_message` has all of it.
    """

    window: int | None = Field(None, ge=256, le=100_000_000)
    representation: Literal["full", "terse"] = "terse"
    fold: Literal["none", "drop", "summarise", "notes"] = "summarise"
    fold_at: float = Field(0.75, ge=0.1, le=0.95)
    keep: float = Field(0.25, ge=0.02, le=0.5)
    elide: dict[str, Annotated[int, Field(ge=0, le=1_000_000)]] = Field(default_factory=lambda: {"*": 400})
    longest_result: int = Field(50_000, ge=500, le=1_000_000)


class Memory(Strict):
    """What an agent is shown of its notes, and who else remembers for it (`docs/memory.md`).

    Attributes:
        scopes: whose notes are shown when a run begins.
        project: the project whose notes it may use, and is shown; None for none.
        max_tokens: the longest text of its memory, three bytes a token; what does not fit is left out.
        share: of the model's window, where that is known: the text is no longer than this either.
        providers: functions or classes decorated with `@memory_provider`, or their names as of tools.
        timeout: seconds for one call of a provider.
    """

    scopes: tuple[Literal["session", "agent"], ...] = ("session", "agent")
    project: str | None = Field(None, pattern=NAME)
    max_tokens: int = Field(2_000, ge=100, le=1_000_000)
    share: float = Field(0.1, gt=0, le=0.5)
    providers: tuple[Any, ...] = ()
    timeout: float = Field(10.0, gt=0, le=3_600)

    @field_validator("scopes")
    @classmethod
    def _scopes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(value)))  # in whatever order, they mean the same notes

    @field_validator("providers", mode="before")
    @classmethod
    def _providers(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError("must be a list of providers")
        for item in value:
            if not _is_path(item) and not hasattr(item, "__understudy_memory__"):
                raise ValueError(f"{item!r} is no function or class decorated with @memory_provider, nor {A_PATH}")
        return tuple(value)


class Delegation(Strict):
    """Within which limits a model may write sub-agents itself (docs/subagents.md): by the arguments `instructions`,
    `tools` and `model` of `spawn_agent` and `start_agent`.

    Attributes:
        tools: names of the agent's own tools that such a sub-agent may have.
        models: that it may use; with none of them given it uses the agent's. They are asked with the agent's profile.
        budget: of each such sub-agent, within those of the agents above it.
        output: whether it may say, by `output_schema`, what JSON the sub-agent shall answer with.
    """

    tools: tuple[str, ...] = ()
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    budget: Budgets | None = None
    output: bool = False


class WorkflowLimits(Strict):
    """Within which limits a model may write workflows itself (docs/subagents.md): with the tool `create_workflow`.

    Attributes:
        tools: names of the agent's own tools that their steps may call.
        agents: names of its sub-agents (`AgentSpec.agents`) that may work for them.
        models: that their `model` steps may name; others use the agent's. They are asked with the agent's profile.
        steps: that one run may come to, those within others, tries and rounds counted each.
        at_once: steps that may be under way at once.
        budget: of each such workflow, within those of the agents above it.
    """

    tools: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    steps: int = Field(200, ge=1, le=5_000)
    at_once: int = Field(8, ge=1, le=64)
    budget: Budgets | None = None


class AgentSpec(Strict):
    """What an agent is and may do.

    Attributes:
        name: label of metrics and spans; few different values, please.
        description: what it is for, in a sentence or two: for whoever may use it, another agent's model among them.
        model: None for the cluster's default (`UNDERSTUDY_MODEL`).
        profile: name of a model profile; None for the driver's own credentials.
        tools: functions decorated with `@tool`, names of built-in tools (`read_file`, …) or of groups (`files`), import
            paths (`module:function`), or what an installed package offers (`DISTRIBUTION:NAME`, `docs/agent-files.md`).
        agents: what `spawn_agent` and `start_agent` may create, by name; without it the children are copies of this
            agent. Workflows that its model writes have some of them (`workflows`).
        handoffs: the agents that its model may hand the session off to, each by a tool `transfer_to_NAME`; one that is
            known to the session already may be given by its name (`docs/handoff.md`).
        delegation: within which limits its model may write sub-agents itself; None: it may not.
        workflows: within which limits its model may write workflows itself; None: it may not.
        hooks: functions decorated with `@hook`, or their names as of tools, called in this order at their points
            (`docs/hooks.md`). A sub-agent has those that its own specification lists; a copy of this agent has the
            same.
        mcp_servers: servers of the Model Context Protocol, whose tools it has besides (`docs/mcp.md`).
        output_type: what its final answer must be: a pydantic model, a dataclass or any other annotation with a JSON
            Schema, or a JSON Schema (2020-12) itself (`docs/output.md`). None for any text.
        output_mode: how the model is asked for it: by the endpoint's response format (`native`), as arguments of a tool
            (`tool`), or in the instructions (`prompt`). `auto`: `native`, or `tool` where the endpoint refuses that.
        output_retries: how often in a run the model is asked again for an answer that does not fit.
        memory: what it is shown of its notes, and its memory providers; None: nothing.
        skills: folders with a `SKILL.md`, or folders of such folders (`docs/skills.md`). The model is shown their names
            and descriptions, and reads one with the tool `load_skill`, which it is given. The session keeps a copy.
        workspace: directory that file tools are confined to; None for none. `"worktree"`, or a `Worktree`: each session
            has a git worktree of its own (`docs/worktrees.md`).
        max_rounds: model calls in one run.
        max_continuations: how often a reply cut off by length is continued.
        repeat_limit: rounds in a row with the same tool call and the same result, of which the last is not executed any
            more, and the model is informed; after twice as many the run fails (`no_progress`). 0 for no limit.
        tool_timeout: seconds for one tool call, unless the tool says otherwise.
        parallel_tools: tool calls of one round that run at once.
        max_depth: how deep the tree below this agent may grow.
        sandbox: in what `bash` and the tools with `@tool(sandbox=True)` run: a `Sandbox`, or the name of its backend.
        web: which hosts `web_fetch` may fetch from; it is refused where this is None.
        follow_ups: inputs that wait when the session begins a run: each is a run of its own, in order (`queue`), or
            they become messages of that run, and their runs end with it (`merge`).
        deadline: seconds for one model call, retries included.
        stall: seconds without a byte from the endpoint after which a try of a model call is given up, and made again.
        priority: of its model calls where requests have to wait for a rate limit (`docs/rate-limits.md`): a tree gets
            turns in the proportion 4 (`high`), 2 (`normal`), 1 (`low`) to others that wait. None: that of the agent
            that names it as a sub-agent or for a handoff, and `normal` where none does.
        context: how much of a long history the model is sent.
        approve: tools whose calls a person must approve before they are executed (`Session.approve`), beside those with
            `@tool(approve=True)`: names, or patterns as of file names (`write_*`).
        approve_timeout: seconds after which a call that nobody has approved or rejected is decided upon by
            `approve_default`; None for never.
        answer_timeout: seconds after which a question (`request_user_input`) that nobody has answered fails, or is
            answered with `answer_default`; None for never.
        supervision: what becomes of this agent's sub-agents that end badly.
        restart_type: as a sub-agent: `temporary` is never started again, `transient` when it ends badly, `permanent`
            whatever way it ends. A restart is from the beginning: another session with the same task and no history.
        on_parent_end: as a sub-agent still at work when its parent's run ends: it is asked to end and waited for
            (`cancel`), it goes on by itself (`abandon`), or it is waited for (`wait`).
        lifecycle: as a sub-agent, after its task: it takes no more input (`ephemeral`), it stays open until its parent
            is closed (`linked`), or for good (`detached`).
        shutdown: seconds that a run has to end once it is asked to; then it is ended by force and its process killed.
            0 does so at once, None never.
        budget: one, or several with a scope each. A sub-agent's own apply within those of the agents above it.
        isolation: `process` gives each activation a process of its own, which ends when the session parks or its run
            does; nothing is carried over. `shared` uses one process for one session after the other.
        resources: what its process needs, by Ray's names: `num_cpus`, `memory` (bytes), `GPU`, or your own. It runs
            wherever the cluster has them, and holds them only while the session is in it.
        labels: node labels that its process needs, as Ray's label selectors: `{"accelerator": "in(A100,H100)"}`.
        environment: names of variables that its tools need. Their values are those of the node that its process is on
            (Ray's environment there); tools get no others but what any program needs, and `runtime_env`'s `env_vars`.
        runtime_env: of its process, over that of the driver's job.
        on_change: when a session of this id exists with another specification: it goes on under this one from its next
            run on (`migrate`), or that is a conflict (`refuse`). A sub-agent always keeps what it was created with.
    """

    name: str = Field(pattern=NAME)
    description: str = Field("", max_length=1024)
    instructions: str = Field("", max_length=1_000_000)
    model: str | None = Field(None, min_length=1, max_length=256)
    profile: str | None = Field(None, min_length=1, max_length=128)
    tools: tuple[Any, ...] = ()
    agents: tuple[AgentSpec, ...] = ()
    handoffs: tuple[
        Annotated[
            Annotated[AgentSpec, Tag(AGENT)] | Annotated[str, Field(pattern=NAME), Tag(BY_NAME)],
            Discriminator(lambda value: BY_NAME if isinstance(value, str) else AGENT),
        ],
        ...,
    ] = ()
    delegation: Delegation | None = None
    workflows: WorkflowLimits | None = None
    hooks: tuple[Any, ...] = ()
    mcp_servers: tuple[McpServer, ...] = ()
    output_type: Any = None
    output_mode: Literal["auto", "native", "tool", "prompt"] = "auto"
    output_retries: int = Field(2, ge=0, le=16)
    memory: Memory | None = None
    skills: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = ()
    workspace: (
        Annotated[
            Annotated[str, Tag(DIRECTORY)] | Annotated[Worktree, Tag(WORKTREE)],
            Discriminator(lambda value: DIRECTORY if isinstance(value, str) else WORKTREE),
        ]
        | None
    ) = None
    max_rounds: int = Field(50, ge=1, le=10_000)
    max_continuations: int = Field(2, ge=0, le=16)
    repeat_limit: int = Field(4, ge=0, le=1_000)
    tool_timeout: float = Field(120.0, gt=0, le=86_400)
    parallel_tools: int = Field(8, ge=1, le=64)
    max_depth: int = Field(3, ge=0, le=16)
    sandbox: Sandbox = Field(default_factory=Sandbox)
    web: WebPolicy | None = None
    follow_ups: Literal["queue", "merge"] = "queue"
    deadline: float = Field(600.0, gt=0, le=86_400)
    stall: float = Field(300.0, gt=0, le=86_400)
    priority: Literal["high", "normal", "low"] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    budget: Budgets | None = None
    restart: RestartPolicy = Field(default_factory=RestartPolicy)
    context: Context = Field(default_factory=Context)
    approve: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = ()
    approve_timeout: float | None = Field(None, gt=0, le=31_536_000)
    approve_default: Literal["approve", "reject"] = "reject"
    answer_timeout: float | None = Field(None, gt=0, le=31_536_000)
    answer_default: str | None = Field(None, min_length=1, max_length=10_000)
    supervision: Supervision = Field(default_factory=Supervision)
    restart_type: Literal["permanent", "transient", "temporary"] = "temporary"
    on_parent_end: Literal["cancel", "abandon", "wait"] = "cancel"
    lifecycle: Literal["ephemeral", "linked", "detached"] = "ephemeral"
    shutdown: float | None = Field(10.0, ge=0, le=86_400)
    isolation: Literal["shared", "process"] = "shared"
    resources: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    environment: tuple[Variable, ...] = ()
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    on_change: Literal["migrate", "refuse"] = "migrate"
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("workspace", mode="before")
    @classmethod
    def _workspace(cls, value: Any) -> Any:
        return Worktree() if value == OWN_WORKTREE else value

    @field_validator("sandbox", mode="before")
    @classmethod
    def _sandbox(cls, value: Any) -> Any:
        return {"backend": value} if isinstance(value, str) else value

    @field_validator("resources")
    @classmethod
    def _resources(cls, value: dict[str, float]) -> dict[str, float]:
        names = {"CPU": "num_cpus", "num_gpus": "GPU"}
        found = {names.get(name, name): amount for name, amount in value.items()}
        if len(found) < len(value):
            raise ValueError("names one resource twice")
        wrong = sorted(name for name, amount in found.items() if not name or not 0 < amount < math.inf)
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be positive numbers")
        return found

    @field_validator("environment")
    @classmethod
    def _environment(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(value)))  # in whatever order, they mean the same processes

    @field_validator("runtime_env")
    @classmethod
    def _runtime_env(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("must be JSON-compatible") from None
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _tools(cls, value: Any) -> Any:
        if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
            raise ValueError("must be a list of tools or names of tools")
        for item in value:
            if not isinstance(item, str) and not hasattr(item, "__understudy_tool__"):
                raise ValueError(f"{item!r} is neither a name nor a function decorated with @tool")
        return tuple(value)

    @field_validator("hooks", mode="before")
    @classmethod
    def _hooks(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError("must be a list of hooks")
        for item in value:
            if not _is_path(item) and not hasattr(item, "__understudy_hook__"):
                raise ValueError(f"{item!r} is no function decorated with @hook, nor {A_PATH}")
        return tuple(value)

    @field_validator("mcp_servers")
    @classmethod
    def _mcp_servers(cls, value: tuple[McpServer, ...]) -> tuple[McpServer, ...]:
        if twice(value):
            raise ValueError(f"{', '.join(twice(value))} is there twice")
        return value

    @field_validator("repeat_limit")
    @classmethod
    def _repeat_limit(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 (no limit) or at least 2: with 1 no call would be executed")
        return value

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Its budgets, however many there are."""
        return each(self.budget)

    @field_validator("parameters")
    @classmethod
    def _parameters(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"model", "messages", "tools", "stream", "stream_options", "n"} & set(value))
        if taken:
            raise ValueError(f"{', '.join(taken)} can't be set here")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("must be JSON-compatible") from None
        return value

    @classmethod
    def parse(cls, data: Literal[None] | dict[str, Any]) -> AgentSpec:
        """Build a spec from plain data (a TOML or JSON file).

        Raises:
            InvalidSpec: with every problem in `details["problems"]`.
        """
        if not isinstance(data, dict):
            raise InvalidSpec(f"AgentSpec must be a table of fields, not {type(data).__name__}.")
        return cls(**data)
