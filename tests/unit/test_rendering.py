"""How the command line shows things to people."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from understudy.cluster.cli import doctor, rendering
from understudy.cluster.cli.main import app
from understudy.config import Settings, differences
from understudy.events import ModelCallCompleted, RunStarted


def test_events_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Durations have a unit, times are times of day, and tokens are named; counts for a histogram are left out."""
    call = ModelCallCompleted(
        seq=1, model="m", usage=[746, 10, 0, 0, False], started_at=1_795_677_586_342_113, duration=1_250_000,
        waited={"p": 412_000}, retried={"rate_limited": 2}, chunk_times=[5, 1],
    )  # fmt: skip
    rendering.print_events([RunStarted(seq=0, queued=1_135_522), call])
    started, completed = capsys.readouterr().out.splitlines()
    assert "queued=1.136s" in started
    assert "tokens=in:746,out:10" in completed
    assert "duration=1.250s" in completed
    assert "waited=p:0.412s retried=rate_limited:2" in completed
    assert "chunk_times" not in completed
    assert f"started_at={rendering.when(1_795_677_586_342_113)}" in completed


def test_where_json_is_said() -> None:
    """An option in front of the command is none of the program's, and the error says where it belongs."""
    done = CliRunner().invoke(app, ["--json", "ps"])
    assert done.exit_code == 2
    assert "understudy COMMAND --json" in done.output


def test_doctor_warns_of_services_with_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Given services that were started with other settings, then each that differs is named, with what to do, as a
    warning: nothing has failed. Where none differs, all is well."""
    running, here = (Settings("sqlite:///x", "gpt", standby=standby).of_services() for standby in (1, 4))
    rendering.print_checks([doctor.of_services(different) for different in (differences(running, here), [])])
    warning, advice, well = capsys.readouterr().out.splitlines()
    assert warning == "warn settings of the services: UNDERSTUDY_STANDBY=1 (this environment says 4)"
    assert "`understudy down`" in advice
    assert "`understudy up --keep`" in advice
    assert well.startswith("ok   settings of the services")
    assert doctor.of_services(differences(running, here)).ok


def test_doctor_refuses_what_the_services_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that can't be used is reported before anything starts, with its address and what is wrong with it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-dummy")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://10.0.0.256:8000/v1")
    found = doctor._model(Settings("sqlite:///x", "gpt"))
    assert not found.ok
    assert "http://10.0.0.256:8000/v1" in found.found
