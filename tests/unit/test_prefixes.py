"""The offline model's prefix cache: what an endpoint finds again of a prompt."""

from __future__ import annotations

from understudy.testing.prefixes import BLOCK, Prefixes


def test_whole_units_of_the_beginning_are_found_again() -> None:
    """The longest common beginning with any earlier prompt of the same model counts, in whole units."""
    prefixes = Prefixes()
    a, b = "a" * (3 * BLOCK + 7), "a" * (2 * BLOCK) + "b" * (2 * BLOCK)
    assert prefixes.found("m", a) == 0
    assert prefixes.found("m", a) == 3 * BLOCK
    assert prefixes.found("m", b) == 2 * BLOCK
    assert prefixes.found("m", b + "c" * BLOCK) == 4 * BLOCK
    assert prefixes.found("other", b) == 0
    assert prefixes.found("m", "x" + a) == 0
    assert prefixes.found("m", a[: BLOCK - 1]) == 0
