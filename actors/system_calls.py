"""What commands in a sandbox may not ask the kernel for: what no namespace keeps apart. A filter for seccomp.

- Keys (`keyrings(7)`): a command would have the session keyring of the node's user, and share it with other commands.
- Sockets of other families than Unix, IP and netlink: `AF_VSOCK` leads to the machine that a virtual one runs on, and
  most kernels know no namespaces for it.
- `io_uring`, whose operations no filter sees, sockets among them.
- Calls of other architectures (32-bit programs), whose numbers are others.
"""

from __future__ import annotations

import errno
import platform
import struct
from pathlib import Path

FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""

IO_URING = (425, 426, 427)

ARCHITECTURES = {
    "x86_64": (0xC000003E, 41, (248, 249, 250)),
    "aarch64": (0xC00000B7, 198, (217, 218, 219)),
}
"""By the machine's name: the architecture as `linux/audit.h` has it; the numbers of `socket`, and of `add_key`,
`request_key` and `keyctl`."""

X32 = 0x40000000
"""The bit in numbers of x86-64's calls with short pointers."""

LOAD, EQUAL, NOT_BELOW, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of classic BPF: load a word of the call's data; jump if equal, if not below; the verdict."""

NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where these are in `struct seccomp_data`, on machines that begin with the lowest byte."""

ALLOW, ERROR = 0x7FFF0000, 0x00050000
"""Verdicts of seccomp; an error has its number in the lowest bits."""


def filter_file() -> Path | None:
    """The filter for this machine; None if there is none for it."""
    machine = platform.machine()
    return Path(__file__).with_name(f"system_calls.{machine}.bpf") if machine in ARCHITECTURES else None


def program(machine: str) -> bytes:
    """The filter for a machine, as its file has it. Refused calls do not exist, as on a kernel without them."""
    architecture, socket, keys = ARCHITECTURES[machine]
    steps = [
        (LOAD, ARCHITECTURE, "", ""),
        (EQUAL, architecture, "", "missing"),
        (LOAD, NUMBER, "", ""),
        (NOT_BELOW, X32, "missing", ""),
        *((EQUAL, number, "missing", "") for number in (*keys, *IO_URING)),
        (EQUAL, socket, "", "allowed"),
        (LOAD, FIRST_ARGUMENT, "", ""),
        *((EQUAL, family, "allowed", "") for family in FAMILIES),
    ]
    verdicts = {"other family": ERROR | errno.EAFNOSUPPORT, "missing": ERROR | errno.ENOSYS, "allowed": ALLOW}
    places = {name: len(steps) + place for place, name in enumerate(verdicts)}
    found = [struct.pack("=HBBI", RETURN, 0, 0, verdict) for verdict in verdicts.values()]
    for at in reversed(range(len(steps))):
        code, value, *leads = steps[at]
        passed_over = [places[name] - at - 1 if name else 0 for name in leads]
        found.insert(0, struct.pack("=HBBI", code, *passed_over, value))
    return b"".join(found)
