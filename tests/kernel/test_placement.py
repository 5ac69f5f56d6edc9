"""What a session asks of its process: from the spec to Ray's options, and activations with processes of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy import AgentSpec, tool
from understudy.cluster.cli.doctor import placements
from understudy.cluster.client.compiling import compile_spec, place
from understudy.cluster.client.packages import package_key, refuse_temporary, within_job
from understudy.cluster.ray import package_store
from understudy.cluster.ray.package_store import LARGEST, fetch
from understudy.cluster.ray.placing import actor_options, obstacle, variables
from understudy.errors import InvalidConfiguration, InvalidSpec
from understudy.manifest import changes
from understudy.node.node_service import NodeService
from understudy.placement import ISOLATED, is_isolated, is_scarce, placement_key
from understudy.protocol import Exit, StepCall, Work
from understudy.store.operations import code

from . import kernel as k

DRIVER = {"code_path": ["/work/job"], "runtime_env": {"pip": ["numpy"], "env_vars": {"A": "1", "B": "1"}}}


@tool
def own() -> str:
    """A tool from the driver's code."""
    return ""


def compiled(**fields: Any) -> dict[str, Any]:
    return compile_spec(AgentSpec(name="a", **fields), model="offline", profile=None, pickle=None).spec


def node(alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources, "Labels": labels or {}}


def test_who_asks_for_nothing_has_the_default_placement() -> None:
    """Without wishes and own code nothing is stored, and the hash is that of earlier versions."""
    spec = compiled()
    assert place(spec, {}) == {}
    assert spec["placement"] == ""
    assert not {"isolation", "resources", "labels", "environment", "runtime_env"} & spec.keys()


def test_wishes_make_a_placement_of_their_own() -> None:
    """Each wish is a part of the key and of the spec's hash; the key says what must be known without the definition."""
    hashes, keys = {compiled()["hash"]}, {""}
    for wish in (
        {"isolation": "process"},
        {"resources": {"GPU": 1}},
        {"labels": {"zone": "a"}},
        {"runtime_env": {"pip": ["x"]}},
        {"environment": ["DB_PASS"]},
    ):
        spec = compiled(**wish)
        stored = place(spec, DRIVER)
        key = spec["placement"]
        definition = json.loads(stored[key])
        assert (list(stored), definition["code_path"]) == ([key], ["/work/job"])
        assert (is_isolated(key), is_scarce(key)) == ("isolation" in wish, "resources" in wish or "labels" in wish)
        hashes.add(spec["hash"])
        keys.add(key)
    assert (len(hashes), len(keys)) == (6, 6)


def test_a_sub_agent_has_its_own_placement() -> None:
    """Each agent of a tree runs where its own spec says, and the store knows that it needs all of the definitions."""
    agents = [AgentSpec(name="gpu", resources={"GPU": 1}), AgentSpec(name="plain")]
    spec = compiled(tools=["spawn_agent"], agents=agents)
    stored = place(spec, {})
    assert spec["placement"] == spec["agents"]["plain"]["placement"] == ""
    assert is_scarce(spec["agents"]["gpu"]["placement"])
    assert set(stored) == code.digests(spec, "") == {spec["agents"]["gpu"]["placement"]}


def test_a_runtime_environment_goes_over_the_drivers() -> None:
    """Fields of the spec replace the job's, variables are added, and secrets are left out."""
    spec = compiled(runtime_env={"working_dir": "s3://code", "env_vars": {"B": "2", "API_KEY": "x"}})
    [stored] = place(spec, DRIVER).values()
    variables = {"A": "1", "B": "2"}
    assert json.loads(stored)["runtime_env"] == {"pip": ["numpy"], "working_dir": "s3://code", "env_vars": variables}
    with pytest.raises(InvalidConfiguration):
        place(compiled(runtime_env={"pip": ["https://user:secret@host/x"]}), {})


