"""The other rows of *fleet*: what the work costs, and what it does to models, tools, the store and nodes."""

from __future__ import annotations

from .. import conventions as names
from .indicators import (
    AGENT,
    ERROR_LABEL,
    FLEET,
    GENAI_AGENT,
    GENAI_MODEL,
    MODEL,
    MODEL_LABEL,
    TOOL_LABEL,
    model_error_share,
    quantiles,
)
from .model import BLUE, GREEN, GREY, RED, YELLOW, Query, Row, lines, table
from .promql import or_zero, share

RATE_LIMITS = "profile, model, resource"
LIMITED = "{{profile}} {{model}} {{resource}}"
OF_MODEL = f"{{{{{MODEL_LABEL}}}}}"
COST = "agent, model, currency"


def models() -> Row:
    """Model calls, tokens and money."""
    failed, answered = (
        FLEET.rate(names.INFERENCE_DURATION, GENAI_MODEL, chosen, by=MODEL_LABEL, suffix="_count")
        for chosen in (f'{ERROR_LABEL}!~"|aborted|refused"', f'{ERROR_LABEL}!="aborted"')
    )
    calls = FLEET.rate(names.INFERENCE_DURATION, GENAI_MODEL, by=f"{MODEL_LABEL}, {ERROR_LABEL}", suffix="_count")
    spent, allowed = (FLEET.total(names.BUDGET_TOKENS, f'state="{state}"') for state in ("spent", "allowed"))
    reserved = FLEET.total(names.BUDGET_TOKENS, 'state="reserved"')
    tokens = {
        names.INFERENCE_INPUT_TOKENS: "input",
        names.INFERENCE_CACHED_TOKENS: "of which read from the cache",
        names.INFERENCE_CACHE_WRITE_TOKENS: "of which written to the cache",
        names.INFERENCE_OUTPUT_TOKENS: "output",
        names.INFERENCE_REASONING_TOKENS: "of which reasoning",
    }
    return Row(
        "Model and money",
        (
            lines(
                "Model calls",
                "Calls that ended, per second, by model and error; no error is an answer. `aborted` calls were "
                "cancelled; answers of `refused` ones were held back by a hook beside the call.",
                Query(calls, f"{OF_MODEL} {{{{{ERROR_LABEL}}}}}"),
                unit="ops",
                stacked=True,
            ),
            lines(
                "Model errors",
                "Share of calls that failed for good, cancelled ones left out.",
                Query(or_zero(model_error_share(FLEET)), "all models"),
                Query(share(failed, answered), OF_MODEL),
                unit="percentunit",
                thresholds=((0.01, YELLOW), (0.1, RED)),
            ),
            lines(
                "Model retries",
                "Failed tries within calls that were followed by another one, per second, by what was wrong. Retries "
                "without errors: the endpoint is short (`rate_limited`) or unsteady, but patience helps.",
                Query(or_zero(FLEET.rate(names.MODEL_RETRY_COUNT, MODEL, by="reason")), "{{reason}}"),
                unit="ops",
                stacked=True,
            ),
            lines(
                "Model latency",
                "Time of a model call that was answered, retries included; the wait for its turn is not in it.",
                *quantiles(
                    names.INFERENCE_DURATION, GENAI_MODEL, f'{ERROR_LABEL}=""', by=MODEL_LABEL, shares=(0.5, 0.95)
                ),
                unit="s",
            ),
            lines(
                "Time to the first chunk",
                "From the first request of a streamed call to its first chunk.",
                *quantiles(names.INFERENCE_FIRST_CHUNK, GENAI_MODEL, by=MODEL_LABEL, shares=(0.5, 0.95)),
                unit="s",
            ),
            lines(
                "Time per output chunk",
                "From one chunk of a stream to the next: how fast a model writes. Endpoints send one token or several "
                "in a chunk.",
                *quantiles(names.INFERENCE_PER_CHUNK, GENAI_MODEL, by=MODEL_LABEL, shares=(0.5, 0.95)),
                unit="s",
            ),
            lines(
                "Tokens",
                "Tokens per second of the chosen agents and models.",
                *(
                    Query(or_zero(FLEET.rate(name, GENAI_AGENT, GENAI_MODEL)), legend)
                    for name, legend in tokens.items()
                ),
                unit="short",
            ),
            lines(
                "Cost per hour",
                "At the present rate, by agent and model, in the price table's currency, which it may name "
                "(`currency`). Flat 0: the models have no prices (`UNDERSTUDY_PRICES`).",
                Query(
                    or_zero(f"{FLEET.rate(names.MODEL_COST, AGENT, MODEL, by=COST)} * 3600"),
                    "{{agent}} {{model}} {{currency}}",
                ),
                unit="short",
                decimals=4,
                stacked=True,
            ),
            lines(
                "Wait for a model slot",
                "How long calls that have ended waited for one of their profile's places (`max_concurrency`) and for "
                "its rate limit. With more of these, runs would be shorter by this.",
                *quantiles(names.MODEL_CALL_WAIT, by="profile", shares=(0.5, 0.95)),
                unit="s",
            ),
            lines(
                "Token budgets",
                "Of the trees at work: what they may use, have used, and hold for calls in flight. Spent near allowed: "
                "runs will end with `budget_exceeded`. Trees near it have spent nine tenths of theirs.",
                Query(or_zero(allowed), "allowed"),
                Query(or_zero(spent), "spent"),
                Query(or_zero(reserved), "reserved"),
                Query(or_zero(FLEET.total(names.BUDGETS_NEAR_LIMIT, by="resource")), "trees near their {{resource}}"),
                width=12,
            ),
            lines(
                "Model calls in flight",
                "By node service. At a profile's `max_concurrency` more calls wait in line.",
                Query(FLEET.total(names.MODEL_CALLS_IN_FLIGHT, by="instance"), "{{instance}}"),
                stacked=True,
                width=12,
            ),
            lines(
                "Rate limits",
                "What endpoints permit in a minute, as given or learned, and what all nodes together may use of it "
                "now. Flat 0: no limit is known.",
                Query(or_zero(FLEET.total(names.RATE_LIMIT, by=RATE_LIMITS, function="max")), f"{LIMITED} limit"),
                Query(or_zero(FLEET.total(names.RATE_SHARE, by=RATE_LIMITS)), f"{LIMITED} shared out"),
                unit="short",
                width=12,
            ),
            lines(
                "Calls that wait for a model slot",
                "Calls that wait for one of their profile's places (`max_concurrency`) or for its rate limit, those of "
                "them that do under a known limit, and requests that an endpoint refused all the same (429): other "
                "users share its limit.",
                Query(or_zero(FLEET.total(names.MODEL_CALLS_WAITING, by="profile")), "{{profile}} waiting now"),
                Query(or_zero(FLEET.total(names.RATE_WAITING, by="profile")), "{{profile}} under a known limit"),
                Query(or_zero(FLEET.rate(names.RATE_REFUSED, by="profile")), "{{profile}} refused per second"),
                unit="short",
                width=12,
            ),
        ),
    )


