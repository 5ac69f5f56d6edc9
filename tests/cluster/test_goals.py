"""A goal on Ray: `understudy goal` follows it while processes die, and is itself ended and begun again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy import Cluster
from understudy.testing.offline import Reply
from understudy.testing.policies import content_text, last_turn

from ..faults import PATIENCE, kill, staged, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROUNDS = 4


def tries(body: dict[str, Any]) -> Reply:
    """The worker writes a file in each of its tries, and says which one this is; the fourth one meets the condition."""
    if "You work." in content_text(body["messages"][0]):
        number = sum(message["role"] == "user" for message in body["messages"])
        if not last_turn(body["messages"])[1]:
            write = {"path": f"{number}.txt", "content": "done"}
            return Reply(tool_calls=(("write_file", write),), delay=0.3)
        return Reply(text=f"try {number}", delay=0.3)
    number = int(content_text(body["messages"][1]).partition("try ")[2][0])
    return Reply(text=json.dumps({"reason": f"it was try {number}", "met": number == ROUNDS}), delay=0.3)


def test_a_goal_survives_kills_of_all_that_pursues_it(ray_cluster: str, tmp_path: Path) -> None:
    """Given a goal that is met in its fourth round, and in each round a death: of a session actor, the node service,
    the gateway, the supervisor; and the command itself is interrupted, and begun again with the same ids. The goal is
    met in four rounds, each worked and judged once, and the command that was begun again shows every verdict."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    work = tmp_path / "work"
    work.mkdir()
    with Cluster.connect(dsn, max_actors=3, standby=1) as cluster:
        with staged(dsn, tmp_path / "stage", policy=tries) as stage:
            environment = {
                **os.environ, "UNDERSTUDY_STORE": dsn, "UNDERSTUDY_MODEL": "m", "OPENAI_API_KEY": "sk-of-the-tests",
                "OPENAI_BASE_URL": stage.server.url,
            }  # fmt: skip
            words = ["goal", "four tries", "Try", "--instructions", "You work.", "--tool", "files", "--session", "g"]

            def command() -> subprocess.Popen[str]:
                return subprocess.Popen(
                    [sys.executable, "-P", "-m", "understudy.cluster", *words, "--run-id", "1"], cwd=work,
                    env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True,
                )  # fmt: skip

            first = command()
            for number, role in enumerate(("frame", "node", "gateway", "supervisor"), 1):
                wait_until((work / f"{number}.txt").exists, f"try {number}")
                if number == 2:
                    first.send_signal(signal.SIGINT)
                    _, said = first.communicate(timeout=PATIENCE)
                    assert first.returncode == 130, said
                    assert "understudy goal --session g --run-id 1" in said
                for pid in stage.pids(role)[:1]:
                    kill(pid)
            stdout, stderr = command().communicate(timeout=2 * PATIENCE)
            assert stdout == "try 4\n", stderr
            assert [line for line in stderr.splitlines() if line.startswith("= ")] == [
                *(f"= round {number}: not met: it was try {number}" for number in range(1, ROUNDS)),
                "= round 4: met: it was try 4",
            ]
            session = cluster.session("g")
            stage.check(session)
            assert len(session.tree()) == 1 + 2 * ROUNDS
        cluster.shutdown()
