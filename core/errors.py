"""The one error tree. Every error has a stable `code`, survives pickling, and says what to do next.

Subclasses set `code` and `hint`; callers give the message and, where there is one, the session. Where another step
helps than that of the class, `details["hint"]` says it, and so goes wherever the error goes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class UnderstudyError(Exception):
    """Base of all errors raised by Understudy.

    Attributes:
        code: stable identifier for scripts, e.g. `fenced`.
        message: what happened.
        session_id: the session concerned, if any.
        details: JSON-compatible facts for programs.
    """

    code: ClassVar[str] = "error"
    hint: str = ""

    def __init__(self, message: str, *, session_id: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.session_id = session_id
        self.details = details or {}
        self.hint = self.details.get("hint", self.hint)

    def __str__(self) -> str:
        where = f" (session {self.session_id})" if self.session_id else ""
        said = f"[{self.code}] {self.message}{where}"
        stop = "" if said.endswith((".", "!", "?", ":")) else "."
        return f"{said}{stop} {self.hint}" if self.hint else said

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), session_id=self.session_id, details=self.details), (self.message,)

    def to_wire(self) -> dict[str, Any]:
        """The error as JSON-compatible data; `from_wire` restores the same class."""
        return {"code": self.code, "message": self.message, "session_id": self.session_id, "details": self.details}

    @staticmethod
    def of(error: Exception, *, session_id: str | None = None) -> UnderstudyError:
        """An error that is one of ours, or one of ours that says what it was."""
        if isinstance(error, UnderstudyError):
            return error
        return UnderstudyError(f"{type(error).__name__}: {error}", session_id=session_id)

    @staticmethod
    def from_wire(data: dict[str, Any]) -> UnderstudyError:
        """Restore an error; an unknown code (from a newer version) becomes a plain `UnderstudyError`."""
        kind = error_classes().get(data.get("code", ""), UnderstudyError)
        return kind(data.get("message", ""), session_id=data.get("session_id"), details=data.get("details"))


def error_classes(root: type[UnderstudyError] = UnderstudyError) -> dict[str, type[UnderstudyError]]:
    """Every class of the tree by its code."""
    # Ray makes a subclass of each error that a task raised; it stands for none of its own.
    found = {root.code: root} if "code" in vars(root) else {}
    for kind in root.__subclasses__():
        found |= error_classes(kind)
    return found


class InvalidInput(UnderstudyError):
    """What the caller gave is refused; nothing was changed."""

    code = "invalid_input"


class InvalidSpec(InvalidInput):
    """An agent specification has mistakes; `details["problems"]` lists all of them."""

    code = "invalid_spec"
    hint = "Correct the fields named above."


class InvalidConfiguration(InvalidInput):
    """A setting from the environment or a call is missing or unreadable."""

    code = "invalid_configuration"


class MetricsPortTaken(InvalidConfiguration):
    """A node service can't serve its metrics on the port that it was given: another process listens there."""

    code = "metrics_port_taken"
    hint = (
        "Set UNDERSTUDY_METRICS_PORT to a free port, or to 0: then each service takes a free one, which "
        "`understudy ps --json` shows. Services on one machine can't share a port; `ss -ltnp` shows who has it."
    )


class UnknownSession(InvalidInput):
    """No session with this id is in the store."""

    code = "unknown_session"
    hint = "`understudy ps --all` lists the sessions of this store."


class UnknownRun(InvalidInput):
    """The session has no run with this id."""

    code = "unknown_run"
    hint = "`understudy show SESSION` lists its runs."


class UnknownSchedule(InvalidInput):
    """No schedule of this name is in the store."""

    code = "unknown_schedule"
    hint = "`understudy schedules list` lists those that there are."


class UnknownTriageEntry(InvalidInput):
    """No entry of the triage inbox has this id."""

    code = "unknown_triage_entry"
    hint = "`understudy triage --all` lists those that there are."


class UnknownQueue(InvalidInput):
    """No queue of this name is in the store."""

    code = "unknown_queue"
    hint = "`understudy queues list` lists those that there are, `understudy queues set NAME` makes one."


