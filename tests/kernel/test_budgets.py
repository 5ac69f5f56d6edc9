"""Budgets: the arithmetic, and what sessions, trees and their deaths make of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from understudy import HookContext, Replace, hook
from understudy.actors.hooks import describe_hook
from understudy.actors.tools import tool
from understudy.cluster.client.compiling import compile_spec
from understudy.cluster.client.results import RunResult, SessionInfo
from understudy.cluster.ray import bootstrap
from understudy.config import ModelProfile, Settings
from understudy.errors import InvalidConfiguration, InvalidSpec
from understudy.estimates import estimate_tokens
from understudy.json_text import to_json
from understudy.messages import Usage
from understudy.prices import MILLION, Price, money, price_table
from understudy.profiles import Profiles
from understudy.protocol import unpacked
from understudy.reads import RunRecord, SessionRecord
from understudy.records import ModelRequest
from understudy.spec import AgentSpec, Budget
from understudy.store import budgets
from understudy.store.budgets import Ask, Charge, Grant, Refusal
from understudy.store.db.engine import Database
from understudy.store.reads.gauges import MARK
from understudy.testing.offline import Faults, Reply

from .. import plans
from . import kernel as k

amounts = st.integers(0, 10_000)
rates = st.integers(0, 5 * MILLION)
prices = st.builds(Price, rates, rates, rates)

CHEAP = {"offline": Price(1 * MILLION, MILLION // 10, 10 * MILLION)}
"""A millionth for an input token, ten for an output token."""


# What can be written down.


def estimated(body: dict[str, Any]) -> int:
    """The tokens of a request, by its body."""
    return estimate_tokens(ModelRequest("", "", "", to_json(body["messages"]).encode(), body.get("tools", [])))


def test_a_budget_says_what_it_limits() -> None:
    """A budget without a limit, one that limits depth elsewhere than in a tree, and two of one scope are mistakes."""
    for mistake in ({}, {"scope": "session", "depth": 1}, {"tokens": -1}, {"cost": "0.0000001"}, {"scope": "all"}):
        with pytest.raises(InvalidSpec):
            Budget(**mistake)
    with pytest.raises(InvalidSpec, match="one budget for each scope"):
        AgentSpec(name="a", budget=(Budget(tokens=1), Budget(rounds=1)))
    with pytest.raises(InvalidSpec) as caught:
        AgentSpec(name="a", budget=[{"tokens": 1}, {"scope": "run", "rounds": 0}])
    assert [problem["field"] for problem in caught.value.details["problems"]] == ["budget.1.rounds"]


def test_limits_are_stored_in_whole_units() -> None:
    """Cost is stored in millionths and time in microseconds; what is not limited is left out."""
    several = (Budget(cost="0.25", seconds=1.5), Budget(scope="run", rounds=3, children=0))
    spec = AgentSpec(name="a", budget=several)
    compiled = compile_spec(spec, model="offline", profile=None).spec
    assert compiled["budget"] == [
        {"scope": "tree", "cost": 250_000, "seconds": 1_500_000}, {"scope": "run", "rounds": 3, "children": 0},
    ]  # fmt: skip
    assert compile_spec(AgentSpec(name="a"), model="offline", profile=None).spec["budget"] is None
    assert budgets.limits_of({"tokens": 10}) == [("tree", "tokens", 10)]


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_price_table_is_read_exactly(tmp_path: Path, suffix: str) -> None:
    """Decimals in a file are not rounded; cached input costs as much as other input, unless it says otherwise."""
    path = tmp_path / f"prices.{suffix}"
    texts = {
        "json": '{"m": {"input": 0.15, "output": "0.6"}, "n": {"input": 1, "cached_input": 0.1, "output": 2}}',
        "toml": '[m]\ninput = 0.15\noutput = "0.6"\n[n]\ninput = 1\ncached_input = 0.1\noutput = 2\n',
    }
    path.write_text(texts[suffix])
    found = Settings.from_environment({"UNDERSTUDY_PRICES": str(path)}).prices
    assert found == {"m": Price(150_000, 150_000, 600_000), "n": Price(1_000_000, 100_000, 2_000_000)}


@pytest.mark.parametrize(
    "table", [{"m": {"input": 1}}, {"m": {"input": -1, "output": 1}}, {"m": {"input": "x", "output": 1}}, {"m": 1}, 7]
)
def test_a_price_that_is_none(table: Any) -> None:
    """A field that is missing, negative or no number is refused with its place."""
    with pytest.raises(InvalidConfiguration):
        price_table(table)


def test_a_price_table_may_say_its_currency() -> None:
    """It is that of all its prices, since budgets add them up: another one beside it is refused, and what is none."""
    m, n = {"input": 1, "output": 2}, {"input": 3, "output": 4, "currency": "EUR"}
    assert {price.currency for price in price_table({"currency": "EUR", "m": m, "n": n}).values()} == {"EUR"}
    assert price_table({"m": m})["m"].currency == ""
    assert price_table(price_table({"currency": "EUR", "m": m}))["m"].currency == "EUR"
    with pytest.raises(InvalidConfiguration, match="EUR, USD"):
        price_table({"currency": "USD", "m": m, "n": n})
    for wrong in ("euro", "€", 978):
        with pytest.raises(InvalidConfiguration, match="ISO 4217"):
            price_table({"currency": wrong, "m": m})


def test_prices_reach_the_services() -> None:
    """The settings that start the services carry the table; a profile that comes again without prices keeps them."""
    settings = Settings("sqlite:////s.db", "m", prices=price_table({"currency": "EUR", **CHEAP}))
    assert bootstrap.read(bootstrap.request(settings, "spans")) == (settings, "spans")
    profiles = Profiles({"m": Price(1, 1, 1), "n": Price(2, 2, 2)})
    profiles.learn(ModelProfile("p", "key", prices={"m": Price(3, 3, 3)}))
    profiles.learn(ModelProfile("p", "key", prices={"o": Price(4, 4, 4)}))
    profiles.learn(ModelProfile("p", "key"))
    found = [profiles.price("p", model) for model in ("m", "n", "o", "x")]
    assert found == [Price(3, 3, 3), Price(2, 2, 2), Price(4, 4, 4), None]


def test_a_price_table_that_is_not_there(tmp_path: Path) -> None:
    """The variable is named."""
    with pytest.raises(InvalidConfiguration, match="UNDERSTUDY_PRICES"):
        Settings.from_environment({"UNDERSTUDY_PRICES": str(tmp_path / "none.json")})


# The arithmetic.


@given(prices, amounts, amounts, st.integers(0, 100), st.integers(0, 100))
def test_a_call_costs_no_more_than_was_reserved(price: Price, asked: int, said: int, cached: int, less: int) -> None:
    """However much of the input is cached, and however short the reply is."""
    usage = Usage(asked, said * (100 - less) // 100, cached_tokens=asked * cached // 100)
    assert 0 <= price.cost(usage) <= price.most(asked, said)


@given(prices, amounts, st.integers(0, 10**8))
def test_the_longest_affordable_reply(price: Price, asked: int, available: int) -> None:
    """It can be paid, and one token more can't."""
    longest = price.affordable(available, asked)
    if longest is None:
        assert price.output == 0
        assert price.most(asked, 0) <= available
    elif longest < 0:
        assert price.most(asked, 0) > available
    else:
        assert price.most(asked, longest) <= available < price.most(asked, longest + 1)


