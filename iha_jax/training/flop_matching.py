"""Makes a model cost what another one costs: windows, the schedule of layers, and the feed-forward width.

    python -m iha_jax.training.flop_matching configs/compare/global_mha.py configs/compare/iha.py
    python -m iha_jax.training.flop_matching configs/tiny_mha.py configs/tiny.py --adjust window,schedule,width

prints the account of both, kind of layer by kind of layer, in both counts of `iha_jax.training.flops`, and what would
have to change for the second to match the first.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from iha_jax.models.config import AttentionKind, ModelConfig
from iha_jax.training.cli import load
from iha_jax.training.flops import Account, ModelFlops, Pairs, account

Adjustment = Literal["window", "schedule", "width"]

# Feed-forward widths are kept multiples of this: odd ones are slow on matrix units.
_WIDTH_STEP = 8


@dataclasses.dataclass(frozen=True)
class Match:
    """A variant and how its training FLOPs per token compare with the reference's.

    Attributes:
      config: the variant, as it has to be.
      ratio: its model FLOPs (visible pairs) over the reference's.
      full_ratio: likewise by the full count.
      changes: what was changed, as ``"iha.window: 16 -> 13"``.
    """

    config: ModelConfig
    ratio: float
    full_ratio: float
    changes: tuple[str, ...]


def match_flops(
    reference: ModelConfig,
    variant: ModelConfig,
    *,
    adjust: Sequence[Adjustment] = ("window", "schedule"),
    tolerance: float = 0.02,
    tokens: int | None = None,
    count: Pairs = "visible",
) -> Match:
    """Changes a variant as little as needed to cost as many FLOPs per token as a reference.

    Tried in this order, and the first that is within the tolerance is taken: the variant as it is; its windows (those
    of the kinds in its pattern that have one); its schedule, that is the number of other layers to one global
    ``"mha"`` layer, nearest first, with windows fitted if they may be; its feed-forward width, nothing else changed.
    Each is moved to where the FLOPs are closest, not just into the tolerance. A window of plain attention fitted to
    global attention is the whole length: leave ``"window"`` out where the window is the point.

    Args:
      reference: the model to match.
      variant: the model to change.
      adjust: what may change.
      tolerance: of the ratio of FLOPs, 0.02 for 2%.
      tokens: T, default the reference's context length.
      count: of pairs, in which to match.

    Raises:
      ValueError: for an unknown adjustment; if nothing allowed comes within the tolerance; what comes closest is named.
    """
    unknown = set(adjust) - set(get_args(Adjustment))
    if unknown:
        raise ValueError(f"adjust must be of {get_args(Adjustment)}, got {sorted(unknown)}.")
    tokens = reference.max_length if tokens is None else tokens
    variant = variant.resolve()
    accounts = account(reference, tokens=tokens)
    wanted = _cost(accounts, count)

    def ratio(config: ModelConfig) -> float:
        return _cost(account(config, tokens=tokens), count) / wanted

    best = variant
    for candidate in _candidates(variant, adjust, tokens, ratio):
        if abs(ratio(candidate) - 1) < abs(ratio(best) - 1):
            best = candidate
        if abs(ratio(best) - 1) <= tolerance:
            break
    found = account(best, tokens=tokens)
    if abs(_cost(found, count) / wanted - 1) > tolerance:
        raise ValueError(
            f"adjusting {', '.join(adjust) or 'nothing'} does not bring the variant within {tolerance:.1%} of the "
            f"reference's {wanted / 1e6:.2f} MFLOP a token: the closest is {_cost(found, count) / 1e6:.2f} "
            f"({', '.join(_changes(variant, best)) or 'as it is'}). Allow more adjustments of {get_args(Adjustment)}."
        )
    return Match(
        config=best,
        ratio=_cost(found, "visible") / _cost(accounts, "visible"),
        full_ratio=_cost(found, "full") / _cost(accounts, "full"),
        changes=_changes(variant, best),
    )


def table(config: ModelConfig, tokens: int | None = None) -> str:
    """The account of a model, a line for each kind of layer: forward MFLOP a token of one layer, by part.

    Args:
      config: the model's.
      tokens: T, default the configured context length.
    """
    counted = account(config, tokens=tokens)
    config, tokens = config.resolve(), counted.tokens
    parts = [field.name for field in dataclasses.fields(ModelFlops)]
    header = ["kind", "layers", "window", "parameters", *parts, "layer", "full count"]
    rows = [header]
    for entry in counted.layers:
        numbers = [getattr(entry.model, part) for part in parts] + [entry.model.total, entry.full.total]
        window = config.window(entry.kind)
        start = [entry.kind, str(entry.layers), "all" if window is None else str(window), f"{entry.parameters:,}"]
        rows.append(start + [f"{number / tokens / 1e6:.3f}" for number in numbers])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        [
            *lines,
            f"logits {counted.logits / tokens / 1e6:.3f} MFLOP a token; {counted.parameters:,} parameters in all",
            f"training, MFLOP a token: {counted.model_training_per_token / 1e6:.3f} by visible pairs, "
            f"{counted.full_training_per_token / 1e6:.3f} by the full count",
        ]
    )


def _candidates(variant: ModelConfig, adjust: Sequence[Adjustment], tokens: int, ratio) -> Iterable[ModelConfig]:
    yield variant
    if "window" in adjust:
        yield from _fitted_windows(variant, tokens, ratio)
    if "schedule" in adjust:
        for scheduled in _schedules(variant):
            yield scheduled
            if "window" in adjust:
                yield from _fitted_windows(scheduled, tokens, ratio)
    if "width" in adjust:
        step = _WIDTH_STEP

        def with_width(units: int) -> ModelConfig:
            return dataclasses.replace(variant, mlp_dim=units * step)

        # FLOPs are linear in the width: two points tell where they match.
        one, two = ratio(with_width(1)), ratio(with_width(2))
        yield with_width(max(1, round(1 + (1 - one) / (two - one))))


def _fitted_windows(config: ModelConfig, tokens: int, ratio) -> Iterable[ModelConfig]:
    """The window whose FLOPs are closest, for every kind of layer in use that has one."""
    for kind in dict.fromkeys(config.layer_kinds):
        if config.window(kind) is None:
            continue

        def fitted(window: int, kind: AttentionKind = kind) -> ModelConfig:
            options = dataclasses.replace(getattr(config, kind), window=window)
            return dataclasses.replace(config, **{kind: options})

        low, high = 1, tokens
        while high - low > 1:  # FLOPs grow with the window
            middle = (low + high) // 2
            low, high = (middle, high) if ratio(fitted(middle)) <= 1 else (low, middle)
        yield min((fitted(low), fitted(high)), key=lambda candidate: abs(ratio(candidate) - 1))


def _schedules(config: ModelConfig) -> Iterable[ModelConfig]:
    """Other numbers of the pattern's first kind to one global layer, nearest first."""
    kind = config.pattern[0]
    if kind == "mha":
        return
    now = config.pattern.count(kind)
    for count in sorted(range(1, config.num_layers + 1), key=lambda count: abs(count - now)):
        pattern = (kind,) * count + (("mha",) if count < config.num_layers else ())
        if pattern != config.pattern:
            yield dataclasses.replace(config, pattern=pattern)


