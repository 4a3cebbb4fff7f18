"""Results as a table for a terminal, as JSON lines, and as a page with maps of length and depth."""

import dataclasses
import html
import json
import math
from collections.abc import Sequence

import numpy as np

from iha_jax.evaluation.ruler.runner import Record, averaged, mean
from iha_jax.viz.drawing import image, linear
from iha_jax.viz.views import page_style

_AVERAGE = "average"


def table(records: Sequence[Record]) -> str:
    """Mean scores, 0 … 100: a line for every task, and for every depth where depths were asked for."""
    return "\n".join("  ".join(line) for line in _padded(_rows(records)))


def json_lines(records: Sequence[Record]) -> str:
    """A record a line."""
    return "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in records)


def page(records: Sequence[Record], title: str, notes: Sequence[str] = ()) -> str:
    """The results as HTML that loads nothing.

    Args:
      records: the outcomes.
      title: of the page.
      notes: paragraphs under the title.
    """
    tasks = list(dict.fromkeys(record.task for record in records if record.depth is not None))
    maps = [_AVERAGE, *tasks] if len(tasks) > 1 else tasks
    pictures = "".join(_heat_map(records, task) for task in maps)
    how = (
        "Rows are depths, from the beginning of the text to its end; columns are lengths in tokens, prompt and answer "
        "together. White is 0, full colour 100."
    )
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        "<h2>By task and length</h2>",
        _html_table(_rows(records)),
        f'<h2>By length and depth</h2><p class=note>{how}</p><div class="maps">{pictures}</div>' if pictures else "",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{page_style()}{_STYLE}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


_STYLE = (
    "table.heat td{text-align:center;padding:0;min-width:3.2rem}table.heat th{font-weight:normal;text-align:right}"
    "table.heat td{position:relative}table.heat img{display:block;width:100%!important;height:1.9rem}"
    "table.heat span{position:absolute;inset:0;line-height:1.9rem;font-size:.85em}"
)


def _rows(records: Sequence[Record]) -> list[list[str]]:
    """The table's lines, the heading first."""
    lengths = list(dict.fromkeys(record.length for record in records))
    scores = averaged(records, lambda r: (r.task, r.depth, r.length))
    of_tasks = averaged(records, lambda r: (r.task, r.length))
    tasks = list(dict.fromkeys(record.task for record in records))
    rows = [["task", "depth", *map(str, lengths)]]
    for task in tasks:
        rows.append([task, "all", *(_number(of_tasks.get((task, length))) for length in lengths)])
        for depth in sorted({r.depth for r in records if r.task == task and r.depth is not None}):
            rows.append(["", f"{depth:g} %", *(_number(scores.get((task, depth, length))) for length in lengths)])
    if len(tasks) > 1:
        # Every task counts alike, whatever its number of questions.
        means = [mean(of_tasks[task, length] for task in tasks if (task, length) in of_tasks) for length in lengths]
        rows.append([_AVERAGE, "", *map(_number, means)])
    return rows


def _heat_map(records: Sequence[Record], task: str) -> str:
    """Depths down, lengths across; of one task or of all that have depths."""
    among = [r for r in records if r.depth is not None and task in (r.task, _AVERAGE)]
    scores = averaged(among, lambda r: (r.length, r.depth))
    lengths = sorted({r.length for r in among})
    depths = sorted({r.depth for r in among if r.depth is not None})
    head = "".join(f"<th scope=col>{length}</th>" for length in lengths)
    rows = []
    for depth in depths:
        cells = []
        for length in lengths:
            score = scores.get((length, depth), math.nan)
            colour = linear(np.full((1, 1), score), 100.0)
            # Readable on its colour, and colours of a background wouldn't be printed: a picture is.
            ink = "#fff" if score > 55 else "#000"
            told = f"{_number(score)} at {length} tokens, depth {depth:g} %"
            cells.append(f'<td>{image(colour, told)}<span style="color:{ink}">{_number(score)}</span></td>')
        rows.append(f"<tr><th scope=row>{depth:g} %</th>{''.join(cells)}</tr>")
    table = f"<table class=heat><thead><tr><th>depth</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<figure><figcaption>{html.escape(task)}</figcaption><div class=scroll tabindex=0>{table}</div></figure>"


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    def line(kind: str, row: Sequence[str]) -> str:
        cells = "".join(f"<{kind}{'' if i == 0 else ' class=n'}>{html.escape(c)}</{kind}>" for i, c in enumerate(row))
        return f"<tr>{cells}</tr>"

    head, body = line("th", rows[0]), "".join(line("td", row) for row in rows[1:])
    return f'<div class="scroll" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _padded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in rows
    ]


def _number(score: float | None) -> str:
    return "–" if score is None or math.isnan(score) else f"{score:.1f}"