def test_variables_are_had_by_those_who_name_them() -> None:
    """Who names the same variables shares processes, in whatever order; who names others, or none, does not. The
    processes have those and what the runtime environment sets, and no value is stored."""
    agents = [AgentSpec(name="plain"), AgentSpec(name="same", environment=["B", "A", "B"])]
    spec = compiled(tools=["spawn_agent"], environment=("A", "B"), agents=agents)
    stored = place(spec, {})
    assert list(stored) == [spec["placement"]] == [spec["agents"]["same"]["placement"]]
    assert spec["agents"]["plain"]["placement"] == compiled().get("placement", "") == ""
    assert variables(json.loads(stored[spec["placement"]])) == ["A", "B"]
    [other] = place(compiled(environment=["A"], runtime_env={"env_vars": {"C": "1", "DB_PASS": "x"}}), {}).values()
    assert variables(json.loads(other)) == ["A", "C"]
    assert variables({}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"isolation": "none"},
        {"resources": {"GPU": 0}},
        {"resources": {"GPU": -1}},
        {"resources": {"num_gpus": 1, "GPU": 1}},
        {"resources": {"memory": float("inf")}},
        {"labels": {"a": 1}},
        {"runtime_env": {"x": object()}},
        {"environment": ["A=1"]},
        {"environment": ["1A"]},
        {"environment": "HOME"},
        {"environment": {"A": "1"}},
    ],
)
def test_wishes_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """When the spec is made, not when a process should start."""
    with pytest.raises(InvalidSpec):
        AgentSpec(name="a", **wrong)


def test_rays_options() -> None:
    """Ray names CPUs and GPUs by parameters of their own, all others by `resources`."""
    definition = {"resources": {"num_cpus": 2, "GPU": 1, "memory": 5, "fpga": 1}, "labels": {"zone": "a"}}
    assert actor_options(definition) == {
        "num_cpus": 2, "num_gpus": 1, "memory": 5, "resources": {"fpga": 1}, "label_selector": {"zone": "a"}
    }  # fmt: skip
    assert actor_options({"code_path": ["x"], "isolation": "process"}) == {}


def test_what_no_node_has_is_named() -> None:
    """A placement is impossible if no living node could have it when it is empty; the reason says what is missing."""
    nodes = [node(CPU=8), node(CPU=3, GPU=1, labels={"zone": "b"}), node(alive=False, GPU=8, labels={"zone": "a"})]
    assert obstacle({}, nodes) == ""
    assert obstacle({"resources": {"GPU": 1, "num_cpus": 2}, "labels": {"zone": "in(a, b)"}}, nodes) == ""
    assert obstacle({"resources": {"GPU": 2}}, nodes) == "no node has GPU 2 (most there is: 1)"
    assert obstacle({"resources": {"GPU": 1, "num_cpus": 4}}, nodes) == "no node has all of GPU, CPU"
    assert obstacle({"resources": {"num_cpus": 8}}, nodes) == "no node has CPU 8 (most there is: 7.98)"
    assert "labels" in obstacle({"labels": {"zone": "a"}}, nodes)
    assert (
        obstacle({"labels": {"zone": "!b"}, "resources": {"GPU": 1}}, nodes) == "no node has GPU 1 (most there is: 0)"
    )
    [check] = placements({"abc-resources": "no node has GPU 2"})
    assert (check.ok, check.found) == (False, "no node has GPU 2")


@given(
    st.dictionaries(
        st.sampled_from(["isolation", "resources", "labels", "x"]), st.sampled_from(["process", {}, {"a": 1}])
    )
)
def test_keys_are_functions_of_the_definition(definition: dict[str, Any]) -> None:
    """The same definition has the same key, in whatever order it was written."""
    assert placement_key(definition) == placement_key(dict(reversed(definition.items())))


ALONE = f"abc{ISOLATED}"