@given(st.builds(Usage, amounts, amounts, cost=amounts), st.builds(Usage, amounts, amounts, cost=amounts))
def test_costs_add_up(one: Usage, other: Usage) -> None:
    """A sum costs what its parts cost, and is the same after a trip through a wire form without it where it is 0."""
    assert (one + other).cost == one.cost + other.cost
    assert Usage.from_wire(one.to_wire()) == one
    assert len(Usage(1, 1).to_wire()) == 5


class Book:
    """A few sessions of a tree with accounts, as an operation would see them."""

    def __init__(self, limits: list[tuple[int, str, int]]) -> None:
        self.accounts = [budgets.new_account(f"s{level}", "tree", name, limit) for level, name, limit in limits]
        self.open: list[tuple[list[Charge], Grant]] = []

    def charges(self, level: int) -> list[Charge]:
        """What the session at a level is charged to: its own accounts and those above."""
        return [
            Charge(level - int(account["session_id"][1:]), account)
            for account in self.accounts
            if int(account["session_id"][1:]) <= level
        ]

    def right(self) -> None:
        for account in self.accounts:
            held = sum(g.of(account["resource"]) for c, g in self.open if any(a is account for _, a in c))
            assert account["reserved"] == held
            assert account["spent"] + account["reserved"] <= account["allowed"] + account["beyond"]
            assert min(account["spent"], account["reserved"], account["beyond"]) >= 0


