"""Whether a model runs on the GPU that its host has, and what to do when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Gpu = Literal["nvidia", "amd"]
# As the setting says it: one of those; nobody asks (none); look on this machine (here), or do so if the server is here.
GpuSetting = Literal["auto", "here", "nvidia", "amd", "none"]

_AMD = "0x1002"
# Less memory, in bytes, is a processor's own graphics, which no model server uses.
_LEAST_MEMORY = 4_000_000_000

_NAMES: dict[Gpu, str] = {"nvidia": "an NVIDIA GPU", "amd": "an AMD GPU"}
_FILES: dict[Gpu, str] = {
    "nvidia": "compose.yaml (compose.yaml:compose.cdi.yaml where Docker has no NVIDIA runtime)",
    "amd": "compose.yaml:compose.rocm.yaml",
}


def gpu_here(root: Path = Path("/")) -> Gpu | None:
    """The GPU of this machine; in a container, of its host, whose driver is to be seen there. root: for tests."""
    if any((root / "proc/driver/nvidia/gpus").glob("*")):
        return "nvidia"
    for memory in (root / "sys/class/drm").glob("card*/device/mem_info_vram_total"):
        if _text(memory.with_name("vendor")) == _AMD and int(_text(memory) or 0) >= _LEAST_MEMORY:
            return "amd"
    return None


def gpu_of(setting: GpuSetting, *, server_here: bool, root: Path = Path("/")) -> Gpu | None:
    """Return the GPU of the model server's host, as far as it is known. root: as for `gpu_here`."""
    match setting:
        case "nvidia" | "amd":
            return setting
        case "none":
            return None
        case "auto":
            return gpu_here(root) if server_here else None
        case "here":
            return gpu_here(root)


def gpu_note(share: float | None, gpu: Gpu | None) -> str | None:
    """A sentence about a model that its host's GPU has nothing or only a part of; None when all is well or not known.

    share: the part of the loaded model that lies in GPU memory, 0 to 1; None while it is not loaded.
    """
    if share is None or share >= 1:
        return None
    if share > 0:
        return (
            f"only {share:.0%} of the model fits into the GPU's memory, the rest runs on the processor, slowly: "
            "a smaller model (LOCAL2_MODEL), fewer answers at once (OLLAMA_NUM_PARALLEL), a smaller LOCAL2_NUM_CTX, "
            "or no second model beside it (in containers compose.small.yaml)"
        )
    if gpu is None:
        return None
    return (
        f"the model runs on the CPU, though its host has {_NAMES[gpu]}: in containers, make up, or in .env "
        f"COMPOSE_FILE={_FILES[gpu]}; an Ollama outside of containers says in its log why. "
        "If it is meant: LOCAL2_GPU=none"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
