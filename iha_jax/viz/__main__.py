"""The command line: ``python -m iha_jax.viz runs/tiny --prompt "def main(" --out page.html``."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from iha_jax.training.sample import prompt_ids
from iha_jax.training.trained import open_trained
from iha_jax.viz.views import look_at_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a page about a checkpoint and a prompt.

    Args:
      arguments: of the command line, default the process's.
    """
    options = _parser().parse_args(arguments)
    try:
        trained = open_trained(options.checkpoint)
        config, tokenizer = trained.config, trained.tokenizer
        ids = prompt_ids(tokenizer, options.prompt)
        if ids.shape[1] > config.model.max_length:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, but the model is made for {config.model.max_length}"
            )
        special = {tokenizer.bos_id: "start", tokenizer.eos_id: "end"}
        words = [special.get(int(i)) or tokenizer.decode([int(i)]) for i in ids[0]]
        view = look_at_model(trained.model, ids, words, title=f"Inside {config.name}, step {trained.step}")
        options.out.write_text(view.page([f"Prompt: {options.prompt!r}"]), encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(view.layers)} layers, {ids.shape[1]} tokens: {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iha_jax.viz",
        description="A page about what a trained model does with a prompt: mixing tensors, collapse, and patterns of "
        "attention, layer by layer.",
    )
    parser.add_argument(
        "checkpoint",
        type=pathlib.Path,
        help="a run's directory (its newest checkpoint), or one of its checkpoints/STEP",
    )
    parser.add_argument("--prompt", required=True, help="text; pictures of more than a hundred tokens are hard to read")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="the page, HTML")
    return parser


if __name__ == "__main__":
    sys.exit(main())