limits = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["tokens", "cost", "rounds"]), st.integers(1, 3_000)), max_size=5
)
asks = st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(1, 300))
outcomes = st.tuples(st.integers(0, 5), st.integers(0, 100), st.booleans())


@given(limits, st.lists(asks | outcomes, max_size=60), st.booleans())
def test_no_account_is_overdrawn(
    given_limits: list[tuple[int, str, int]], moves: list[tuple[int, int, Any]], honest: bool
) -> None:
    """Whatever is reserved, answered, failed or lost in a tree, in whatever order: what is spent and reserved stays
    within every limit, but for what answers take beyond what was reserved for them, and that is counted."""
    book, price = Book(given_limits), CHEAP["offline"]
    for first, second, third in moves:
        if not isinstance(third, bool):
            charges = book.charges(first)
            granted = budgets.grant(charges, Ask(second, third, price), 0)
            if isinstance(granted, Refusal):
                assert any(account["session_id"] == granted.session_id for account in book.accounts)
                assert granted.message
                assert granted.error("s")["details"]["resource"] == granted.resource
            else:
                for _, account in charges:
                    account["reserved"] += granted.of(account["resource"])
                book.open.append((charges, granted))
        elif book.open:
            charges, granted = book.open.pop(first % len(book.open))
            output = (granted.output or second) * second // 100 if honest else second * 20
            usage = Usage(granted.tokens - granted.output, min(output, granted.output) if honest else output)
            usage = Usage(usage.input_tokens, usage.output_tokens, cost=price.cost(usage)) if third else Usage()
            for _, account in charges:
                budgets.book(account, granted, usage, 1 if third else 0)
        book.right()
    if honest:
        assert all(account["spent"] <= account["allowed"] for account in book.accounts if not account["beyond"])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=4))
def test_the_first_deadline_counts(given_clocks: list[tuple[int, int]]) -> None:
    """Of several budgets of seconds the one that ends first; none whose scope has not begun."""
    charges = []
    for number, (since, allowed) in enumerate(given_clocks):
        account = budgets.new_account(f"s{number}", "tree", "seconds", allowed)
        charges.append(Charge(number, {**account, "since": since}))
    found = budgets.deadline_of(charges)
    ends = [since + allowed for since, allowed in given_clocks if since]
    assert (found.due_at if found else None) == min(ends, default=None)
    assert isinstance(budgets.grant(charges, Ask(1, 1), 100), Refusal) == bool(ends)


# Sessions.


@tool(on_crash="rerun")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def calls(count: int) -> list[Any]:
    """Replies that ask for a tool, each in a round of its own."""
    return [[("add", {"a": 1, "b": number})] for number in range(count)]


def at_length(_body: dict[str, Any]) -> Reply:
    """A policy that says more than any budget here allows."""
    return Reply(text="x" * 4_000)


def spawns(count: int, agent: str = "worker") -> list[tuple[str, dict[str, Any]]]:
    return [("spawn_agent", {"agent": agent, "task": f"task {number}"}) for number in range(count)]


def lead(*replies: Any, child: dict[str, Any], **more: Any) -> dict[str, Any]:
    return k.spec(k.script(*replies), ["spawn_agent"], agents={"worker": child}, **more)


def accounts(kernel: k.Kernel, session_id: str = "s") -> dict[str, tuple[int, int, int, int]]:
    """Allowed, reserved, spent and beyond, by scope and resource."""
    statement = text("SELECT * FROM account WHERE session_id = :s")
    with kernel.service.database.read() as connection:
        found = connection.execute(statement, {"s": session_id}).mappings().all()
    names = ("allowed", "reserved", "spent", "beyond")
    return {f"{row['scope']} {row['resource']}": tuple(row[name] for name in names) for row in found}


