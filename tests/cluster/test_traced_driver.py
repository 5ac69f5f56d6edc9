"""A program that uses OpenTelemetry, the services that it starts, and a collector: one trace through all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from typer.testing import CliRunner

from understudy import AgentSpec, Cluster
from understudy.cluster.cli.main import app
from understudy.cluster.client.session_handle import current_span
from understudy.errors import InvalidInput
from understudy.identifiers import read_traceparent, run_span_identifier, tool_span_identifier

from ..collectors import HttpCollector
from ..traced import spans_in

PATIENCE = 60.0
SECRET = "Bearer-hunter2hunter2"


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_one_trace_from_the_driver_into_a_command(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a span that is current where `send` is called, then the run is below it, at the collector that the connect
    named, with its headers; a command has the call's span; the services log JSON with ids, and no secret."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    with HttpCollector() as collector:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}",
            "UNDERSTUDY_LOG_FORMAT": "json",
            "UNDERSTUDY_LOG_LEVEL": "debug",
            "UNDERSTUDY_EVENT_LOG": str(tmp_path / "log"),
        }.items():
            monkeypatch.setenv(name, value)
        with Cluster.connect(dsn, max_actors=2) as cluster:
            spec = AgentSpec(name="clerk", model="offline", tools=["bash"], sandbox="none", workspace=str(tmp_path))
            session = cluster.spawn(spec, session_id="traced")
            tracer = TracerProvider().get_tracer("driver")
            with tracer.start_as_current_span("request") as span:
                context = span.get_span_context()
                asked = 'call bash {"command": "echo it is $TRACEPARENT"}'
                result = session.send(asked, run_id="r").result(PATIENCE, check=True)
            alone = session.send("hello", run_id="r2", traceparent="").result(PATIENCE, check=True)
            assert alone.ok
            spans = session.trace("r")
            shown = CliRunner().invoke(app, ["trace", "traced", "r", "--store", dsn])
            as_json = CliRunner().invoke(app, ["trace", "traced", "--json", "--store", dsn])
            unknown = CliRunner().invoke(app, ["trace", "traced", "nothing", "--store", dsn])
            deadline = time.monotonic() + PATIENCE
            while len(found := spans_in(collector.received)) < 8 and time.monotonic() < deadline:
                time.sleep(0.05)
            cluster.shutdown()
    trace_id, call = f"{context.trace_id:032x}", tool_span_identifier("traced", "r/1/0")
    assert f"it is 00-{trace_id}-{call}-01" in result.text
    run = found[run_span_identifier("traced", "r")]
    assert (run.trace_id.hex(), run.parent_span_id.hex()) == (trace_id, f"{context.span_id:016x}")
    assert found[call].trace_id.hex() == trace_id
    second = found[run_span_identifier("traced", "r2")]
    assert second.parent_span_id == b""
    assert [(link.trace_id, link.span_id) for link in second.links] == [(run.trace_id, run.span_id)]
    assert {key.lower(): value for key, value in collector.headers[0].items()}["authorization"] == SECRET
    of_run = {key: one for key, one in found.items() if one.trace_id == run.trace_id}
    assert {one.span_id for one in spans} == {key for key, one in of_run.items() if one.name != "start clerk"}
    assert shown.exit_code == 0, shown.output
    assert "execute_tool bash" in shown.output
    assert "\x1b" not in shown.output
    assert [one["operation"] for one in json.loads(as_json.output)] == ["invoke_agent", "chat"]
    assert unknown.exit_code == 1
    assert any(tmp_path.joinpath("log").iterdir())
    import ray  # not before understudy, which has a word with it about authentication

    _logs_tell(Path(ray._private.worker._global_node.get_logs_dir_path()))


def _logs_tell(directory: Path) -> None:
    """The services' and the session actors' lines are JSON with ids, and the header's value is in no file."""
    found = []
    for path in directory.glob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "hunter2" not in text, path
            found += [json.loads(line) for line in text.splitlines() if line.startswith('{"at":')]
    mine = [line for line in found if line.get("session_id") == "traced"]
    assert {line["role"] for line in found} >= {"node"}
    assert any(line["message"].startswith("run_finished") and line["trace_id"] for line in mine)


@pytest.mark.thorough
def test_without_opentelemetry_nothing_of_it_is_imported() -> None:
    """A program that does not use it pays nothing: the caller's span is asked for only where the API is loaded."""
    code = (
        "import sys\n"
        "from understudy.cluster.client.session_handle import current_span\n"
        "before = {name for name in sys.modules if name.startswith('opentelemetry')}\n"
        "sys.modules.pop('opentelemetry.trace', None)\n"
        "assert current_span() is None\n"
        "assert 'opentelemetry.trace' not in sys.modules\n"
        "assert not any(name.startswith('opentelemetry.sdk') for name in before), before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_span_is_current() -> None:
    """Without one the run has a trace of its own."""
    assert current_span() is None


@pytest.mark.parametrize(
    "value",
    [
        "", "x", f"00-{'a' * 32}-{'b' * 16}", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01", f"00-{'A' * 32}-{'b' * 16}-01", f"00-{'a' * 31}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01-more", f"00-{'g' * 32}-{'b' * 16}-01", f" 00-{'a' * 32}-{'b' * 16}-01",
    ],
)  # fmt: skip
def test_what_is_no_traceparent(value: str) -> None:
    """W3C Trace Context's rules: lengths, small hexadecimal digits, no zeros, no version ff."""
    with pytest.raises(InvalidInput, match="traceparent"):
        read_traceparent(value)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.sampled_from(["00", "01", "ff"]))
def test_any_traceparent_is_read(trace_id: int, span_id: int, flags: str) -> None:
    """Sampled or not; a later version may say more behind."""
    ids = (f"{trace_id:032x}", f"{span_id:016x}")
    read = (*ids, flags != "00")
    assert read_traceparent(f"00-{ids[0]}-{ids[1]}-{flags}") == read
    assert read_traceparent(f"cc-{ids[0]}-{ids[1]}-{flags}-what-the-future-brings") == read
