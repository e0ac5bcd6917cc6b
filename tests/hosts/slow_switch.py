"""Connects hosts by TUN devices and holds back every packet for a while: what netem does where the kernel has it.

`python slow_switch.py DEVICE SECONDS PID,PID,... ADDRESS,ADDRESS,...` makes a device in the network namespace of each
process, says `ready`, and passes packets on until its standard input closes. Addresses of one family, in order.
"""

import collections
import contextlib
import ctypes
import fcntl
import ipaddress
import os
import select
import struct
import sys
import time

# linux/if_tun.h, linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET = 1 << 16


def open_device(name: str, pid: str) -> int:
    """A TUN device in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def destination(packet: bytes) -> bytes:
    return packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]


def switch(devices: dict[bytes, int], delay_secs: float) -> None:
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    for device in devices.values():
        poll.register(device, select.POLLIN)
    while True:
        wait = None if not waiting else max(0.0, 1000 * (waiting[0][0] - time.monotonic()))
        for ready, _ in poll.poll(wait):
            if ready == 0:
                return
            while True:
                try:
                    packet = os.read(ready, _MAX_PACKET)
                except BlockingIOError:
                    break
                target = devices.get(destination(packet))
                if target is not None:
                    waiting.append((time.monotonic() + delay_secs, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            # A full queue drops packets, as a real one does.
            with contextlib.suppress(OSError):
                os.write(target, packet)


def main() -> None:
    name, delay, pids, addresses = sys.argv[1:]
    devices = {
        ipaddress.ip_address(address).packed: open_device(name, pid)
        for pid, address in zip(pids.split(","), addresses.split(","))
    }
    os.write(1, b"ready\n")
    switch(devices, float(delay))


if __name__ == "__main__":
    main()
