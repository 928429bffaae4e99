"""Shows the progress of a long task on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress as Bar

from symbiosis_priv.checkpoints.weights import Progress
from symbiosis_priv.display import terminal


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A progress bar that appears with the first report, on a terminal only."""
    console = terminal.console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
