import os

import pytest

from dsc.runtime.host_cpus import allowed_cpus

VERSION_2 = "sys/fs/cgroup/cpu.max"
QUOTA_1, PERIOD_1 = "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine of eight CPUs and its control groups' files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def write(**files):
        for name, text in files.items():
            path = tmp_path / {"v2": VERSION_2, "quota": QUOTA_1, "period": PERIOD_1}[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_a_limit_all_that_it_may_run_on(system):
    assert allowed_cpus(system()) == 8
    assert allowed_cpus(system(v2="max 100000\n")) == 8
    assert allowed_cpus(system(v2="", quota="-1\n", period="100000\n")) == 8


@pytest.mark.parametrize(("quota", "cpus"), [(200000, 2), (150000, 2), (50000, 1), (1000, 1), (10**7, 8)])
def test_a_container_s_share_of_time_counts_when_it_is_less(system, quota, cpus):
    assert allowed_cpus(system(v2=f"{quota} 100000\n")) == cpus


def test_the_first_control_groups_wrote_it_to_two_files(system):
    assert allowed_cpus(system(quota="300000\n", period="100000\n")) == 3


def test_a_file_that_makes_no_sense_does_not_count(system):
    for text in ("", "max", "1 2 3", "x y", "100000 0"):
        assert allowed_cpus(system(v2=text)) == 8


def test_the_processors_that_it_may_run_on_count(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert allowed_cpus(system(v2="400000 100000")) == 1
