"""The first rows of *fleet*: is it healthy, what is it doing, how does it recover."""

from __future__ import annotations

from dataclasses import replace

from .. import conventions as names
from .indicators import AGENT, AGENT_LABEL, BUDGETS, CLUSTER, FLEET, GENAI_AGENT, quantiles, unaccounted
from .model import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, YELLOW, Panel, Query, Row, lines, stat
from .promql import or_zero

STATUS_COLOURS = {
    "running": GREEN,
    "waiting_for_model": BLUE,
    "waiting_for_child": PURPLE,
    "waiting_for_input": YELLOW,
    "waiting_for_queue": ORANGE,
    "quarantined": RED,
    "idle": GREY,
}


def health() -> Row:
    """Is anything wrong, on one line."""
    silence = FLEET.total(names.SUPERVISOR_SILENCE, function="max")
    head = FLEET.total(names.HEAD_SILENCE, function="max")
    outage = FLEET.total(names.STORE_OUTAGE, function="max")
    return Row(
        "Is it healthy?",
        (
            stat(
                "Alerts firing",
                or_zero('count(ALERTS{alertname=~"Understudy.+", alertstate="firing"})'),
                "Rules of alerts.yaml that fire now. docs/alerts.md has for each what to look at and what to do.",
                thresholds=((1, RED),),
            ),
            stat(
                "Node services",
                or_zero(FLEET.total(names.BUILD_INFO, function="count")),
                "Node services that were scraped. Fewer than there are nodes: `understudy doctor` on the missing one.",
                base=RED,
                thresholds=((1, GREEN),),
            ),
            replace(
                stat(
                    "Silent for",
                    silence,
                    "The supervisor: since a node service last heard of it, the worst of all. Seconds are normal while "
                    "it is restarted; then nothing that dies is resumed. After 30 s: Ray's own log, `understudy "
                    "doctor`. The head: since Ray's GCS answers a node service no more. Nothing can be started "
                    "meanwhile; a Ray of KubeRay's ends its workers after ten minutes, others after one.",
                    unit="s",
                    thresholds=((10, YELLOW), (30, RED)),
                ),
                queries=(Query(silence, "supervisor", now=True), Query(head, "head", now=True)),
            ),
            stat(
                "Store unreachable for",
                outage,
                "0 while the store answers. Sessions pause meanwhile and nothing is lost: look at the database first.",
                unit="s",
                thresholds=((1, YELLOW), (30, RED)),
            ),
            stat(
                "Runs unaccounted for",
                unaccounted(CLUSTER),
                "Accepted − finished − live, over the whole life of the store. Anything but 0 that stays is a run that "
                "was lost or counted twice: `understudy store check`. Always of the whole cluster; some while a node "
                "service is away.",
                base=RED,
                thresholds=((-0.5, GREEN), (0.5, RED)),
            ),
            stat(
                "Stuck sessions",
                or_zero(FLEET.total(names.SESSIONS_STUCK)),
                "Sessions whose process died and that have made no progress since. They are quarantined after three "
                "such deaths (`stuck_after`): see which tool is open in `understudy show`.",
                thresholds=((1, ORANGE),),
            ),
            stat(
                "Quarantined sessions",
                or_zero(FLEET.total(names.SESSIONS, 'status="quarantined"')),
                "Given up until a person looks: `understudy ps --all`, `understudy show SESSION`, then "
                "`understudy resume` or `close`.",
                thresholds=((1, ORANGE),),
            ),
            stat(
                "Oldest unread input",
                or_zero(FLEET.total(names.INBOX_OLDEST, function="max")),
                "How long the oldest item of an inbox waits. It grows when session actors are short (see Session "
                "actors) or sessions wait for people.",
                unit="s",
                thresholds=((60, YELLOW), (600, ORANGE)),
            ),
        ),
    )


