"""What the box needs of the system, by Debian's names."""

import os
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


class BoxError(OSError):
    """Why there is no box; the message says what to do."""


def search_path() -> str:
    """PATH, and the folders of daemons, which are not on every user's."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def missing(accounting: bool) -> list[str]:
    """Packages whose command is not found."""
    wanted = _COMMANDS | (_ACCOUNTING if accounting else {})
    return [package for command, package in wanted.items() if shutil.which(command, path=search_path()) is None]


def install(packages: list[str]) -> None:
    """By apt-get, as root. BoxError with what it said."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        try:
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise BoxError(f"apt-get: not found; install {', '.join(packages)} by other means") from error
        if done.returncode:
            raise BoxError(f"apt-get could not install {', '.join(packages)}: {done.stderr}")
