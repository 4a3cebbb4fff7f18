"""What the operation must do whatever its implementation, each stated as a property of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iha_jax import HeadMixing, Rope, interleaved_head_attention
from tests import oracle
from tests.ops.cases import IMPLEMENTATIONS, QUICK

B, T, N, K, H, P = 2, 13, 4, 2, 8, 3

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

TOKEN_ROPE = Rope(theta=10_000.0, positions="token")
# Every way of being causal: (causal, window).
CAUSAL_MODES = [("virtual", None), ("virtual", 4), ("token", None), ("token", 4)]


STATIC = ("causal", "window", "rope", "logits_soft_cap", "implementation")


operation = functools.partial(interleaved_head_attention, precision="highest")
attend = jax.jit(operation, static_argnames=STATIC, compiler_options=QUICK)


def inputs(seed=0, *, t=T, n=N, k=K, h=H, across_heads=False, p=P):
    """Random query, key, value and mixing tensors."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    mixing = HeadMixing(
        query=draw(n, n, p) / n**0.5,
        key=draw(k, k, p) / k**0.5,
        value=draw(k, k, p) / k**0.5,
        collapse=draw(n, n, p) / n**0.5 if across_heads else draw(n, p),
    )
    return draw(B, t, n, h), draw(B, t, k, h), draw(B, t, k, h), mixing


def mha(query, key, value, causal=True, window=None, theta=None):
    """Multi-head attention by jax itself, with RoPE from NumPy."""
    if theta is not None:
        angle = np.arange(query.shape[1])[:, None, None] * theta ** (-np.arange(0, H, 2) / H)
        turn = np.exp(1j * angle)

        def rotate(x):
            z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
            return np.concatenate([z.real, z.imag], -1).astype(np.float32)

        query, key = rotate(query), rotate(key)
    # A mask of our own: at jax 0.7 `local_window_size` is wrong without causality.
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    seen = (distance >= 0) | (not causal)
    if window is not None:
        seen &= np.abs(distance) < window
    return jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])


@pytest.mark.parametrize("causal", ["virtual", "token", None])
@pytest.mark.parametrize(("window", "rope"), [(None, None), (4, TOKEN_ROPE), (1, Rope(theta=10_000.0))])
def test_one_pseudo_head_of_copies_is_multi_head_attention(implementation, causal, window, rope):
    query, key, value, _ = inputs()
    mixing = HeadMixing.copy(N, 1, K, select="mean")
    out = attend(query, key, value, mixing, causal=causal, window=window, rope=rope, implementation=implementation)
    expected = mha(query, key, value, causal is not None, window, rope and rope.theta)
    chex.assert_trees_all_close(out, expected, atol=1e-5)


@pytest.mark.parametrize(("collapse", "window"), [("per_head", None), ("per_head", 4), ("across_heads", 4)])
def test_token_causality_with_any_collapse_summing_to_one_is_multi_head_attention(implementation, collapse, window):
    query, key, value, _ = inputs()
    weights = np.random.default_rng(1).normal(size=(N, P)).astype(np.float32)
    weights += (1 - weights.sum(1, keepdims=True)) / P
    mixing = HeadMixing.copy(N, P, K, collapse)
    r = weights if collapse == "per_head" else np.eye(N, dtype=np.float32)[:, :, None] * weights[:, None]
    mixing = HeadMixing(mixing.query, mixing.key, mixing.value, r)
    options = {"window": window, "rope": TOKEN_ROPE, "implementation": implementation}
    out = attend(query, key, value, mixing, causal="token", **options)
    chex.assert_trees_all_close(out, mha(query, key, value, True, window, TOKEN_ROPE.theta), atol=1e-5)


@pytest.mark.parametrize(("collapse", "window"), [("per_head", None), ("per_head", 4), ("across_heads", 4)])
def test_virtual_causality_with_the_last_pseudo_head_is_multi_head_attention(implementation, collapse, window):
    query, key, value, _ = inputs()
    options = {"causal": "virtual", "window": window, "rope": TOKEN_ROPE, "implementation": implementation}
    expected = mha(query, key, value, True, window, TOKEN_ROPE.theta)
    out = attend(query, key, value, HeadMixing.copy(N, P, K, collapse), **options)
    chex.assert_trees_all_close(out, expected, atol=1e-5)
    # The first pseudo-head sees only one of the P copies of its own token: no multi-head attention.
    other = attend(query, key, value, HeadMixing.copy(N, P, K, collapse, select="first"), **options)
    assert np.abs(other - expected).max() > 0.05


