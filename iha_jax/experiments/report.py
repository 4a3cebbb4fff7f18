"""One self-contained page about a comparison: nothing is loaded, no script runs, and it prints."""

import dataclasses
import html
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from iha_jax.experiments.comparison import COSTS, Comparison, Metric
from iha_jax.experiments.pictures import looks_inside
from iha_jax.experiments.runner import Cell, cells, collect
from iha_jax.experiments.snapshot import write_text
from iha_jax.experiments.statistics import Paired, Spread, paired, spread
from iha_jax.viz.drawing import Series, key_sample, line_chart
from iha_jax.viz.views import page_style


def write_report(comparison: Comparison, seeds: int, output: pathlib.Path, command: str) -> pathlib.Path:
    """Writes ``report.html`` about what is finished, and ``results.jsonl`` beside it.

    Args:
      comparison: the grid.
      seeds: how many.
      output: directory of all results.
      command: that makes this page, shown on it.

    Returns:
      The page's path.
    """
    records = collect(comparison, seeds, output)
    finished = [cell for cell in cells(comparison, seeds, output) if cell.result() is not None]
    file = output / "report.html"
    write_text(file, page(comparison, seeds, records, finished, command))
    return file


def page(comparison: Comparison, seeds: int, records: list[dict[str, Any]], done: list[Cell], command: str) -> str:
    """The page as HTML.

    Args:
      comparison: the grid.
      seeds: how many were asked for.
      records: results of the finished runs.
      done: their cells, for pictures.
      command: that makes this page.
    """
    results = _Results(comparison, records)
    total = seeds * len(comparison.entries)
    missing = "" if len(records) == total else f'<p class="warn">{len(records)} of {total} runs are finished.</p>'
    body = [
        f"<h1>{_text(comparison.title)}</h1>",
        missing,
        f"<p>{_text(comparison.note)}</p>",
        f"<p>{_text(_seeds_sentence(seeds, comparison.baseline))}</p>",
        "<h2>In short</h2>",
        _in_short(results),
        "<h2>Results</h2>",
        *(_results_table(results, setting) for setting in comparison.settings),
        "<h2>Learning curves</h2>",
        _legend(comparison.variants),
        *(_curves(results, setting) for setting in comparison.settings),
        "<h2>Cost</h2>",
        _cost_table(results),
        looks_inside(done),
        "<h2>How it was made</h2>",
        f"<pre>{_text(command)}</pre>",
        _versions(records),
        _all_runs(results),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{_text(comparison.title)}</title><style>{page_style()}</style></head><body><main>"
        + "\n".join(part for part in body if part)
        + "</main></body></html>\n"
    )


@dataclasses.dataclass(frozen=True)
class _Results:
    comparison: Comparison
    records: list[dict[str, Any]]

    def of(self, setting: str, variant: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["setting"] == setting and r["variant"] == variant]

    def variants(self, setting: str) -> list[str]:
        return [v for v in self.comparison.variants if self.of(setting, v)]

    def metrics(self, setting: str) -> list[Metric]:
        """Those that any run of a setting has; all while there is no run."""
        known = {name for v in self.comparison.variants for r in self.of(setting, v) for name in r["metrics"]}
        return [m for m in self.comparison.metrics if m.name in known or not known]

    def values(self, setting: str, variant: str, metric: str) -> dict[int, float]:
        return {r["seed"]: r["metrics"][metric] for r in self.of(setting, variant) if metric in r["metrics"]}

    def difference(self, setting: str, variant: str, metric: Metric) -> Paired:
        baseline = self.values(setting, self.comparison.baseline, metric.name)
        return paired(self.values(setting, variant, metric.name), baseline, metric.higher_is_better)


# --------------------------------------------------------------------------------------------------------- sections


def _seeds_sentence(seeds: int, baseline: str) -> str:
    return (
        f"Mean ± standard deviation over {seeds} {'seed' if seeds == 1 else 'seeds'}. Differences are to {baseline} "
        "with the same seed (the same data in the same order), then averaged."
    )