async def replacing(kernel: k.Kernel, used: list[str]) -> None:
    """What the supervisor does: it reports a frame that left, and another one takes its place."""
    while True:
        workers = [worker for worker in kernel.workers.values() if worker.frame.identity.placement == ALONE]
        await asyncio.wait([worker.task for worker in workers], return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            if worker.task.done():
                used.append(worker.frame_id)
                del kernel.workers[worker.frame_id]
                frame_id = worker.frame_id
                await kernel.call("frame_died", frame_id, "exit", 0.0, False)
                kernel.add_frame(ALONE)


async def test_each_activation_has_a_process_of_its_own(store: str, tmp_path: Path) -> None:
    """Given isolated sessions that share two frames and call tools, each frame ends with its activation: none is seen
    in two sessions, nor in two runs of one; and a shared session beside them keeps its frame."""
    path = tmp_path / "notes"
    script = k.script([("note", {"path": str(path), "text": "x"})], "done")
    isolated = k.spec(script, [k.note], placement=ALONE)
    used: list[str] = []
    async with k.running(store, tmp_path, frames=1) as kernel:
        for _ in range(2):
            kernel.add_frame(ALONE)
        keeper = asyncio.create_task(replacing(kernel, used))
        names = ["a", "b", "c", "d"]
        ends = await asyncio.gather(*(kernel.run(name, isolated) for name in names), kernel.run("shared", k.spec("hi")))
        await kernel.send("a", "again", "second")
        ends.append(await kernel.end("a", "second"))
        assert {end["status"] for end in ends} == {"completed"}
        frames: dict[str, set[tuple[str, int]]] = {}
        for name in names:
            for event in await kernel.events(name):
                if event["type"] == "session_activated":
                    frames.setdefault(event["data"]["frame_id"], set()).add((name, event["epoch"]))
        assert all(len(activations) == 1 for activations in frames.values()), frames
        assert len(frames) >= 5
        assert kernel.holder("shared") is not None
        assert all(kernel.holder(name) is None for name in names)
        keeper.cancel()


async def test_the_wait_for_what_no_node_has_is_reported(store: str, tmp_path: Path) -> None:
    """Given a placement that can't be had, then its session says why it waits, and others go on."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.service.frames.supply.unschedulable = {"gpu": "no node has GPU 1"}
        await kernel.spawn("stuck", k.spec("hi", placement="gpu"))
        await kernel.send("stuck")
        assert (await kernel.run("other", k.spec("hi")))["status"] == "completed"
        assert (await kernel.info("stuck"))["error"]["message"] == "no node has GPU 1"
        assert (await kernel.info("other"))["error"] is None
        kernel.service.frames.supply.unschedulable = {}
        assert (await kernel.info("stuck"))["error"] is None
        kernel.add_frame("gpu")
        assert (await kernel.end("stuck"))["status"] == "completed"


async def test_a_sub_agent_runs_where_its_spec_says(store: str, tmp_path: Path) -> None:
    """Given a parent and a child with another placement, then each is activated in a frame of its own placement."""
    child = k.spec(k.script("found"), name="child", hash="child", placement="gpu")
    spawns = [("spawn_agent", {"agent": "child", "task": "go"})]
    lead = k.spec(k.script(spawns, "done"), ["spawn_agent"], agents={"child": child})
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.add_frame("gpu")
        assert (await kernel.run("lead", lead))["status"] == "completed"
        rows = await kernel.ask("read", "tree", ["lead"], {})
        assert [row["placement"] for row in rows] == ["", "gpu"]
        frames = {worker.frame_id: worker.frame.identity.placement for worker in kernel.workers.values()}
        for row in rows:
            [activated] = [e for e in await kernel.events(row["session_id"]) if e["type"] == "session_activated"][:1]
            assert frames[activated["data"]["frame_id"]] == row["placement"]


PACKAGE, MODULES = "gcs://_ray_pkg_0123.zip", "gcs://_ray_pkg_4567.zip"


def test_a_jobs_packages_belong_to_its_sessions() -> None:
    """The packages of a placement's runtime environment, those of sub-agents too, are code that the session refers to;
    they are no part of what the agent is."""
    driver = {"runtime_env": {"working_dir": PACKAGE, "py_modules": [MODULES, "s3://bucket/x.zip"]}}
    spec = compiled(tools=["spawn_agent"], agents=[AgentSpec(name="b", tools=[own])])
    before = spec["hash"]
    place(spec, driver)
    packages = {package_key(PACKAGE), package_key(MODULES)}
    assert spec["hash"] == before
    assert code.digests(spec, spec["placement"]) == {spec["placement"], *packages}
    alone = {"agents": spec["agents"]}
    assert code.digests(alone, "") == {spec["placement"], *packages}
    other = json.loads(json.dumps(spec).replace(package_key(PACKAGE), "another"))
    assert changes(spec, other) == ()


@given(st.sampled_from(["", "session_1", "session_2"]), st.lists(st.sampled_from(["a", "b.c"]), max_size=3))
def test_a_script_inside_a_working_dir(session: str, parts: list[str]) -> None:
    """Where Ray unpacks it, under whatever name, a path is relative to the package; elsewhere it is not a job's."""
    unpacked = f"/tmp/ray/{session}/runtime_resources/working_dir_files/_ray_pkg_0123"
    assert within_job("/".join([unpacked, *parts])) == ("/".join(parts) or ".")
    assert within_job("/".join(["/home/user", *parts])) is None


def test_a_package_that_is_too_large(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is left to Ray, and the driver's log says so; a smaller one is stored as Ray has it."""
    for size, stored in ((3, b"xxx"), (LARGEST + 1, None)):
        monkeypatch.setattr(package_store, "_internal_kv_get", lambda _address, size=size: b"x" * size)
        assert fetch(PACKAGE) == stored
    assert "32 MiB is too large" in caplog.text


def test_a_store_in_a_working_dir() -> None:
    """A SQLite file that Ray would delete is refused; one elsewhere is not, nor is a server."""
    unpacked = "/tmp/ray/s/runtime_resources/working_dir_files/_ray_pkg_0123"
    with pytest.raises(InvalidConfiguration, match="Ray deletes"):
        refuse_temporary(f"sqlite:///{unpacked}/store.db")
    for store in ("sqlite:////home/user/store.db", "postgresql://host/db"):
        refuse_temporary(store)


@pytest.mark.parametrize("shutdown", [0.0, 10.0])
async def test_a_process_of_its_own_ends_with_a_run_that_ends_during_a_model_call(
    store: str, tmp_path: Path, shutdown: float
) -> None:
    """Given isolated runs that wait for a model, one by one, when each is cancelled, then its frame ends, the next one
    has another, and no frame is left that nobody can have."""
    spec = k.spec(k.script("never"), placement=ALONE, shutdown=shutdown)
    used: list[str] = []
    async with k.running(store, tmp_path, frames=0) as kernel:
        kernel.add_frame(ALONE)
        keeper = asyncio.create_task(replacing(kernel, used))
        kernel.server.hold()
        await kernel.spawn("s", spec)
        for run in ("a", "b"):
            await kernel.send("s", "go", run)
        for number, run in enumerate(("a", "b"), 1):
            await asyncio.to_thread(kernel.server.wait, lambda stats, n=number: stats.requests == n)
            await kernel.ask("cancel", "s", run, "enough")
            assert (await kernel.end("s", run))["status"] == "cancelled"
            await asyncio.to_thread(kernel.server.wait, lambda stats, n=number: stats.aborted == n)
        kernel.server.release()
        assert (await kernel.run("other", {**spec, "hash": "other"}))["status"] == "completed"
        frames = [
            event["data"]["frame_id"]
            for name in ("s", "other")
            for event in await kernel.events(name)
            if event["type"] == "session_activated"
        ]
        assert len(frames) == len(set(frames)) == 3
        assert set(frames) - set(used) <= {frames[-1]}
        keeper.cancel()


async def test_a_process_of_its_own_that_comes_for_a_call_while_its_run_is_cancelled_ends(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an isolated session whose process died during a model call, when the run is cancelled, and the next process
    asks for the call while the cancel is being committed, then that process ends too."""
    attaching, go, step = asyncio.Event(), asyncio.Event(), NodeService.step

    async def late(service: NodeService, call: StepCall) -> Work | Exit:
        if call.request is not None and call.batch is None:
            attaching.set()
            await go.wait()
        return await step(service, call)

    async with k.running(store, tmp_path, frames=0) as kernel:
        workers = [kernel.add_frame(ALONE), kernel.add_frame(ALONE)]
        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script("never"), placement=ALONE))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        submit = kernel.service.journal.submit

        async def slow(operation: Any, *touches: str, **options: Any) -> Any:
            if "answered" in operation.__qualname__:
                go.set()
                while not any(slot.resting for slot in kernel.service.frames.paging.slots.values()):  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(0)
            return await submit(operation, *touches, **options)

        monkeypatch.setattr(NodeService, "step", late)
        monkeypatch.setattr(kernel.service.journal, "submit", slow)
        first = kernel.holder("s")
        assert first is not None
        kernel.kill(first, replace=False)
        await attaching.wait()
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        [second] = [worker for worker in workers if worker is not first]
        await asyncio.wait_for(second.task, k.STUCK_SECONDS)
        assert not kernel.service.frames.paging.slots
        kernel.server.release()


async def test_a_process_of_its_own_ends_with_a_run_that_ends_instead_of_asking_again(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an isolated session that waits for a model, with another run queued, when its service dies, and the run is
    cancelled before the process calls in again, then the other run has another process."""
    go, step = asyncio.Event(), NodeService.step

    async def late(service: NodeService, call: StepCall) -> Work | Exit:
        await go.wait()
        return await step(service, call)

    async with k.running(store, tmp_path, frames=0) as kernel:
        for _ in range(2):
            kernel.add_frame(ALONE)
        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script("one"), placement=ALONE))
        await kernel.send("s", "go", "a")
        await kernel.send("s", "go", "b")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        monkeypatch.setattr(NodeService, "step", late)
        kernel.kill_node()
        await kernel.quiet()
        await kernel.ask("cancel", "s", "a", "enough")
        go.set()
        kernel.server.release()
        assert (await kernel.end("s", "a"))["status"] == "cancelled"
        assert (await kernel.end("s", "b"))["status"] == "completed"
        events = await kernel.events("s")
        frames = [event["data"]["frame_id"] for event in events if event["type"] == "session_activated"]
        assert len(frames) == len(set(frames)) == 2
