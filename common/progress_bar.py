"""Progress of long work: a bar where a person watches, a log line a quarter of the way elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from common.log import get_logger, log_event

log = get_logger("progress")
Progress = Callable[[int, int], None]  # what is done, and how much there is in all


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A function to call with (bytes done, bytes in all), growing."""
    if sys.stderr.isatty():
        with tqdm(desc=what, unit="B", unit_scale=True, file=sys.stderr) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show
        return
    quarter = 0

    def tell(done: int, total: int) -> None:
        nonlocal quarter
        if total and 4 * done // total > quarter:
            quarter = 4 * done // total
            log_event(log, logging.INFO, what, percent=25 * quarter)

    yield tell
