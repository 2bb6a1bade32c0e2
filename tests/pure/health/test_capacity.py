"""What a worker has: by setting, by what `nvidia-smi` says, and by what CUDA shows it."""

from pathlib import Path
from typing import Any

import pytest

from celery5.errors import Misconfigured
from celery5.health import capacity, machine
from celery5.health.capacity import find_capacity
from celery5.protocol.scaling.resource_budget import to_numbers

TWO_GPUS = """#!/bin/sh
echo '0, GPU-aaaa, 24576'
echo '1, GPU-bbbb, 8192'
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an `nvidia-smi` on PATH that does what a script says."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    capacity._list_gpus.cache_clear()

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(script)
        path.chmod(0o755)

    yield write
    capacity._list_gpus.cache_clear()


def test_gpus_and_their_memory_are_found_by_nvidia_smi(smi: Any) -> None:
    smi(TWO_GPUS)
    found = find_capacity("gpu=auto vram_gb=auto")
    assert to_numbers(found.amounts) == {"gpu": 2, "vram_gb": 32}
    assert found.devices == ((0, "0"), (1, "1"))


@pytest.mark.parametrize(
    ("visible", "gpus", "memory"),
    [("1", 1, 8), ("GPU-aaaa", 1, 24), ("0,1", 2, 32), ("", 0, 0), ("-1", 0, 0), ("1,-1,0", 1, 8)],
)
def test_only_gpus_count_that_cuda_shows_the_worker(
    smi: Any, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int, memory: int
) -> None:
    smi(TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_capacity({"gpu": "auto", "vram_gb": "auto"})
    assert to_numbers(found.amounts) == {"gpu": gpus, "vram_gb": memory}
    assert [name for _, name in found.devices] == visible.split(",")[:gpus]


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\nexit 9\n",
        "#!/bin/sh\necho 'No devices were found'\n",
        "#!/bin/sh\nexec sleep 60\n",
        "no script at all",
    ],
)
def test_an_nvidia_smi_that_fails_or_hangs_has_no_gpus(
    smi: Any, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    smi(script)
    monkeypatch.setattr(capacity, "SMI_LIMIT", 0.2)
    assert to_numbers(find_capacity("gpu=auto vram_gb=auto").amounts) == {"gpu": 0, "vram_gb": 0}


def test_a_gpu_that_shares_the_memory_of_the_machine_has_none_of_its_own(smi: Any) -> None:
    smi("#!/bin/sh\necho '0, GPU-cccc, [N/A]'\n")
    assert to_numbers(find_capacity("gpu=auto vram_gb=auto").amounts) == {"gpu": 1, "vram_gb": 0}


def test_auto_alone_means_all_that_is_found_and_given_numbers_win(smi: Any) -> None:
    found = to_numbers(find_capacity("auto").amounts)
    assert found == {
        "cpu": machine.count_cores(),
        "memory_gb": pytest.approx(machine.total_memory() / 2**30, abs=1e-4),
    }
    smi(TWO_GPUS)
    capacity._list_gpus.cache_clear()
    assert to_numbers(find_capacity({"": "auto", "gpu": 1, "licence": 3}).amounts) == {
        **found, "gpu": 1, "vram_gb": 32, "licence": 3
    }  # fmt: skip


def test_processes_of_one_parent_never_have_the_same_gpu(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    shares = [find_capacity({"gpu": 3, "vram_gb": 9}, number, 2) for number in (1, 2)]
    assert [to_numbers(share.amounts) for share in shares] == [
        {"gpu": 2, "vram_gb": 4.5},
        {"gpu": 1, "vram_gb": 4.5},
    ]
    assert [share.devices for share in shares] == [((0, "4"), (2, "7")), ((1, "5"),)]


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("licence=auto", "licence=auto: only cpu, memory_gb, gpu, vram_gb can be detected"),
        ("gpus=auto", "did you mean 'gpu'"),
    ],
)
def test_auto_is_refused_for_a_resource_that_cannot_be_detected(smi: Any, setting: str, wrong: str) -> None:
    with pytest.raises(Misconfigured, match=wrong):
        find_capacity(setting)


def test_more_gpus_than_cuda_shows_are_refused(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(Misconfigured, match="gpu is 2, but CUDA_VISIBLE_DEVICES names 1"):
        find_capacity("gpu=2")


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "memory.max").write_text(str(3 * 2**30))
    (tmp_path / "own").write_text("0::/unit\n")
    tree = machine.ControlGroups(str(tmp_path), "", "memory.max", "memory.current", b"inactive_file")
    monkeypatch.setattr(machine, "CONTROL_GROUP_TREES", (tree,))
    monkeypatch.setattr(machine, "_PROC_CGROUP", str(tmp_path / "own"))
    assert to_numbers(find_capacity("memory_gb=auto").amounts) == {"memory_gb": 3}
