"""`python -m understudy.testing`: the offline model as a process; prints one JSON line with its URL when ready."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .offline import Faults, OfflineServer
from .policies import load_policy
from .rate_limit import RateLimit

PARENT_CHECK = 0.5
"""Seconds between two looks at the parent, where the kernel can't tell of its death."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m understudy.testing", description="The offline model.")
    parser.add_argument("--port", type=int, default=0, help="0 (default) for a free one")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds until the first byte")
    parser.add_argument("--chunk-delay", type=float, default=0.0, help="seconds between the events of a stream")
    parser.add_argument("--policy", metavar="MODULE:CALLABLE", help="what to answer")
    parser.add_argument("--fault-429", type=float, default=0.0, metavar="SHARE", help="answered with status 429")
    parser.add_argument("--fault-500", type=float, default=0.0, metavar="SHARE", help="answered with status 500")
    parser.add_argument("--fault-cut", type=float, default=0.0, metavar="SHARE", help="cut in the middle")
    parser.add_argument("--per-minute", type=int, metavar="REQUESTS", help="more are refused with status 429")
    parser.add_argument("--fault-529", type=float, default=0.0, metavar="SHARE", help="answered with status 529")
    parser.add_argument("--fault-stall", type=float, default=0.0, metavar="SHARE", help="silent from the middle on")
    parser.add_argument(
        "--fault-malformed", type=float, default=0.0, metavar="SHARE", help="with garbage in the stream"
    )
    parser.add_argument("--fault-lost", type=float, default=0.0, metavar="SHARE", help="background responses not found")
    parser.add_argument("--cut-at", type=int, default=0, metavar="EVENTS", help="where streams are cut; default: half")
    parser.add_argument("--retry-after", type=float, metavar="SECONDS", help="sent with 429, 500 and 529")
    parser.add_argument("--parent-death", action="store_true", help="exit when the parent process dies")
    return parser.parse_args()


async def _parent_death(parent: int) -> None:
    """Return when the process that was our parent at the start is dead.

    Not PR_SET_PDEATHSIG: that fires when the *thread* that started us ends, while its process lives on.
    """
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        while os.getppid() == parent:  # noqa: ASYNC110 - no event exists for this
            await asyncio.sleep(PARENT_CHECK)
        return
    dead = asyncio.Event()
    loop.add_reader(descriptor, dead.set)
    if os.getppid() == parent:  # otherwise it died before we looked, and the number may be another's by now
        await dead.wait()


async def _main(options: argparse.Namespace, parent: int) -> None:
    server = OfflineServer(
        load_policy(options.policy) if options.policy else None,
        latency=options.latency,
        chunk_delay=options.chunk_delay,
        faults=Faults(
            status_429=options.fault_429,
            status_500=options.fault_500,
            cut_stream=options.fault_cut,
            retry_after=options.retry_after,
            status_529=options.fault_529,
            stall=options.fault_stall,
            malformed=options.fault_malformed,
            lost_ids=options.fault_lost,
            cut_at=options.cut_at,
        ),
        port=options.port,
        rate_limit=RateLimit(options.per_minute) if options.per_minute else None,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with server.serving():
        print(json.dumps({"url": server.url, "pid": os.getpid()}), flush=True)
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(stopped.wait())]
        if options.parent_death:
            waits.append(asyncio.create_task(_parent_death(parent)))
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()


if __name__ == "__main__":
    _parent = os.getppid()
    _options = _arguments()
    if _options.policy:
        sys.path.insert(0, str(Path.cwd()))
    asyncio.run(_main(_options, _parent))
