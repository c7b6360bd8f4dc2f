"""A slow, lossy link to a network namespace of its own.

The kernel's netem would do, where it is built in; this needs only TUN devices: two of them, and a thread that carries
the packets between them late, one after the other, and not all of them.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DELAY = 0.04  # seconds, each way
LOSS = 0.03
BYTES_PER_SECOND = 250_000


class Unavailable(Exception):
    pass


class Link:
    """`here` is our address, `program` the prefix of commands that run at the other end."""

    def __init__(self) -> None:
        number = os.getpid() % 60_000
        self.namespace = f"strata-{number}"
        self.names = (f"st{number}a", f"st{number}b")
        self.here, there = f"10.213.{number % 250}.1", f"10.213.{number % 250}.2"
        self.program = ("ip", "netns", "exec", self.namespace)
        self.sent = self.lost = 0
        self._ends: list[int] = []
        self._over = threading.Event()
        if shutil.which("ip") is None:
            raise Unavailable("iproute2 is not installed")
        try:
            self._ends = [_tun(name) for name in self.names]
            _ip("netns", "add", self.namespace)
            _ip("link", "set", self.names[1], "netns", self.namespace)
            _ip("address", "add", f"{self.here}/30", "dev", self.names[0])
            _ip("link", "set", self.names[0], "up")
            _ip("-n", self.namespace, "address", "add", f"{there}/30", "dev", self.names[1])
            _ip("-n", self.namespace, "link", "set", self.names[1], "up")
            _ip("-n", self.namespace, "link", "set", "lo", "up")
            subprocess.run([*self.program, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise Unavailable(f"no network namespaces here: {error}") from None
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        chance = random.Random(0)
        waiting: list[tuple[float, int, int, bytes]] = []  # when, order, to, packet
        free = [0.0, 0.0]  # when each direction can take the next packet
        while not self._over.is_set():
            soonest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            ready, _, _ = select.select(self._ends, [], [], min(soonest, 0.2))
            now = time.monotonic()
            for end in ready:
                packet = os.read(end, 65536)
                side = self._ends.index(end)
                self.sent += 1
                if chance.random() < LOSS:
                    self.lost += 1
                    continue
                free[side] = max(now, free[side]) + len(packet) / BYTES_PER_SECOND
                heapq.heappush(waiting, (free[side] + DELAY, self.sent, 1 - side, packet))
            while waiting and waiting[0][0] <= now:
                _, _, side, packet = heapq.heappop(waiting)
                os.write(self._ends[side], packet)

    def close(self) -> None:
        self._over.set()
        if hasattr(self, "_thread"):
            self._thread.join()
        for end in self._ends:
            os.close(end)  # its device goes with it
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
