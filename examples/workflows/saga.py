"""A saga: three bookings that belong together. If one fails, those before it are cancelled, the last one first.

The offices are folders here, and a booking is a file in one, named by the key of its call. So a call that is made
again, or whose process died, books once.

understudy workflow run understudy.examples.workflows.saga:travel city=Oslo offices=/tmp/offices
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from understudy import ToolContext, ToolError, WorkflowContext, tool, workflow

KINDS = ("flight", "hotel", "car")


class Trip(BaseModel):
    """The numbers of what is booked, by kind."""

    city: str
    bookings: dict[str, str]


@tool(on_crash="rerun")
def book(kind: str, city: str, offices: str, context: ToolContext) -> str:
    """Book something; its number. An office that has a file `full` has nothing left."""
    office = Path(offices) / kind
    office.mkdir(parents=True, exist_ok=True)
    if (office / "full").exists():
        raise ToolError(f"no {kind} is left in {city}")
    number = context.call_key.replace("/", "-")
    (office / number).write_text(city)
    return number


@tool(on_crash="rerun")
def cancel(kind: str, number: str, offices: str) -> str:
    """Cancel a booking. One that is cancelled already stays so."""
    (Path(offices) / kind / number).unlink(missing_ok=True)
    return f"{kind} {number} is cancelled"


@workflow
async def travel(ctx: WorkflowContext, city: str, offices: str) -> Trip:
    """Book a flight, a hotel and a car, or nothing."""
    bookings: dict[str, str] = {}
    for kind in KINDS:
        number = await ctx.tool(book, kind, city, offices)
        ctx.on_failure(ctx.tool, cancel, kind, number, offices)
        bookings[kind] = number
        await ctx.publish("booked", bookings)
    return Trip(city=city, bookings=bookings)
