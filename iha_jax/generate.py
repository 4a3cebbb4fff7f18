"""The command line: ``python -m iha_jax.generate runs/tiny --prompt "def main("``."""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.sampling import Sampling
from iha_jax.training.trained import open_trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Completes prompts and prints them; a single completion as it is written.

    Args:
      arguments: of the command line, default the process's.
    """
    options = _parser().parse_args(arguments)
    try:
        sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=tuple(options.stop),
            seed=options.seed,
        )
        prompts = list(options.prompt)
        if options.prompt_file is not None:
            prompts += [options.prompt_file.read_text(encoding="utf-8")]
        if not prompts:
            raise ValueError("there is no prompt: give --prompt TEXT, several times for several, or --prompt-file FILE")
        generator = Generator.of(open_trained(options.checkpoint), batch_size=options.batch_size)
        alone = len(prompts) * options.samples == 1 and not options.json
        if alone:
            print(prompts[0], end="", flush=True)
        found = generator.complete(
            prompts,
            sampling,
            options.samples,
            on_text=(lambda prompt, sample, text: print(text, end="", flush=True)) if alone else None,
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if alone:
        print()
    for prompt, completions in zip(prompts, found, strict=True):
        for sample, completion in enumerate(completions):
            if options.json:
                line = {"prompt": prompt, "sample": sample, "text": completion.text, "finish": completion.finish}
                print(json.dumps(line))
            elif not alone:
                print(f"--- {prompt!r}, sample {sample} ({completion.finish})\n{completion.text}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iha_jax.generate", description="Complete prompts with a trained model."
    )
    add = parser.add_argument
    add("checkpoint", help="a run's directory (its newest checkpoint), or one of its checkpoints/STEP")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompt-file", type=pathlib.Path, metavar="FILE", help="a text file, one prompt")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token every time (default 0.7)")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens that reach this sum")
    add("--samples", type=int, default=1, metavar="N", help="completions of each prompt")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--seed", type=int, default=0)
    add("--batch-size", type=int, default=8, metavar="N", help="completions written at a time")
    add("--json", action="store_true", help="print JSON lines: prompt, sample, text, finish")
    return parser


if __name__ == "__main__":
    sys.exit(main())
