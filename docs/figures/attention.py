"""Draws the figures of `docs/how_it_works.md` from the library's own rules: ``python docs/figures/attention.py``."""

import pathlib

import jax.numpy as jnp
import numpy as np
from mechanism import COLOURS, Canvas

from iha_jax import Rope
from iha_jax.ops.masks import visible
from iha_jax.ops.rope import apply_rope, rope_tables

TOKENS, PSEUDO = 4, 2
SIZE, CELL = TOKENS * PSEUDO, 24
UNSEEN = "#e4e7eb"


def virtual_tokens():
    """Position and pseudo-head of every virtual token."""
    return jnp.repeat(jnp.arange(TOKENS), PSEUDO), jnp.tile(jnp.arange(PSEUDO), TOKENS)


def square(canvas, left, top, title, note, colours, tokens=TOKENS, pseudo=PSEUDO):
    """A square of queries (rows) and keys (columns); lines between tokens."""
    side = tokens * pseudo * CELL
    canvas.text(left + side / 2, top - 50, title, 16, weight="bold")
    canvas.text(left + side / 2, top - 30, note, 13, colour="#52606d")
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            canvas.box(left + column * CELL, top + row * CELL, CELL - 1, CELL - 1, colour)
    for token in range(tokens):
        at = token * pseudo * CELL
        middle = at + pseudo * CELL / 2
        canvas.text(left + middle, top - 8, f"{token}", 13)
        canvas.text(left - 10, top + middle + 4, f"{token}", 13, anchor="end")
        if token:
            canvas.line(left, top + at - 0.5, left + side, top + at - 0.5, "white", 3)
            canvas.line(left + at - 0.5, top, left + at - 0.5, top + side, "white", 3)


def visibility():
    """Who sees whom, under both causalities, with and without a window."""
    canvas = Canvas(560, 580)
    position, pseudo = virtual_tokens()
    cases = (
        ("virtual", None, 'causal="virtual"', "the paper's"),
        ("virtual", 2, 'causal="virtual", window=2', "always 2 · P keys"),
        ("token", None, 'causal="token"', "whole tokens"),
        ("token", 2, 'causal="token", window=2', "this token and the one before"),
    )
    for i, (causal, window, title, note) in enumerate(cases):
        seen = np.asarray(
            visible(
                position[:, None],
                pseudo[:, None],
                position[None],
                pseudo[None],
                num_pseudo_heads=PSEUDO,
                causal=causal,
                window=window,
            )
        )
        colours = [[COLOURS[0] if cell else UNSEEN for cell in row] for row in seen]
        square(canvas, 50 + 280 * (i % 2), 75 + 290 * (i // 2), title, note, colours)
    return canvas.svg()


def shade(value):
    """From white (0) to blue (1)."""
    ends = ((255, 255, 255), (31, 71, 158))
    return "#" + "".join(f"{round(a + (b - a) * value):02x}" for a, b in zip(*ends, strict=True))


def positions():
    """Scores of equal queries and keys: what the rotation alone tells two virtual tokens apart."""
    canvas = Canvas(560, 300)
    position, pseudo = virtual_tokens()
    vector = jnp.ones((SIZE, 16))
    for i, (kind, note) in enumerate((("virtual", "P² distances in a block"), ("token", "one distance in a block"))):
        rope = Rope(theta=100.0, positions=kind)
        index = position * PSEUDO + pseudo if kind == "virtual" else position
        rotated = np.asarray(apply_rope(vector, *rope_tables(index, rope, 16, PSEUDO, jnp.float32)))
        scores = rotated @ rotated.T
        scores = (scores - scores.min()) / (scores.max() - scores.min())
        square(
            canvas,
            50 + 280 * i,
            75,
            f'Rope(positions="{kind}")',
            note,
            [[shade(cell) for cell in row] for row in scores],
        )
    return canvas.svg()


def collapses():
    """Which pseudo-outputs (columns: head, then pseudo-head) an output head (rows) may read."""
    heads, pseudo = 3, 2
    canvas = Canvas(560, 240)
    for i, (name, note) in enumerate((("per_head", "R is [N, P]"), ("across_heads", "R is [N, N, P]"))):
        left, top, side = 60 + 270 * i, 80, 30
        canvas.text(left + heads * pseudo * side / 2, 28, f'collapse="{name}"', 16, weight="bold")
        canvas.text(left + heads * pseudo * side / 2, 48, note, 13, colour="#52606d")
        for row in range(heads):
            canvas.text(left - 8, top + row * 44 + 22, f"head {row}", 13, anchor="end")
            for source in range(heads):
                for p in range(pseudo):
                    read = source == row or name == "across_heads"
                    x = left + (source * pseudo + p) * side
                    canvas.box(x, top + row * 44, side - 2, 34, COLOURS[source] if read else UNSEEN)
        for source in range(heads):
            canvas.text(left + (source + 0.5) * pseudo * side, top + 3 * 44 + 14, f"head {source}", 13)
    return canvas.svg()


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent
    for draw in (visibility, positions, collapses):
        (folder / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
