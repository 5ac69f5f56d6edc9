"""A server of the Model Context Protocol for tests, with faults: `python tests/mcp_server.py DIRECTORY [PAUSE]`.

Its calls are lines in DIRECTORY/calls, each with its pid. A call of `hold` or `look` waits for DIRECTORY/go. It speaks
the protocol by itself: with the `mcp` package it would need two seconds to start. Real servers have tests of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()

STRING, NUMBER = {"type": "string"}, {"type": "integer"}

FORM = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}, "required": ["count"]}
"""What it asks people for."""


def note(text: str) -> None:
    """Append a line to the calls, in one write."""
    with (DIRECTORY / "calls").open("a") as file:
        file.write(f"{text} {os.getpid()}\n")


def wait_for(name: str) -> None:
    """Wait for a file."""
    while not (DIRECTORY / name).exists():
        time.sleep(0.005)


class Server:
    """What it offers, and what it says."""

    def __init__(self) -> None:
        self._saying = threading.Lock()
        self._tools: dict[str, tuple[Callable[..., str], dict[str, Any], dict[str, bool]]] = {
            "add": (self.add, {"a": NUMBER, "b": NUMBER}, {}),
            "hold": (self.hold, {"word": STRING}, {}),
            "look": (self.look, {"word": STRING}, {"readOnlyHint": True}),
            "put": (self.look, {"word": STRING}, {"idempotentHint": True}),
            "hang": (self.hang, {}, {}),
            "die": (self.die, {}, {}),
            "die_once": (self.die_once, {}, {"readOnlyHint": True}),
            "flood": (self.flood, {"size": NUMBER}, {}),
            "fail": (self.fail, {}, {}),
            "secret": (self.secret, {"key": {**STRING, "default": os.environ.get("TEST_MCP_VALUE")}}, {}),
            "grow": (self.grow, {}, {}),
            "roots": (self.roots, {}, {}),
            "untrue": (self.untrue, {}, {}),
            "order": (self.order, {"questions": NUMBER}, {}),
            "check": (self.check, {"questions": NUMBER}, {"readOnlyHint": True}),
            "visit": (self.visit, {}, {}),
        }
        self._answers: dict[str, Any] = {}
        self._answered = threading.Condition()
        self._numbers = itertools.count(1)

    # Tools.

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        note(f"add {a} {b}")
        return str(a + b)

    def hold(self, word: str) -> str:
        """Wait, then repeat a word."""
        note(f"hold {word}")
        wait_for("go")
        return f"held {word}"

    def look(self, word: str) -> str:
        """Wait, then repeat a word; it only reads."""
        note(f"look {word}")
        wait_for("go")
        return f"seen {word}"

    def hang(self) -> str:
        """Answer nothing any more."""
        note("hang")
        with self._saying:
            time.sleep(3_600)
        return ""

    def die(self) -> str:
        """Die in the middle of the call."""
        note("die")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def die_once(self) -> str:
        """Die in the middle of the first call."""
        note("die_once")
        if (DIRECTORY / "calls").read_text().count("die_once ") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def flood(self, size: int) -> str:
        """Say very much."""
        note("flood")
        sys.stderr.write("f" * size + "\n")
        return "x" * size

    def fail(self) -> str:
        """Fail."""
        raise ValueError("it does not work")

    def secret(self, key: str) -> str:
        """The variables that it has been given."""
        return f"{os.environ.get('TEST_MCP_VALUE', 'none')} {os.environ.get('TEST_MCP_OTHER', 'none')}"

    def grow(self) -> str:
        """Offer another tool from now on."""
        self._tools["grown"] = (self.fail, {}, {})
        return "grown"

    def roots(self) -> str:
        """Ask the client for its roots."""
        return json.dumps(self._ask("roots/list", None))

    def order(self, questions: int) -> str:
        """Ask a person so many questions, then say what the answers were."""
        return self.check(questions, "order")

    def check(self, questions: int, name: str = "check") -> str:
        """The same; it only reads."""
        note(name)
        said = []
        for number in range(1, questions + 1):
            asked = {"message": f"How many of {number}?", "requestedSchema": FORM}
            answer = self._ask("elicitation/create", asked)
            note(f"{name} answer {number}: {answer.get('action')} {answer.get('content')}")
            wait_for(f"go{number}")
            said.append(answer["action"])
        return " ".join(said)

    def visit(self) -> str:
        """Ask a person to visit a page."""
        asked = {"mode": "url", "message": "Pay", "url": "https://pay.example", "elicitationId": "7"}
        return json.dumps(self._ask("elicitation/create", asked))

    def _ask(self, method: str, params: dict[str, Any] | None) -> dict[str, Any]:
        number = f"ask-{next(self._numbers)}"
        said = {"jsonrpc": "2.0", "id": number, "method": method}
        self._say(said if params is None else {**said, "params": params})
        with self._answered:
            self._answered.wait_for(lambda: number in self._answers)
            found: dict[str, Any] = self._answers.pop(number)
        return found

    def untrue(self) -> str:
        """Answer otherwise than the schema of its output says."""
        return "text"

    # The protocol.

    def run(self) -> None:
        """Answer until the input ends."""
        for line in sys.stdin:
            message = json.loads(line)
            if "method" not in message:
                with self._answered:
                    self._answers[message["id"]] = message.get("result", message.get("error"))
                    self._answered.notify_all()
            elif "id" in message:
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            result = self._result(message["method"], message.get("params") or {})
        except LookupError:
            error = {"code": -32601, "message": "there is no such method"}
            if (message.get("params") or {}).get("name") == "refuse":  # with a code that clients have of their own
                error = {"code": -32000, "message": "refused"}
            self._say({"jsonrpc": "2.0", "id": message["id"], "error": error})
        else:
            self._say({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def _result(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        if method == "tools/call":
            return self._call(given["name"], given.get("arguments") or {})
        answers: dict[str, dict[str, Any]] = {
            "initialize": {
                "protocolVersion": "2025-06-18", "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
                "serverInfo": {"name": "test", "version": "1"},
            },
            "tools/list": {"tools": [self._described(name) for name in list(self._tools)]},
            "resources/list": {"resources": [{"uri": "memo://welcome", "name": "welcome"}]},
            "resources/templates/list": {"resourceTemplates": []},
            "resources/read": {"contents": [{"uri": "memo://welcome", "text": "Welcome."}]},
            "prompts/list": {"prompts": [{"name": "greet", "arguments": [{"name": "whom", "required": True}]}]},
            "prompts/get": {
                "messages": [
                    {"role": "user", "content": {"type": "text", "text": f"Greet {given.get('arguments')}."}}
                ]
            },
        }  # fmt: skip
        return answers[method]

    def _described(self, name: str) -> dict[str, Any]:
        function, properties, hints = self._tools[name]
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"name": name, "description": function.__doc__, "inputSchema": schema, "annotations": hints}
        return {**described, "outputSchema": schema} if name == "untrue" else described

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            text, failed = self._tools[name][0](**arguments), False
        except ValueError as error:
            text, failed = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": failed}

    def _say(self, message: dict[str, Any]) -> None:
        with self._saying:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    note("start")
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    print(f"started with {os.environ.get('TEST_MCP_VALUE', 'nothing')}", file=sys.stderr, flush=True)
    Server().run()