@pytest.mark.parametrize(("causal", "window"), CAUSAL_MODES)
def test_a_token_changes_nothing_before_it(implementation, causal, window):
    query, key, value, mixing = inputs(across_heads=True)
    call = functools.partial(attend, causal=causal, window=window, rope=Rope(), implementation=implementation)
    before = np.asarray(call(query, key, value, mixing))
    for t in (0, 1, 6, T - 1):
        poked = [x.copy() for x in (query, key, value)]
        for x in poked:
            x[:, t] += 10
        after = np.asarray(call(*poked, mixing))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).all()


@pytest.mark.parametrize(("causal", "window"), [("virtual", 4), ("token", 4), (None, 4)])
def test_a_key_reaches_exactly_as_far_as_the_window(implementation, causal, window):
    query, key, value, mixing = inputs()
    call = functools.partial(attend, causal=causal, window=window, rope=Rope(), implementation=implementation)
    before, t = np.asarray(call(query, key, value, mixing)), 5
    key, value = key.copy(), value.copy()
    key[:, t] += 1
    value[:, t] += 1
    changed = (np.asarray(call(query, key, value, mixing)) != before).any(axis=(0, 2, 3))
    # Under virtual causality pseudo-queries p < P-1 reach into token t - W.
    last = t + window if causal == "virtual" else t + window - 1
    first = t - window + 1 if causal is None else t
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(first, last + 1))


def test_exactly_the_windows_virtual_keys_are_visible(implementation):
    """Zero queries weigh all visible keys alike, and one-hot values say which tokens those were."""
    window, heads = 3, P
    query = np.zeros((1, T, heads, H), np.float32)
    key = np.random.default_rng(0).normal(size=(1, T, heads, H)).astype(np.float32)
    value = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (1, T, heads, T))
    copy = HeadMixing.copy(heads, P)
    mixing = HeadMixing(copy.query, copy.key, copy.value, np.eye(P, dtype=np.float32))  # head h shows pseudo-head h
    shares = lambda causal: np.asarray(  # noqa: E731
        attend(query, key, value, mixing, causal=causal, window=window, implementation=implementation)
    )[0]
    virtual, token, neither = shares("virtual"), shares("token"), shares(None)
    for t in range(window, T - window):
        for p in range(P):
            counts = np.zeros(T)
            counts[t], counts[t - window + 1 : t], counts[t - window] = p + 1, P, P - 1 - p
            assert counts.sum() == window * P
            chex.assert_trees_all_close(virtual[t, p] * window * P, counts.astype(np.float32), atol=1e-5)
            counts = np.zeros(T)
            counts[t - window + 1 : t + 1] = P
            chex.assert_trees_all_close(token[t, p] * window * P, counts.astype(np.float32), atol=1e-5)
            counts[t : t + window] = P
            chex.assert_trees_all_close(neither[t, p] * (2 * window - 1) * P, counts.astype(np.float32), atol=1e-5)


@pytest.mark.parametrize("causal", ["virtual", "token"])
@pytest.mark.parametrize("window", [T, 2**31])
def test_a_window_of_the_whole_length_is_no_window(implementation, causal, window):
    options = {"causal": causal, "rope": Rope(), "implementation": implementation}
    chex.assert_trees_all_close(attend(*inputs(), window=window, **options), attend(*inputs(), **options), atol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [("virtual", None), ("virtual", 4), ("token", 4), (None, None)])
def test_what_padding_holds_changes_nothing(implementation, causal, window):
    query, key, value, mixing = inputs()

    @functools.partial(jax.jit, compiler_options=QUICK)
    def output_and_gradients(ids, *arrays):
        def loss(*arrays):
            options = {"causal": causal, "window": window, "rope": Rope(), "implementation": implementation}
            out = operation(*arrays, query_segment_ids=ids, **options)
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    for row in ([1] * 9 + [0] * 4, [0] * 4 + [2] * 9, [1] * 4 + [0] * 3 + [2] * 6):
        ids = np.broadcast_to(np.array(row, np.int32), (B, T))
        padded = ids == 0
        clean = output_and_gradients(ids, query, key, value, mixing)
        for content in (np.nan, np.inf, 1e30):
            filled = [np.where(padded[:, :, None, None], np.float32(content), x) for x in (query, key, value)]
            chex.assert_trees_all_equal(output_and_gradients(ids, *filled, mixing), clean)
        chex.assert_tree_all_finite(clean)
        assert not np.asarray(clean[0][1])[padded].any()
        for gradient in clean[1][:3]:
            assert not np.asarray(gradient)[padded].any()
            assert np.asarray(gradient)[~padded].any()


