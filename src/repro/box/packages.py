"""What the box needs of the system, by Debian's names."""

import shutil
import subprocess

_COMMANDS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}


def missing(accounting: bool) -> list[str]:
    """Packages whose command is not on the path (or in /usr/sbin)."""
    wanted = _COMMANDS | (_ACCOUNTING if accounting else {})
    return [package for command, package in wanted.items() if path(command) is None]


def path(command: str) -> str | None:
    """Where a command is; daemons lie in folders that are not on every user's path."""
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


def install(packages: list[str]) -> None:
    """By apt-get, as root. CalledProcessError with what it said."""
    environment = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *command], env=environment, check=True, capture_output=True, text=True)