def tools() -> Row:
    """Tool calls, and what waits for people."""
    return Row(
        "Tools",
        (
            lines(
                "Tool calls",
                "Results per second by tool and outcome.",
                Query(or_zero(FLEET.rate(names.TOOL_CALLS, by="tool, outcome")), "{{tool}} {{outcome}}"),
                unit="ops",
                stacked=True,
                width=6,
            ),
            lines(
                "Tool duration",
                "95 in 100 calls of a tool take no longer.",
                *quantiles(names.EXECUTE_TOOL_DURATION, by=TOOL_LABEL, shares=(0.95,)),
                unit="s",
                width=6,
            ),
            lines(
                "Tools in doubt",
                "Calls that had started when their process died, by what becomes of them. Many with policy `report`: "
                'say `on_crash="rerun"` where that is harmless, or write `reconcile`; `understudy certify` tells.',
                Query(or_zero(FLEET.increase(names.TOOLS_IN_DOUBT, by="tool, policy")), "{{tool}} {{policy}}"),
                width=6,
            ),
            lines(
                "Waiting for people",
                "Questions asked and answered, each within the graph's step, and the sessions that wait for an "
                "answer. These want somebody: `understudy ps`, `understudy answer`.",
                Query(FLEET.increase(names.INPUTS_REQUESTED), "asked"),
                Query(or_zero(FLEET.increase(names.INPUTS_RECEIVED)), "answered"),
                Query(or_zero(FLEET.total(names.SESSIONS, 'status="waiting_for_input"')), "sessions waiting now"),
                width=6,
            ),
        ),
    )


