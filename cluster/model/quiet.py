"""Calls into transformers' loading: one at a time, and without its progress bars and warnings over ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: transformers replaces methods of its base class while it loads (`PreTrainedModel.tie_weights` among them) and puts
#: back what it found: of two loads at a time, one would put back the other's replacement, for good.
_LOADING = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block no other thread loads; transformers logs errors only and draws no bars, as before after it."""
    from transformers.utils import logging

    with _LOADING:
        level = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
