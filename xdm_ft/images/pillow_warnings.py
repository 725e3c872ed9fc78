"""Pillow's warnings, in our words and with the name of the image. Python would print them without it."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

NAMED_AT_MOST = 3  # images per process: there may be thousands
logger = logging.getLogger("xdm_ft")
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # it logs an error, without a name, and then raises the exception


class PillowWarnings:
    """Collects the warnings of the image that each thread decodes.

    `warnings.catch_warnings` changes the whole process: the first thread that decodes enters it, the last one leaves.
    """

    def __init__(self) -> None:
        self.lock, self.threads, self.of_thread = threading.Lock(), 0, threading.local()
        self.caught = warnings.catch_warnings()
        self.images = 0  # number of images that had warnings

    @contextmanager
    def logged(self, name: str) -> Iterator[None]:
        """Context in which the image `name` is decoded. Logs its warnings if it decodes."""
        self._enter()
        self.of_thread.texts = texts = dict[str, None]()
        try:
            yield
        finally:
            self.of_thread.texts = None
            self._leave()
        if texts:
            self.images += 1
            if self.images <= NAMED_AT_MOST:
                logger.warning("%s: parts of the file are damaged (%s); check the image", name, "; ".join(texts))
            if self.images == NAMED_AT_MOST:
                logger.warning("further images with damaged parts are not named")

    def _enter(self) -> None:
        with self.lock:
            if self.threads == 0:
                self.caught = warnings.catch_warnings()
                self.caught.__enter__()
                warnings.filterwarnings("always", module="PIL")
                # `decode` refuses images above the limit itself
                warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
                warnings.showwarning = functools.partial(self._collect, warnings.showwarning)
            self.threads += 1

    def _leave(self) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0:
                self.caught.__exit__(None, None, None)

    def _collect(self, otherwise: Callable[..., None], message: Warning, *place: Any, **options: Any) -> None:
        texts = getattr(self.of_thread, "texts", None)
        if texts is None:  # of a thread that decodes nothing
            otherwise(message, *place, **options)
        else:
            texts[" ".join(str(message).split())] = None


pillow_warnings = PillowWarnings()
