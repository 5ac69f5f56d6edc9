"""Deterministic simulation: the real kernel on a virtual clock, with one seeded scheduler that decides everything.

Several nodes, each with a node service, its gateway and its frames, a supervisor and clients run as simulated processes
in one thread. Whatever they wait for (another process, the store, the endpoint, the clock) is a point where the seed
decides what happens next: delays, order, lost replies, repetitions, pauses, deaths, partitions, slow kills, steps of
the clock, a store that hangs, commits late, or loses its connections. Same seed, same run, byte for byte.

    python -m tests.simulation --seeds 100       fresh seeds
    python -m tests.simulation --seed 4711       one seed, with its schedule

The method is that of FoundationDB (SIGMOD 2021, "FoundationDB: A Distributed Unbundled Transactional Key Value Store",
section 4) and of TigerBeetle's VOPR.
"""