def _in_short(results: _Results) -> str:
    baseline, lines = results.comparison.baseline, []
    for setting in results.comparison.settings:
        metric = results.metrics(setting)[0]
        base = spread(list(results.values(setting, baseline, metric.name).values()))
        if base.count:
            lines.append(
                f"<li>{_text(setting)}, {_text(metric.label)}: {_text(baseline)} reaches {_value(base, metric)}.<ul>"
            )
        else:
            lines.append(f"<li>{_text(setting)}, {_text(metric.label)}.<ul>")
        for variant in results.variants(setting):
            if variant != baseline:
                found = spread(list(results.values(setting, variant, metric.name).values()))
                lines.append(f"<li>{_text(variant)}: {_value(found, metric)}")
                difference = results.difference(setting, variant, metric)
                if difference.spread.count:
                    lines.append(
                        f", {_difference(difference.spread, metric)}; better with {difference.better} of "
                        f"{difference.spread.count} seeds"
                    )
                lines.append(".</li>")
        lines.append("</ul></li>")
    return f"<ul>{''.join(lines)}</ul>"


def _results_table(results: _Results, setting: str) -> str:
    metrics, baseline = results.metrics(setting), results.comparison.baseline
    variants = results.variants(setting)
    if not variants:
        return ""
    best = {m.name: _best(results, setting, variants, m) for m in metrics}
    head = ["variant"]
    for metric in metrics:
        head += [f"{metric.label} {'↑' if metric.higher_is_better else '↓'}", f"minus {baseline}"]
    rows = []
    for variant in variants:
        row = [_text(variant)]
        for metric in metrics:
            found = _value(spread(list(results.values(setting, variant, metric.name).values())), metric)
            row.append(f"<strong>{found}</strong>" if variant == best[metric.name] else found)
            if variant == baseline:
                row.append("–")
            else:
                difference = results.difference(setting, variant, metric)
                row.append(_difference(difference.spread, metric) if difference.spread.count else "–")
        rows.append(row)
    references = []
    for metric in metrics:
        if metric.reference is not None:
            known = [x for v in variants for x in results.values(setting, v, metric.reference).values()]
            if known:
                references.append(f"{metric.label} {metric.reference_label}: {_number(float(np.mean(known)), metric)}")
    note = f"<p class=note>{_text('; '.join(references))}.</p>" if references else ""
    return f"<h3>{_text(setting)}</h3>{_table(head, rows)}{note}"


def _best(results: _Results, setting: str, variants: Sequence[str], metric: Metric) -> str:
    means = {v: spread(list(results.values(setting, v, metric.name).values())).mean for v in variants}
    known = {v: mean for v, mean in means.items() if not math.isnan(mean)}
    choose = max if metric.higher_is_better else min
    return choose(known, key=known.__getitem__) if known else ""


def _legend(variants: Sequence[str]) -> str:
    items = "".join(f"<li>{key_sample(i)} {_text(variant)}</li>" for i, variant in enumerate(variants))
    return f'<ul class="legend">{items}</ul><p class=note>Bands are one standard deviation over seeds.</p>'


def _curves(results: _Results, setting: str) -> str:
    names = dict.fromkeys(
        name for v in results.variants(setting) for r in results.of(setting, v) for name in r["curves"]
    )
    charts = []
    for name in names:
        share = "accuracy" in name
        series = [
            Series(variant, i, _averaged([r["curves"].get(name, []) for r in results.of(setting, variant)]))
            for i, variant in enumerate(results.comparison.variants)
            if results.of(setting, variant)
        ]
        number = (
            (lambda y: f"{y:.0%}" if abs(y * 100 - round(y * 100)) < 1e-9 else f"{y:.1%}") if share else "{:g}".format
        )
        chart = line_chart(f"{name}, {setting}", series, _x_label(results, setting), number)
        charts.append(f"<figure><figcaption>{_text(name)}</figcaption>{chart}</figure>")
    return f'<h3>{_text(setting)}</h3><div class="charts">{"".join(charts)}</div>' if charts else ""


def _x_label(results: _Results, setting: str) -> str:
    labels = {r["notes"].get("x_axis", "epoch") for v in results.variants(setting) for r in results.of(setting, v)}
    return " or ".join(sorted(labels))


