"""Making room in a model's context: what an activation adds to its batch before it asks its model."""

from __future__ import annotations

from msgspec.structs import replace

from understudy.agents import CHILD
from understudy.commands import COMMAND
from understudy.messages import CUT_OFF, FOLD
from understudy.records import STEER

from .context import INPUT_CHARACTERS, View, fold_request, learned_window, next_step, shortened
from .draft import Draft
from .window import Window, stated_reply

LEAST_WORDS, MOST_WORDS = 100, 1_500
"""How long a summary may be that is asked for."""

MOST_INPUTS = 20
"""So many of a run's inputs are repeated, if they have to be shortened: the first, and the latest."""

INPUTS = ("", CHILD, COMMAND, STEER)
"""Origins of the messages that say what a run is to do."""


def make_room(window: Window, draft: Draft) -> None:
    """Add what is due so that the next request fits into the model's context: records of what it is sent from now on,
    or a request for a summary, which is then what the model is asked next.

    Raises:
        Exhausted: the endpoint has refused what is left, and nothing more can be left out.
    """
    trouble, recorded = window.trouble(), window.view(draft.messages)
    if not (trouble.refused or recorded.window or window.policy.window):
        return  # nobody knows how much fits
    view, measure, reply = recorded, window.measure(draft.messages), stated_reply(window.spec["parameters"])
    if trouble.refused and not trouble.asked:
        said = ((window.model_error or {}).get("details") or {}).get("window", 0)
        known = view.window or window.policy.window or 0
        view = replace(view, window=learned_window(said, known, measure.tokens, reply))
    while True:
        step = next_step(window.policy, view, measure, trouble, reply)
        if isinstance(step, View):
            view = replace(step, input=_inputs(window, step.through) if step.through > view.through else step.input)
        if view != recorded:
            view = replace(view, per_byte=window.measured_per_byte())
            draft.say(window, view.record())
            recorded = view
        if step is None:
            return
        if isinstance(step, int):
            words = round((view.window or window.policy.window or 0) * window.policy.keep / 2)
            words = min(max(words, LEAST_WORDS), MOST_WORDS)
            draft.say(window, fold_request(window.policy, step, measure.tokens, words))
            return
        trouble = replace(trouble, refused=False)
        measure = window.measure(draft.messages)


def summary_of(window: Window, draft: Draft) -> str | None:
    """The summary that has come, and of which nothing was made yet; None if there is none, or it is empty: then history
    stays as it was."""
    found = window.fold_answer()
    if found is None or any(message.origin == FOLD for message in draft.messages):
        return None
    interrupted = (found[0].extra or {}).get("finish_reason") == "aborted"  # with its run
    return None if interrupted else found[0].text.strip() or None


def take_summary(window: Window, draft: Draft, summary: str) -> None:
    """Record the summary that has come: from now on it stands for what it is of."""
    found = window.fold_answer()
    assert found is not None
    through = (found[1].extra or {})["through"]
    cut_off = (found[0].extra or {}).get("finish_reason") == CUT_OFF
    view = replace(window.view(), through=through, summary=summary, gap=cut_off, input=_inputs(window, through))
    draft.say(window, view.record())


def _inputs(window: Window, through: int) -> str:
    """What the current run received, by inputs, news and steers, of that which is left out with what is up to a `seq`:
    all of it, or the beginnings and ends of the first and the latest."""
    said = [message for message in window.backwards() if message.role == "user" and message.seq <= through]
    return repeated([message.text for message in reversed(said) if message.origin in INPUTS])


def repeated(texts: list[str]) -> str:
    """These inputs in one text that is bounded, however many and long they are."""
    if sum(map(len, texts)) > INPUT_CHARACTERS:
        left_out = len(texts) - MOST_INPUTS
        more = f"[… {left_out} inputs are left out …]"
        texts = texts if left_out <= 0 else [texts[0], more, *texts[1 + left_out :]]
        texts = [shortened(text, INPUT_CHARACTERS // len(texts)) for text in texts]
    return "\n\n".join(texts)
