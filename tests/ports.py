"""A port for a rendezvous."""

from __future__ import annotations

import itertools
import os
import socket


def free_port() -> int:
    """A free port that nobody takes before it is used.

    The kernel gives sockets that ask for no port one above 32,767, and gloo asks for many. So this one is lower, and
    depends on the process.
    """
    for port in itertools.count(10_000 + os.getpid() * 7 % 20_000):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
