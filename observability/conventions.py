"""All names that leave the process: metrics, spans and attributes. Change one here, and dashboards change with it.

Names follow the OpenTelemetry GenAI conventions where these have one (`opentelemetry-semantic-conventions` still ships
deprecated ones, so they are written down here), `understudy.*` otherwise.
"""

from __future__ import annotations

SERVICE_NAME = "understudy"
SCOPE_NAME = "understudy"
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
"""As the GenAI conventions' own repository names the version that is in development there."""

# Operations, the first word of a span's name.
INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"
CRASH = "crash"
RECOVER = "recover"
MOVE = "move"
WAIT_FOR_INPUT = "wait_for_input"
START = "start"
QUARANTINE = "quarantine"
RESUME = "resume"
MIGRATE = "migrate"
CLOSE = "close"
FORCE_SHUTDOWN = "force_shutdown"
RESTART = "restart"

GENAI_OPERATIONS = frozenset({INVOKE_AGENT, CHAT, EXECUTE_TOOL})
"""Those that the GenAI conventions know; the others are ours."""

# Span attributes of the GenAI conventions.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_CACHE_WRITE_TOKENS = "gen_ai.usage.cache_write.input_tokens"
USAGE_REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"
TOKEN_MODALITY = "gen_ai.token.modality"

FUNCTION = "function"
"""`gen_ai.tool.type` of all tools."""
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

REQUEST_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stop": "gen_ai.request.stop_sequences",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "reasoning_effort": "gen_ai.request.reasoning.level",
}
"""Attributes of a request by the parameter of chat completions that they tell."""

USAGE_COST = "gen_ai.usage.cost"
"""Not of the conventions, which have no name for money: what Langfuse and others read as a call's cost."""

COST_CURRENCY = "understudy.cost.currency"
"""By ISO 4217, as the price table says it."""

PROVIDER = "openai"
"""`gen_ai.provider.name` of a call that nobody answered: the protocol's, as the gateway's."""

# Span attributes of ours.
SESSION_PARENT_ID = "understudy.session.parent_id"
SESSION_ROOT_ID = "understudy.session.root_id"
RUN_ID = "understudy.run.id"
RUN_STATUS = "understudy.run.status"
RUN_ROUNDS = "understudy.run.rounds"
RUN_WAITED = "understudy.run.waited"
ROUND = "understudy.round"
EPOCH = "understudy.epoch"
MODEL_ATTEMPT = "understudy.model.attempt"
MODEL_RETRIES = "understudy.model.retries"
MODEL_REDONE = "understudy.model.redone"
TOOL_OUTCOME = "understudy.tool.outcome"
TOOL_EXECUTIONS = "understudy.tool.executions"
CRASH_PID = "understudy.crash.pid"
CRASH_WAITING = "understudy.crash.waiting"
CRASH_PROGRESS = "understudy.crash.progress"
CRASH_DECISION = "understudy.crash.decision"
INPUT_KIND = "understudy.input.kind"
INPUT_DECISION = "understudy.input.decision"
MOVE_FROM = "understudy.move.from"
MOVE_FORCED = "understudy.move.forced"
MIGRATE_CHANGED = "understudy.migrate.changed"
SPEC_HASH = "understudy.spec.hash"
RESTART_CHILD = "understudy.restart.child_id"
RESTART_LOST = "understudy.restart.lost_id"
RESTART_NUMBER = "understudy.restart.number"
RESTART_DELAY = "understudy.restart.delay"
MODEL_LATE = "understudy.model.late"
NODE_ID = "understudy.node_id"
PID = "understudy.pid"

