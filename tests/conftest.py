"""Tests touch no network, and leave a core to others."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported anywhere

import torch

torch.set_num_threads(2)
