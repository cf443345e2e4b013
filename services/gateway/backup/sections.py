"""Which sections a backup has, in the order of the file."""

from __future__ import annotations

from collections.abc import Collection

from services.gateway.backup.files import FilesSection
from services.gateway.backup.keys import KeysSection
from services.gateway.backup.knowledge import KnowledgeSection
from services.gateway.backup.memories import MemoriesSection
from services.gateway.backup.preferences import PreferencesSection
from services.gateway.backup.section import Section
from services.gateway.backup.sessions import SessionsSection
from services.gateway.backup.settings import SettingsSection
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway


def all_sections(gateway: Gateway) -> dict[str, Section]:
    """By name. Keys come last: an interrupted restore must not have taken away the key that repeats it."""
    found: list[Section] = [
        SettingsSection(gateway),
        SessionsSection(gateway),
        MemoriesSection(gateway),
        FilesSection(gateway),
        PreferencesSection(gateway),
        KnowledgeSection(gateway),
        KeysSection(gateway),
    ]
    return {section.name: section for section in found}


def chosen(gateway: Gateway, without: Collection[str]) -> dict[str, Section]:
    """All sections but those left out. Raises ApiError 422 for a name that none has."""
    found = all_sections(gateway)
    if unknown := sorted(set(without) - set(found)):
        raise ApiError(
            422, "unknown_section", f"there is no section {unknown[0][:100]}; there are: {', '.join(sorted(found))}"
        )
    return {name: section for name, section in found.items() if name not in without}


async def present(sections: dict[str, Section]) -> None:
    """Raises ApiError 503 for the first section that cannot be reached."""
    for name, section in sections.items():
        if reason := await section.absent():
            raise ApiError(
                503, "section_unavailable", f"{reason} To go on without its data: --without {name}", section=name
            )
