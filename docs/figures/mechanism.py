"""Draws `mechanism.svg`, the figure of the README: ``python docs/figures/mechanism.py``. Plain SVG, no dependencies."""

import pathlib

HEADS, PSEUDO, TOKENS = 3, 2, 4
COLOURS = ("#4269d0", "#efb118", "#3ca951")
INK, FAINT, SOFT = "#1f2933", "#9aa5b1", "#e4e7eb"


def blend(weights):
    """The colour of a mixture of heads."""
    channels = [round(sum(w * int(c[i : i + 2], 16) for w, c in zip(weights, COLOURS, strict=True))) for i in (1, 3, 5)]
    return "#" + "".join(f"{channel:02x}" for channel in channels)


MIXES = [
    [(0.75, 0.15, 0.10), (0.35, 0.55, 0.10)],
    [(0.10, 0.80, 0.10), (0.45, 0.30, 0.25)],
    [(0.10, 0.15, 0.75), (0.15, 0.45, 0.40)],
]


class Canvas:
    """A list of SVG elements."""

    def __init__(self, width, height):
        self.size, self.items = (width, height), []

    def box(self, x, y, width, height, fill, stroke="none", opacity=1.0):
        self.items.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{fill}" '
            f'stroke="{stroke}" opacity="{opacity}"/>'
        )

    def text(self, x, y, words, size=13, anchor="middle", colour=INK, weight="normal"):
        self.items.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
            f'font-weight="{weight}">{words}</text>'
        )

    def line(self, x1, y1, x2, y2, colour=FAINT, width=1.0, arrow=False):
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.items.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-width="{width}"{end}/>'
        )

    def svg(self):
        width, height = self.size
        marker = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, '
            f'sans-serif"><rect width="{width}" height="{height}" fill="white"/>{marker}{"".join(self.items)}</svg>\n'
        )


def draw():
    """Four panels: base heads, mixing, interleaving with virtual causal attention, collapse."""
    canvas = Canvas(960, 330)
    for x, title, note in (
        (92, "1  Base heads", "N heads of one token"),
        (300, "2  Mix", "P pseudo-heads a head"),
        (605, "3  Interleave and attend", "one head: T·P virtual tokens, causal by virtual index"),
        (880, "4  Collapse", "P outputs into one"),
    ):
        canvas.text(x, 30, title, 16, weight="bold")
        canvas.text(x, 50, note, 12, colour="#52606d")

    rows = [105 + 75 * head for head in range(HEADS)]
    for head, y in enumerate(rows):
        canvas.box(60, y - 16, 64, 32, COLOURS[head])
        canvas.text(92, y + 5, f"head {head}", 13, colour="white")
        for pseudo in range(PSEUDO):
            top = y - 27 + 29 * pseudo
            for source, weight in enumerate(MIXES[head][pseudo]):
                canvas.line(126, rows[source], 252, top + 12, COLOURS[source], 0.4 + 3 * weight)
            canvas.box(254, top, 92, 24, blend(MIXES[head][pseudo]))
            canvas.text(300, top + 17, f"head {head}, p = {pseudo}", 12, colour="white")

    # The attention square of head 0: rows are pseudo-queries, columns pseudo-keys, in natural (token, pseudo) order.
    cell, left, top = 24, 520, 108
    size = TOKENS * PSEUDO
    for i in range(size):
        colour = blend(MIXES[0][i % PSEUDO])
        canvas.box(left + i * cell + 2, top - 20, cell - 4, 14, colour)
        canvas.box(left - 24, top + i * cell + 5, 18, cell - 10, colour)
        for j in range(size):
            seen = j <= i
            canvas.box(left + j * cell, top + i * cell, cell - 1, cell - 1, colour if seen else SOFT, opacity=0.85)
    for token in range(TOKENS):
        middle = token * PSEUDO * cell + cell
        canvas.text(left + middle, top - 26, f"token {token}", 11)
        canvas.text(left - 30, top + middle + 4, f"token {token}", 11, anchor="end")
        if token:
            at = token * PSEUDO * cell
            canvas.line(left, top + at - 0.5, left + size * cell, top + at - 0.5, "white", 2)
            canvas.line(left + at - 0.5, top, left + at - 0.5, top + size * cell, "white", 2)
    canvas.text(left + size * cell / 2, top + size * cell + 20, "P² patterns in every block of two tokens", 12)
    canvas.line(360, rows[0], 448, rows[0], INK, 1.5, arrow=True)

    for pseudo in range(PSEUDO):
        y = 150 + 50 * pseudo
        canvas.box(800, y, 54, 26, blend(MIXES[0][pseudo]))
        canvas.text(827, y + 18, f"p = {pseudo}", 12, colour="white")
        canvas.line(856, y + 13, 900, 188, INK, 1.2, arrow=True)
    canvas.box(903, 173, 48, 30, COLOURS[0])
    canvas.text(927, 193, "head 0", 12, colour="white")
    canvas.line(left + size * cell + 12, 188, 792, 188, INK, 1.5, arrow=True)
    return canvas.svg()


if __name__ == "__main__":
    pathlib.Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
