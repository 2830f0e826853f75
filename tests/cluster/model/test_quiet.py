"""Models loaded in several threads at a time leave transformers as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cluster.model.load import load_model, locate
from tests.tiny import make_tiny


def test_threads_that_load_at_once_leave_tied_weights_tied(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "qwen2")  # tied: its head is missing unless somebody ties it
    before = PreTrainedModel.tie_weights

    def load(_: int) -> bool:
        model = load_model(locate(str(directory)), dtype=torch.float32, device=torch.device("cpu"))
        return model is not None

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(12)))
    assert PreTrainedModel.tie_weights is before
    assert load(0)
