"""The administrator's key: configured, or generated at the first start and kept in the data folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from services.gateway.settings import KEY_RULE, GatewaySettings, is_key
from shared.errors import SettingsError

_GENERATED = re.compile(r"l2_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class AdminKey:
    """`made`: the file in which it was put at this moment; None for one that was there."""

    secret: str
    made: Path | None = None


def new_key() -> str:
    return "l2_" + secrets.token_urlsafe(32)


def admin_key(settings: GatewaySettings) -> AdminKey:
    """The configured key, else the one in the data folder, else a new one, which is kept there.

    Raises SettingsError when the file cannot be made, or holds no key that could be meant.
    """
    if settings.admin_key is not None:
        return AdminKey(settings.admin_key.get_secret_value())
    path = settings.data_dir / "admin.key"
    try:
        if path.exists():
            return AdminKey(_kept(path))
        return _made(path)
    except OSError as exc:
        raise SettingsError(
            f"the administrator's key cannot be kept in {path}: {exc.strerror or exc}; "
            "make the folder writable, choose another one with LOCAL2_DATA_DIR, or set LOCAL2_ADMIN_KEY"
        ) from exc


def shown_by(path: Path) -> str:
    """The command that shows a kept key."""
    return f"cat {shlex.quote(str(path))}"


def _made(path: Path) -> AdminKey:
    key = new_key()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"admin.key.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key + "\n")
            file.flush()
            # a name without its content, after a power cut, would be an empty key
            os.fsync(file.fileno())
        # a link, unlike a rename, fails when another gateway on this folder was first
        os.link(fresh, path)
    except FileExistsError:
        return AdminKey(_kept(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return AdminKey(key, path)


def _kept(path: Path) -> str:
    """Raises SettingsError: with an empty key, or the beginning of one, everybody would be administrator."""
    if path.stat().st_mode & 0o077:
        path.chmod(0o600)
    try:
        key = path.read_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        key = "\0"
    wrong = None
    if not key:
        wrong = "is empty"
    elif not is_key(key):
        wrong = f"holds no key ({KEY_RULE})"
    elif key.startswith("l2_") and not _GENERATED.fullmatch(key):
        wrong = "holds a part of a generated key, or more than one"
    if wrong:
        raise SettingsError(
            f"{path} {wrong}: put the key back, or remove the file, so that a new one is generated at the next start"
        )
    return key
