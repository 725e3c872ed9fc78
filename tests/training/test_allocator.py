"""Memory that training frees stays with the process."""

import platform
import resource

import pytest
import torch

from xdm_ft.training.memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_blocks_that_come_and_go_are_not_faulted_in_again() -> None:
    keep_freed_memory()
    pages = 16 * 2**20 // resource.getpagesize()  # of a block of 16 MB
    torch.ones(4 * 2**20).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4 * 2**20).sum()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * pages  # 20 × pages where handed back
