"""Several hosts on this machine: network namespaces with different host names, joined by a bridge. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mpi.launch import find_mpiexec

NETWORK = "10.77.0."
# Command that mpiexec calls instead of ssh: options, a host's address, a command.
SHELL_ON_HOST = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
namespace={prefix}${{1##*.}}
shift
exec ip netns exec $namespace unshare -u bash -c "hostname $namespace; $*"
"""


class NoHosts(Exception):
    """Hosts cannot be emulated here; says why in one sentence."""


class Hosts:
    """Emulated hosts; `command` begins a command line that runs MPI ranks on them."""

    def __init__(self, prefix: str, count: int, shell: Path):
        self.names = [f"{prefix}{number}" for number in range(1, count + 1)]
        self.addresses = [f"{NETWORK}{number}" for number in range(1, count + 1)]
        self._shell = shell

    def command(self, per_host: int) -> list[str]:
        """mpiexec on the first host; what follows starts with `-n RANKS`."""
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self._shell), "-hosts", ",".join(self.addresses)]
        named = ["unshare", "-u", "bash", "-c", f'hostname {self.names[0]}; exec "$@"', "bash"]
        return ["ip", "netns", "exec", self.names[0], *named, find_mpiexec(), *launcher, "-ppn", str(per_host)]


@contextmanager
def emulated_hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, gone afterwards."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NoHosts("no network namespaces: iproute2 and util-linux are not installed")
    if "hydra" not in subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True).stdout.lower():
        raise NoHosts("hosts are emulated for the options of MPICH's mpiexec")
    prefix = f"fedmpi{os.getpid()}h"
    with TemporaryDirectory(prefix="fedmpi-hosts-") as folder:
        shell = Path(folder) / "shell_on_host"
        shell.write_text(SHELL_ON_HOST.format(prefix=prefix))
        shell.chmod(0o755)
        hosts, wires = Hosts(prefix, count, shell), f"{prefix}0"
        try:
            _connect(hosts, wires)
            yield hosts
        except subprocess.CalledProcessError as error:
            if error.cmd[0] != "ip":
                raise
            said = str(error.stderr).strip()
            raise NoHosts(f"no network namespaces can be made, which takes root: {said}") from None
        finally:
            for name in [*hosts.names, wires]:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(hosts: Hosts, wires: str) -> None:
    """A bridge in a separate namespace, and a wire to it from every host."""
    _ip("netns", "add", wires)
    _ip("-n", wires, "link", "add", "name", "bridge", "type", "bridge")
    _ip("-n", wires, "link", "set", "bridge", "up")
    for name, address in zip(hosts.names, hosts.addresses, strict=True):
        socket = f"to{address.removeprefix(NETWORK)}"
        _ip("netns", "add", name)
        _ip("link", "add", "name", "wire", "netns", name, "type", "veth", "peer", "name", socket, "netns", wires)
        _ip("-n", wires, "link", "set", socket, "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        for device in ("wire", "lo"):
            _ip("-n", name, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
