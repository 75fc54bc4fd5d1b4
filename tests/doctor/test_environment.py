import pytest
import torch

from forebay.doctor.environment import inspect_environment

MEMINFO = "MemTotal: 100 kB\nMemAvailable: 67108864 kB\n"
LIMITS = "Limit Soft Hard Units\nMax locked memory         8388608              8388608              bytes\n"


def _write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path):
    _write(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__limits=LIMITS,
        proc__self__status="CapEff:\t000001ffffffffff\n",
        proc__self__uid_map="0 0 4294967295\n",
        proc__cpuinfo="model name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n",
        sys__devices__system__node__node0__cpulist="0-7",
        sys__devices__system__node__node1__cpulist="8-15",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
    )
    return tmp_path


def _find(root, topic, environment=None):
    return [f for f in inspect_environment(root=root, environment=environment or {}) if f.topic == topic]


def test_a_machine_in_order(root):
    values = {f.topic: f.value for f in inspect_environment(root=root, environment={})}
    assert values["driver"] == "no NVIDIA driver"
    assert values["instruction set"] == "Some CPU: avx512f, avx2, fma"
    assert values["numa"] == "node 0: cores 0-7; node 1: cores 8-15"
    assert values["huge pages"] == "transparent: madvise"
    assert values["memlock"] == "soft 8388608, hard 8388608; does not hold pinned memory back"
    assert values["host memory"].startswith("64.00 GiB according to MemAvailable")
    assert values["allocator"] == "defaults"
    assert not [f for f in inspect_environment(root=root, environment={}) if f.is_problem and f.topic != "host kernel"]


def test_a_limit_on_locked_memory(root):
    _write(root, proc__self__status="CapEff:\t0000000000000000\n")
    (found,) = _find(root, "memlock")
    assert found.is_problem
    assert "0.00781 GiB may be pinned" in found.value
    assert found.advice is not None
    assert "ulimit -l unlimited" in found.advice


def test_a_control_group_s_limits(root):
    _write(
        root,
        proc__self__cgroup="0::/\n",
        **{"sys__fs__cgroup__memory.max": str(8 * 2**30), "sys__fs__cgroup__memory.current": str(2**30)},
    )
    assert any(f.value.startswith("7.00 GiB according to the control group") for f in _find(root, "host memory"))
    _write(root, **{"sys__fs__cgroup__cpu.max": "50000 100000\n"})
    (found,) = _find(root, "cores")
    assert found.is_problem
    assert found.advice is not None
    assert "set FOREBAY_NUM_THREADS=1" in found.advice


def test_torch_without_cuda_beside_a_driver(root):
    _write(root, proc__driver__nvidia__version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Jan 1\n")
    assert _find(root, "driver")[0].value == "NVIDIA 570.86.15"
    assert _find(root, "torch")[0].is_problem is not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("environment", "topic", "text", "is_problem"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "allocator", "ends all overlap", True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "allocator", "less exact", False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "variables", "nothing overlaps", True),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "variables", "one connection", False),
        ({"OMP_NUM_THREADS": "1"}, "variables", "torchrun sets it", False),
        ({"FOREBAY_NUM_THREADS": "x"}, "cores", "must be a whole number above 0", True),
        ({"FOREBAY_HOST_MEMORY_GIB": "-1"}, "host memory", "must be a number of GiB above 0", True),
    ],
)
def test_variables(root, environment, topic, text, is_problem):
    found = [f for f in _find(root, topic, environment) if f.advice and text in f.advice]
    assert len(found) == 1
    assert found[0].is_problem is is_problem
    assert not [f for f in _find(root, "variables") if f.advice]


def test_expandable_segments_and_huge_pages(root):
    assert _find(root, "allocator", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})[0].advice is None
    _write(root, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n")
    assert "madvise" in (_find(root, "huge pages")[0].advice or "")


def test_this_machine():
    topics = {finding.topic for finding in inspect_environment()}
    assert {"forebay", "driver", "torch", "gpu", "host kernel", "instruction set", "cores", "memlock", "numa"} <= topics
