"""Tests touch no network, and compute on one thread, as banks of heads do.

Their products are small: a second thread gains nothing, and waits for its core for ever where others want it too.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported anywhere

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a run in an earlier test has set as many as there are cores
