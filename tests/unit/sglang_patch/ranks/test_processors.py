"""Which processors a rank gets."""

from __future__ import annotations

from pathlib import Path

from kt_runtime.sglang_patch.ranks.processors import cores_of, processors_of


def test_two_threads_of_a_core_stay_with_one_rank(tmp_path: Path) -> None:
    places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)}
    for processor, (package, core) in places.items():
        directory = tmp_path / f"cpu{processor}" / "topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text(f"{package}\n")
        (directory / "core_id").write_text(f"{core}\n")
    cores = cores_of(range(8), tmp_path)
    assert cores == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [processors_of(cores, rank, 2) for rank in range(2)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert [len(processors_of(cores, rank, 3)) for rank in range(3)] == [2, 2, 4]


def test_each_rank_has_a_memory_node_also_where_one_package_has_two(tmp_path: Path) -> None:
    """Sub-NUMA clustering: the cores of one package, alternately on two nodes."""
    for processor in range(8):
        directory = tmp_path / f"cpu{processor}"
        (directory / "topology").mkdir(parents=True)
        (directory / f"node{processor % 2}").mkdir()
        (directory / "topology" / "physical_package_id").write_text("0\n")
        (directory / "topology" / "core_id").write_text(f"{processor}\n")
    cores = cores_of(range(8), tmp_path)
    assert [processors_of(cores, rank, 2) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_fewer_cores_than_ranks_are_shared(tmp_path: Path) -> None:
    cores = cores_of([3, 5], tmp_path)  # of which the system says nothing
    assert cores == [[3], [5]]
    assert processors_of(cores, 2, 4) == [3, 5]