def _changes(before: ModelConfig, after: ModelConfig) -> tuple[str, ...]:
    changes = []
    for kind in dict.fromkeys(after.layer_kinds):
        if after.window(kind) != before.window(kind):
            changes.append(f"{kind}.window: {before.window(kind)} -> {after.window(kind)}")
    if after.pattern != before.pattern:
        changes.append(f"pattern: {' '.join(before.pattern)} -> {' '.join(after.pattern)}")
    if after.hidden_dim != before.hidden_dim:
        changes.append(f"mlp_dim: {before.hidden_dim} -> {after.hidden_dim}")
    return tuple(changes)


def _cost(counted: Account, count: Pairs) -> float:
    return counted.model_training_per_token if count == "visible" else counted.full_training_per_token


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m iha_jax.training.flop_matching", description=main.__doc__)
    parser.add_argument("reference", help="config file of the model to match")
    parser.add_argument("variant", help="config file of the model to change")
    parser.add_argument("--adjust", default="window,schedule", help="what may change: window, schedule, width")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--count", choices=get_args(Pairs), default="visible")
    options = parser.parse_args(arguments)
    reference, variant = load(options.reference), load(options.variant)
    tokens = reference.data.sequence_length
    for name, config in ((options.reference, reference), (options.variant, variant)):
        print(f"{name}, T = {tokens}, MFLOP a token\n{table(config.model, tokens)}\n")
    try:
        match = match_flops(
            reference.model,
            variant.model,
            adjust=[name for name in options.adjust.split(",") if name],
            tolerance=options.tolerance,
            tokens=tokens,
            count=options.count,
        )
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    if match.changes:
        print(f"to match: {'; '.join(match.changes)}\n{table(match.config, tokens)}\n")
    print(f"variant / reference: {match.ratio:.4f} by visible pairs, {match.full_ratio:.4f} by the full count")


if __name__ == "__main__":
    main()