def queues() -> Row:
    """What waits for a slot, and what of schedules has failed."""
    return Row(
        "Queues and schedules",
        (
            lines(
                "Runs of queues",
                "Those that have a slot, and those that wait for one, by queue: `understudy queues list`.",
                Query(
                    FLEET.total(names.QUEUE_RUNS, 'state!="behind"', by="queue, state", function="max"),
                    "{{queue}} {{state}}",
                ),
                width=6,
            ),
            lines(
                "Time to a slot",
                "95 in 100 runs of a queue had waited no longer when they got their slot.",
                *quantiles(names.QUEUE_WAITED, by="queue", shares=(0.95,)),
                unit="s",
                width=6,
            ),
            lines(
                "Runs that begin",
                "Slots given per second, by queue.",
                Query(FLEET.rate(names.QUEUE_WAITED, suffix="_count", by="queue"), "{{queue}}"),
                unit="ops",
                width=6,
            ),
            lines(
                "Open in triage",
                "Failures of what schedules begin that nobody has resolved, by schedule: `understudy triage`.",
                Query(FLEET.total(names.TRIAGE_OPEN, by="schedule", function="max"), "{{schedule}}"),
                width=6,
            ),
        ),
    )


def store() -> Row:
    """Commits, and what leaves for other systems."""
    return Row(
        "Store and projection",
        (
            lines(
                "Commit duration",
                "A transaction of the journal. Every round has at least two, so this is what a round costs at least.",
                *quantiles(names.COMMIT_DURATION),
                unit="s",
                width=8,
                thresholds=((0.05, YELLOW), (0.25, RED)),
            ),
            lines(
                "Commits",
                "Transactions per second, and how many operations each merges: more under load, which is how it keeps "
                "up.",
                Query(FLEET.rate(names.COMMIT_OPERATIONS, suffix="_count"), "transactions per second"),
                Query(FLEET.rate(names.COMMIT_OPERATIONS, suffix="_sum"), "operations per second"),
                Query(FLEET.mean(names.COMMIT_OPERATIONS), "operations in each"),
                width=8,
            ),
            lines(
                "Projection lag",
                "Age of the oldest event that a sink has not taken; growing: the collector refuses or is slow, nothing "
                "is lost. And the age of what is counted in the store: sessions, inboxes, budgets.",
                Query(FLEET.total(names.LAG, by="sink", function="max"), "{{sink}}"),
                Query(FLEET.total(names.STORE_COUNTS_AGE, function="max"), "counts of the store"),
                unit="s",
                width=8,
                thresholds=((60, RED),),
            ),
            lines(
                "Events",
                "Events committed per second, by type: all that happens to sessions.",
                Query(FLEET.rate(names.EVENTS, by="type"), "{{type}}"),
                unit="ops",
                stacked=True,
                width=12,
            ),
            lines(
                "Exports",
                "What sinks took per second, batches they refused, and events they have not taken yet.",
                Query(FLEET.rate(names.EXPORTED, by="sink"), "{{sink}} taken"),
                Query(FLEET.rate(names.EXPORT_FAILURES, by="sink"), "{{sink}} refused"),
                Query(FLEET.total(names.LAG_EVENTS, by="sink"), "{{sink}} not taken yet"),
                width=12,
            ),
        ),
    )


def nodes() -> Row:
    """Processes and memory."""
    return Row(
        "Nodes",
        (
            lines(
                "Nodes by state",
                "As the supervisor says. Missing: gone without a drain, and no other has come in its place. More than "
                "are scraped: `UnderstudyNodeServicesNotScraped` in docs/alerts.md.",
                Query(FLEET.total(names.NODES, by="state", function="max"), "{{state}}"),
                Query(or_zero(FLEET.total(names.BUILD_INFO, function="count")), "scraped"),
                colours={"serving": GREEN, "missing": RED, "drained": GREY, "scraped": BLUE},
            ),
            lines(
                "Session actors",
                "Those that act, wait with their session, or stand by, and how many there may be. No standby: the next "
                "crash waits for a process to start.",
                Query(FLEET.total(names.FRAMES, by="state"), "{{state}}"),
                Query(FLEET.total(names.ACTORS_CAP), "cap"),
                colours={"cap": RED, "standby": BLUE, "acting": GREEN, "waiting": GREY},
            ),
            lines(
                "Memory of session actors",
                "By node; with the memory that is still free, which the cap follows.",
                Query(FLEET.total(names.FRAMES_MEMORY, by="instance"), "{{instance}}"),
                Query(FLEET.total(names.MEMORY_AVAILABLE, by="instance"), "{{instance}} free"),
                unit="bytes",
            ),
            lines(
                "Memory of node services",
                "Resident memory. It grows with sessions at work, not with those in the store.",
                Query(FLEET.total(names.SERVICE_MEMORY, by="instance"), "{{instance}}"),
                unit="bytes",
                width=12,
            ),
            table(
                "Versions",
                "What each node service runs. Two versions that stay: an update that did not reach every node.",
                Query(f"count by (instance, version) ({FLEET.series(names.BUILD_INFO)})", now=True, format="table"),
                width=12,
                height=8,
            ),
        ),
    )
