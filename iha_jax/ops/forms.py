"""Which rearrangement and which tiles serve a problem best: a count of the work decides (`paper.md` section 7)."""

import dataclasses
import itertools

from iha_jax.ops import tuning
from iha_jax.ops.arguments import Arguments
from iha_jax.ops.block_sizes import MAX_NARROW_BYTES, NarrowPlan, SlabPlan, band_of, narrow_plan, slab_plan
from iha_jax.ops.tiles import Form
from iha_jax.ops.types import Causal

OUTPUT_COST = 16
"""Writing and reading back one element of a product costs about as much as 16 more terms of its sum (CPU, float32:
0.4 ns an element against 80 GFLOP/s). It keeps contractions over a few heads from looking free."""

SMALL_MIXING_COST = 1.4
"""Mixing scores is done by products with a few rows or columns: per unit of `cost` they took 1.1 to 1.5 times as long
as the products of pseudo-heads (CPU, float32, P of 2 to 20)."""

MAX_BASE_SCORE_BYTES = 2 * MAX_NARROW_BYTES
"""Scores from base products keep all heads together; beyond this the grouped pseudo-head form is taken."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything static that decides how an attention is computed.

    ``heads`` and ``kv_heads`` are those computed; a shard computes a part of the heads out of all ``sources``.
    """

    batch: int
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    sources: int
    kv_sources: int
    head_dim: int
    value_dim: int
    pseudo: int
    causal: Causal
    window: int | None
    rotates_pseudo_heads: bool
    across_heads: bool
    aligned: bool

    @classmethod
    def of(cls, args: Arguments) -> "Problem":
        """The problem that validated arguments pose."""
        return cls(
            batch=args.query.shape[0],
            query_len=args.query.shape[1],
            key_len=args.key.shape[1],
            heads=args.mixing.num_heads,
            kv_heads=args.mixing.num_kv_heads,
            sources=args.query.shape[2],
            kv_sources=args.key.shape[2],
            head_dim=args.head_dim,
            value_dim=args.value.shape[3],
            pseudo=args.num_pseudo_heads,
            causal=args.causal,
            window=args.window,
            rotates_pseudo_heads=(
                args.rope is not None and args.rope.positions == "virtual" and args.num_pseudo_heads > 1
            ),
            across_heads=args.mixing.collapse.ndim == 3,
            aligned=args.aligned,
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """One contraction of the forward pass, counted over the whole problem.

    Attributes:
      name: what it computes.
      outputs: elements of its result.
      terms: length of its sums.
      recomputed: whether the backward pass needs its result again.
      gradients: products that the backward pass makes of it, each of its size: one per operand.
      penalty: factor on its cost for the shape of its operands.
    """

    name: str
    outputs: int
    terms: int
    recomputed: bool = True
    gradients: int = 2
    penalty: float = 1.0

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""
        return 2 * self.outputs * self.terms

    @property
    def training_flops(self) -> int:
        """The same of forward and backward pass, recomputation included."""
        return self.flops * (1 + self.recomputed + self.gradients)


def choose(problem: Problem) -> tuple[NarrowPlan | SlabPlan, Form]:
    """The cheapest plan and form by `cost`."""
    candidates = []
    for scores, values in itertools.product(("pseudo", "base"), ("mixed", "base")):
        form = Form(scores, values)
        plan = plan_for(problem, form)
        if plan is not None:
            candidates.append((sum(cost(p) for p in products(problem, plan, form)), len(candidates), plan, form))
    _, _, plan, form = min(candidates, key=lambda c: c[:2])
    return plan, form


def cost(product: Product) -> float:
    """Work of a product in multiply-adds, the traffic of its result included."""
    return product.penalty * product.outputs * (product.terms + OUTPUT_COST)


def plan_for(problem: Problem, form: Form) -> NarrowPlan | SlabPlan | None:
    """The tiles a form would use, or None where the form does not apply."""
    if form.scores == "base" and problem.rotates_pseudo_heads:
        return None
    sizes = tuning.sizes_for(problem)
    band = band_of(problem.causal, problem.window) if problem.aligned else None
    if band is not None and band.left + band.right >= problem.key_len:
        band = None  # the window reaches everything: causality alone limits the work
    if band is not None:
        plan = narrow_plan(problem.batch, problem.query_len, problem.heads, problem.pseudo, band, sizes)
        if plan is not None:
            return plan
    base_scores = form.scores == "base"
    plan = slab_plan(
        problem.batch,
        problem.query_len,
        problem.key_len,
        problem.heads,
        problem.kv_heads,
        problem.pseudo,
        problem.head_dim + problem.value_dim,
        causal_by_index=problem.aligned and problem.causal is not None,
        band=band,
        all_heads=base_scores,
        sizes=sizes,
    )
    if base_scores:
        keys = max(slab.keys for slab in plan.slabs)
        block = 4 * problem.batch * problem.heads * problem.pseudo**2 * plan.tile * keys
        if block > MAX_BASE_SCORE_BYTES:
            return None
    return plan


def products(problem: Problem, plan: NarrowPlan | SlabPlan, form: Form) -> list[Product]:
    """Every contraction that the forward pass executes, padding and masked pairs included."""
    b, n, k, p = problem.batch, problem.heads, problem.kv_heads, problem.pseudo
    m, l = problem.sources, problem.kv_sources  # noqa: E741
    h, d = problem.head_dim, problem.value_dim
    if isinstance(plan, NarrowPlan):
        queries = mixed_queries = b * plan.padded
        mixed_keys = b * plan.steps * (plan.group + plan.left + plan.right) * plan.tile
        pairs = queries * plan.key_tokens
        groups = 1
    else:
        groups = k // plan.kv_heads
        repeats = plan.repeats or 1
        padded = [-(-slab.queries // plan.tile) * plan.tile for slab in plan.slabs]
        queries = b * repeats * sum(padded)
        mixed_queries = b * repeats * sum(slab.queries for slab in plan.slabs)
        mixed_keys = b * repeats * max(slab.keys for slab in plan.slabs)
        pairs = b * repeats * sum(q * slab.keys for q, slab in zip(padded, plan.slabs, strict=True))

    result = []
    if form.scores == "pseudo":
        result += [
            Product("mix queries", mixed_queries * n * p * h, m),
            Product("mix keys", mixed_keys * k * p * h, l),
            Product("scores", pairs * n * p * p, h),
        ]
    else:
        result += [
            Product("base scores", pairs * m * l, h),
            Product("mix scores by query", pairs * n * p * l, m, penalty=SMALL_MIXING_COST),
            Product("mix scores by key", pairs * n * p * p, l, penalty=SMALL_MIXING_COST),
        ]
    result.append(Product("sums of exponentials", queries * n * p, pairs // queries * p, recomputed=False, gradients=0))
    if form.values == "mixed":
        result.append(Product("mix values", mixed_keys * k * p * d, l))
    if not problem.across_heads:
        # A weighted sum of P rows; its gradient with respect to the probabilities is fused into the softmax's.
        result.append(Product("collapse", pairs * n * p, p, gradients=1))
        if form.values == "mixed":
            result.append(Product("values", queries * n * d, pairs // queries * p, recomputed=False))
        else:
            result += [
                Product("mix weights", pairs * n * l, p),
                Product("values", queries * n * d, pairs // queries * l, recomputed=False),
            ]
    elif form.values == "mixed":
        result += [
            Product("pseudo outputs", queries * n * p * d, pairs // queries * p),
            Product("collapse", queries * m * d * groups, n // groups * p, recomputed=False),
        ]
    else:
        result += [
            Product("collapse", pairs * m * k * p, n // k * p),
            Product("mix weights", pairs * m * l * groups, k // groups * p),
            Product("values", queries * m * d * groups, pairs // queries * l, recomputed=False),
        ]
    return result