# Metrics; `prometheus_name` gives the spelling on the wire, of attributes as labels, too.
INFERENCE_DURATION = "gen_ai.client.inference.duration"
INFERENCE_FIRST_CHUNK = "gen_ai.client.inference.time_to_first_chunk"
INFERENCE_PER_CHUNK = "gen_ai.client.inference.time_per_output_chunk"
INFERENCE_INPUT_TOKENS = "gen_ai.client.inference.usage.input_tokens"
INFERENCE_OUTPUT_TOKENS = "gen_ai.client.inference.usage.output_tokens"
INFERENCE_CACHED_TOKENS = "gen_ai.client.inference.usage.cache_read.input_tokens"
INFERENCE_CACHE_WRITE_TOKENS = "gen_ai.client.inference.usage.cache_write.input_tokens"
INFERENCE_REASONING_TOKENS = "gen_ai.client.inference.usage.reasoning.output_tokens"
INVOKE_AGENT_DURATION = "gen_ai.invoke_agent.duration"
EXECUTE_TOOL_DURATION = "gen_ai.execute_tool.duration"
EVENTS = "understudy.events"
SESSIONS_CREATED = "understudy.sessions_created"
RUNS_ACCEPTED = "understudy.runs_accepted"
RUNS_FINISHED = "understudy.runs_finished"
RUN_QUEUED = "understudy.run_queued"
QUEUE_WAITED = "understudy.queue_waited"
ACTIVATIONS = "understudy.activations"
SESSION_CRASHES = "understudy.session_crashes"
CRASH_DETECTION = "understudy.crash_detection_duration"
RESTORE_DURATION = "understudy.restore_duration"
TOKENS_REDONE = "understudy.tokens_redone"
MODEL_CALLS = "understudy.model_calls"
MODEL_CALL_WAIT = "understudy.model_call_wait"
MODEL_COST = "understudy.model_cost"
MODEL_RETRY_COUNT = "understudy.model_retries"
MODEL_CALLS_REISSUED = "understudy.model_calls_reissued"
TOOL_CALLS = "understudy.tool_calls"
TOOLS_IN_DOUBT = "understudy.tools_in_doubt"
INPUTS_REQUESTED = "understudy.inputs_requested"
INPUTS_RECEIVED = "understudy.inputs_received"
TIMERS_SET = "understudy.timers_set"
TIMERS_FIRED = "understudy.timers_fired"
TIMER_LATENESS = "understudy.timer_lateness"
MEMORY_FAILURES = "understudy.memory_failures"
CHILDREN_SPAWNED = "understudy.children_spawned"
CHILD_RESTARTS = "understudy.child_restarts"
SESSIONS_MOVED = "understudy.sessions_moved"
SESSIONS_MIGRATED = "understudy.sessions_migrated"
SESSIONS_QUARANTINED = "understudy.sessions_quarantined"
CANCEL_REQUESTS = "understudy.cancel_requests"
COMMIT_DURATION = "understudy.commit_duration"
COMMIT_OPERATIONS = "understudy.commit_operations"
FENCED_WRITES = "understudy.fenced_writes"

# Metrics that are read when somebody looks.
SESSIONS = "understudy.sessions"
SESSIONS_STUCK = "understudy.sessions_stuck"
RUNS_LIVE = "understudy.runs_live"
RUNS_CARRIED = "understudy.runs_carried"
INBOX_ITEMS = "understudy.inbox_items"
INBOX_OLDEST = "understudy.inbox_oldest"
TIMERS_PENDING = "understudy.timers_pending"
BUDGET_TOKENS = "understudy.budget_tokens"
QUEUE_RUNS = "understudy.queue_runs"
TRIAGE_OPEN = "understudy.triage_open"
STORE_COUNTS_AGE = "understudy.store_counts_age"
STORE_OUTAGE = "understudy.store_outage"
HEAD_SILENCE = "understudy.head_silence"
NODES = "understudy.nodes"
BUDGETS_NEAR_LIMIT = "understudy.budgets_near_limit"
SUPERVISOR_SILENCE = "understudy.supervisor_silence"
FRAMES = "understudy.frames"
ACTORS_CAP = "understudy.actors_cap"
STANDBYS_TAKEN = "understudy.standbys_taken"
READY_SESSIONS = "understudy.ready_sessions"
MODEL_CALLS_IN_FLIGHT = "understudy.model_calls_in_flight"
MODEL_CALLS_WAITING = "understudy.model_calls_waiting"
RATE_LIMIT = "understudy.rate_limit"
RATE_SHARE = "understudy.rate_limit_share"
RATE_WAITING = "understudy.rate_limit_waiting"
RATE_REFUSED = "understudy.rate_limit_refusals"
SERVICE_MEMORY = "understudy.node_service_memory"
FRAMES_MEMORY = "understudy.frames_memory"
MEMORY_AVAILABLE = "understudy.memory_available"
LAG_EVENTS = "understudy.projection_lag_events"
LAG = "understudy.projection_lag"
EXPORTED = "understudy.exported"
EXPORT_FAILURES = "understudy.export_failures"
BUILD_INFO = "understudy.build_info"


def prometheus_name(name: str, unit: str = "") -> str:
    """The name in Prometheus' spelling; a counter's `_total` is added by the exposition format itself."""
    spelled = name.replace(".", "_")
    return f"{spelled}_{unit}" if unit else spelled


def doubling(first: float, count: int) -> tuple[float, ...]:
    """`count` upper bounds of histogram buckets, each twice the one before."""
    return tuple(round(first * 2**power, 6) for power in range(count))


CALL_BUCKETS = doubling(0.01, 20)
"""0.01 … 81.92 s, as the conventions advise for model calls and tools, and on to more than an hour: with reasoning, in
background mode or with a slow tool such a call takes that long, and quantiles end at the last bound."""

INVOKE_AGENT_BUCKETS = doubling(0.1, 17)
"""0.1 … 409.6 s, as the conventions advise for agents, and on to more than an hour."""

RESTORE_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)
"""Has a bound at each recovery target: 60 ms, 250 ms and, for a lost node, 15 s."""

DETECTION_BUCKETS = RESTORE_BUCKETS
"""The same, so that the two can be compared."""

LATENESS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 600.0, 3600.0)
"""Up to a time in which nothing ran that could have fired it."""

COMMIT_BUCKETS = doubling(0.0005, 13)
BATCH_BUCKETS = doubling(1, 9)