class EventsPruned(UnknownRun):
    """The run is known, but retention has removed its events."""

    code = "events_pruned"
    hint = "`understudy show SESSION` has its messages and result; its spans are where they were exported to."


class InvalidArchive(InvalidInput):
    """A file is no archive of a session, or was damaged; nothing was imported."""

    code = "invalid_archive"
    hint = "Export the session again (`understudy store export`)."


class ArchiveVersion(InvalidArchive):
    """An archive was written by a newer version of Understudy; nothing was imported."""

    code = "archive_version"
    hint = "Upgrade Understudy to at least the version that wrote the archive."


class UntrustedCode(UnderstudyError):
    """An archive brings code, or says which of the node's secrets tools see; nothing was imported."""

    code = "untrusted_code"
    hint = "It would run with the rights of your cluster. If you trust whoever made the archive: --trust-code."


class OutputFailed(UnderstudyError):
    """What a command's output went to takes no more of it: a full disk, a pipe that nobody reads."""

    code = "output_failed"


class Conflict(UnderstudyError):
    """The request contradicts what is stored under the same key; nothing was changed."""

    code = "conflict"


class SessionConflict(Conflict):
    """A session with this id exists and has another specification."""

    code = "session_conflict"
    hint = 'Use another session_id, the specification it was created with, or one with on_change="migrate".'


class RunConflict(Conflict):
    """A run with this id exists and has another input."""

    code = "run_conflict"
    hint = "A run_id names one input: use another run_id for another text."


class SessionClosed(Conflict):
    """The session takes no more input."""

    code = "session_closed"
    hint = "Spawn a new session."


class AnswerConflict(Conflict):
    """The question was answered, and otherwise; nothing was changed."""

    code = "answer_conflict"
    hint = "The first answer counts: `understudy show SESSION` has what followed from it."


class NotAsked(Conflict):
    """Nobody waits for an answer to this call."""

    code = "not_asked"
    hint = "`understudy show SESSION` lists what the session waits for."


class NotRunning(Conflict):
    """The session has no run that could be steered: none is at work, or the one that is was asked to end."""

    code = "not_running"
    hint = "Use `send`: it begins a run of its own."


class SessionActive(Conflict):
    """The session, or one below it, has work to do; nothing was changed."""

    code = "session_active"
    hint = "Wait for its runs to end, or cancel them."


class Fenced(Conflict):
    """A newer activation of the session exists: this one may write nothing and must leave."""

    code = "fenced"


class BatchLost(Conflict):
    """A batch that an activation sent is missing in the store. What came behind it is refused, and the session goes on
    in another process from what the store has."""

    code = "batch_lost"
    hint = "The session goes on by itself; the store may have lost what it had acknowledged."


class StaleGeneration(Conflict):
    """A newer supervisor owns the store: this one may change nothing."""

    code = "stale_generation"


class CannotDrain(Conflict):
    """A node can't be drained: there would be nobody to go on. Nothing was changed."""

    code = "cannot_drain"
    hint = (
        "Start another Ray node first (with PostgreSQL), or stop the services in good order: "
        "`understudy drain --stop`. `understudy ps --json` has the nodes."
    )


class StoreError(UnderstudyError):
    """The store refused or failed."""

    code = "store_error"


class StoreUnreachable(StoreError):
    """The store can't be reached; nothing was acknowledged that is not committed."""

    code = "store_unreachable"
    hint = "Check the address, the network and the credentials in UNDERSTUDY_STORE."


class StoreRefused(StoreUnreachable):
    """The server does not let us in: wrong password, role or database."""

    code = "store_refused"
    hint = "Check the user, the password and the database's name in UNDERSTUDY_STORE, and the server's pg_hba.conf."


class StorePasswordMissing(StoreUnreachable):
    """Services that Ray has restarted have nobody left who knows the store's password; they wait for it."""

    code = "store_password_missing"
    hint = "Connect once from an environment that has it in UNDERSTUDY_STORE (`understudy up`): then runs go on."


class StoreReadOnly(StoreUnreachable):
    """The store can't be written: its file or directory, or a server that only reads."""

    code = "store_readonly"
    hint = "Make the file and its directory writable; PostgreSQL: name the primary, or all hosts, in UNDERSTUDY_STORE."


