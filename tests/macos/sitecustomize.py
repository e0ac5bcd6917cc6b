"""Makes a process like one on macOS, as far as Python's own names go; Python imports it when it starts.

TensorFlow and other libraries in C go on as on Linux. `helpers.as_on_macos` is the environment of such a process.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

LINUX_ONLY = {
    os: (
        "copy_file_range", "eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate",
        "sched_getaffinity", "sched_setaffinity", "setns", "splice", "unshare", "waitid",
    ),
    select: ("epoll",),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    socket: (
        "AF_NETLINK", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SOCK_SEQPACKET", "SO_ATTACH_FILTER", "SO_BINDTODEVICE",
        "SO_MARK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT",
    ),
}  # fmt: skip
FUNCTIONS_IN_C = ("prctl", "unshare", "setns", "sched_setaffinity")


def missing_function(library: ctypes.CDLL, name: str) -> Any:
    if name in FUNCTIONS_IN_C:
        raise AttributeError(f"dlsym({name}): symbol not found")
    return of_ctypes(library, name)


def no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


if "MACOS_PROCESSES" in os.environ:
    Path(os.environ["MACOS_PROCESSES"], str(os.getpid())).touch()
for module, names in LINUX_ONLY.items():
    for name in names:
        vars(module).pop(name, None)
of_ctypes = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = missing_function
sys.addaudithook(no_proc)
# `urllib` imports it on macOS.
proxies: Any = ModuleType("_scproxy")
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
# They remember what they find on Linux.
sysconfig.get_config_vars()
sys.platform = "darwin"