@pytest.mark.parametrize(("causal", "window"), [("virtual", None), ("virtual", 4), ("token", 4), (None, None)])
def test_packed_documents_equal_the_documents_alone(implementation, causal, window):
    query, key, value, mixing = inputs()
    options = {"causal": causal, "window": window, "rope": Rope(), "implementation": implementation}
    length = 6  # two documents, then one token of padding
    ids = np.array([7] * length + [3] * length + [0], np.int32)
    positions = np.array([*range(length), *range(length), 0], np.int32)
    ids, positions = (np.broadcast_to(x, (B, T)) for x in (ids, positions))
    packed = attend(query, key, value, mixing, query_positions=positions, query_segment_ids=ids, **options)
    for rows in (slice(0, length), slice(length, 2 * length)):
        alone = attend(query[:, rows], key[:, rows], value[:, rows], mixing, **options)
        chex.assert_trees_all_close(packed[:, rows], alone, atol=1e-5)


@pytest.mark.parametrize("positions", ["virtual", "token"])
def test_a_common_shift_of_positions_changes_nothing(implementation, positions):
    options = {"causal": "virtual", "window": 4, "rope": Rope(positions=positions), "implementation": implementation}
    index = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    shifts = np.array([[123_457], [1_000_000]], np.int32)
    base = attend(*inputs(), query_positions=index, **options)
    chex.assert_trees_all_close(attend(*inputs(), query_positions=index + shifts, **options), base, atol=2e-5)


@pytest.mark.parametrize(("causal", "window"), [("virtual", None), ("virtual", 4), ("token", 4), (None, None)])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(implementation, causal, window):
    arrays = inputs(across_heads=True)
    # Rows 0-2 are padding, rows 3-5 belong to a document without keys.
    query_ids = np.broadcast_to(np.array([0] * 3 + [5] * 3 + [1] * 7, np.int32), (B, T))
    key_ids = np.broadcast_to(np.array([0] * 6 + [1] * 7, np.int32), (B, T))

    def empty_rows(*arrays):
        out = operation(
            *arrays,
            causal=causal,
            window=window,
            rope=Rope(),
            query_segment_ids=query_ids,
            key_segment_ids=key_ids,
            implementation=implementation,
        )
        return jnp.sum(jnp.cos(out[:, :6]) + out[:, :6]), out

    derivative = jax.value_and_grad(empty_rows, argnums=(0, 1, 2, 3), has_aux=True)
    (_, out), gradients = jax.jit(derivative, compiler_options=QUICK)(*arrays)
    assert not np.asarray(out[:, :6]).any()
    assert np.asarray(out[:, 6:]).all()
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


def test_soft_cap_bounds_the_logits_and_keeps_a_gradient(implementation):
    query, key, value, mixing = inputs()
    call = functools.partial(attend, causal="virtual", rope=Rope(), implementation=implementation)
    plain = call(query, key, value, mixing)
    chex.assert_trees_all_close(call(query, key, value, mixing, logits_soft_cap=1e4), plain, atol=1e-5)
    # Logits bounded by +-c: as c falls to 0 the weights become uniform, that is those of zero queries.
    flat = call(np.zeros_like(query), key, value, mixing)
    chex.assert_trees_all_close(call(query, key, value, mixing, logits_soft_cap=1e-6), flat, atol=1e-4)

    def spread(query):
        options = {"rope": Rope(), "logits_soft_cap": 2.0, "implementation": implementation}
        return operation(query, key, value, mixing, **options)[:, 1:].var()

    slope = jax.jit(jax.grad(spread), compiler_options=QUICK)(query)
    assert np.asarray(slope)[:, 1:].all()


def test_bfloat16_errs_at_most_twice_as_much_as_bfloat16_written_out(implementation):
    """The yardstick forms every pseudo-head in bfloat16 and lets jax attend on the virtual sequence."""
    query, key, value, mixing = inputs(t=T, k=N)
    low = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    virtual = [
        jnp.einsum("btmh,mnp->btpnh", x, jnp.asarray(w, jnp.bfloat16)).reshape(B, T * P, N, H)
        for x, w in zip(low, (mixing.query, mixing.key, mixing.value), strict=True)
    ]
    pseudo = jax.nn.dot_product_attention(*virtual, is_causal=True).reshape(B, T, P, N, H)
    yardstick = jnp.einsum("btpnh,np->btnh", pseudo, jnp.asarray(mixing.collapse, jnp.bfloat16))
    out = attend(*low, mixing, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    exact = oracle.attention(*low, mixing.query, mixing.key, mixing.value, mixing.collapse)
    rms = lambda x: float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - exact))))  # noqa: E731
    assert rms(out) <= 2 * rms(yardstick)