class StoreFull(StoreUnreachable):
    """The store's disk takes no more."""

    code = "store_full"
    hint = "Free space on its disk, or raise the quota or the file size limit: what waits is then committed unasked."


class StoreBusy(StoreUnreachable):
    """Another process is in the way; it was waited for, and nothing was changed."""

    code = "store_busy"
    hint = "Try again. If it persists, see who holds the lock (pg_stat_activity; the processes with the file open)."


class StoreMissing(StoreUnreachable):
    """There is no such SQLite file, and the command does not make one."""

    code = "store_missing"
    hint = "Check --store and UNDERSTUDY_STORE; `understudy store migrate` makes a new one."


class StoreOwned(StoreError):
    """Another live cluster owns this store and namespace."""

    code = "store_owned"
    hint = "Stop the other cluster (`understudy down` there), or use another UNDERSTUDY_NAMESPACE."


class StoreVersion(StoreError):
    """The database was written by a newer version of Understudy; it was not touched."""

    code = "store_version"
    hint = "Upgrade Understudy to at least the version that wrote the database."


class StoreForbidden(StoreError):
    """PostgreSQL does not let this role do what is needed; nothing was changed."""

    code = "store_forbidden"
    hint = (
        "Grant it: USAGE on the schema and SELECT, INSERT, UPDATE, DELETE on its tables, to migrate CREATE too; or "
        "have the owner of the tables run `understudy store migrate`, or the SQL of `understudy store ddl`."
    )


class StoreSchema(StoreError):
    """The database has not the tables that this version needs, and may not be changed; it was not touched."""

    code = "store_schema"
    hint = "`understudy store verify` prints the DDL that is missing, `understudy store migrate` applies migrations."


class ModelError(UnderstudyError):
    """A model call failed for good."""

    code = "model_error"


class ModelUnavailable(ModelError):
    """The endpoint failed in a way worth retrying, until the retries or the deadline were used up."""

    code = "model_unavailable"
    hint = "Check the endpoint's status, then send again."


class ModelRefused(ModelError):
    """The endpoint refused the request: repeating it unchanged can't help."""

    code = "model_refused"
    hint = "Check the model's name, the key and the request."


class ContextOverflow(ModelRefused):
    """The endpoint refused the request as longer than its model's context window.

    `details["window"]` has the window in tokens, where the endpoint said it. An agent's session folds its history and
    asks again; a run ends with this error if nothing more can be left out, or the specification forbids it.
    """

    code = "context_overflow"
    hint = "Send less, use a model with a larger context window, or let the history be folded (AgentSpec.context)."


class ModelProtocolError(ModelError):
    """The endpoint answered something that is not the OpenAI chat completions protocol."""

    code = "model_protocol"
    hint = "OPENAI_BASE_URL must point at an OpenAI-compatible API, usually ending in /v1."


class ModelProfileMissing(ModelError):
    """No credentials are known for the model profile of this session."""

    code = "model_profile_missing"
    hint = "Connect once from an environment that has the key (OPENAI_API_KEY, OPENAI_BASE_URL)."


class ToolError(UnderstudyError):
    """A tool could not do its work; the model sees the message as an observation."""

    code = "tool_error"


class McpServerUnusable(ToolError):
    """An MCP server that the agent needs can't be used."""

    code = "mcp_server_unusable"
    hint = "See what the server says; `required=False` lets runs go on without its tools."


class WorkspaceViolation(ToolError):
    """A path leads outside the workspace."""

    code = "workspace_violation"


class WorktreeFailed(UnderstudyError):
    """The git worktree of a session can't be made, or not be merged; whatever the agent has done in it is there."""

    code = "worktree_failed"
    hint = "The message says what is in the way; docs/worktrees.md what a worktree needs."


class MergeConflict(WorktreeFailed):
    """What a session has changed in its worktree can't be merged; `details`: `branch`, `path`, `files` and `reason`."""

    code = "merge_conflict"
    hint = "Nothing of it is merged. `git merge BRANCH` in the workspace does, once the files are dealt with."


