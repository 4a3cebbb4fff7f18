"""Draws the figures of `docs/theory.md`: ``python docs/figures/theory.py``."""

import pathlib

from charts import Chart, Line, figure

from iha_jax.theory import CountPermutationMatch3, heads_needed, polynomial_filter_parameters

KINDS = ((False, "multi-head", "#efb118"), (True, "interleaved", "#4269d0"))


def lines(xs, value):
    """One line for each kind of attention."""
    return tuple(Line(name, xs, [value(x, kind) for x in xs], colour) for kind, name, colour in KINDS)


def filters():
    """Filter banks: heads and parameters against k, parameters against n."""
    powers, lengths = range(1, 101), range(10, 201, 5)
    return figure(
        (
            Chart("Heads", "k, powers of A", lines(powers, heads_needed)),
            Chart(
                "Parameters (n = 50, d = 3)",
                "k, powers of A",
                lines(powers, lambda k, kind: polynomial_filter_parameters(50, 3, k, interleaved=kind)),
            ),
            Chart(
                "Parameters (k = 40, d = 3)",
                "n, tokens",
                lines(lengths, lambda n, kind: polynomial_filter_parameters(n, 3, 40, interleaved=kind)),
            ),
        )
    )


def counts():
    """CPM-3: heads and attention parameters against n."""
    lengths = range(1, 41)

    def parameters(n, kind):
        return CountPermutationMatch3.build(n, 10, 4, interleaved=kind).num_attention_parameters

    return figure(
        (
            Chart("Heads", "n, tokens", lines(lengths, heads_needed)),
            Chart("Parameters of the attention layer", "n, tokens", lines(lengths, parameters)),
        )
    )


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent
    (folder / "theory_filters.svg").write_text(filters(), encoding="utf-8")
    (folder / "theory_cpm3.svg").write_text(counts(), encoding="utf-8")