async def tree(kernel: k.Kernel, session_id: str = "s") -> list[dict[str, Any]]:
    """The sessions below."""
    found: list[dict[str, Any]] = await kernel.ask("read", "tree", [session_id], {})
    return found[1:]


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=3, prices=CHEAP) as made:
        yield made


async def test_without_a_budget_there_are_no_accounts(kernel: k.Kernel) -> None:
    """A session without a budget is charged to nothing and its replies are not cut; what it costs is known."""
    run = await kernel.run("s", k.spec(k.script("x" * 400)))
    used = Usage.from_wire(run["usage"])
    assert used.cost == used.input_tokens + 10 * used.output_tokens
    assert "max_completion_tokens" not in kernel.server.requests[0].body
    assert (accounts(kernel), (await kernel.info("s"))["cost_used"]) == ({}, used.cost)
    info = unpacked(await kernel.info("s"), SessionRecord, "info")
    assert RunResult.of(unpacked(run, RunRecord, "run")).cost == SessionInfo.of(info).cost == money(used.cost)
    [answer] = [event for event in await kernel.events("s") if event["type"] == "model_call_completed"]
    assert answer["data"]["usage"] == run["usage"]


async def test_without_a_budget_no_statement_is_about_one(store: str, tmp_path: Path) -> None:
    """A session with tools and a sub-agent, none of them limited, reads and writes no account and no reservation."""
    database = Database(store)
    database.prepare()
    database.close()
    worker = k.spec(k.script(*calls(1), "done"), [add], name="worker")
    with plans.recording() as recorder:
        async with k.running(store, tmp_path, prices=CHEAP) as kernel:
            kernel.check = lambda *_: None  # type: ignore[method-assign]  # the proof reads everything
            assert (await kernel.run("s", lead(spawns(1), "done", child=worker)))["status"] == "completed"
    work = [statement for statement in recorder.statements if MARK not in statement]  # others count, now and then
    touched = set().union(*map(plans.tables_in, work))
    assert {"session", "message", "tool_call"} <= touched
    assert not touched & {"account", "reservation"}


@pytest.mark.conformance
async def test_every_scope_ends_a_run_and_is_named(kernel: k.Kernel) -> None:
    """Rounds of a run start at zero with the next one, those of a session don't; the error names what refused."""
    compiled = k.spec(
        k.script(*calls(9)), [add], budget=[{"scope": "run", "rounds": 2}, {"scope": "session", "rounds": 3}]
    )
    run = await kernel.run("s", compiled)
    assert (run["status"], run["rounds"], run["error"]["code"]) == ("budget_exceeded", 2, "budget_exceeded")
    wanted = {"session_id": "s", "scope": "run", "resource": "rounds", "limit": "2"}
    assert run["error"]["details"] == wanted
    await kernel.send("s", "again", "r2")
    run = await kernel.end("s", "r2")
    assert (run["status"], run["rounds"], run["error"]["details"]["scope"]) == ("budget_exceeded", 1, "session")
    assert accounts(kernel) == {"run rounds": (2, 0, 1, 0), "session rounds": (3, 0, 3, 0)}


@pytest.mark.conformance
async def test_a_childs_budget_nests_in_its_parents(kernel: k.Kernel) -> None:
    """A call must fit into every account above it; whichever does not allow it is named."""
    worker = k.spec(k.script(*calls(9)), [add], name="worker", budget=[{"scope": "tree", "rounds": 2}])
    run = await kernel.run("s", lead(spawns(1), spawns(1), "done", child=worker, budget=[{"rounds": 5}]))
    assert (run["status"], run["rounds"]) == ("budget_exceeded", 2)
    first, second = await tree(kernel)
    rows = [await kernel.ask("read", "run", [child["session_id"], "task"], {}) for child in (first, second)]
    assert [row["error"]["details"]["session_id"] for row in rows] == [first["session_id"], "s"]
    assert [row["rounds"] for row in rows] == [2, 1]
    assert accounts(kernel) == {"tree rounds": (5, 0, 5, 0)}
    assert accounts(kernel, first["session_id"]) == {"tree rounds": (2, 0, 2, 0)}
    assert "does not allow it: 0 left, 1 needed" in (await kernel.results())[0]