class ClusterError(UnderstudyError):
    """The cluster or one of its services failed."""

    code = "cluster_error"


class ClusterUnreachable(ClusterError):
    """Ray or Understudy's services can't be reached."""

    code = "cluster_unreachable"
    hint = "`understudy doctor` says what is missing."


class ServiceGone(ClusterError):
    """A service or an actor died or can't be reached; the call may or may not have had its effect."""

    code = "service_gone"
    hint = "Calls are idempotent: repeat it."


class VersionMismatch(ClusterError):
    """The services, or Ray's nodes, have another version of Understudy; nothing was changed."""

    code = "version_mismatch"
    hint = "`understudy up` ends the services in good order and starts this version's. Or use the version that runs."


class InvalidAuthToken(ClusterUnreachable):
    """Ray's head lets nobody in without its token, and this process does not have it."""

    code = "invalid_auth_token"
    hint = (
        "Set RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN to the cluster's token, or put it into ~/.ray/auth_token; "
        "RAY_AUTH_MODE must be token or unset."
    )


class Unschedulable(ClusterError):
    """No node has what a placement asks for."""

    code = "unschedulable"
    hint = "`ray status` shows what the nodes have; add one, or change the spec's resources and labels."


class DeadlineExceeded(ClusterError):
    """The wait ended before the work did; the work goes on."""

    code = "deadline_exceeded"
    hint = "The run goes on: ask again with a longer timeout, or attach later by its run_id."


class NoProgress(UnderstudyError):
    """The model asked for the same call again and again, although a message said that it has the result."""

    code = "no_progress"
    hint = "`understudy show SESSION` has the transcript; `AgentSpec.repeat_limit` is the limit."


class Refused(UnderstudyError):
    """A hook of the agent's did not let it ask the model, so the run could not go on."""

    code = "refused"
    hint = "The message says which hook, and why: correct what it objects to, or the hook."


class OutputInvalid(UnderstudyError):
    """A run has no answer that fits the agent's output type; `details`: `reason` and `problems` (docs/output.md)."""

    code = "output_invalid"
    hint = "`understudy show SESSION` has the answers; a clearer schema, or more `output_retries`, may help."


class WorkflowError(UnderstudyError):
    """A workflow's code failed, or did what a workflow's code may not do."""

    code = "workflow_error"
    hint = "`understudy workflow status SESSION` has its steps; docs/workflows.md says what its code may do."


class StepFailed(WorkflowError):
    """A step of a workflow did not do what it was to; `details` has its `path`, `step`, `outcome` and `status`."""

    code = "step_failed"
    hint = "Catch it in the workflow's code, give the step a `retry`, or mend what failed and run it again."


class StepTimeout(StepFailed):
    """A step was not done in the time that it has: nobody answered, no event came, or it was ended."""

    code = "step_timeout"
    hint = "Catch it in the workflow's code, or give the step more time."


class WorkflowDiverged(WorkflowError):
    """The workflow's code asks for other steps than the log has of this run: the code was changed, or is not
    deterministic."""

    code = "workflow_diverged"
    hint = "Mend the code, or guard the change with `ctx.patched`; then answer `retry`: the run goes on from its log."


class GoalNotMet(WorkflowError):
    """A goal was not met in so many rounds as it may have; `details` has the last verdict's `reason`, and `rounds`."""

    code = "goal_not_met"
    hint = "The work so far is there. Run it again with more rounds, or a condition that can be met."


class NoVerdict(WorkflowError):
    """Nobody knows whether a goal is met: the evaluator came to no verdict, and none is guessed."""

    code = "no_verdict"
    hint = "`understudy tree SESSION` has the evaluator's session; mend what its run failed with, and run it again."


class StepLimit(WorkflowError):
    """A workflow that a model wrote came to more steps than it may."""

    code = "step_limit"
    hint = "Have it do less at once or in fewer rounds, or raise `steps` of the agent's `WorkflowLimits`."


class RunFailed(UnderstudyError):
    """A run ended without a usable answer."""

    code = "run_failed"
    hint = "`understudy show SESSION` has the error and the transcript."
