"""The image of `deploy/Containerfile`: built on a Debian without anything else, and run without a right too many."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import REPO

pytestmark = [pytest.mark.long, pytest.mark.alone]

_TOOLS = ("mmdebstrap", "buildah", "podman", "runc")
#: What a container needs in order to reach the package index as this machine does.
_OF_THIS_MACHINE = ("/etc/ssl/certs", "/usr/local/share/ca-certificates", "/etc/pip.conf", "/etc/resolv.conf")
_PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "HTTPS_PROXY", "https_proxy")
#: Prints the modules that had to be compiled for this start.
_COMPILED_NOW = """
import os, sys
import keras, tensorflow, kdist.trainer, kdist.cli.main, hydra.main
sources = [m for m in sys.modules.values() if (getattr(m, "__file__", None) or "").endswith(".py")]
# Modules that are part of the interpreter have no such file.
cached = {m.__name__: m.__cached__ or "" for m in sources if hasattr(m, "__cached__")}
print(len(cached) > 1000, [name for name, path in cached.items() if not os.path.exists(path)])
"""


class Images:
    """A storage for images of its own, which leaves nothing on this machine."""

    def __init__(self, folder: Path) -> None:
        self._options = [
            "--root",
            str(folder / "root"),
            "--runroot",
            str(folder / "runroot"),
            "--storage-driver",
            "vfs",
        ]
        self._folder = folder

    def build(self) -> None:
        """Builds the image `kdist`.

        Raises:
            OSError: this system does not permit it.
        """
        base = self._folder / "base.tar"
        _run("mmdebstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(base), timeout=300)
        self._podman("import", str(base), "localhost/debian-python", timeout=120)
        base.unlink()
        volumes = [f"--volume={path}:{path}:ro" for path in _OF_THIS_MACHINE if Path(path).exists()]
        variables = [f"--env={name}" for name in _PIP_VARIABLES if name in os.environ]
        _run(
            "buildah", *self._options, "bud", "--isolation", "chroot", "--quiet", *volumes, *variables,
            "--build-arg", "BASE=localhost/debian-python", "--tag", "kdist", "--file", "deploy/Containerfile", ".",
            timeout=900,
        )  # fmt: skip

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Runs a container as the manifests do: nothing but `/tmp` can be written. It has no network."""
        return self._podman(
            "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file",
            "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp:mode=1777,notmpcopyup",
            "--cap-drop", "all", "--security-opt", "no-new-privileges",
            # Not the defaults of podman, which are more than a sandbox may allow.
            "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096",
            *options, "kdist", *arguments, timeout=200, check=False,
        )  # fmt: skip

    def remove(self) -> None:
        self._podman("system", "reset", "--force", timeout=120, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _podman(self, *arguments: str, timeout: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        # By default podman keeps its state where all containers of this machine do, and `system reset` removes that.
        state = ["--tmpdir", str(self._folder / "tmp")]
        return _run("podman", *self._options, *state, *arguments, timeout=timeout, check=check)


def _run(*command: str, timeout: float, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=REPO)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done


@pytest.fixture(scope="module")
def images() -> object:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("an image is built by root, on Linux")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    # Podman refuses a runroot whose path is longer than 50 characters; under xdist those of pytest are.
    found = Images(Path(tempfile.mkdtemp(prefix="kdist-images-")))
    try:
        found.build()
        if (tried := found.run("--version")).returncode:
            pytest.skip(f"containers cannot be run here: {tried.stderr.strip()[-500:]}")
        yield found
    finally:
        found.remove()


def test_a_cluster_trains_in_a_container_that_cannot_be_written(images: Images) -> None:
    done = images.run("+recipe=linear", "cluster=1ps1w", "train.steps=100", "run.dir=/tmp/run")
    assert done.returncode == 0, done.stderr
    assert "steps=100 done" in done.stdout


def test_it_is_not_root_and_everything_is_compiled(images: Images) -> None:
    done = images.run("-c", _COMPILED_NOW, options=("--entrypoint", "python"))
    assert done.stdout == "True []\n", done.stderr
    done = images.run("-u", options=("--entrypoint", "id"))
    assert done.stdout == "1000\n", done.stderr


def test_exit_codes_are_those_of_the_command(images: Images) -> None:
    done = images.run("+recipe=linear", "train.batch_size=0")
    assert done.returncode == 2
    assert "kdist: error: train.batch_size=0" in done.stderr
