"""A death that is told at a bad moment: what the frame held is resumed all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from understudy.errors import StaleGeneration

from . import kernel as k


async def test_a_death_is_told_before_a_take_up_that_does_not_know_of_it(store: str, tmp_path: Path) -> None:
    """Given a tool at work, when its frame and the node service die and the next one hears of the frame's death first,
    then it says that it can't act yet; told again, after a `take_up` that counted the frame as alive, it resumes."""
    notes = tmp_path / "notes"
    script = k.script([("look", {"path": str(notes), "text": "x"})], "done")
    async with k.running(store, tmp_path, frames=1) as kernel:
        died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def die(_number: int, label: str, worker: k.Worker | None) -> None:
            if label == "tool begins" and worker is not None and not died.done():
                worker.dead = True
                worker.task.cancel()
                del kernel.workers[worker.frame_id]
                assert kernel._life is not None
                kernel._up.clear()
                kernel._life.kill()
                died.set_result(worker.frame_id)

        kernel.on_point = die
        running = asyncio.create_task(kernel.run("s", k.spec(script, [k.look])))
        frame_id = await died
        assert kernel._life is not None
        await kernel._life.bury()
        await kernel._boot()
        with pytest.raises(StaleGeneration):
            await kernel.service.recovery.frame_died(frame_id, "process_died")
        await kernel.take_up(kernel.generation, kernel.nodes, [frame_id])
        await kernel.service.recovery.frame_died(frame_id, "process_died")
        kernel.add_frame()
        assert (await running)["status"] == "completed"
        assert len(k.notes(notes)) == 1
        assert kernel.service.recovery.swept == 0