async def test_the_reply_is_no_longer_than_what_is_reserved(kernel: k.Kernel) -> None:
    """A reply is capped to what every account allows, and what was not used comes back."""
    kernel.server.policy = at_length
    run = await kernel.run("s", k.spec(max_continuations=0, budget=[{"tokens": 300}]))
    body = kernel.server.requests[0].body
    asked = estimated(body)
    assert body["max_completion_tokens"] == 300 - asked
    assert sum(run["usage"][:2]) == accounts(kernel)["tree tokens"][2] <= 300


async def test_cost_is_limited_and_named(kernel: k.Kernel) -> None:
    """Money runs out as tokens do; the error says how much there was."""
    run = await kernel.run("s", k.spec(k.script(*calls(40)), [add], max_rounds=40, budget=[{"cost": 3_000}]))
    assert (run["status"], run["error"]["details"]["limit"]) == ("budget_exceeded", "0.003")
    allowed, reserved, spent, beyond = accounts(kernel)["tree cost"]
    assert (reserved, beyond, spent) == (0, 0, Usage.from_wire(run["usage"]).cost)
    assert 1_000 < spent <= allowed


@hook("before_model")
def dearer(_context: HookContext) -> Replace:
    """Another model is asked."""
    return Replace(model="dear")


async def test_a_model_that_a_hook_puts_in_place_is_paid_by_its_own_price(store: str, tmp_path: Path) -> None:
    """Given a hook that has another model asked, ten times as dear, then the call reserves what that one may cost: its
    reply is no longer than what the budget pays for. Events say which model was asked."""
    table = {**CHEAP, "dear": Price(10 * MILLION, MILLION, 100 * MILLION)}
    async with k.running(store, tmp_path, prices=table) as kernel:
        kernel.server.policy = at_length
        hooks = [describe_hook(dearer, pickle=None)[0]]
        run = await kernel.run("s", k.spec(max_continuations=0, budget=[{"cost": 20_000}], hooks=hooks))
        allowed, reserved, spent, beyond = accounts(kernel)["tree cost"]
        assert (reserved, beyond, spent) == (0, 0, Usage.from_wire(run["usage"]).cost)
        assert 10_000 < spent <= allowed
        calls = [event["data"] for event in await kernel.events("s") if event["type"].startswith("model_call_")]
        assert [call["model"] for call in calls] == ["dear", "dear"]


async def test_a_limit_of_money_needs_prices(store: str, tmp_path: Path) -> None:
    """Where a model of the agent, or of a sub-agent below it, has no price, the session is not made."""
    async with k.running(store, tmp_path, prices={"priced": CHEAP["offline"]}) as kernel:
        worker = k.spec(name="worker")
        for compiled in (
            k.spec(budget=[{"cost": 5}]),
            lead("x", child=worker, model="priced", budget=[{"cost": 5}]),
            lead("x", child={**worker, "budget": [{"scope": "run", "cost": 5}]}),
        ):
            with pytest.raises(InvalidSpec, match="UNDERSTUDY_PRICES"):
                await kernel.spawn("s", compiled)
        assert await kernel.spawn("s", k.spec(budget=[{"tokens": 5}]))


async def test_usage_that_is_missing_is_estimated(store: str, tmp_path: Path) -> None:
    """Where the endpoint does not count, the input is taken as it was reserved, the reply by its length; all say so."""
    with patch("understudy.gateway.chat.read_usage", return_value=None):
        async with k.running(store, tmp_path, prices=CHEAP) as kernel:
            run = await kernel.run("s", k.spec(k.script("x" * 300), budget=[{"tokens": 1_000}]))
            body = kernel.server.requests[0].body
            used = RunResult.of(unpacked(run, RunRecord, "run")).usage
            assert used.estimated
            assert (used.input_tokens, used.output_tokens) == (estimated(body), 100)
            assert used.cost == used.input_tokens + 10 * used.output_tokens
            assert accounts(kernel)["tree tokens"] == (1_000, 0, used.total_tokens, 0)
            [answer] = [event for event in await kernel.events("s") if event["type"] == "model_call_completed"]
            assert answer["data"]["usage"][4] is True


