"""A GPU that a model does not use is told, with what mends it; what is not known is not told."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.llm.gpu import Gpu, GpuSetting, gpu_here, gpu_note, gpu_of


def card(root: Path, vendor: str, memory: str) -> None:
    device = root / "sys/class/drm/card0/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor)
    (device / "mem_info_vram_total").write_text(memory)


def test_a_machine_without_one_has_none(tmp_path: Path) -> None:
    assert gpu_here(tmp_path) is None


def test_the_driver_of_nvidia_is_seen(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert gpu_here(tmp_path) == "nvidia"


@pytest.mark.parametrize(
    ("vendor", "memory", "found"),
    [
        ("0x1002\n", "17163091968\n", "amd"),
        ("0x1002\n", "536870912\n", None),
        ("0x8086\n", "17163091968\n", None),
        ("0x1002\n", "", None),
        ("\xff", "17163091968\n", None),
    ],
)
def test_a_card_of_amd_counts_when_it_has_memory_of_its_own(
    tmp_path: Path, vendor: str, memory: str, found: Gpu | None
) -> None:
    card(tmp_path, vendor, memory)
    assert gpu_here(tmp_path) == found


@pytest.mark.parametrize(
    ("setting", "server_here", "there"),
    [
        ("nvidia", False, "nvidia"),
        ("amd", True, "amd"),
        ("none", True, None),
        ("here", False, "nvidia"),
        ("auto", True, "nvidia"),
        ("auto", False, None),
    ],
)
def test_the_setting_says_whose_gpu_it_is(
    tmp_path: Path, setting: GpuSetting, server_here: bool, there: Gpu | None
) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0").mkdir(parents=True)
    assert gpu_of(setting, server_here=server_here, root=tmp_path) == there


@pytest.mark.parametrize(
    ("share", "there", "said"),
    [
        (None, "nvidia", ""),
        (1.0, "nvidia", ""),
        (1.0, None, ""),
        (0.0, None, ""),
        (0.0, "nvidia", "COMPOSE_FILE=compose.yaml (compose.yaml:compose.cdi.yaml where"),
        (0.0, "amd", "COMPOSE_FILE=compose.yaml:compose.rocm.yaml"),
        (0.62, None, "only 62% of the model fits"),
        (0.62, "nvidia", "OLLAMA_NUM_PARALLEL"),
    ],
)
def test_a_note_says_the_line_that_mends_it(share: float | None, there: Gpu | None, said: str) -> None:
    note = gpu_note(share, there)
    assert (note is None) is (said == "")
    assert said in (note or "")
