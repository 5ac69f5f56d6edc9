"""What is done about a long history, as a function of its size and of what went wrong."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.context import (
    Exhausted,
    Measure,
    Place,
    Policy,
    Trouble,
    View,
    fold_request,
    learned_window,
    next_step,
    shortened,
    shortened_arguments,
)
from understudy.estimates import attached_excess, image_size, image_tokens
from understudy.gateway.overflow import is_overflow, stated_window
from understudy.json_text import from_json
from understudy.windows import known_window

MESSAGES = 20


def measure(each: int = 100, count: int = MESSAGES, through: int = 0, saved: int = 0) -> Measure:
    """A history of so many messages of so many tokens each."""
    ends = [Place(through, 0, 0)] + [Place(through + n, n * each, n * saved) for n in range(1, count)]
    return Measure(count * each, 1.0, count * each, ends)


def test_nothing_is_done_while_there_is_room() -> None:
    """Below the share of the window, and where no window is known, requests stay as they are."""
    assert next_step(Policy(window=10_000), View(), measure(), Trouble(), 1_000) is None
    assert next_step(Policy(), View(), measure(each=10_000), Trouble(), 1_000) is None


def test_results_are_shortened_first_if_that_is_worth_it() -> None:
    """Where older results are most of a full context, they are elided, and all but `keep` of the history is."""
    step = next_step(Policy(window=2_400), View(), measure(saved=80), Trouble(), 400)
    assert step == View(elided=15)
    assert next_step(Policy(window=2_400), View(), measure(saved=10), Trouble(), 400) == 15


def test_a_summary_is_asked_for_or_not() -> None:
    """`summarise` and `notes` ask the model, `drop` leaves out, `none` leaves as it is."""
    steps = {fold: next_step(Policy(window=2_400, fold=fold), View(), measure(), Trouble(), 400)
             for fold in ("summarise", "notes", "drop", "none")}  # fmt: skip
    assert steps == {"summarise": 15, "notes": 15, "drop": View(through=15, gap=True), "none": None}


def test_what_fits_is_summarised_first() -> None:
    """Given a history that is longer than the window alone: the request for its summary has only what fits."""
    step = next_step(Policy(window=1_000), View(window=1_000), measure(), Trouble(refused=True), 100)
    assert step == 8


def test_after_a_refusal_the_request_for_a_summary_has_less() -> None:
    """Each refusal halves what is to be summarised; after three it is left out without."""
    steps = [
        next_step(Policy(window=1_000), View(window=1_000), measure(), Trouble(refused=True, asked=asked), 0)
        for asked in (1, 2, 3)
    ]
    assert steps == [3, 1, View(through=19, window=1_000, gap=True)]


def test_a_failed_summary_is_not_asked_for_again_at_once() -> None:
    """Given a request for a summary that failed at this size: nothing is done, until there is a tenth more; a full
    context is folded without."""
    policy, failed = Policy(window=2_500), fold_request(Policy(), 5, 2_000, 100)
    trouble = Trouble(failed=failed)
    assert next_step(policy, View(), measure(), trouble, 100) is None
    assert next_step(policy, View(), measure(each=120), trouble, 100) == 15
    assert isinstance(next_step(Policy(window=2_100), View(), measure(), trouble, 100), View)


def test_in_the_end_every_message_is_shortened() -> None:
    """Given nothing that can be folded: messages keep less and less of themselves, and then it is given up."""
    view, lengths = View(window=100), list[int]()
    for _ in range(6):
        step = next_step(Policy(), view, measure(each=1_000, count=1), Trouble(refused=True), 0)
        assert isinstance(step, View)
        view = step
        lengths.append(step.longest)
    assert lengths == [16_000, 8_000, 4_000, 2_000, 1_000, 500]
    with pytest.raises(Exhausted):
        next_step(Policy(), view, measure(each=1_000, count=1), Trouble(refused=True), 0)


@given(
    window=st.integers(256, 10_000), each=st.integers(1, 500), count=st.integers(1, 60), saved=st.integers(0, 400),
    fold=st.sampled_from(["summarise", "notes", "drop", "none"]),
    representation=st.sampled_from(["full", "terse"]), refusals=st.integers(0, 60),
)  # fmt: skip
def test_it_always_comes_to_an_end(
    window: int, each: int, count: int, saved: int, fold: str, representation: str, refusals: int
) -> None:
    """Whatever the sizes, and however often the endpoint refuses: each step is one further, so that the model is asked
    or it is given up after a bounded number of them."""
    policy = Policy(window=window, fold=fold, representation=representation)
    view, trouble, steps = View(), Trouble(refused=refusals > 0), 0
    while True:
        left = [n for n in range(count + 1) if n >= view.through]
        ends = [
            Place(n, (n - view.through) * each, max(0, n - view.elided) * min(saved, each)) for n in left[:-1] or left
        ]
        now = Measure(len(left) * each, 1.0, len(left) * each, ends)
        try:
            step = next_step(policy, view, now, trouble, 100)
        except Exhausted:
            return
        steps += 1
        assert steps < 200
        if step is None:
            if refusals <= 0:
                return
            refusals -= 1
            view, trouble = (
                View(view.through, view.elided, view.longest, learned_window(0, window, now.tokens, 100)),
                (Trouble(refused=refusals > 0)),
            )
        elif isinstance(step, int):
            assert view.through < step <= count
            trouble = Trouble(refused=True, asked=trouble.asked + 1)  # never granted
        else:
            further = (step.through, step.elided, -step.longest or 1), (view.through, view.elided, -view.longest or 1)
            assert step != view
            assert step.longest < view.longest or further[0][:2] > further[1][:2] or not view.longest
            view, trouble = step, Trouble()


def test_a_window_that_explains_the_refusal_is_believed() -> None:
    """What an endpoint says of its window counts if the request does not fit into it; else the estimate was wrong."""
    assert learned_window(8_192, 0, 8_000, 400) == 8_192
    assert learned_window(0, 4_000, 5_000, 0) == 4_000
    assert learned_window(128_000, 0, 8_000, 400) == 6_400
    assert learned_window(0, 0, 1_000, 0) == 800


@pytest.mark.parametrize(
    ("text", "code", "window"),
    [
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
         "context_length_exceeded", 8192),
        ("This model's maximum context length is 65536 tokens. However, you requested 70000 tokens", None, 65536),
        ("the request exceeds the available context size (4096 tokens), try increasing it", 400, 4096),
        ("prompt is too long: 212345 tokens > 200000 maximum", None, 200_000),
        ("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", None, 1_048_576),
        ("Prompt contains 40000 tokens, too large for model with 32768 maximum context length", None, 32_768),
        ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000", None, 4096),
        ("Please reduce the length of the messages or completion.", "context_length_exceeded", 0),
    ],
)  # fmt: skip
def test_refusals_are_recognized(text: str, code: object, window: int) -> None:
    """What endpoints say of requests that are too long, and the window where they state it."""
    assert is_overflow(text, code)
    assert stated_window(text) == window


def test_other_refusals_are_not() -> None:
    """A refusal for another reason is none of these."""
    assert not is_overflow("Invalid schema for response_format 'x'", "invalid_value")
    assert not is_overflow("You exceeded your current quota", "insufficient_quota")


@given(st.text(max_size=3_000), st.integers(0, 2_000))
def test_a_shortened_text_says_so(text: str, limit: int) -> None:
    """A text that is longer than the limit keeps so many characters, its beginning and its end, and says what is gone;
    another one stays as it is. Shortened arguments are JSON still."""
    short = shortened(text, limit, 7)
    if len(text) <= limit:
        assert short == text
    else:
        assert f"{len(text) - limit} of {len(text)} characters are left out; read_message with number 7" in short
        assert short.startswith(text[: limit - limit // 4])
        assert short.endswith(text[len(text) - limit // 4 :] if limit // 4 else "…]\n")
    from_json(shortened_arguments(f'{{"a": "{"b" * limit}"}}', limit).encode())


def png(width: int, height: int) -> str:
    header = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", width, height)
    data = header + b"\x08\x02\0\0\0" + b"x" * 100_000
    return "data:image/png;base64," + base64.b64encode(data).decode()


def jpeg(width: int, height: int) -> str:
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + b"\x03" + b"\0" * 9
    data = b"\xff\xd8\xff\xe0" + struct.pack(">H", 16) + b"JFIF" + b"\0" * 10 + frame + b"x" * 1_000
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "detail", "tokens"),
    [
        (png(1024, 1024), "high", 765),
        (png(2048, 4096), "high", 1105),
        (png(4096, 8192), "low", 85),
        (jpeg(512, 512), "auto", 255),
        (jpeg(0, 0), "auto", 85 + 8 * 170),
        ("https://example.org/picture.png", "auto", 85 + 8 * 170),
        ("data:image/png;base64,!!!", "auto", 85 + 8 * 170),
    ],
)
def test_an_image_counts_by_its_pixels(url: str, detail: str, tokens: int) -> None:
    """OpenAI's own examples, and images whose size can't be had."""
    assert image_tokens({"url": url, "detail": detail}) == tokens
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url, "detail": detail}}]
    assert attached_excess(content) == len(url) - 3 * tokens


def test_sizes_are_read_from_the_beginning() -> None:
    """PNG and JPEG say their size; anything else does not."""
    assert (image_size(png(3, 5)), image_size(jpeg(7, 9))) == ((3, 5), (7, 9))
    assert image_size("data:image/webp;base64," + base64.b64encode(b"RIFF").decode()) is None


def test_known_windows() -> None:
    """The longest beginning of a name decides; a provider before it does not matter."""
    assert known_window("gpt-4o-mini") == 128_000
    assert known_window("openai/gpt-4.1-nano") == 1_047_576
    assert known_window("ft:gpt-4o-mini:acme::1") == 128_000
    assert known_window("offline") is None
