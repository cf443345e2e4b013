"""Upgrade `local2 run` from an older commit to this checkout, with data in every store, and compare.

`python tests/upgrade/run.py COMMIT` installs the commit into a folder of its own, starts it with the scripted model,
and fills it over HTTP. It makes a backup, starts this checkout on the same data folder, and compares what the users
see; then it starts this checkout once more. At the end it restores the old backup into an empty folder. Exit status 0:
nothing is lost or doubled. `--record FILE` writes the recording that tests/e2e/test_upgrade.py uses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.local2_run import Failed, environment, running, scripted_model  # noqa: E402
from support.upgrading import RULES, fill, goes_on, same, seen, works  # noqa: E402


def checkout(commit: str, folder: Path) -> Path:
    """Return a folder with a commit of this repository, installed into an environment of its own."""
    tree = folder / "old"
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=tree, check=True)
    made = subprocess.run(["make", "setup"], cwd=tree, env=environment(), capture_output=True, text=True, check=False)
    if made.returncode:
        raise Failed(f"make setup of {commit}: {made.stdout[-2000:]}{made.stderr[-2000:]}")
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="the commit to upgrade from, or a folder with an installed checkout of it")
    parser.add_argument("--record", type=Path, help="a file (.tar.xz) for the old release's data, backup and view")
    options = parser.parse_args()
    began = time.monotonic()

    def done(what: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="local2-upgrade-") as made, scripted_model(Path(made), RULES) as model:
        folder = Path(made)
        data, copy, backup, view = (folder / name for name in ("data", "restored", "old.backup", "seen.json"))
        try:
            old = Path(options.old).resolve() if Path(options.old).is_dir() else checkout(options.old, folder)
            with running(old, data, model) as stack:
                done(f"{options.old} runs")
                anna = fill(stack)
                works(stack)
                before = seen(stack, anna)
                done("it has " + ", ".join(f"{len(rows)} {name}" for name, rows in before.items()))
                stack.command("backup", str(backup))
            if options.record:
                view.write_text(json.dumps({"anna": anna, "seen": before}), encoding="utf-8")
                with tarfile.open(options.record, "w:xz") as archive:
                    for path in (data, backup, view):
                        archive.add(path, path.name, filter=_without_logs)
            with running(ROOT, data, model) as stack:
                same(stack, anna, before, "after the upgrade")
                works(stack)
                done("upgraded: everything is there, once")
            if not list(data.glob("knowledge.lbug.backup-*")):
                raise Failed("the migration left no backup of the graph")
            with running(ROOT, data, model) as stack:
                same(stack, anna, before, "after a second start")
                works(stack)
                goes_on(stack)
                done("started again: the same, and new turns are taken in")
            with running(ROOT, copy, model) as stack:
                stack.command("restore", str(backup))
                same(stack, anna, before, "after a restore of the old backup")
                works(stack)
                done("the old release's backup is restored: everything is there, once")
        except Failed as exc:
            done(f"FAILED  {exc}")
            return 1
    return 0


def _without_logs(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith((".log", ".sock")) else entry


if __name__ == "__main__":
    sys.exit(main())
