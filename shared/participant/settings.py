"""Settings: defaults ← YAML file ← environment ← run-time updates.

Every setting has an environment name for one participant, `LOCAL2_<PARTICIPANT>_<FIELD>`, and general ones for all,
`LOCAL2_<FIELD>` unless the field declares others; the first that is set, and not empty, counts (`Settings.variables`).
So one environment can serve several participants (`LOCAL2_WEB_FETCH_TIMEOUT`). The YAML file (`LOCAL2_CONFIG`, default
`local2.yaml` in the working directory) has a section per participant and one named `defaults`. A participant's own
section is checked for names that it does not have; `defaults` is for all, and each takes from it what it knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import orjson
from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as MalformedSource

from shared import zones
from shared.errors import SettingsError
from shared.participant.yaml_file import read_yaml
from shared.telemetry.unread import not_understood

ENV_PREFIX = "LOCAL2_"
# More days than these are no sensible age of anything here.
_MOST_DAYS = 36_500


def kept_days(what: str) -> Any:
    """A setting with the days after which something is removed; see `shared.participant.retention`."""
    return Field(default=0, ge=0, le=_MOST_DAYS, description=f"{what}; 0: never")


class Settings(BaseSettings):
    """What every participant has. Subclasses add fields; a run-time setting is named in `runtime`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="ignore", frozen=True, populate_by_name=True, validate_default=True
    )

    # The names of the fields that an operator may change while the participant runs.
    runtime: ClassVar[frozenset[str]] = frozenset({"log_level"})
    # Whether the class knows every setting of the participant; one that reads a few of another's does not.
    whole: ClassVar[bool] = True

    data_dir: Path = Field(default=Path(".local2"), description="Folder of everything that is kept on disk")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="URL of the bus: redis://, rediss:// or unix://; redis+cluster:// or redis+sentinel:// for several",
    )
    redis_timeout: float = Field(default=0.5, gt=0, description="Seconds of silence before a connection is replaced")
    heartbeat: float = Field(
        default=1.0,
        gt=0,
        description="Seconds between two heartbeats; after three missed ones (the visibility timeout) other replicas "
        "take over the work",
    )
    max_deliveries: int = Field(default=5, ge=1, description="Attempts before an entry becomes a dead letter")
    drain: float = Field(default=5.0, ge=0, description="Seconds that SIGTERM leaves for finishing work in flight")
    concurrency: int = Field(default=16, ge=1, description="Messages handled at the same time by one replica")
    retention: int = Field(
        default=86_400, ge=1, description="Seconds that journals and tool results are kept after completion"
    )
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="Least severe level shown"
    )
    log_format: str = Field(default="auto", pattern="^(auto|json|console)$", description="auto: console on a terminal")
    otlp_endpoint: str | None = Field(
        default=None,
        pattern="^https?://",
        validation_alias=AliasChoices(
            "LOCAL2_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
        description="Collector of traces, by OTLP over HTTP; unset: no traces",
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Port on which /metrics is shown; 0: a free one; unset: none"
    )
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="Address of that port")
    time_zone: str = Field(
        default="",
        description="IANA time zone of users who have none, for example Europe/Berlin; empty: that of the variable "
        "`TZ`, else of this machine",
    )

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, text: str) -> str:
        return zones.zone_name(text) if text else ""

    @property
    def tool_limit(self) -> float | None:
        """Return the operator's limit of a tool call, in seconds; None: `tool_timeout` was not set."""
        return getattr(self, "tool_timeout", None) if "tool_timeout" in self.model_fields_set else None

    @property
    def zone(self) -> str:
        """Return the IANA name of the deployment's time zone."""
        return self.time_zone or zones.machine_zone() or "UTC"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` hands the layers in, already merged: a plain `cls(...)` takes nothing from outside.
        return (init_settings,)

    @classmethod
    def load(cls, participant: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """The settings of one participant; `overrides` are its run-time updates.

        Raises SettingsError that names each wrong value and where it may come from.
        """
        # This class itself holds what all participants share, and is loaded for any of them.
        checked = cls.whole and cls is not Settings
        defaults, section = map(cls._by_field, _from_yaml(participant, cls._names() if checked else None))
        general, own = (Environment(cls, participant, own=own).read() for own in (False, True))
        for_all = {**defaults, **general}
        for_one = {**{name: value for name, value in section.items() if name not in general}, **own}
        try:
            return cls(**{**cls.settle(for_all, for_one), **cls._by_field(overrides or {})})
        except ValidationError as exc:
            raise SettingsError(f"settings of {participant}: {cls._told(exc, participant)}") from exc

    @classmethod
    def _told(cls, exc: ValidationError, participant: str) -> str:
        """Each wrong value by its field and the environment variable that sets it."""
        names = cls._names()

        def place(parts: Sequence[int | str]) -> str:
            first, *rest = (str(part) for part in parts)
            field = names.get(first.lower())
            if field is None:
                return _dotted(parts)
            return f"{_dotted([field, *rest])} ({cls._variable(field, participant)})"

        return describe(exc, place)

    @classmethod
    def settle(cls, for_all: dict[str, Any], for_one: dict[str, Any]) -> dict[str, Any]:
        """The values of one participant from what was said to all and what was said to it alone, by field names."""
        return {**for_all, **for_one}

    @classmethod
    def variables(cls, field: str, participant: str) -> list[str]:
        """The environment variables that set a field, the one that goes before the others first.

        The field's alias declares general names in capitals; `LOCAL2_<FIELD>` is one unless the alias has a name of
        ours, which then takes its place (`LOCAL2_API_PORT` for the gateway's `port`).
        """
        own = f"{own_prefix(participant)}{field.upper()}"
        declared = cls._declared(field)
        ours = any(name.startswith(ENV_PREFIX) for name in declared)
        return list(dict.fromkeys([own, *([] if ours else [f"{ENV_PREFIX}{field.upper()}"]), *declared]))

    @classmethod
    def _declared(cls, field: str) -> list[str]:
        alias = cls.model_fields[field].validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        return [choice for choice in choices if isinstance(choice, str) and choice.isupper()]

    @classmethod
    def _variable(cls, field: str, participant: str) -> str:
        """The environment variable of the field: the one that is set now, else the one that most people know."""
        names = cls.variables(field, participant)
        usual = [*cls._declared(field), f"{ENV_PREFIX}{field.upper()}"][0]
        return next((name for name in names if os.environ.get(name)), usual)

    @classmethod
    def _names(cls) -> dict[str, str]:
        """Field names by what the sources may call them, in small letters."""
        names: dict[str, str] = {}
        for name, info in cls.model_fields.items():
            names[name] = name
            alias = info.validation_alias
            if isinstance(alias, AliasChoices):
                names.update({str(choice).lower(): name for choice in alias.choices})
            elif isinstance(alias, str):
                names[alias.lower()] = name
        return names

    @classmethod
    def _by_field(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keys as field names: the sources speak in aliases (`OLLAMA_HOST`) for fields that have them."""
        names = cls._names()
        return {names.get(key.lower(), key): value for key, value in values.items()}

    @property
    def slots_in_all(self) -> int:
        """Messages of all kinds handled at the same time by one replica."""
        return self.concurrency

    def update_settings(self, values: Mapping[str, Any]) -> Self:
        """These settings with validated run-time updates. Raises SettingsError; nothing is changed then."""
        unknown = sorted(set(values) - self.runtime)
        if unknown:
            raise SettingsError(
                f"not a run-time setting: {', '.join(unknown)}; these are: {', '.join(sorted(self.runtime))}"
            )
        current = {name: getattr(self, name) for name in self.model_fields_set}
        try:
            return type(self)(**{**current, **values})
        except ValidationError as exc:
            raise SettingsError(describe(exc)) from exc

    @classmethod
    def get_settings_schema(cls) -> dict[str, Any]:
        """JSON schema of the run-time settings only."""
        schema = cls.model_json_schema(by_alias=False)
        properties = {name: part for name, part in schema["properties"].items() if name in cls.runtime}
        result = {"type": "object", "properties": properties, "additionalProperties": False}
        if "$defs" in schema:
            result["$defs"] = schema["$defs"]
        return result

    def runtime_values(self) -> dict[str, Any]:
        """The current run-time settings as JSON values; secrets are never among them."""
        dumped = self.model_dump(mode="json", include=set(self.runtime))
        return {name: value for name, value in dumped.items() if not isinstance(getattr(self, name), SecretStr)}


S = TypeVar("S", bound=Settings)


def stored_values(participant: str, raw: Sequence[bytes]) -> dict[str, Any]:
    """Run-time values as Redis keeps them, by their names; what cannot be read is left out, and said."""
    values: dict[str, Any] = {}
    for name, value in zip(raw[::2], raw[1::2], strict=True):
        try:
            values[name.decode()] = orjson.loads(value)
        except ValueError as exc:
            not_understood(f"settings of {participant}", name.decode(errors="replace"), f"not JSON: {exc}", value)
    return values


@dataclass(frozen=True, slots=True)
class Described:
    """What a participant says of its run-time settings: their schema and start values."""

    schema: dict[str, Any]
    defaults: dict[str, Any]

    @staticmethod
    def parse(participant: str, raw: bytes | None) -> Described | None:
        """None for a participant that was never here, or when what it said cannot be read."""
        if raw is None:
            return None
        try:
            value = orjson.loads(raw)
            return Described(dict(value["schema"]), dict(value["defaults"]))
        except (ValueError, TypeError, KeyError) as exc:
            not_understood(f"description of {participant}", "", f"no description of settings: {exc!r}", raw)
            return None


def _dotted(parts: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in parts)


def describe(exc: ValidationError, place: Callable[[Sequence[int | str]], str] = _dotted) -> str:
    """One sentence a person can act on, without the values (they may be secrets). `place` names where one stands."""
    return "; ".join(
        (f"{place(error['loc'])}: " if error["loc"] else "") + error["msg"].removeprefix("Value error, ")
        for error in exc.errors(include_url=False)
    )


def own_prefix(participant: str) -> str:
    """What the environment variables of one participant begin with."""
    return f"{ENV_PREFIX}{participant.upper().replace('-', '_')}_"


class Environment(EnvSettingsSource):
    """The environment as one participant hears it: its `own` names, or the general ones. Empty is as if not set."""

    def __init__(self, settings_cls: type[Settings], participant: str, *, own: bool) -> None:
        super().__init__(settings_cls, env_ignore_empty=True)
        self._names = {
            field: [name for n, name in enumerate(settings_cls.variables(field, participant)) if (n == 0) == own]
            for field in settings_cls.model_fields
        }

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found = (self.env_vars.get(name.lower()) for name in self._names[field_name])
        return next((value for value in found if value is not None), None), field_name, False

    def read(self) -> dict[str, Any]:
        """Values by field name. Raises SettingsError."""
        try:
            return self()
        except MalformedSource as exc:
            raise SettingsError(f"environment: {exc}; lists and mappings are written as JSON") from exc


def _file() -> Path | None:
    """The configuration file, if there is one. Raises SettingsError when one is named that is not there."""
    named = os.environ.get("LOCAL2_CONFIG")
    path = Path(named or "local2.yaml")
    if path.is_file():
        return path
    if named:
        raise SettingsError(f"LOCAL2_CONFIG names {path}, but there is no such file")
    return None


def _sections(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path) or {}
        return {str(name): {str(key): value for key, value in (own or {}).items()} for name, own in content.items()}
    except (ValueError, AttributeError, TypeError) as exc:
        raise SettingsError(f"{path}: a mapping of participants to their settings is expected: {exc}") from exc


def misspelt_sections(participants: Collection[str]) -> list[str]:
    """A sentence on each section of the configuration file whose name is nearly that of a participant, but nobody's.

    Other names may be those of participants of one's own. Raises SettingsError.
    """
    path = _file()
    known = {"defaults", *participants}
    unknown = [name for name in _sections(path) if name not in known] if path else []
    near = {name: found[0] for name in unknown if (found := get_close_matches(name.lower(), known, n=1, cutoff=0.75))}
    return [f"{path}: nobody reads the section {name}; did you mean {meant}?" for name, meant in near.items()]


def _from_yaml(participant: str, known: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says to all, and to the participant. `known`: names that its own section may have, None when any
    will do."""
    path = _file()
    if path is None:
        return {}, {}
    sections = _sections(path)
    shared, own = sections.get("defaults", {}), sections.get(participant, {})
    if known is not None and (unknown := [name for name in own if name.lower() not in known]):
        raise SettingsError(f"{path}, section {participant}: {'; '.join(_no_setting(name, known) for name in unknown)}")
    return shared, own


def _no_setting(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1)
    return f"there is no setting {name}{f'; did you mean {near[0]}?' if near else ''}"
