"""Output to the terminal: tables that fit its width, and text that is not truncated in files and pipes."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDTH = 140  # width of a file or a pipe
_AGAIN_S = 4.0


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or as COLUMNS says. Emoji codes are disabled: an address may contain `:a:`."""
    found = Console(stderr=stderr, emoji=False)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Console(stderr=stderr, emoji=False, width=_WIDTH)


def say(text: str, *, style: str | None = None) -> None:
    """Print a line that can be copied: it is not wrapped, and markup in it has no effect."""
    console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def working(what: str, *, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Announce a task such as "loading torch" immediately, and again every four seconds until the block ends. `tell` is
    called with each line; None prints to stderr."""
    tell = tell or _to_stderr
    began, done = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not done.wait(_AGAIN_S):
            tell(f"{what}: {time.monotonic() - began:.0f} s so far")

    tell(f"{what} ...")
    thread = threading.Thread(target=repeat, name="working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def progress(time: ProgressColumn, *, of: Console) -> Progress:
    """Bars with a description, a count and a time, which are shown on a terminal only and disappear at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), time)
    return Progress(*columns, console=of, transient=True, disable=not of.is_terminal)


@contextmanager
def progress_bar(label: str, *, tell: Callable[[str], None] | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, from the first call of the function (done, total) until all is done. Without a terminal, a line
    every four seconds. `tell`: called with each line; None prints to stderr."""
    shown, due = console(stderr=True), time.monotonic() + _AGAIN_S
    bar = progress(TimeRemainingColumn(), of=shown)
    task = bar.add_task(label, total=None)

    def update(done: int, total: int) -> None:
        nonlocal due
        if not shown.is_terminal:
            if (now := time.monotonic()) >= due:
                due = now + _AGAIN_S
                (tell or _to_stderr)(f"{label}: {done} of {total}")
            return
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield update
    finally:
        bar.stop()


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    justify: JustifyMethod = "left",
    styles: Sequence[str] = (),
) -> Table:
    """A table with one row per item, or with one column per item if that is narrower. Cells may contain markup.
    `styles`: a style per item, or none."""
    styles = styles or [""] * len(rows)
    screen = Table(title=title, title_justify="left")
    if not rows or len(headings) <= len(rows):
        for heading in headings:
            screen.add_column(heading, justify=justify, overflow="fold")
        for cells, style in zip(rows, styles, strict=True):
            screen.add_row(*cells, style=style)
        return screen
    screen.add_column(headings[0], justify=justify)
    for cells, style in zip(rows, styles, strict=True):
        screen.add_column(cells[0], justify=justify, style=style, overflow="fold")
    for place, heading in enumerate(headings[1:], start=1):
        screen.add_row(heading, *(cells[place] for cells in rows))
    return screen