def _averaged(curves: Iterable[Sequence[Sequence[float]]]) -> list[tuple[float, float, float, float]]:
    """x, mean, and mean less and plus a standard deviation, over the seeds that got as far as x."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            at.setdefault(x, []).append(y)
    points = []
    for x in sorted(at):
        mean, deviation, _ = spread(at[x])
        points.append((x, mean, mean - deviation, mean + deviation))
    return points


def _cost_table(results: _Results) -> str:
    rows = []
    for setting in results.comparison.settings:
        for variant in results.variants(setting):
            records = results.of(setting, variant)
            row = [_text(setting), _text(variant)]
            for name in COSTS:
                known = [r["costs"][name] for r in records if r["costs"].get(name) is not None]
                row.append(_cost(name, spread(known)) if known else "–")
            rows.append(row)
    note = (
        "FLOPs are those of a training step per token: model FLOPs count what the mathematics asks for, executed "
        "FLOPs what the programs compute (cheaper forms, padding and recomputation included). Time is that of training "
        "alone, compilation excluded; it depends on what else the machine was doing."
    )
    return _table(["setting", "variant", *COSTS.values()], rows, text_columns=2) + f"<p class=note>{note}</p>"


def _versions(records: list[dict[str, Any]]) -> str:
    seen: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in record["versions"].items():
            seen.setdefault(name, {})[version] = None
    commands = dict.fromkeys(record["command"] for record in records)
    lines = "".join(f"<li>{_text(name)} {_text(', '.join(found))}</li>" for name, found in seen.items())
    ran = "".join(f"<pre>{_text(command)}</pre>" for command in commands)
    return f"<p>Runs were started by</p>{ran}<ul class=versions>{lines}</ul>" if records else ""


def _all_runs(results: _Results) -> str:
    metrics = results.comparison.metrics
    notes = dict.fromkeys(name for r in results.records for name in r["notes"])
    head = ["setting", "variant", "seed", *(m.label for m in metrics), *(n.replace("_", " ") for n in notes)]
    rows = [
        [
            _text(r["setting"]),
            _text(r["variant"]),
            str(r["seed"]),
            *(_number(r["metrics"].get(m.name, math.nan), m) for m in metrics),
            *(_text(str(r["notes"].get(n, "–"))) for n in notes),
        ]
        for r in results.records
    ]
    return f"<details><summary>All {len(rows)} runs</summary>{_table(head, rows, text_columns=2)}</details>"


# ----------------------------------------------------------------------------------------------------------- pieces


def _text(text: str) -> str:
    return html.escape(text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text and the rest numbers; cells are HTML already, headings are not."""

    def cell(kind: str, index: int, content: str) -> str:
        return f"<{kind}{'' if index < text_columns else ' class=n'}>{content}</{kind}>"

    heads = "".join(cell("th", i, _text(name)) for i, name in enumerate(head))
    body = "".join("<tr>" + "".join(cell("td", i, c) for i, c in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float, metric: Metric) -> str:
    if math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if metric.percent else f"{value:.4f}"


def _value(found: Spread, metric: Metric) -> str:
    if not found.count:
        return "–"
    if found.count == 1:
        return _number(found.mean, metric)
    if metric.percent:
        return f"{100 * found.mean:.2f} ± {100 * found.deviation:.2f} %"
    return f"{found.mean:.4f} ± {found.deviation:.4f}"


def _difference(found: Spread, metric: Metric) -> str:
    scale, digits, unit = (100, 2, " points") if metric.percent else (1, 4, "")
    # A typographic minus, as wide as the plus.
    text = f"{scale * found.mean:+.{digits}f}".replace("-", "\N{MINUS SIGN}")
    return text + (f" ± {scale * found.deviation:.{digits}f}" if found.count > 1 else "") + unit


def _cost(name: str, found: Spread) -> str:
    if name == "wall_seconds":
        return f"{found.mean:,.0f} s" + (f" ± {found.deviation:,.0f}" if found.count > 1 else "")
    if name == "memory_bytes":
        return f"{found.mean / 2**20:,.1f} MiB"
    if name == "parameters":
        return f"{found.mean:,.0f}"
    return _with_prefix(found.mean)


def _with_prefix(value: float) -> str:
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g}"
