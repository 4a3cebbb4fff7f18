"""Every implementation against the float64 oracle, over random cases of every option of the contract."""

import functools

import chex
import jax
import numpy as np
import pytest

from tests import oracle
from tests.ops import cases

FAST = 20
ALL = 140
EVERY_DAY_PALLAS = (0, 3, 4, 6, 7, 9, 15, 17)
DRAWS = 3  # of arrays for each program; two are enough every day

# float32: the figures the project promises. bfloat16: pseudo-heads are rounded to 8 bits before the logits and once
# more at the end, which moves single elements by some per cent and the mean by far less.
OUTPUT_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-2}
MEAN_TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3}
DERIVATIVE_TOLERANCE = {"float32": 1e-4, "bfloat16": 8e-2}


class OracleSuite:
    """Subclassed once for each implementation, which says what it cannot do."""

    implementation: str

    def unsupported(self, spec: cases.Spec) -> str | None:
        """Why the implementation cannot serve a case, if it cannot; it must then raise NotImplementedError."""
        del spec
        return None

    def mean_limit(self, spec, arrays, integers, cotangent, expected) -> float:
        """The mean error allowed of an output."""
        del arrays, integers, cotangent, expected
        return MEAN_TOLERANCE[spec.dtype]

    @pytest.mark.parametrize(
        "number", [*range(FAST), *(pytest.param(i, marks=pytest.mark.slow) for i in range(FAST, ALL))]
    )
    def test_values_and_derivatives(self, number):
        spec = cases.specs(ALL)[number]
        if self.unsupported(spec):
            with pytest.raises(NotImplementedError):
                cases.call(spec, self.implementation, *cases.draw(spec, 0))
            return
        run = cases.compiled(spec, self.implementation)
        found = []
        for seed in range(DRAWS - (number < FAST)):
            found.append(self.check(spec, run, seed=1000 * number + seed))
        error, limit = np.mean(found, axis=0)
        assert error <= limit, f"output off by {error:.2e} on average, above {limit:.2e}: {spec}"

    def check(self, spec, run, seed):
        """Checks a draw; returns the mean error of its outputs and the limit of that, for all draws together."""
        arrays, integers = cases.draw(spec, seed)
        rng = np.random.default_rng(seed + 1)
        cotangent = rng.normal(size=(spec.B, spec.T, spec.N, spec.Hv))
        # Of unit length, so that the derivatives are of the order of one whatever the case's size.
        cotangent = (cotangent / np.linalg.norm(cotangent)).astype(np.float32)
        out, gradients = run(arrays, integers, cotangent)
        expected = cases.expected(spec, arrays, integers)
        chex.assert_shape(out, expected.shape)
        error = np.abs(out - expected) / np.maximum(1, np.abs(expected))
        where = f"{spec}, seed {seed}"
        assert error.max() <= OUTPUT_TOLERANCE[spec.dtype], f"output off by {error.max():.2e}: {where}"
        found = error.mean(), self.mean_limit(spec, arrays, integers, cotangent, expected)

        exact = [np.asarray(x, np.float64) for x in arrays]
        function = lambda *inputs: (cases.expected(spec, inputs, integers) * cotangent).sum()  # noqa: E731
        for i, (name, gradient) in enumerate(zip(cases.INPUTS, gradients, strict=True)):
            chex.assert_shape(gradient, exact[i].shape)
            direction = rng.normal(size=exact[i].shape)
            derivative = oracle.directional_derivative(function, exact, i, direction)
            error = abs((gradient * direction).sum() - derivative) / max(1, abs(derivative))
            assert error <= DERIVATIVE_TOLERANCE[spec.dtype], f"derivative of {name} off by {error:.2e}: {where}"
        return found


class TestReference(OracleSuite):
    implementation = "reference"

    def test_any_order_of_tokens(self):
        """Positions in no order and segments in pieces: the reference does not rely on index order."""
        spec = cases.Spec(
            *(2, 11, 13, 4, 2, 16),
            Hv=8,
            P=3,
            layout="packed_cross",
            causal="virtual",
            window=4,
            rope=cases.Rope(),
            scale=None,
            logits_soft_cap=None,
            across_heads=True,
            dtype="float32",
        )
        arrays, _ = cases.draw(spec, 0)
        rng = np.random.default_rng(1)
        integers = {}
        for side, length in (("query", spec.T), ("key", spec.S)):
            rows = [rng.permutation(length) for _ in range(spec.B)]
            integers[f"{side}_positions"] = np.stack(rows).astype(np.int32)
            integers[f"{side}_segment_ids"] = rng.integers(0, 3, (spec.B, length)).astype(np.int32)
        operation = jax.jit(functools.partial(cases.call, spec, self.implementation), compiler_options=cases.QUICK)
        out = operation(arrays, integers)
        expected = cases.expected(spec, arrays, integers)
        assert (np.abs(expected).max(axis=(2, 3)) == 0).any(), "some query should see nothing"
        chex.assert_trees_all_close(np.asarray(out, np.float64), expected, atol=2e-5)


class TestBlockwise(OracleSuite):
    implementation = "blockwise"


class TestPallas(OracleSuite):
    """The fused kernels, interpreted. Compiling an interpreted kernel takes seconds: fewer cases every day."""

    implementation = "pallas"

    def mean_limit(self, spec, arrays, integers, cotangent, expected):
        if spec.dtype == "float32":
            return MEAN_TOLERANCE["float32"]
        # The matrix unit takes mixing weights and probabilities of bfloat16 heads in bfloat16 too. That may cost as
        # much again as a computation that materialises pseudo-heads in bfloat16 loses by rounding them.
        materialised, _ = cases.compiled(spec, "reference")(arrays, integers, cotangent)
        return 2 * (np.abs(materialised - expected) / np.maximum(1, np.abs(expected))).mean()

    @pytest.mark.parametrize(
        "number", [pytest.param(i, marks=[] if i in EVERY_DAY_PALLAS else pytest.mark.slow) for i in range(ALL)]
    )
    def test_values_and_derivatives(self, number):
        super().test_values_and_derivatives(number)


def test_the_fast_cases_cover_every_option():
    fast = cases.specs(ALL)[:FAST]
    assert {s.layout for s in fast} == {*cases.SELF_LAYOUTS, *cases.CROSS_LAYOUTS}
    assert {s.causal for s in fast} == {"virtual", "token", None}
    assert {s.P for s in fast} == {1, 2, 3, 4, 8, 20}
    assert {s.dtype for s in fast} == {"float32", "bfloat16"}
    assert {s.across_heads for s in fast} == {True, False}
    assert {16, 64, 80, 96, 128} <= {s.H for s in fast}
    assert any(s.K < s.N for s in fast)
    assert any(s.Hv != s.H for s in fast)
    assert {type(s.rope.scaling).__name__ for s in fast if s.rope} >= {"LinearScaling", "Llama3Scaling", "YarnScaling"}
