from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
    if "ZEROCLI_TEST_LONG" not in os.environ:
        skip = pytest.mark.skip(reason="takes long: ZEROCLI_TEST_LONG=1")
        for item in items:
            if "long" in item.keywords:
                item.add_marker(skip)
