from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
