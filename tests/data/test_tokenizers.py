"""Tokenizers behind one protocol."""

import numpy as np
import pytest

from iha_jax.data import ByteTokenizer, load_tokenizer


@pytest.mark.parametrize("text", ["", "plain", "é€𝄞\n\t\x00", "日本語"])
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    np.testing.assert_array_equal(ids, list(text.encode()))
    assert tokenizer.decode([256, *ids, 257]) == text
    assert max([*ids, tokenizer.bos_id, tokenizer.eos_id]) < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["missing.json", "missing.model", "/no/such/dir/tokenizer.json"])
def test_unknown_tokenizers_say_what_was_expected(name):
    with pytest.raises(ValueError, match=r"unknown tokenizer .*expected 'bytes'"):
        load_tokenizer(name)
