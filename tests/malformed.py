"""Malformed answers, each with what must become of it: the value that is accepted, or the reason why there is none.

The truth is known from how an answer is made, and not from reading it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from understudy.testing.offline import Reply

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer", "minimum": 0}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "price": {"type": "number"},
        "paid": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["id", "price", "paid", "note", "items"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}
"""The last property is a list that may be full, so that some answers lack nothing but brackets."""

OPEN: dict[str, Any] = {**ORDER, "additionalProperties": {"type": "string"}}
"""The same with room for more: what was cut off is never known to be all."""

WORDS = ("pen", "Füller", "筆", "😀", 'a "quoted" one', "back\\slash", "line\nbreak", "{not} [json]", "", "null")


@dataclass(frozen=True)
class Case:
    """An answer.

    Attributes:
        kind: how it was made.
        reason: why it is not accepted; empty if it is.
        value: what is accepted.
    """

    kind: str
    schema: dict[str, Any]
    reply: Reply
    reason: str = ""
    value: Any = None


def order(chosen: random.Random) -> dict[str, Any]:
    """An instance of `ORDER` and of `OPEN`."""
    items = [{"name": chosen.choice(WORDS), "count": chosen.randrange(100)} for _ in range(chosen.choice((1, 2, 3, 3)))]
    return {
        "id": chosen.randrange(-5, 10**9), "price": chosen.choice((0.1, 12, 1e-7, 3.0, -2.5)),
        "paid": chosen.random() < 0.5, "note": chosen.choice((None, *WORDS)), "items": items,
    }  # fmt: skip


def written(chosen: random.Random, value: Any) -> str:
    """JSON text of a value, in one of the ways to write it."""
    return json.dumps(value, ensure_ascii=chosen.random() < 0.5, indent=chosen.choice((None, None, 2)))


def cases(seed: int) -> Iterator[Case]:
    """Answers without end, all kinds in turn."""
    chosen = random.Random(f"{seed}/malformed")
    while True:
        for make in KINDS:
            schema = chosen.choice((ORDER, OPEN))
            value = order(chosen)
            for found in make(chosen, schema, value):
                yield Case(make.__name__, schema, *found)


Found = Iterator[tuple[Any, ...]]


def whole(chosen: random.Random, _schema: Any, value: Any) -> Found:
    """Nothing but the answer, with spaces, byte order mark or newlines around it."""
    around = chosen.choice(("", " ", "\n", "\ufeff", "\r\n\t"))
    yield Reply(text=around + written(chosen, value) + around.strip("\ufeff")), "", value


def fenced(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = written(chosen, value)
    yield Reply(text=f"```{chosen.choice(('json', '', 'JSON'))}\n{text}\n```"), "", value
    yield Reply(text=f"Here it is:\n```json\n{text}\n```\nAnything else?"), "", value
    yield Reply(text=f"```json\n{text}\n```\n```json\n{written(chosen, order(chosen))}\n```"), "ambiguous"


def surrounded(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = written(chosen, value)
    yield Reply(text=f"{chosen.choice(('Sure! ', 'The answer is: ', 'Der Auftrag lautet „so“: '))}{text}"), "", value
    yield Reply(text=f"{text}{chosen.choice((' That is all.', chr(10) + '-- ' + chr(10) + 'me'))}"), "", value
    yield Reply(text=f"As said in [1]: {text}"), "ambiguous"
    yield Reply(text=f"{text} (in {{braces}})"), "ambiguous"
    yield Reply(text=f'"order": {text}'), "ambiguous"
    yield Reply(text=f"{text}, and more"), "ambiguous"


def several(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = written(chosen, value)
    yield Reply(text=f"{text}\n{written(chosen, order(chosen))}"), "ambiguous"
    yield Reply(text=f"{text}{text}"), "ambiguous"
    yield Reply(text=f"First {text}, or rather {written(chosen, order(chosen))}"), "ambiguous"
    yield Reply(text=f"{{}} {text}"), "ambiguous"


def unclosed(chosen: random.Random, schema: Any, value: Any) -> Found:
    """Without its last bracket, which the schema allows to add or not."""
    text = json.dumps(value)
    whole = schema is ORDER
    yield (Reply(text=text[:-1]), "", value) if whole else (Reply(text=text[:-1]), "cut_off")
    full = whole and len(value["items"]) == 3
    yield (Reply(text=text[:-2]), "", value) if full else (Reply(text=text[:-2]), "cut_off")
    yield Reply(text=text[:-3]), "cut_off"  # a number, which may go on
    turned = {**value, "items": [{"count": item["count"], "name": item["name"]} for item in value["items"]]}
    ending = json.dumps(turned)[:-3]
    yield (Reply(text=ending, finish_reason="length"), "", turned) if full else (Reply(text=ending), "cut_off")


def cut(chosen: random.Random, schema: Any, value: Any) -> Found:
    """Ended by the longest length, anywhere before its last two brackets."""
    text = written(chosen, value)
    last = text.rindex("}", 0, text.rindex("]"))
    for _ in range(3):
        yield Reply(text=text[: chosen.randrange(1, last)], finish_reason="length"), "cut_off"
    yield Reply(text="", finish_reason="length"), "cut_off"
    yield Reply(text=f"{text} And as an alter", finish_reason="length"), "cut_off"
    yield Reply(text=text, finish_reason="length"), "", value


def wrong_types(chosen: random.Random, _schema: Any, value: Any) -> Found:
    wrong = {
        "id": ("3", 3.0, 3.5, None, True, [3], "three"), "price": ("0.1", None, False, {}), "paid": (1, "true", None),
        "note": (7, ["x"], False), "items": ({}, "[]", None, [], [1], [{"name": "x"}], [{"name": "x", "count": "3"}],
                                             [{"name": "x", "count": -1}], [{"name": "x", "count": 1}] * 4),
    }  # fmt: skip
    for name in chosen.sample(sorted(wrong), 3):
        yield Reply(text=written(chosen, {**value, name: chosen.choice(wrong[name])})), "schema"


def wrong_shape(chosen: random.Random, schema: Any, value: Any) -> Found:
    lacking = {name: item for name, item in value.items() if name != chosen.choice(sorted(value))}
    if len(lacking) < len(value):
        yield Reply(text=written(chosen, lacking)), "schema"
    more = {**value, "extra": "x"}
    yield (Reply(text=written(chosen, more)), "schema") if schema is ORDER else (Reply(text=json.dumps(more)), "", more)
    nested = {**value, "items": [{**value["items"][0], "extra": 1}]}
    yield Reply(text=written(chosen, nested)), "schema"
    yield Reply(text=written(chosen, [value])), "schema"
    yield Reply(text=written(chosen, json.dumps(value))), "schema"
    yield Reply(text=chosen.choice(("null", "3", "true", '"done"', "[]"))), "schema"


def no_json(chosen: random.Random, _schema: Any, value: Any) -> Found:
    yield Reply(text=chosen.choice(("I have done it.", "Done!", "```json\n```", "¯\\_(ツ)_/¯"))), "not_json"
    yield Reply(text=chosen.choice(("", " ", "\n\n", "\ufeff"))), "not_json"
    yield Reply(text=None), "not_json"
    simple = {**value, "note": None, "items": [{"name": "pen", "count": 1}]}
    text = json.dumps(simple)
    yield Reply(text=text[:-1] + ",}"), "not_json"
    yield Reply(text=str(simple)), "not_json"  # as Python writes it
    yield Reply(text=text.replace(", ", " ", 1)), "not_json"
    yield Reply(text=text.replace('"id"', "id")), "not_json"
    yield Reply(text=text.replace(": null", ": null /* none */")), "not_json"
    yield Reply(text=text.replace('"pen"', '"pe\nn"')), "not_json"
    yield Reply(text=text.replace('"count": 1', '"count": 01')), "not_json"


def numbers(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = json.dumps({**value, "id": 4711})
    for number in ("NaN", "Infinity", "-Infinity", "1e400", "-1e999", str(10**30), str(2**64), str(-(2**63) - 1)):
        if chosen.random() < 0.4:
            yield Reply(text=text.replace("4711", number)), "inexact"
    small = json.dumps({**value, "price": 4711.5})
    yield Reply(text=small.replace("4711.5", "1e-400")), "inexact"
    large = {**value, "id": chosen.choice((2**63, 2**64 - 1, -(2**63)))}
    yield Reply(text=written(chosen, large)), "", large


def characters(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = json.dumps({**value, "note": "MARK"})
    yield Reply(text=text.replace("MARK", "\\ud83d")), "inexact"
    yield Reply(text=text.replace("MARK", "x\ufffdy")), "inexact"
    yield Reply(text=text.replace("MARK", "\\ud83d\\ude00")), "", {**value, "note": "😀"}
    yield Reply(text=text.replace("MARK", "a\\u0000b")), "", {**value, "note": "a\0b"}
    yield Reply(text=text.replace("MARK", "\\u00e9\u00e9")), "", {**value, "note": "éé"}


def keys(chosen: random.Random, _schema: Any, value: Any) -> Found:
    text = json.dumps(value)
    yield Reply(text=f'{{"id": 1, {text[1:]}'), "ambiguous"
    yield Reply(text=text.replace('"count"', '"count": 5, "count"', 1)), "ambiguous"
    yield Reply(text=f"{text[:-1]}, {text[1:]}"), "ambiguous"


def nested(chosen: random.Random, _schema: Any, value: Any) -> Found:
    depth = chosen.choice((60, 200, 5000))
    yield Reply(text=json.dumps({**value, "note": "MARK"}).replace('"MARK"', "[" * depth + "]" * depth)), "inexact"


def refusals(chosen: random.Random, _schema: Any, value: Any) -> Found:
    yield Reply(refusal="I can't help with that."), "refused"
    yield Reply(text=json.dumps(value), finish_reason="content_filter"), "refused"


KINDS: tuple[Callable[[random.Random, Any, Any], Found], ...] = (
    whole, fenced, surrounded, several, unclosed, cut, wrong_types, wrong_shape, no_json, numbers, characters, keys,
    nested, refusals,
)  # fmt: skip
