"""Optional packages: the extras of pyproject.toml that only some settings need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import SettingsError


@contextmanager
def required_by(setting: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra inside this block.

    setting: the setting that needs them, as the operator wrote it. Raises SettingsError that names the missing package,
    the setting and the commands that install the extra.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        raise SettingsError(f"{setting} needs the package {exc.name}, which is not installed; {advice(extra)}") from exc


def advice(*extras: str) -> str:
    """Return the commands that install some extras."""
    names = ",".join(extras)
    return f"to install: pip install 'local2[{names}]' (in a checkout: make extras EXTRAS='{' '.join(extras)}')"