async def test_a_failed_call_costs_nothing(store: str, tmp_path: Path) -> None:
    """What was reserved for it is free again for the next run."""
    async with k.running(store, tmp_path, faults=Faults(fail_first=1, fail_status=400)) as kernel:
        budget = [{"tokens": 300, "rounds": 1}]
        assert (await kernel.run("s", k.spec(budget=budget)))["status"] == "failed"
        assert accounts(kernel) == {"tree tokens": (300, 0, 0, 0), "tree rounds": (1, 0, 0, 0)}
        await kernel.send("s", "again", "r2")
        assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_time_that_is_over_allows_no_call(kernel: k.Kernel) -> None:
    """Given a microsecond that begins with the run, no second call is made, and the clock is named."""
    run = await kernel.run("s", k.spec(k.script(*calls(3)), [add], budget=[{"scope": "run", "seconds": 1}]))
    assert (run["status"], run["error"]["details"]["resource"]) == ("budget_exceeded", "seconds")
    assert kernel.server.count <= 1


# Sub-agents.


@pytest.mark.conformance
async def test_more_sub_agents_than_allowed(kernel: k.Kernel) -> None:
    """Those beyond the limit are not started; the model reads why, and the run goes on."""
    run = await kernel.run("s", lead(spawns(5), spawns(1), "done", child=k.spec(name="w"), budget=[{"children": 3}]))
    assert (run["status"], run["text"], len(await tree(kernel))) == ("completed", "done", 3)
    results = await kernel.results()
    assert [text.startswith("no sub-agent was started: the budget of 3 children") for text in results] == [
        False, False, False, True, True, True,
    ]  # fmt: skip
    assert accounts(kernel) == {"tree children": (3, 0, 3, 0)}


@tool(on_crash="rerun")
async def fatal() -> str:
    """Kill the process that runs it."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


async def test_a_refusal_outlives_the_deaths_of_its_round(kernel: k.Kernel) -> None:
    """Given a sub-agent that was refused and a tool that is given up beside it, the model reads the refusal's reason,
    nothing of it is left, and the run's next wait costs no commits."""
    asks = [("request_user_input", {"prompt": "Go on?"})]
    replies = ([*spawns(1), ("fatal", {})], asks, "done")
    tools = ["spawn_agent", "request_user_input", fatal]
    agents = {"worker": k.spec(name="worker")}
    await kernel.spawn("s", k.spec(k.script(*replies), tools, agents=agents, budget=[{"children": 0}]))
    await kernel.send("s")
    [question] = await kernel.paused("s")
    refused, given_up = await kernel.results()
    assert refused.startswith("no sub-agent was started: the budget of 0 children")
    assert "died 3 times in a row" in given_up
    await kernel.ask("answer", "s", question["call_id"], "ok", "yes", 1)
    assert (await kernel.end("s"))["status"] == "completed"


async def test_a_tree_grows_as_deep_as_allowed(kernel: k.Kernel) -> None:
    """Levels are counted from the session that has the budget."""
    leaf = k.spec(name="leaf")
    middle = k.spec(k.script(spawns(1, "leaf"), "mine"), ["spawn_agent"], agents={"leaf": leaf}, name="middle")
    run = await kernel.run("s", lead(spawns(1), "done", child=middle, budget=[{"depth": 1}]))
    assert (run["status"], len(await tree(kernel))) == ("completed", 1)
    assert "1 depth" in (await kernel.results((await tree(kernel))[0]["session_id"]))[0]


@pytest.mark.conformance
async def test_parents_that_spawn_at_once_share_the_limit(kernel: k.Kernel) -> None:
    """Eight parents that want four sub-agents each at the same moment get no more than the tree allows together."""
    middle = k.spec(
        k.script(spawns(4, "leaf"), "mine"), ["spawn_agent"], agents={"leaf": k.spec(name="leaf")}, name="middle"
    )
    run = await kernel.run("s", lead(spawns(8), "done", child=middle, budget=[{"children": 20}]))
    assert run["status"] == "completed"
    assert len(await tree(kernel)) == 20
    assert accounts(kernel) == {"tree children": (20, 0, 20, 0)}


