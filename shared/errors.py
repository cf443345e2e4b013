"""The errors of LoCAL2, grouped by what the caller does about them.

Local2Error
├── PermanentError      the message can never be handled     → dead letter
│   └── DecodeError     its fields or payload are malformed
├── TransientError      the world is in the way just now     → left pending, tried again
│   └── BusUnavailable  Redis did not answer in time
├── Fenced              somebody else owns this now          → stop, write nothing more
├── ToolError           a text for the model                 → a tool result with `error`
├── SettingsError       a configuration value is wrong       → refuse to start or to apply
└── ModelError          the model backend failed             → see `shared.llm.port`
"""


class Local2Error(Exception):
    """Root of every error raised on purpose."""


class PermanentError(Local2Error):
    """This message cannot be handled, however often it is tried."""


class DecodeError(PermanentError):
    """A stream entry's fields or payload do not have the declared form."""


class TransientError(Local2Error):
    """Trying again later may succeed."""


class BusUnavailable(TransientError):
    """Redis did not answer within the time allowed."""


class Fenced(Local2Error):
    """Another replica owns this work; nothing more may be written for it."""


class ToolError(Local2Error):
    """A tool could not do what was asked; the text is read by the model."""


class SettingsError(Local2Error):
    """A configuration value is missing, malformed or out of range."""


class ModelError(Local2Error):
    """The model backend failed; subclasses in `shared.llm.port` say how.

    remedy: what to do about it, where that is known; the error's text ends with it. cause: the text without it.
    """

    def __init__(self, text: str = "", remedy: str = "") -> None:
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.cause = text
        self.remedy = remedy
