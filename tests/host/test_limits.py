import re

import pytest

from forebay.host import HostMemoryError, available_host_memory, check_host_memory, limits
from forebay.host.limits import in_gib

GIB = 2**30
KIB_PER_GIB = 2**20
PRIVILEGED, ORDINARY = "000001fffeffffff", "0000000000000000"


class Machine:
    """A root directory with the files that say how much memory there is."""

    def __init__(self, root):
        self.root = root
        self.meminfo(100)
        self.write("proc/self/cgroup", "0::/\n")
        self.memlock("8388608", privileged=True)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def meminfo(self, available_gib):
        self.write(
            "proc/meminfo",
            f"MemTotal:  {500 * KIB_PER_GIB} kB\nMemFree:  1 kB\nMemAvailable:  {available_gib * KIB_PER_GIB} kB\n",
        )

    def memlock(self, soft, *, privileged, locked_kib=0, pinned_kib=0, uid_map="0 0 4294967295"):
        capabilities = PRIVILEGED if privileged else ORDINARY
        self.write(
            "proc/self/status",
            f"Name:\tpython\nVmLck:\t{locked_kib} kB\nVmPin:\t{pinned_kib} kB\nCapEff:\t{capabilities}\n",
        )
        self.write("proc/self/uid_map", f"         {uid_map}\n")
        self.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max resident set          unlimited            unlimited            bytes     \n"
            f"Max locked memory         {soft:<20} unlimited            bytes     \n",
        )

    def cgroup2(self, path, limit_gib, used_gib, *, high_gib=None, inactive=0, active=0):
        folder = f"sys/fs/cgroup{path}"
        text = {None: "max"}.get(limit_gib, str((limit_gib or 0) * GIB))
        self.write(f"{folder}/memory.max", text + "\n")
        self.write(f"{folder}/memory.high", "max\n" if high_gib is None else f"{high_gib * GIB}\n")
        self.write(f"{folder}/memory.current", f"{used_gib * GIB}\n")
        stat = f"anon 1\nfile 7\nshmem 9\ninactive_file {inactive * GIB}\nactive_file {active * GIB}\n"
        self.write(f"{folder}/memory.stat", stat)

    def cgroup1(self, path, limit_bytes, used_gib, *, inactive=0):
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit_bytes}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used_gib * GIB}\n")
        stat = f"inactive_file 5\ntotal_inactive_file {inactive * GIB}\ntotal_active_file 0\n"
        self.write(f"{folder}/memory.stat", stat)

    def limits(self, *, pinned=False, budget_bytes=None, used_bytes=0, environment=()):
        return limits(
            pinned=pinned,
            budget_bytes=budget_bytes,
            used_bytes=used_bytes,
            root=self.root,
            environment=dict(environment),
        )

    def tightest(self, **arguments):
        limit = self.limits(**arguments)[0]
        return limit.available_bytes / GIB, limit.source.replace(str(self.root), "")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_free_memory(machine):
    assert machine.tightest() == (100, "MemAvailable in /proc/meminfo")
    assert machine.tightest(pinned=True) == (100, "MemAvailable in /proc/meminfo")
    assert available_host_memory(root=machine.root) == 100 * GIB


def test_not_linux(tmp_path):
    (limit,) = limits(pinned=True, root=tmp_path, environment={})
    assert limit.source == "the free memory that psutil reports"
    assert limit.available_bytes > 0


