"""Memory that training frees stays with the process, and its peak is measured."""

import platform
import resource
import subprocess
import sys

import pytest
import torch

from xdm_ft.runtime.machine import PeakMemory, retain_freed_memory

LARGE = 64 if float(platform.libc_ver()[1] or 0) >= 2.35 else 25  # megabytes; older ones keep blocks up to 32 MB
IN_FRESH_PROCESS = """
import resource, sys, torch
from xdm_ft.runtime.machine import retain_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        held = [torch.ones(megabytes * 2**18) for _ in range(4)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

megabytes = int(sys.argv[1])
retain_freed_memory()
faults(40)
print(faults(10))
"""


@pytest.mark.slow
# the first blocks may lie in several places, each of which is faulted in once
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_blocks_that_come_and_go_are_not_faulted_in_again():
    argv = [sys.executable, "-c", IN_FRESH_PROCESS, str(LARGE)]
    faults = int(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    assert faults < 10 * LARGE * 2**20 // resource.getpagesize()  # 40 × a block's where handed back


# Linux adds up a process's pages per core and reads the sum with an error: on 64 cores tens of megabytes
def test_the_peak_counts_what_was_freed_and_not_what_was_there():
    kept = torch.ones(128 * 2**20)  # 512 MB
    memory = PeakMemory(torch.device("cpu"))
    if memory.peak is None:
        pytest.skip("this system does not tell")
    assert memory.peak < 150e6
    torch.ones(128 * 2**20).sum()
    assert 400e6 < memory.peak < 700e6 and len(kept)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_a_later_model_has_a_peak_of_its_own_after_an_earlier_one_has_freed_as_much():
    def blocks():
        held = [torch.ones(250_000) for _ in range(400)]  # 1 MB each: below the size that malloc maps by itself
        assert len(held) == 400

    retain_freed_memory()
    blocks()
    memory = PeakMemory(torch.device("cpu"))
    blocks()
    assert memory.peak is None or memory.peak > 250e6
