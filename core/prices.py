"""What models cost. Money is counted in whole millionths of the currency that the price table is in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from .errors import InvalidConfiguration
from .messages import Usage

MILLION = 1_000_000
HIGHEST = Decimal(1_000_000)
KINDS = ("input", "cached_input", "output", "cache_write")
CURRENCY = "currency"


@dataclass(frozen=True, slots=True)
class Price:
    """What a model costs, in millionths of the currency for a million tokens: at 0.15 a million, `input` is 150,000.

    Attributes:
        cached_input: of input tokens that came from the endpoint's cache.
        cache_write: of input tokens that it took into its cache; None if these cost what others do.
        currency: its code by ISO 4217, as EUR; empty if the price table says none.
    """

    input: int
    cached_input: int
    output: int
    cache_write: int | None = None
    currency: str = ""

    def cost(self, usage: Usage) -> int:
        """Millionths of the currency that these tokens cost, rounded up."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        written = min(usage.cache_write_tokens, usage.input_tokens - cached)
        fresh = usage.input_tokens - cached - written
        write = self.input if self.cache_write is None else self.cache_write
        spent = fresh * self.input + cached * self.cached_input + written * write + usage.output_tokens * self.output
        return -(-spent // MILLION)

    @property
    def dearest_input(self) -> int:
        """Of an input token, whatever the endpoint does with it."""
        return max(self.input, self.cached_input, self.cache_write or 0)

    def most(self, input_tokens: int, output_tokens: int) -> int:
        """The most that a call with so many tokens can cost, whatever of it is cached."""
        return -(-(input_tokens * self.dearest_input + output_tokens * self.output) // MILLION)

    def affordable(self, money: int, input_tokens: int) -> int | None:
        """The longest reply that this much money allows after the input, below 0 if not even that; None for any."""
        left = money * MILLION - input_tokens * self.dearest_input
        if left < 0:
            return -1
        return left // self.output if self.output else None

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "price") -> Price:
        """A price from decimals per million tokens: `{"input", "output"}`, and perhaps `cached_input` and
        `cache_write`, which are otherwise those of input, and `currency`.

        Raises:
            InvalidConfiguration: a field is missing or unknown, is no decimal from 0 to a million, or no currency.
        """
        if not isinstance(given, Mapping):
            raise InvalidConfiguration(f"{where} must be a table with input and output, not {given!r}")
        strange = sorted(set(given) - {*KINDS, CURRENCY})
        missing = [name for name in ("input", "output") if name not in given]
        if strange or missing:
            fault = f"has no {', '.join(missing)}" if missing else f"has unknown fields: {', '.join(strange)}"
            raise InvalidConfiguration(
                f"{where} {fault}. A price has input, output and perhaps cached_input, cache_write, currency"
            )
        amounts = {name: _amount(given[name], f"{where}.{name}") for name in KINDS if name in given}
        cached = amounts.get("cached_input", amounts["input"])
        currency = _currency(given.get(CURRENCY, ""), where)
        return cls(amounts["input"], cached, amounts["output"], amounts.get("cache_write"), currency)


def _amount(value: Any, where: str) -> int:
    try:
        amount = Decimal(str(value)) * MILLION
    except InvalidOperation:
        amount = Decimal(-1)
    if not amount.is_finite() or not 0 <= amount <= HIGHEST * MILLION or amount != amount.to_integral_value():
        raise InvalidConfiguration(
            f"{where}={value!r} must be an amount per million tokens, from 0 to a million, with at most six decimals"
        )
    return int(amount)


def _currency(value: Any, where: str) -> str:
    if not isinstance(value, str) or (value and not re.fullmatch("[A-Z]{3}", value)):
        raise InvalidConfiguration(f"{where}.{CURRENCY}={value!r} must be a code of ISO 4217, as EUR or USD")
    return value


def price_table(given: Mapping[str, Any] | str | Path) -> dict[str, Price]:
    """The prices by model, from a table or from a JSON or TOML file (by its suffix) that holds one.

    Beside the models it may have `currency`, that of the prices that say none of their own. All of a cluster's prices
    must be in one: budgets add them up.

    Raises:
        InvalidConfiguration: what can't be used, and where.
    """
    if isinstance(given, (str, Path)):
        return price_table(_read(Path(given)))
    if not isinstance(given, Mapping):
        raise InvalidConfiguration(f"prices must be a table of models, not {type(given).__name__}")
    models = {str(model): price for model, price in given.items() if model != CURRENCY}
    found = {
        model: price if isinstance(price, Price) else Price.of(price, f"prices[{model!r}]")
        for model, price in models.items()
    }
    currency = _currency(given.get(CURRENCY, ""), "prices")
    found = {model: replace(price, currency=price.currency or currency) for model, price in found.items()}
    currencies = sorted({price.currency for price in found.values()} - {""})
    if len(currencies) > 1:
        raise InvalidConfiguration(
            f"prices are in several currencies ({', '.join(currencies)}): budgets add them up, so give all in one"
        )
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(text, parse_float=Decimal)
        found: dict[str, Any] = json.loads(text, parse_float=Decimal)
        return found
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(f"the price table {path} can't be read: {error}") from None


def money(millionths: int) -> Decimal:
    """An amount in the currency of the price table."""
    return Decimal(millionths) / MILLION
