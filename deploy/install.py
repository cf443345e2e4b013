"""Install LoCAL2 with the exact versions of uv.lock, by uv.

`python deploy/install.py --extra NAME` installs into the environment of this Python, or of `--python PYTHON`.
`python deploy/install.py --lock [ARGUMENTS]` writes uv.lock from pyproject.toml instead.

uv is itself a wheel: pip installs it here if it is missing. uv does not read pip's configuration. This script passes on
pip's index, extra indexes, links and certificates. The packages come from that index, by the version and the hash in
the lock; the addresses in the lock are not used. So a machine behind a mirror installs the same files.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
# pip's options and uv's variables for the same, with the separator that uv expects between several values.
_SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}
# Where pip's options stand, the strongest last.
_SECTIONS = ("global", "install", ":env:")


def uv_environment(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of uv for the options in pip's configuration.

    pip_config: the output of `pip config list`. A variable that the environment already has stays as it is.
    """
    found: dict[str, str] = {}
    options = dict(line.split("=", 1) for line in pip_config.splitlines() if "=" in line)
    for option, (name, separator) in _SAME.items():
        for section in _SECTIONS:
            value = options.get(f"{section}.{option}")
            if value is not None and name not in environment:
                found[name] = separator.join(str(ast.literal_eval(value)).split())
    if "UV_INDEX" in found:
        # pip takes the best version of all indexes; uv alone would take the first index that has the package
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return found


def uv_program() -> str:
    """Return the path of uv, which pip installs first where it is missing. Raises CalledProcessError."""
    program = Path(sysconfig.get_path("scripts")) / "uv"
    version = subprocess.run([program, "--version"], capture_output=True, text=True) if program.exists() else None
    if version is None or f"uv=={version.stdout.split()[1]}" != UV:
        print(f"Fetching {UV}, which installs the packages", flush=True)
        subprocess.run([*_PIP, "install", "--quiet", UV], check=True)
    return str(program)


_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def lock(uv: str, arguments: list[str]) -> None:
    """Write uv.lock. It names the public index, so this machine's indexes and links are left out."""
    names = {name for name, _ in _SAME.values()} | {"UV_INDEX_URL", "UV_EXTRA_INDEX_URL"}
    environment = {name: value for name, value in os.environ.items() if name not in names - {"SSL_CERT_FILE"}}
    subprocess.run([uv, "lock", *arguments], cwd=ROOT, env=environment, check=True)


def install(uv: str, extras: list[str], wheels: list[str], python: str, *, editable: bool) -> None:
    """Install the locked packages of these extras, the wheels without their dependencies, and LoCAL2 itself.

    Raises CalledProcessError.
    """
    listed = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    environment = {**os.environ, **uv_environment(listed, os.environ)}
    add = [uv, "pip", "install", "--python", python, "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "requirements.txt"
        chosen = [word for extra in extras for word in ("--extra", extra)]
        export = [uv, "export", "--quiet", "--frozen", "--no-emit-project", "--output-file", str(packages), *chosen]
        subprocess.run(export, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*add, "--require-hashes", "--requirement", packages], cwd=ROOT, env=environment, check=True)
    own = ["--editable", "."] if editable else ["."]
    subprocess.run([*add, *wheels, *own], cwd=ROOT, env=environment, check=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml; may be repeated")
    parser.add_argument("--wheel", action="append", default=[], help="a package to install without its dependencies")
    parser.add_argument("--python", default=sys.executable, help="the Python whose environment gets the packages")
    parser.add_argument("--not-editable", action="store_true", help="install a copy of LoCAL2, not this folder")
    parser.add_argument("--lock", action="store_true", help="write uv.lock; further arguments go to `uv lock`")
    given, further = parser.parse_known_args(arguments)
    if further and not given.lock:
        parser.error(f"unknown arguments: {' '.join(further)}")
    try:
        uv = uv_program()
        if given.lock:
            lock(uv, further)
        else:
            install(uv, given.extra, given.wheel, given.python, editable=not given.not_editable)
    except subprocess.CalledProcessError as exc:
        print(f"not installed: `{Path(exc.cmd[0]).name} {exc.cmd[1]}` failed; its message is above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
