import re

import pytest

from forebay.host import affinity, cores_of_node, num_local_ranks, numa_node_of_pci_device, threads_per_rank


def _device(root, name, node):
    folder = root / "sys/bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")


@pytest.mark.parametrize("written", ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", " 0000:3B:00.0\n"])
def test_node_of_a_device_however_its_id_is_written(tmp_path, written):
    _device(tmp_path, "0000:3b:00.0", 1)
    assert numa_node_of_pci_device(written, root=tmp_path) == 1


def test_node_of_a_device_in_another_domain(tmp_path):
    _device(tmp_path, "0000:01:00.0", 0)
    _device(tmp_path, "0009:01:00.0", 3)
    _device(tmp_path, "10000:01:00.0", 5)
    assert numa_node_of_pci_device("00000009:01:00.0", root=tmp_path) == 3
    assert numa_node_of_pci_device("00010000:01:00.0", root=tmp_path) == 5


def test_node_that_linux_does_not_know(tmp_path):
    assert numa_node_of_pci_device("0000:3b:00.0", root=tmp_path) is None
    _device(tmp_path, "0000:3b:00.0", -1)
    assert numa_node_of_pci_device("0000:3b:00.0", root=tmp_path) is None


@pytest.mark.parametrize("bad", ["", "cuda:0", "3b:00", "0000:3b:00.9", "0000/../3b:00.0"])
def test_not_a_bus_id(bad):
    with pytest.raises(ValueError, match=f"{re.escape(repr(bad))} is not a PCI bus id; .* such as '0000:3b:00.0'"):
        numa_node_of_pci_device(bad)


def test_cores_of_a_node_within_the_affinity(tmp_path):
    folder = tmp_path / "sys/devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text("8-11,24,26-27\n")
    everything = set(range(64))
    assert cores_of_node(1, root=tmp_path, within=everything) == {8, 9, 10, 11, 24, 26, 27}
    assert cores_of_node(1, root=tmp_path, within={0, 9, 24}) == {9, 24}
    assert cores_of_node(0, root=tmp_path, within=everything) == set()
    (folder / "cpulist").write_text("\n")  # memory without cores
    assert cores_of_node(1, root=tmp_path, within=everything) == set()
    core = min(affinity())
    (folder / "cpulist").write_text(f"{core}\n")
    assert cores_of_node(1, root=tmp_path) == {core}


def test_threads_are_the_cores_shared_by_the_local_ranks():
    assert num_local_ranks({}) == num_local_ranks({"LOCAL_WORLD_SIZE": ""}) == 1
    assert num_local_ranks({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert threads_per_rank({}, num_cores=16) == 16
    assert threads_per_rank({"LOCAL_WORLD_SIZE": "3"}, num_cores=16) == 5
    assert threads_per_rank({"LOCAL_WORLD_SIZE": "8"}, num_cores=4) == 1
    assert threads_per_rank({"LOCAL_WORLD_SIZE": "8", "FOREBAY_NUM_THREADS": "7"}, num_cores=16) == 7
    assert threads_per_rank({}) == len(affinity())


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "FOREBAY_NUM_THREADS"])
@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_numbers(name, text):
    message = f"{name} must be a whole number above 0, such as 8, or unset, got '{text}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        threads_per_rank({name: text}, num_cores=4)
