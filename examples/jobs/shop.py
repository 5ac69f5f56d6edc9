"""The tools of the example: a module beside the driver, as in any project."""

import os
from pathlib import Path

from understudy import tool

PRICES = {"pen": 2, "desk": 180, "lamp": 35}


@tool(on_crash="rerun")  # read-only: may simply run again after a crash
def price(item: str) -> str:
    """What an item costs."""
    return f"{item}: {PRICES[item]} EUR" if item in PRICES else f"there is no {item}"


@tool  # has an effect: never started twice for the same call
def order(item: str, number: int) -> str:
    """Order an item."""
    with Path(os.environ["SHOP_LEDGER"]).open("a") as ledger:
        ledger.write(f"{number} {item}\n")
    return f"ordered {number} {item}"