def work() -> Row:
    """What sessions do, and what waits."""
    return Row(
        "Work",
        (
            lines(
                "Sessions by status",
                "What sessions do now. Those that wait hold no process.",
                Query(FLEET.total(names.SESSIONS, by="status"), "{{status}}"),
                stacked=True,
                colours=STATUS_COLOURS,
            ),
            lines(
                "Runs",
                "Inputs accepted by the chosen agents; of all agents, runs ended by status and requests to cancel; "
                "per second.",
                Query(or_zero(FLEET.rate(names.RUNS_ACCEPTED, AGENT)), "accepted"),
                Query(FLEET.rate(names.RUNS_FINISHED, by="status"), "{{status}}"),
                Query(FLEET.rate(names.CANCEL_REQUESTS), "cancel requests"),
                unit="ops",
                colours={"failed": RED, "quarantined": RED, "completed": GREEN},
            ),
            lines(
                "Run duration",
                "From a run's start to its end, by agent.",
                *quantiles(names.INVOKE_AGENT_DURATION, GENAI_AGENT, by=AGENT_LABEL, shares=(0.5, 0.95)),
                unit="s",
            ),
            lines(
                "Time until a run begins",
                "From accepting an input to the start of its run: the wait for a session actor, and for the runs "
                "before it.",
                *quantiles(names.RUN_QUEUED),
                unit="s",
            ),
            lines(
                "Waiting in line",
                "Runs that are not finished, inbox items, sessions that are ready but have no session actor, and "
                "timers to come. Ready sessions that stay above 0 want more actors (`UNDERSTUDY_MAX_ACTORS`, or "
                "nodes).",
                Query(FLEET.total(names.RUNS_LIVE), "runs live"),
                Query(FLEET.total(names.INBOX_ITEMS), "inbox items"),
                Query(FLEET.total(names.READY_SESSIONS), "ready sessions"),
                Query(FLEET.total(names.TIMERS_PENDING), "timers pending"),
            ),
            lines(
                "Sessions and timers",
                "Sessions created, sub-agents among them, timers set and fired, per second, and by how much these "
                "were late.",
                Query(or_zero(FLEET.rate(names.SESSIONS_CREATED, AGENT)), "sessions"),
                Query(or_zero(FLEET.rate(names.CHILDREN_SPAWNED, AGENT)), "sub-agents"),
                Query(FLEET.rate(names.TIMERS_SET, by="kind"), "{{kind}}s set"),
                Query(FLEET.rate(names.TIMERS_FIRED, by="kind"), "{{kind}}s fired"),
                Query(FLEET.rate(names.MEMORY_FAILURES, by="what"), "failed to {{what}}"),
                Query(FLEET.quantile(0.99, names.TIMER_LATENESS), "late, p99"),
                unit="ops",
                units={"late, p99": "s"},
            ),
        ),
    )


def recovery() -> Row:
    """Crashes, how long recovery takes, and what it costs."""
    resumed = FLEET.rate(names.RESTORE_DURATION, by="le", suffix="_bucket")
    return Row(
        "Recovery",
        (
            lines(
                "Crashes",
                "Activations whose process died, per minute. `waiting`: only a call in flight was waited for, so the "
                "death counts for nothing. Out of memory: fewer actors, or larger nodes.",
                Query(
                    f"sum by (cause, waiting) (rate({FLEET.series(names.SESSION_CRASHES)}[$__rate_interval])) * 60",
                    "{{cause}}, waiting {{waiting}}",
                ),
                Query(f"{FLEET.rate(names.SESSIONS_QUARANTINED, by='reason')} * 60", "given up: {{reason}}"),
                unit="cpm",
            ),
            lines(
                "Detection",
                "From a dead process's last sign of life to the detection of its death; an upper bound. Lines: 60 ms, "
                "250 ms, 15 s. A hung process takes its probe's deadline.",
                *quantiles(names.CRASH_DETECTION),
                unit="s",
                thresholds=BUDGETS,
            ),
            lines(
                "Restore",
                "From the detection to the session's next activation. Budgets: half within 60 ms, 99 in 100 within "
                "250 ms, 15 s when a node is lost. Above: no standby was left (see Session actors), or the store is "
                "slow.",
                *quantiles(names.RESTORE_DURATION),
                unit="s",
                thresholds=BUDGETS,
            ),
            Panel(
                kind="heatmap",
                title="Restore, all of them",
                description="How many sessions were resumed after which time: quantiles hide a second hump, this "
                "doesn't.",
                queries=(Query(resumed, "{{le}}", exemplars=True, format="heatmap"),),
                unit="s",
                options={
                    "calculate": False,
                    "color": {
                        "mode": "scheme",
                        "scheme": "Oranges",
                        "exponent": 0.5,
                        "fill": "dark-orange",
                        "steps": 64,
                    }
                    | {"scale": "exponential", "reverse": False},
                    "yAxis": {"unit": "s", "axisPlacement": "left", "reverse": False},
                    "rowsFrame": {"layout": "auto"},
                    "cellGap": 1,
                    "filterValues": {"le": 1e-9},
                    "legend": {"show": True},
                    "showValue": "never",
                    "exemplars": {"color": "rgba(255,0,255,0.7)"},
                    "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
                },
            ),
            lines(
                "What crashes cost",
                "Model calls sent again because their gateway died, and the tokens paid twice by that. A dead "
                "session actor never costs any. Standbys taken are the price of fast recovery.",
                Query(FLEET.rate(names.MODEL_CALLS_REISSUED), "calls sent again"),
                Query(FLEET.rate(names.TOKENS_REDONE), "tokens redone"),
                Query(or_zero(FLEET.rate(names.STANDBYS_TAKEN)), "standbys taken"),
                unit="ops",
            ),
            lines(
                "Moves and second starts",
                "Activations by cause, sessions moved off drained nodes, sub-agents started again, sessions with a new "
                "specification, and writes refused to superseded activations.",
                Query(FLEET.rate(names.ACTIVATIONS, by="cause"), "activated: {{cause}}"),
                Query(FLEET.rate(names.SESSIONS_MOVED, by="forced"), "moved, forced {{forced}}"),
                Query(or_zero(FLEET.rate(names.CHILD_RESTARTS)), "sub-agents restarted"),
                Query(or_zero(FLEET.rate(names.SESSIONS_MIGRATED)), "migrated"),
                Query(FLEET.rate(names.FENCED_WRITES), "fenced writes"),
                unit="ops",
            ),
        ),
    )