class Reaper:
    """Kills frames, and now and then the node service, at random points."""

    def __init__(self, kernel: k.Kernel, seed: int) -> None:
        self.kernel, self.random, self.kills = kernel, random.Random(seed), 0
        kernel.on_point = self

    def __call__(self, number: int, label: str, worker: k.Worker | None) -> None:
        if self.random.random() > 0.02:
            return
        self.kills += 1
        if self.random.random() < 0.2:
            self.kernel.kill_node()
        elif self.kernel.workers:
            self.kernel.kill(worker or self.random.choice(list(self.kernel.workers.values())))


PATIENT = {**k.POLICY, "stuck_after": 1_000}
WORK = k.spec(
    k.script([("add", {"a": 1, "b": 2})], "done"), [add], name="worker", parameters={"max_completion_tokens": 60},
    restart=PATIENT,
)  # fmt: skip


async def crowd(dsn: str, directory: Path, count: int, seed: int | None) -> None:
    """Sub-agents in parallel under budgets that half of them fit into, with deaths if there is a seed."""
    limits = [{"tokens": 160 * count, "cost": 260 * count, "children": count}]
    compiled = lead(spawns(count), "done", child=WORK, budget=limits, restart=PATIENT)
    async with k.running(dsn, directory, frames=4, prices=CHEAP, latency=0.005) as kernel:
        reaper = Reaper(kernel, seed) if seed is not None else None
        run = await kernel.run("s", compiled)
        kernel.on_point = None
        await kernel.quiet()
        assert (run["status"], len(await tree(kernel))) in [("completed", count), ("budget_exceeded", count)]
        assert reaper is None or reaper.kills > 0
        sessions = [await kernel.info("s"), *await tree(kernel)]
        for name, used in (("tokens", "tokens_used"), ("cost", "cost_used")):
            allowed, reserved, spent, beyond = accounts(kernel)[f"tree {name}"]
            assert spent == sum(session[used] for session in sessions)
            assert (reserved, beyond) == (0, 0)
            assert spent <= allowed
        ends = [
            (await kernel.ask("read", "run", [child["session_id"], "task"], {}))["status"] for child in sessions[1:]
        ]
        assert {"completed", "budget_exceeded"} == set(ends), ends
        kernel.check()


@pytest.mark.thorough
@pytest.mark.conformance
async def test_64_sub_agents_do_not_overshoot(store: str, tmp_path: Path) -> None:
    """Under a budget of tokens and money that half of them fit into, the tree spends no more than it says."""
    await crowd(store, tmp_path, 64, None)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
async def test_64_sub_agents_that_die_do_not_overshoot(tmp_path: Path, seed: int) -> None:
    """The same while frames and the node service are killed under them: calls that go out again are paid once."""
    await crowd(f"sqlite:///{tmp_path}/store.db", tmp_path, 64, seed)


async def test_a_call_that_goes_out_again_keeps_its_reservation(kernel: k.Kernel) -> None:
    """Given a gateway that dies during a call, the next attempt may reply as long as the first, and nothing
    more is reserved."""
    kernel.server.policy = at_length
    kernel.server.hold()
    await kernel.spawn("s", k.spec(max_continuations=0, budget=[{"tokens": 300, "rounds": 1}]))
    await kernel.send("s")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    before = accounts(kernel)
    kernel.gateway.kill()
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.requests == 2)
    assert accounts(kernel) == before == {"tree tokens": (300, 300, 0, 0), "tree rounds": (1, 1, 0, 0)}
    kernel.server.release()
    run = await kernel.end("s")
    caps = {request.body["max_completion_tokens"] for request in kernel.server.requests}
    assert (run["status"], len(caps), kernel.server.count) == ("completed", 1, 2)
    assert accounts(kernel)["tree rounds"] == (1, 0, 1, 0)


async def test_what_ends_early_gives_back_what_it_held(kernel: k.Kernel) -> None:
    """A run that is cancelled during its call holds nothing any more."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec(budget=[{"tokens": 300}]))
    await kernel.send("s")
    await kernel.until("s", "model_call_started")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    assert accounts(kernel)["tree tokens"][1] == 300
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert accounts(kernel)["tree tokens"] == (300, 0, 0, 0)
    kernel.server.release()


def test_money_is_shown_in_the_tables_currency() -> None:
    """Millionths become decimals without rounding."""
    assert (money(250_000), money(1), money(0)) == (Decimal("0.25"), Decimal("0.000001"), Decimal(0))