def test_meminfo_without_the_line(machine):
    machine.write("proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(RuntimeError, match=r"has no MemAvailable .* set FOREBAY_HOST_MEMORY_GIB"):
        machine.limits()


def test_cgroup2_counts_file_cache_as_free(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.cgroup2("/job", 40, 30, inactive=3, active=2)
    assert machine.tightest() == (15, "the control group limit /sys/fs/cgroup/job/memory.max (40.00 GiB)")
    # Never more than the limit, never less than nothing.
    machine.cgroup2("/job", 40, 1, inactive=3)
    assert machine.tightest()[0] == 40
    machine.cgroup2("/job", 40, 41)
    assert machine.tightest()[0] == 0


def test_cgroup2_max_is_no_limit(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.cgroup2("/job", None, 30)
    assert len(machine.limits()) == 1


def test_cgroup2_high_counts(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.cgroup2("/job", 40, 10, high_gib=32)
    assert machine.tightest() == (22, "the control group limit /sys/fs/cgroup/job/memory.high (32.00 GiB)")


@pytest.mark.parametrize(("tight", "expected"), [("/a", 5), ("/a/b", 6), ("/a/b/c", 7), (None, 50)])
def test_cgroup2_the_tightest_of_the_hierarchy_binds(machine, tight, expected):
    machine.write("proc/self/cgroup", "0::/a/b/c\n")
    for path, limit in (("/a", 80), ("/a/b", 70), ("/a/b/c", 60)):
        machine.cgroup2(path, limit, 10)
    if tight is not None:
        machine.cgroup2(tight, expected + 10, 10)
    available, source = machine.tightest()
    assert available == expected
    assert f"/sys/fs/cgroup{tight or '/a/b/c'}/memory.max" in source
    assert [limit.available_bytes for limit in machine.limits()] == sorted(
        limit.available_bytes for limit in machine.limits()
    )


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../job", "/../x"])
def test_cgroup2_in_a_container_the_mount_itself_has_the_limit(machine, path):
    # What /proc/self/cgroup says is the host's path, or relative to another namespace: not there in the container.
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.cgroup2("", 40, 10)
    machine.write("sys/fs/x/memory.max", "1\n")  # outside the mount: must not be read
    machine.write("sys/fs/x/memory.current", "0\n")
    assert machine.tightest() == (30, "the control group limit /sys/fs/cgroup/memory.max (40.00 GiB)")


def test_cgroup1(machine):
    machine.write("proc/self/cgroup", "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:hugetlb,memory:/slurm/job\n0::/\n")
    machine.cgroup1("", 2**63 - 4096, 90)  # no limit
    machine.cgroup1("/slurm", 50 * GIB, 20)
    machine.cgroup1("/slurm/job", 40 * GIB, 20, inactive=2)
    expected = "the control group limit /sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes (40.00 GiB)"
    assert machine.tightest() == (22, expected)
    assert [limit.available_bytes / GIB for limit in machine.limits()] == [22, 30, 100]


def test_no_cgroups(machine):
    (machine.root / "proc/self/cgroup").unlink()
    assert machine.tightest() == (100, "MemAvailable in /proc/meminfo")


def test_memlock_holds_for_pinned_memory_without_the_capability(machine):
    machine.memlock(str(8 * GIB), privileged=False, locked_kib=KIB_PER_GIB, pinned_kib=2 * KIB_PER_GIB)
    assert machine.tightest(pinned=True) == (5, "RLIMIT_MEMLOCK (ulimit -l, /proc/self/limits)")
    assert machine.tightest(pinned=False)[0] == 100
    machine.memlock("unlimited", privileged=False)
    assert machine.tightest(pinned=True)[0] == 100
    machine.memlock(str(8 * GIB), privileged=True)
    assert machine.tightest(pinned=True)[0] == 100
    # Root of a rootless container has the capability, but not over the limit on locked memory.
    machine.memlock(str(8 * GIB), privileged=True, uid_map="0 1000 1")
    assert machine.tightest(pinned=True)[0] == 8


@pytest.mark.parametrize("budget", [{"budget_bytes": 300 * GIB}, {"environment": {"FOREBAY_HOST_MEMORY_GIB": "300"}}])
def test_a_budget_replaces_the_estimates_but_not_the_control_group(machine, budget):
    machine.memlock("65536", privileged=False)
    assert machine.tightest(pinned=True, **budget)[0] == 300
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.cgroup2("/job", 40, 10)
    assert machine.tightest(pinned=True, **budget)[0] == 30


def test_a_budget_may_be_lower_too_and_shrinks_with_use(machine):
    assert machine.tightest(environment={"FOREBAY_HOST_MEMORY_GIB": "1.5"}) == (1.5, "FOREBAY_HOST_MEMORY_GIB=1.5")
    assert machine.tightest(budget_bytes=8 * GIB, used_bytes=3 * GIB) == (
        5,
        "the host memory budget, of which 3.00 GiB are in use",
    )
    assert machine.tightest(budget_bytes=8 * GIB, used_bytes=9 * GIB)[0] == 0
    # An argument wins over the environment; what is in use shows in the other limits by itself.
    environment = {"FOREBAY_HOST_MEMORY_GIB": "1.5"}
    assert machine.tightest(budget_bytes=8 * GIB, environment=environment)[0] == 8
    assert machine.tightest(used_bytes=3 * GIB)[0] == 100


@pytest.mark.parametrize("text", ["0", "-1", "much", "nan", "inf", "64GiB"])
def test_bad_budget(machine, text):
    message = f"FOREBAY_HOST_MEMORY_GIB must be a number of GiB above 0, such as 64 or 1.5, got '{text}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        machine.limits(environment={"FOREBAY_HOST_MEMORY_GIB": text})


def test_the_environment_is_the_process_s_by_default(machine, monkeypatch):
    monkeypatch.setenv("FOREBAY_HOST_MEMORY_GIB", "2")
    assert limits(pinned=True, root=machine.root)[0].available_bytes == 2 * GIB
    monkeypatch.setenv("FOREBAY_HOST_MEMORY_GIB", "")
    assert limits(pinned=True, root=machine.root)[0].available_bytes == 100 * GIB


def _error(machine, num_bytes, *, environment=(), **arguments):
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(num_bytes, root=machine.root, environment=dict(environment), **arguments)
    assert isinstance(caught.value, MemoryError)
    return str(caught.value).replace(str(machine.root), "")


def test_enough(machine):
    check_host_memory(100 * GIB, purpose="weights", pinned=True, root=machine.root, environment={})
    assert "100.00 GiB of host memory, but only 100.00 GiB" in _error(
        machine, 100 * GIB + 1, purpose="weights", pinned=False
    )


def test_message_free_memory(machine):
    assert _error(machine, 120 * GIB, purpose="optimizer_state", pinned=True) == (
        "optimizer state needs 120.00 GiB of pinned host memory, but only 100.00 GiB are available according to "
        "MemAvailable in /proc/meminfo; nothing was allocated. To need less, lower "
        "optimizer.optimizer_offload_fraction; to have more, free memory on this machine, or set "
        "FOREBAY_HOST_MEMORY_GIB if it can really have more (a virtual machine whose memory grows on demand)"
    )


def test_message_control_group(machine):
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.cgroup2("/job", 40, 10)
    hint = "offload the activations of fewer layers"
    assert _error(machine, 31 * GIB, purpose="activations", pinned=False, setting_hint=hint) == (
        "activations needs 31.00 GiB of host memory, but only 30.00 GiB are available according to the control group "
        "limit /sys/fs/cgroup/job/memory.max (40.00 GiB); nothing was allocated. To need less, offload the "
        "activations of fewer layers; to have more, raise the memory of the container or job"
    )


def test_message_locked_memory(machine):
    machine.memlock("65536", privileged=False)
    assert _error(machine, GIB, purpose="optimizer_state", pinned=True) == (
        "optimizer state needs 1.00 GiB of pinned host memory, but only 6.1e-05 GiB are available according to "
        "RLIMIT_MEMLOCK (ulimit -l, /proc/self/limits); nothing was allocated. To need less, lower "
        "optimizer.optimizer_offload_fraction; to have more, raise it (ulimit -l unlimited, or memlock in "
        "/etc/security/limits.conf). It is taken to hold because the process lacks CAP_IPC_LOCK, but cudaHostRegister "
        "pins through the driver, which need not keep to it: set FOREBAY_HOST_MEMORY_GIB to have the driver asked for "
        "as much as that"
    )


def test_message_budget(machine):
    environment = {"FOREBAY_HOST_MEMORY_GIB": "8"}
    message = _error(
        machine, 6 * GIB, purpose="weights", pinned=True, used_bytes=3 * GIB, environment=environment
    )  # fmt: skip
    assert message == (
        "weights needs 6.00 GiB of pinned host memory, but only 5.00 GiB are available according to "
        "FOREBAY_HOST_MEMORY_GIB=8, of which 3.00 GiB are in use; nothing was allocated. To need less, lower "
        "optimizer.optimizer_offload_fraction; to have more, raise FOREBAY_HOST_MEMORY_GIB"
    )


def test_this_machine():
    found = limits(pinned=True)
    assert found
    assert all(limit.available_bytes >= 0 and limit.source and limit.remedy for limit in found)
    check_host_memory(4096, purpose="other", pinned=False)


def test_gib():
    assert [in_gib(n) for n in (0, 4096, GIB // 2, 3 * GIB)] == ["0.00 GiB", "3.81e-06 GiB", "0.50 GiB", "3.00 GiB"]
