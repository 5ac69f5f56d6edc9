"""Images and documents: what may be one, and how it gets from an input or a tool into a request."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from understudy import File, Image, InvalidInput
from understudy.actors.context import DEFAULT, GONE, View
from understudy.actors.conversation import Conversation
from understudy.actors.execution import Outcome
from understudy.actors.results import received, rendered
from understudy.actors.tools import ToolContext
from understudy.actors.viewing import view_image
from understudy.attachments import MAX_BYTES, MAX_COUNT, as_content
from understudy.errors import ToolError
from understudy.estimates import attachment_size, document_tokens
from understudy.messages import ATTACHMENTS_MARK, Message, ToolCall

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", 512, 512) + b"\0" * 900
PDF = b"%PDF-1.7\n1 0 obj << /Type /Pages >>\n<< /Type /Page >>\n<< /Type/Page /Parent 1 0 R >>"
SHOWN = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0JFIF", "image/jpeg"),
        (b"GIF89a...", "image/gif"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
    ],
)
def test_an_image_is_known_by_its_content(data: bytes, media_type: str) -> None:
    """Not by a name or by what somebody says of it."""
    assert Image(data, "picture.txt").media_type == media_type


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Image(b"<svg>"), "no PNG, JPEG, GIF or WebP"),
        (lambda: Image(b""), "has no bytes"),
        (lambda: Image(PNG.ljust(MAX_BYTES + 1, b"\0")), "make it smaller"),
        (lambda: Image("a.png"), "must be bytes, not str"),
        (lambda: Image(PNG, "a\nb"), "printable"),
        (lambda: File(b"text"), "no PDF"),
        (lambda: as_content([Image(PNG)] * (MAX_COUNT + 1)), "8 attachments"),
        (lambda: as_content([Image(PNG.ljust(MAX_BYTES, b"\0"))] * 3), "7500000 bytes in all"),
    ],
)
def test_what_endpoints_would_refuse_is_refused_at_once(make: Any, problem: str) -> None:
    """A history that has it could not be sent to any model again."""
    with pytest.raises(InvalidInput, match=problem):
        make()


def test_inputs_become_content_parts(tmp_path: Path) -> None:
    """Texts, images and documents in the form of chat completions; parts that are given stay."""
    (tmp_path / "a.pdf").write_bytes(PDF)
    given = {"type": "text", "text": "given"}
    found = as_content(["look", Image(PNG), File.read(tmp_path / "a.pdf"), given])
    assert [part["type"] for part in found] == ["text", "image_url", "file", "text"]
    assert found[1]["image_url"]["url"] == SHOWN
    assert found[2]["file"]["filename"] == "a.pdf"
    assert found[3] is given
    assert as_content("text") == "text"
    assert as_content(Image(PNG)) == [Image(PNG).part()]


def test_a_document_counts_by_its_pages() -> None:
    """By those that can be seen in it, else by its size."""
    assert attachment_size(File(PDF).part()) == 2 * 2_500 * 3
    packed = "data:application/pdf;base64," + base64.b64encode(b"%PDF-" + b"\1" * 500_000).decode()
    assert document_tokens(packed) == 10 * 2_500


def test_results_have_a_placeholder_for_each_attachment() -> None:
    """A list with attachments is shown item by item; results that differ have texts that differ."""
    found = rendered(["before", Image(PNG, "a.png"), {"n": 1}, File(PDF)])
    lines = found.text.splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith(f"[attachment 1: image a.png, image/png, {len(PNG)} bytes, ")
    assert lines[2] == '{"n": 1}'
    assert lines[3].startswith("[attachment 2: document, application/pdf")
    assert found.attachments == (Image(PNG, "a.png").part(), File(PDF).part())
    assert rendered(Image(PNG)).text != rendered(Image(PNG + b"1")).text
    with pytest.raises(ToolError, match="it was executed, but its result may have 8 attachments"):
        rendered([Image(PNG)] * 9)


def test_what_a_sandbox_sends_is_checked() -> None:
    """Its attachments are images and documents within the limits, whatever it writes."""
    made = rendered([Image(PNG, "a.png"), File(PDF, "b.pdf")])
    assert received(made.text, json.loads(json.dumps(made.attachments))) == made
    assert rendered(made) is made
    evil = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for wrong in ([evil], [{"type": "input_audio"}], 3, [Image(PNG).part()] * 9):
        with pytest.raises(ToolError, match="it was executed"):
            received("text", wrong)


def test_an_outcome_is_the_same_from_the_store() -> None:
    """What the store has of a finished call is the content of its message."""
    outcome = Outcome("ok", "[attachment 1: …]", 5, 7, attachments=(Image(PNG).part(),))
    kept = {"outcome": "ok", "content": json.loads(json.dumps(outcome.said)), "duration": 5, "started_at": 7}
    assert Outcome.of(kept) == outcome
    assert Outcome.of({**kept, "content": "text"}).said == "text"


def round_of(*results: Any, seq: int = 2) -> list[Message]:
    """An answer with calls, and their results as the log has them."""
    calls = tuple(ToolCall(f"r/1/{index}", "view", "{}", f"id{index}") for index in range(len(results)))
    messages = [Message("assistant", None, tool_calls=calls, run_id="r", round=1, seq=seq)]
    for index, result in enumerate(results):
        found = rendered(result)
        said = Outcome("ok", found.text, attachments=found.attachments).said
        messages.append(Message("tool", said, tool_call_id=f"r/1/{index}", name="view", seq=seq + 1 + index))
    return messages


def sent(conversation: Conversation, *drafted: Message) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(conversation.part(drafted)["messages"])
    return found


def test_requests_have_attachments_behind_the_results_of_their_round() -> None:
    """Results are text, as chat completions want them; one message of the user's has what is attached to all."""
    conversation = Conversation("")
    messages = [Message("user", "go", seq=1), *round_of(Image(PNG), "plain", [File(PDF), Image(PNG)])]
    conversation.extend(messages)
    found = sent(conversation)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "tool", "user"]
    assert all(isinstance(message["content"], str) for message in found[2:5])
    parts = found[5]["content"]
    assert parts[0]["text"].startswith(ATTACHMENTS_MARK)
    assert [part.get("text", part["type"]) for part in parts[1:]] == [
        "[attachment 1: of view (id0)]", "image_url", "[attachment 1: of view (id2)]", "file",
        "[attachment 2: of view (id2)]", "image_url",
    ]  # fmt: skip


