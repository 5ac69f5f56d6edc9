"""The expressions of conditions and templates: comparisons, and, or, not, in, literals, and paths into variables.

They are read by a parser of their own, and reach nothing but the data that they are given: no attribute of an object
of Python's, no call. How long and how deep one may be is bounded, and so is what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LONGEST_EXPRESSION = 1_000
"""Characters."""

DEEPEST_EXPRESSION = 20
"""Levels of brackets and `not`."""

IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]{0,63}"

WORDS = ("and", "or", "not", "in", "true", "false", "null")
"""Words of the language, which no variable can be named."""

OTHERS = {
    "&&": "and", "||": "or", "!": "not", "===": "==", "=": "==", "<>": "!=", "True": "true", "False": "false",
    "None": "null", "undefined": "null", "AND": "and", "OR": "or", "NOT": "not",
}  # fmt: skip
"""How other languages write what is written in another way here."""

_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TOKEN = re.compile(
    rf"""(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<text>{_TEXT})
    |(?P<sign>===|==|!=|<=|>=|<>|&&|\|\||\}}\}}|\{{\{{|[<>()\[\],=!])""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_PART = re.compile(
    rf"""\.(?:(?P<name>{IDENTIFIER})|(?P<index>\d{{1,9}})|(?P<all>\*))
    |\[\s*(?:(?P<number>\d{{1,9}})|(?P<text>{_TEXT}))\s*\]""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_SPACE = re.compile(r"\s*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


class BadExpression(ValueError):
    """An expression can't be read.

    Attributes:
        problem: why.
        column: where in the text, from 1 on.
    """

    def __init__(self, problem: str, column: int) -> None:
        super().__init__(f"column {column}: {problem}")
        self.problem = problem
        self.column = column


class Every:
    """The part `*` of a path: every item of a list."""

    def __repr__(self) -> str:
        return "*"


EVERY = Every()


@dataclass(frozen=True)
class Literal:
    """A value that is written out."""

    value: Any


@dataclass(frozen=True)
class Items:
    """A list that is written out."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Path:
    """A variable, or a part of one.

    Attributes:
        column: where in the text it is, from 1 on.
    """

    name: str
    parts: tuple[str | int | Every, ...]
    column: int


@dataclass(frozen=True)
class Not:
    """Whether something is not so."""

    inner: Expression


@dataclass(frozen=True)
class Logic:
    """Whether all or any of several things are so; `word` is `and` or `or`."""

    word: str
    inner: tuple[Expression, ...]


@dataclass(frozen=True)
class Comparison:
    """Whether two values are in a relation: `==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`."""

    sign: str
    left: Expression
    right: Expression


Expression = Literal | Items | Path | Not | Logic | Comparison


def parse(text: str) -> Expression:
    """Read a whole text.

    Raises:
        BadExpression: it is no expression.
    """
    if len(text) > LONGEST_EXPRESSION:
        raise BadExpression(f"it is longer than {LONGEST_EXPRESSION} characters", LONGEST_EXPRESSION + 1)
    parser = _Parser(text, 0)
    found = parser.any_of()
    parser.end("")
    return found


def parse_within(text: str, start: int) -> tuple[Expression, int]:
    """Read what is between `{{` and `}}`.

    Args:
        start: where it begins, behind the braces.

    Returns:
        It, and where what follows the closing braces begins.

    Raises:
        BadExpression: it is no expression, or they are missing.
    """
    parser = _Parser(text, start)
    found = parser.any_of()
    return found, parser.end("}}")


def paths(expression: Expression) -> Iterator[Path]:
    """Every variable, or part of one, that an expression reads."""
    match expression:
        case Path():
            yield expression
        case Items(inner) | Logic(_, inner):
            for item in inner:
                yield from paths(item)
        case Not(inner):
            yield from paths(inner)
        case Comparison(_, left, right):
            yield from paths(left)
            yield from paths(right)


class _Parser:
    """Reads an expression from the left to the right (recursive descent)."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._start = start
        self._depth = 0
        self._move(start)

    def any_of(self) -> Expression:
        return self._logic("or", lambda: self._logic("and", self._negated))

    def end(self, sign: str) -> int:
        """Nothing but this may follow; where what is behind it begins."""
        if self._token != sign:
            if sign and not self._token:
                raise self._bad("}} is missing")
            raise self._bad(f"{self._token!r} is not expected here" + self._hint())
        return self._next

    def _bad(self, problem: str) -> BadExpression:
        return BadExpression(problem, self._at + 1)

    def _hint(self) -> str:
        if self._token in OTHERS:
            return f" (write {OTHERS[self._token]!r})"
        if self._token == "[":
            return " (an index stands directly behind what it is of)"
        return ""

    def _move(self, to: int) -> None:
        """Go on to the token that begins here or behind spaces; it is empty at the end."""
        found = _SPACE.match(self._text, to)
        self._at = self._next = found.end() if found is not None else to
        self._kind, self._token = "", ""
        if self._at - self._start > LONGEST_EXPRESSION:
            raise self._bad(f"an expression has at most {LONGEST_EXPRESSION} characters")
        if self._at < len(self._text):
            token = _TOKEN.match(self._text, self._at)
            if token is None:
                raise self._bad(self._unread())
            self._kind, self._token, self._next = token.lastgroup or "", token.group(), token.end()

    def _unread(self) -> str:
        character = self._text[self._at]
        if character in "'\"":
            return f"the text that begins here has no closing {character}"
        if character == "-":
            return 'there is no arithmetic; a name with a hyphen in it is written as in found["my-name"]'
        if character in "+*/%":
            return "there is no arithmetic"
        if character == ".":
            return "behind a dot comes a name, an index or *"
        return f"{character!r} can't be used here"

    def _take(self) -> str:
        token = self._token
        self._move(self._next)
        return token

    def _logic(self, word: str, operand: Any) -> Expression:
        found = [operand()]
        while self._kind == "name" and self._token == word:
            self._take()
            found.append(operand())
        return found[0] if len(found) == 1 else Logic(word, tuple(found))

    def _negated(self) -> Expression:
        if self._token == "not" and self._kind == "name":
            self._deeper()
            self._take()
            found = Not(self._negated())
            self._depth -= 1
            return found
        return self._comparison()

    def _comparison(self) -> Expression:
        left = self._operand()
        sign = self._sign()
        if not sign:
            return left
        found = Comparison(sign, left, self._operand())
        if self._token in ("==", "!=", "<", "<=", ">", ">=", "in"):
            raise self._bad("two values can be compared at a time: put `and` between the comparisons")
        return found

    def _sign(self) -> str:
        if self._token in ("==", "!=", "<", "<=", ">", ">=", "in"):
            return self._take()
        if self._token == "not" and self._kind == "name":
            self._take()
            if self._token != "in":
                raise self._bad("`in` is missing behind `not`")
            self._take()
            return "not in"
        return ""

    def _operand(self) -> Expression:
        kind, token = self._kind, self._token
        if kind == "number":
            self._take()
            return Literal(_number(token))
        if kind == "text":
            value = self._unquoted(token, self._at)
            self._take()
            return Literal(value)
        if token in ("true", "false", "null"):
            self._take()
            return Literal({"true": True, "false": False, "null": None}[token])
        if token in OTHERS or token in WORDS:
            raise self._bad(f"{token!r} is no value{self._hint()}")
        if kind == "name":
            return self._path()
        if token in ("(", "["):
            return self._within(token)
        if token == "{{":
            raise self._bad("within an expression, variables stand without braces")
        raise self._bad("a value is missing" if token in ("", "}}", ")", "]", ",") else f"{token!r} is no value")

    def _within(self, bracket: str) -> Expression:
        self._deeper()
        self._take()
        if bracket == "(":
            inner = self.any_of()
            self._close(")")
            self._depth -= 1
            return inner
        items: list[Expression] = []
        while self._token != "]":
            items.append(self.any_of())
            if self._token != ",":
                break
            self._take()
        self._close("]")
        self._depth -= 1
        return Items(tuple(items))

    def _close(self, bracket: str) -> None:
        if self._token != bracket:
            raise self._bad(f"{bracket!r} is missing")
        self._take()

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST_EXPRESSION:
            raise self._bad(f"brackets and `not` are nested more than {DEEPEST_EXPRESSION} deep")

    def _path(self) -> Path:
        at, name, end = self._at, self._token, self._next
        if re.fullmatch(IDENTIFIER, name) is None:
            raise self._bad("a name has at most 64 characters")
        parts: list[str | int | Every] = []
        while (found := _PART.match(self._text, end)) is not None:
            if found["all"]:
                parts.append(EVERY)
            elif found["text"]:
                parts.append(self._unquoted(found["text"], found.start("text")))
            else:
                parts.append(found["name"] or int(found["index"] or found["number"]))
            end = found.end()
        if self._text[end : end + 1] == "(":
            raise BadExpression(f"{name} can't be called: there are no functions", end + 1)
        self._move(end)
        return Path(name, tuple(parts), at + 1)

    def _unquoted(self, token: str, at: int) -> str:
        def plain(found: re.Match[str]) -> str:
            if found[1] not in _ESCAPES:
                raise BadExpression(f"there is no escape \\{found[1]}", at + found.start() + 2)
            return _ESCAPES[found[1]]

        return re.sub(r"\\(.)", plain, token[1:-1], flags=re.DOTALL)


def _number(token: str) -> int | float:
    return int(token) if re.fullmatch(r"-?\d{1,18}", token) else float(token)
