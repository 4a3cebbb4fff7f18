"""What a person sees: a progress bar or plain lines while training, a table at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from iha_jax.extras import needed

with needed("rich", "showing progress"):
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
    from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"


class Display:
    """Progress and messages; a bar on a terminal, a line now and then elsewhere.

    Attributes:
      console: where everything is printed.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        bar: bool = True,
        line_every: int = 10,
        quiet: bool = False,
        console: Console | None = None,
    ):
        self.console = console or Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._total, self._line_every = total_steps, line_every
        self._progress: Progress | None = None
        self._task: Any = None
        if bar and self.console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )

    def start(self, step: int) -> None:
        """Shows the bar from a step on."""
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("training", total=self._total, completed=step, status="")

    def update(self, step: int, status: str) -> None:
        """Moves the bar; without one, prints a line every ``line_every`` steps."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, status=status)
        elif self._progress is None and (step % self._line_every == 0 or step == self._total):
            self.console.print(f"step {step}/{self._total}  {status}")

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, markup=False)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()

    def completion(self, prompt: str, text: str) -> None:
        """Shows a sampled continuation of a prompt."""
        # Bytes a model makes up must not reach the terminal as control codes.
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        content = Text(prompt, style="bold") + Text(shown)
        self.console.print(Panel(content, title="sampled completion", title_align="left", expand=False))

    def summary(self, title: str, rows: Sequence[tuple[str, str]], losses: Sequence[float]) -> None:
        """The table at the end of a run, with the course of the loss."""
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=False)
        table.add_column(style="dim")
        table.add_column(justify="right")
        if len(losses) > 1:
            table.add_row("training loss", f"{sparkline(losses)}  {losses[0]:.2f} → {losses[-1]:.2f}")
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text, finite values only."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    means = [
        sum(part) / len(part)
        for i in range(count)
        if (part := finite[i * len(finite) // count : (i + 1) * len(finite) // count])
    ]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in means)


def status_line(values: Mapping[str, Any]) -> str:
    """The few numbers that go beside the bar."""
    parts = [f"loss {values['loss']:.3f}"]
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tok/s")
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    parts.append(f"lr {values['learning_rate']:.1e}")
    return "  ".join(parts)