def test_a_request_is_the_same_before_and_behind_a_commit() -> None:
    """Drafted or committed, all at once or one by one, and as the beginning of what follows: the same bytes."""
    results = round_of(Image(PNG), "plain")
    messages = [Message("user", "go", seq=1), *results]
    grown, drafting = Conversation("be kind"), Conversation("be kind")
    for message in messages:
        grown.extend([message])
        grown.measure([])
        text = grown.part()["messages"]
    drafting.extend(messages[:2])
    assert drafting.part(messages[2:])["messages"] == text
    answer = Message("assistant", "I see", seq=9)
    grown.extend([answer])
    assert grown.part()["messages"].startswith(text[:-1])


def test_images_count_by_their_pixels_in_results_as_well() -> None:
    """The size of what follows results is what the estimate counts, not its base64."""
    with_image, without = Conversation(""), Conversation("")
    with_image.extend([Message("user", "go", seq=1), *round_of(Image(PNG))])
    without.extend([Message("user", "go", seq=1), *round_of("x" * 70)])
    more = with_image.measure([]).size - without.measure([]).size
    assert 3 * 255 < more < 3 * 255 + 300


def test_a_shortened_result_has_no_attachments() -> None:
    """Older results that are elided keep their text and say what is missing; that much is saved."""
    results = round_of(Image(PNG))
    conversation = Conversation("", DEFAULT, View(elided=9))
    conversation.extend([Message("user", "go", seq=1), *results])
    found = sent(conversation)
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]
    assert found[2]["content"].endswith(GONE)
    whole = Conversation("")
    whole.extend([Message("user", "go", seq=1), *round_of(Image(PNG), seq=20)])
    assert whole.measure([Message("user", "more")]).ends[-1].saved >= 3 * 255


def test_a_summary_is_asked_for_with_the_attachments() -> None:
    """A request that folds the history up to the results has what belongs to them."""
    conversation = Conversation("")
    conversation.extend([Message("user", "go", seq=1), *round_of(Image(PNG))])
    asked = json.loads(conversation.beginning(3, Message("user", "summarise"))["messages"])
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "user", "user"]
    assert sent(conversation)[-1]["content"][2]["image_url"]["url"] == SHOWN


class TestViewImage:
    def context(self, root: Path) -> ToolContext:
        return ToolContext(
            session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace=str(root)
        )  # fmt: skip

    def test_images_and_documents_of_the_workspace(self, tmp_path: Path) -> None:
        """Each by its content; the name is its path."""
        (tmp_path / "charts").mkdir()
        (tmp_path / "charts/a.png").write_bytes(PNG)
        (tmp_path / "b").write_bytes(PDF)
        assert view_image("charts/a.png", self.context(tmp_path)) == Image(PNG, "charts/a.png")
        assert view_image("b", self.context(tmp_path)) == File(PDF, "b")

    def test_what_it_does_not_show(self, tmp_path: Path) -> None:
        """Text, what is too large, and what is not in the workspace."""
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "large.png").write_bytes(PNG.ljust(MAX_BYTES + 1, b"\0"))
        for path, problem in {
            "a.txt": "no PNG",
            "large.png": "make it smaller",
            "../x": "not allowed",
            "y": "No such",
        }.items():
            with pytest.raises(ToolError, match=problem):
                view_image(path, self.context(tmp_path))
