"""The public client: `Cluster` and `Session`. One API for synchronous and asynchronous programs.

What asks the services is a `Method`: `session.info()` blocks its thread, `await session.info.aio()` does not. What is
not asked by anybody, `Cluster.session` and `Session.run`, is a plain function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Self

from understudy.actors.results import rendered
from understudy.actors.step_values import result_type
from understudy.actors.workflow import WorkflowDefinition, arguments_of
from understudy.attachments import Given
from understudy.config import ModelProfile, Settings, model_profiles_from_environment
from understudy.errors import InvalidConfiguration, InvalidInput
from understudy.identifiers import check_identifier, check_identity, new_identifier
from understudy.prices import price_table
from understudy.protocol import NewSession
from understudy.queues import QueuePlace, QueueSet, Rate
from understudy.reads import DrainInfo, Note, QueueInfo, ScheduleInfo, SessionRecord, TriageEntry
from understudy.schedules import LATEST, SKIP, NewSchedule, ScheduleSet
from understudy.spec import AgentSpec, Budget
from understudy.workflow_definition.steps import Definition
from understudy.workflows import GOAL_ROUNDS

from . import background
from .client_connection import ClientConnection
from .compiling import Compiled, by_value, compile_spec, place, require_own_workspace
from .extensions import offered_profiles
from .goals import goal_of
from .handoff_targets import output_type_of
from .method import client_method, constructor
from .packages import refuse_temporary
from .queue_handle import Queue, queue_place
from .queue_handle import wanted as queue_wanted
from .results import ServiceInfo, SessionInfo
from .run_handle import Run
from .schedule_handle import Schedule, require_one_target, timing, wanted
from .session_handle import Session
from .triage_handle import TriageItem
from .workflows import (
    compile_workflow,
    definition_required,
    scheduled_input,
    scheduled_workflow,
    workflow_function,
)


class Cluster:
    """A connection to the services of one store and namespace. Use it in a `with` or `async with`, or call `close`.

    Closing ends the connection only: runs go on, and another process can attach to them by their ids.
    """

    def __init__(
        self,
        connection: ClientConnection,
        settings: Settings,
        profile: str | None,
        pickle: Callable[[Any], bytes] | None = by_value,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._profile = profile
        self._pickle = pickle
        self._placement: str | None = None

    @constructor
    def connect(
        cls: type[Cluster],
        store: str | None = None,
        *,
        address: str | None = None,
        namespace: str | None = None,
        model: str | None = None,
        standby: int | None = None,
        max_actors: int | None = None,
        profiles: Iterable[ModelProfile] = (),
        prices: Mapping[str, Any] | str | Path | None = None,
        code_by_value: bool = True,
        start: bool = True,
        timeout: float = 60.0,
        identity: str = "",
    ) -> Cluster:
        """Connect; start Ray as a daemon if none runs, and the services if they don't.

        Args:
            store: DSN; default `UNDERSTUDY_STORE`, else one SQLite file per user.
            address: of Ray; default `RAY_ADDRESS`, else the cluster on this machine.
            namespace, model, standby, max_actors: instead of the `UNDERSTUDY_…` variables.
            profiles: endpoints and credentials by name, for specs that name one; the first is the default. Beside them
                are those that installed packages offer (`DISTRIBUTION:NAME`, `docs/agent-files.md`).
            prices: what models cost, by name, as `{"input", "cached_input", "output"}` per million tokens, or a JSON or
                TOML file of that; beside `UNDERSTUDY_PRICES`. The services take them from the connect that starts them,
                and with the profiles of any; a profile's own come first.
            code_by_value: let tools defined in `__main__` travel by value.
            start: start what does not run; if False, raise `ClusterUnreachable` instead.
            timeout: seconds until the services must answer.
            identity: who asks for what is done here (a name, an address), for the events that tell of it; nothing
                proves it, and nothing is allowed or refused by it.

        Raises:
            InvalidConfiguration: a setting can't be used.
            ClusterUnreachable, StoreUnreachable, StoreOwned, StoreVersion: what is missing, and what to do.
        """
        from ..ray.connection import Connection  # loads Ray, which `understudy.testing.LocalCluster` has no use for
        from ..ray.own_ray import connect_ray

        settings = Settings.from_environment(store=store)
        given: dict[str, Any] = {"namespace": namespace, "model": model, "standby": standby, "max_actors": max_actors}
        settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
        check_identifier(settings.namespace, "namespace")
        check_size(settings)
        settings = replace(settings, prices=price_table({**settings.prices, **price_table(prices or {})}))
        check_identity(identity)
        refuse_temporary(settings.store)
        known = list(profiles)
        known += model_profiles_from_environment()
        default = known[0].name if known else None
        known += offered_profiles()
        known = [replace(profile, prices={**settings.prices, **profile.prices}) for profile in known]
        # Here, not on the background loop: Ray sets its signal handlers only from the main thread.
        connection = Connection(settings, connect_ray(address, start=start))
        connection.identity = identity
        background.wait(connection.open(known, timeout, start=start))
        return cls(connection, settings, default, by_value if code_by_value else None)

    @client_method
    def spawn(self, spec: AgentSpec, *, session_id: str | None = None) -> Coroutine[Any, Any, Session]:
        """Get or create a session for an agent; the same id and spec give the same session.

        Raises:
            InvalidSpec: the spec can't be used, or limits the cost of a model without a price.
            SessionConflict: the id exists with another spec.
        """
        if not isinstance(spec, AgentSpec):
            raise InvalidInput(f"spawn takes an AgentSpec, not {type(spec).__name__}")
        require_own_workspace(spec)
        identifier = check_identifier(session_id, "session_id") if session_id is not None else new_identifier()
        compiled = compile_spec(spec, model=self._settings.model, profile=self._profile, pickle=self._pickle)
        return self._create(compiled, identifier, dict(spec.metadata), output_type_of(spec))()

    @client_method
    def workflow(
        self, workflow: Callable[..., Any] | Definition | str | PathLike[str], /, *arguments: Any,
        session_id: str | None = None, run_id: str | None = None, queue: str | QueuePlace | None = None,
        **keywords: Any,
    ) -> Coroutine[Any, Any, Run]:  # fmt: skip
        """Run a workflow: a function that is marked with `@workflow`, a definition, or the path of its file
        (`docs/workflow-files.md`); returns when the run is durable.

        A workflow is a session with the id `session_id`, as an agent's is, and `run_id` is its run: with both ids, a
        driver that is executed twice starts the work once. `RunResult.output` is what the function returns.

        Args:
            arguments, keywords: of the function, after its context. Of a definition its inputs, by name or as one dict,
                and the keywords `agents` (`AgentSpec`) and `tools` (as in an `AgentSpec`) that its steps name.
            queue: the run waits there until it may begin; a `QueuePlace` has a key and a priority as well.

        Raises:
            UnknownQueue: there is no such queue.
            InvalidInput: it is no workflow, its file can't be read, a definition does not take these inputs, or one of
                them has the name of a parameter of this method.
            InvalidSpec: the workflow, or an agent or tool that it uses, can't be used, or its function does not take
                these arguments. For a definition, `details["problems"]` has every problem.
            SessionConflict: the id exists with another specification, or is an agent's.
            RunConflict: the `run_id` was used with another input.
        """
        function = workflow_function(
            workflow, arguments, keywords, {"session_id": session_id, "run_id": run_id, "queue": queue}
        )
        definition = definition_required(function)
        given = arguments_of(function, arguments, keywords)
        return self._begun(definition, given, result_type(function), session_id, run_id, queue)

    @client_method
    def goal(
        self, condition: str, task: str, *, agent: AgentSpec, evaluator: AgentSpec | None = None,
        max_rounds: int = GOAL_ROUNDS, budget: Budget | tuple[Budget, ...] | None = None, session_id: str | None = None,
        run_id: str | None = None, queue: str | QueuePlace | None = None,
    ) -> Coroutine[Any, Any, Run]:  # fmt: skip
        """Have an agent work on a task until a condition holds (`docs/goals.md`); returns when the run is durable.

        In each round the agent does the task, and then an independent evaluator says whether the condition holds; the
        next round begins with the evaluator's reason. `RunResult.output` is the answer that met the condition. A goal
        is a workflow (`workflow`). If the condition is not met its run fails as `goal_not_met`; without a verdict, as
        `no_verdict`.

        Args:
            agent: keeps one conversation over all rounds.
            evaluator: has a new session in each round. None: one with the agent's model, and with tools that read the
                agent's workspace, if it has one.
            max_rounds: 1 to 1,000.
            budget: covers all that is done for the goal.
            queue: see `workflow`.

        Raises:
            InvalidInput: a text is empty, or the number of rounds is not allowed.
            InvalidSpec: an agent can't be used.
            SessionConflict, RunConflict, UnknownQueue: see `workflow`.
        """
        wanted = goal_of(condition, task, agent, evaluator, max_rounds, budget)
        return self._begun(wanted.workflow, wanted.input, output_type_of(agent), session_id, run_id, queue)

    def _begun(
        self, definition: WorkflowDefinition, given: dict[str, Any], output_type: Any, session_id: str | None,
        run_id: str | None, queue: str | QueuePlace | None,
    ) -> Coroutine[Any, Any, Run]:  # fmt: skip
        """A workflow's session, with its run."""
        identifier = check_identifier(session_id, "session_id") if session_id is not None else new_identifier()
        compiled, metadata = self._compiled_workflow(definition)
        content = rendered(given).text
        created = self._create(compiled, identifier, metadata, output_type)
        waits_in = queue_place(queue)

        async def started() -> Run:
            if waits_in is not None:  # else there would be a session without a run
                await Queue(self._connection, waits_in.queue).info.aio()
            session = await created()
            return await session.send.aio(content, run_id=run_id, queue=waits_in)

        return started()

    def _compiled_workflow(self, definition: WorkflowDefinition) -> tuple[Compiled, dict[str, str]]:
        """The specification of a workflow's sessions, and their metadata."""
        compiled = compile_workflow(
            definition, model=self._settings.model, profile=self._profile, pickle=self._pickle
        )  # fmt: skip
        return compiled, dict(definition.options.get("metadata") or {})

    def _create(
        self, compiled: Compiled, session_id: str, metadata: dict[str, str], output_type: Any
    ) -> Callable[[], Coroutine[Any, Any, Session]]:
        """What makes a session of a compiled specification, or finds it."""
        blobs, placements, runtime_env = self._placed(compiled)
        session = NewSession(session_id, compiled.spec, compiled.spec["placement"], metadata)

        async def create() -> Session:
            await self._connection.spawn(session, blobs, placements, runtime_env)
            return Session(self._connection, session_id, output_type)

        return create

    def _placed(self, compiled: Compiled) -> tuple[dict[str, bytes], list[str], dict[str, Any] | None]:
        """The code that a specification needs, with the placements of its tree, and the runtime environment of the
        driver's job, if its code is needed. To be called in the caller's thread: it may be importing the module that a
        tool is pickled with."""
        driver = self._connection.code_placement() if compiled.uses_own_code else {}
        placements = place(compiled.spec, driver)
        return {**compiled.blobs, **placements}, [*placements], driver.get("runtime_env")

    @client_method
    def schedule(
        self, name: str, content: Given | None = None, *, agent: AgentSpec | None = None,
        session: Session | str | None = None,
        workflow: Callable[..., Any] | Definition | str | PathLike[str] | None = None,
        input: Mapping[str, Any] | None = None, agents: Sequence[AgentSpec] = (), tools: Sequence[Any] = (),
        cron: str | None = None, zone: str = "UTC", every: float | timedelta | None = None, at: datetime | None = None,
        start: datetime | None = None, until: datetime | None = None, jitter: float = 0.0, overlap: str = SKIP,
        catch_up: str = LATEST, window: float | None = None, max_firings: int | None = None,
        memory: bool = False, queue: str | QueuePlace | None = None,
    ) -> Coroutine[Any, Any, Schedule]:  # fmt: skip
        """Set a schedule, which does something at given times (docs/schedules.md). With a name alone: the handle of the
        schedule that has it.

        The same definition again changes nothing; a different one replaces the schedule that has the name. Give one of
        `agent`, `session` and `workflow`, and one of `cron`, `every` and `at`.

        Args:
            content: the input of each firing, as for `Session.send`; of a workflow it is `input`.
            agent: each firing creates a session of this agent.
            session: each firing sends an input to this session.
            workflow: each firing runs this workflow, in a session of its own: what `Cluster.workflow` takes.
            input: of the workflow, by the names of its parameters.
            agents, tools: for a workflow's definition: those that its steps name.
            cron: five fields, or `@daily` and the like; read in `zone`, an IANA name.
            every: interval in seconds, counted from `start`, else from now.
            at: one time. A time without a time zone is in `zone`, here and below.
            start, until: nothing is due before or after these.
            jitter: seconds; each firing is delayed by up to so many.
            overlap: while the last firing's run has not ended, a due time is skipped (`skip`), waits for the run to end
                (`queue`), has the run cancelled and fires (`cancel`), or fires all the same (`all`).
            catch_up: of the due times that passed in an outage, the `latest` fires, or `all` do.
            window: seconds that a firing may be late; a due time that is later is missed. None for no limit.
            max_firings: the schedule ends after so many.
            memory: the schedule is a loop: each firing's input says how the earlier runs ended (docs/loops.md). Only
                with `agent`, and not with `overlap="all"`.
            queue: the run of each firing waits there until it may begin; a `QueuePlace` has a key and a priority as
                well.

        Raises:
            InvalidInput: this is no schedule, is never due, or the workflow does not take this input.
            InvalidSpec: the agent or workflow can't be used.
            UnknownSession, SessionClosed: the session does not exist, or takes no more input.
            UnknownQueue: there is no such queue.
        """
        schedule = Schedule(self._connection, name)
        require_one_target(content, agent, session, workflow, input, agents, tools)
        if content is None and workflow is None:
            return _at_once(schedule)
        fields: dict[str, Any] = {
            "overlap": overlap, "catch_up": catch_up, "window": window or 0.0, "place": queue_place(queue)
        }  # fmt: skip
        compiled = None
        if workflow is not None:
            function = scheduled_workflow(workflow, agents, tools)
            content = scheduled_input(function, input)
            compiled, fields["metadata"] = self._compiled_workflow(definition_required(function))
        elif agent is not None:
            compiled = compile_spec(agent, model=self._settings.model, profile=self._profile, pickle=self._pickle)
            fields["metadata"] = dict(agent.metadata)
        else:
            fields["session_id"] = (
                session.id if isinstance(session, Session) else check_identifier(str(session), "session")
            )
        blobs: dict[str, bytes] = {}
        runtime_env = None
        if compiled is not None:
            blobs, _, runtime_env = self._placed(compiled)
            fields |= {"spec": compiled.spec, "placement": compiled.spec["placement"]}
        times = timing(cron, zone, every, at, start, until, jitter)
        new = wanted(name, content, times, max_firings=max_firings or 0, memory=memory, **fields)
        return self._set(schedule, new, blobs, runtime_env)

    async def _set(
        self, schedule: Schedule, new: NewSchedule, blobs: dict[str, bytes], runtime_env: dict[str, Any] | None
    ) -> Schedule:
        async def put(packages: dict[str, bytes]) -> ScheduleSet:
            return await self._connection.ask_once(ScheduleSet, "set_schedule", new, {**blobs, **packages})

        await self._connection.keeping(runtime_env, put)
        return schedule

    @client_method
    async def schedules(self) -> list[ScheduleInfo]:
        """All schedules, also those that are paused or have ended, sorted by name."""
        return await self._connection.read(list[ScheduleInfo], "schedules")

    @client_method
    async def triage(self, *, resolved: bool = False) -> list[TriageEntry]:
        """The failures of runs that schedules began, equal ones as one entry, the latest first (docs/loops.md).

        Args:
            resolved: list resolved entries, too.
        """
        return await self._connection.read(list[TriageEntry], "triage", resolved=resolved)

    def triage_item(self, entry_id: str) -> TriageItem:
        """The handle of a triage entry by its id; that the entry exists is not checked before it is used."""
        return TriageItem(self._connection, check_identifier(entry_id, "entry_id"))

    @client_method
    def queue(
        self, name: str, *, concurrency: int | None = None, per_key: int | None = None, rate: Rate | None = None
    ) -> Coroutine[Any, Any, Queue]:
        """Set a queue's limits (docs/queues.md). With a name alone: the handle of the queue that has it.

        The same limits again change nothing. New limits replace all earlier ones at once; runs that are already at work
        are not affected.

        Args:
            concurrency: how many of its runs may be at work at once; None or 0 for no limit.
            per_key: how many of those may have the same key; None or 0 for no limit.
            rate: how many may begin within a period: `Rate(10, seconds=60)`; None for no limit.

        Raises:
            InvalidInput: a limit is not allowed, or there are as many queues as there may be.
        """
        queue, new = Queue(self._connection, name), queue_wanted(name, concurrency, per_key, rate)

        async def set_queue() -> Queue:
            if new is not None:
                await self._connection.ask_once(QueueSet, "set_queue", new)
            return queue

        return set_queue()

    @client_method
    async def queues(self) -> list[QueueInfo]:
        """All queues, sorted by name."""
        return await self._connection.read(list[QueueInfo], "queues")

    def session(self, session_id: str) -> Session:
        """A session by its id; whether it exists shows when it is used."""
        return Session(self._connection, check_identifier(session_id, "session_id"))

    @client_method
    async def sessions(
        self, *, live_only: bool = False, roots_only: bool = False, limit: int = 100
    ) -> list[SessionInfo]:
        """Sessions, newest first."""
        options = {"live_only": live_only, "roots_only": roots_only, "limit": limit}
        return list(map(SessionInfo.of, await self._connection.read(list[SessionRecord], "sessions", **options)))

    @client_method
    async def services(self) -> list[ServiceInfo]:
        """The processes of the cluster."""
        return await self._connection.services()

    @client_method
    async def drain(
        self, node_id: str | None = None, timeout: float = 600.0, *, wait: bool = True, stop: bool = False
    ) -> list[DrainInfo]:
        """Have a node's sessions finish their tools or model call and go on at other nodes; it gets no new ones.

        Args:
            node_id: or the beginning of one; None with `stop` only.
            timeout: seconds; what is left then moves the hard way, as if the node were lost.
            wait: until nothing is left there.
            stop: all nodes, and with nobody to go on: everything is parked, then the services end.

        Raises:
            CannotDrain: the node is unknown, or there would be nobody to go on.
        """
        return await self._connection.drain(node_id, timeout, wait=wait or stop, stop=stop)

    @client_method
    async def undrain(self, node_id: str) -> bool:
        """Take a drain back: the node gets new sessions again; True if it was drained."""
        return await self._connection.undrain(node_id)

    @client_method
    async def drains(self) -> list[DrainInfo]:
        """The nodes that are drained, or were."""
        return await self._connection.read(list[DrainInfo], "drains")

    @client_method
    async def notes(self, scope: str, owner: str) -> list[Note]:
        """The notes of a session (`session`, its id), of the agents of a name (`agent`), of a `project`, or the board
        of a tree (`tree`, its root's id), the one that was written last at the end."""
        return await self._connection.read(list[Note], "notes", scope, owner)

    @client_method
    async def close(self) -> None:
        """End the connection; everything goes on."""
        await self._connection.close()

    @client_method
    async def shutdown(self) -> None:
        """End the services of this store and namespace. Unfinished runs continue with the next `connect`."""
        await self._connection.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close.aio()


async def _at_once(schedule: Schedule) -> Schedule:
    return schedule


def check_size(settings: Settings) -> None:
    """Raise `InvalidConfiguration` unless there can be so many session actors."""
    if not 0 <= settings.standby <= 64 or (settings.max_actors is not None and settings.max_actors < 1):
        raise InvalidConfiguration("standby must be 0 to 64, and max_actors at least 1")
