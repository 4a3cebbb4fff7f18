"""lm-evaluation-harness with our models: its own command line, with the model ``iha_jax`` known to it.

    python -m iha_jax.evaluation.harness --model iha_jax --model_args checkpoint=runs/tiny --tasks gsm8k

Arguments of the model: ``checkpoint``, ``batch_size`` (rows at a time), ``max_length`` (default the model's),
``chat_template`` (as in `DataConfig`; default that of the run's data), ``seed``. The harness finds no models but its
own by name, hence a command of ours in place of ``lm_eval``: every option is the same.
"""

import collections
import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from iha_jax.extras import needed

with needed("lm_eval", "the evaluation harness"):
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry

from iha_jax.data.chat import load_template
from iha_jax.evaluation.generate import Generator
from iha_jax.evaluation.sampling import Sampling
from iha_jax.training.trained import open_trained

_LOG = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
    """A trained model as the harness asks for it.

    Attributes:
      truncated: requests so far whose context was cut on the left to fit.
    """

    def __init__(
        self,
        checkpoint: str,
        batch_size: int | str = 8,
        max_length: int | None = None,
        chat_template: str | None = None,
        seed: int = 0,
        **ignored: Any,
    ):
        """Reads the checkpoint.

        Args:
          checkpoint: a run's directory, or one of its ``checkpoints/STEP``.
          batch_size: rows at a time; "auto" is 8.
          max_length: tokens of a row; default the model's.
          chat_template: as in `DataConfig`; default the run's.
          seed: of draws.
          **ignored: what the harness gives every model (device, max_batch_size); anything else is an error.

        Raises:
          ValueError: an argument is unknown or wrong.
        """
        super().__init__()
        unknown = sorted({*ignored} - {"device", "max_batch_size"})
        if unknown:
            raise ValueError(
                f"unknown model_args {unknown}: expected checkpoint, batch_size, max_length, chat_template, seed"
            )
        trained = open_trained(checkpoint)
        self._name = f"{trained.config.name}-{trained.step}"
        rows = 8 if str(batch_size).startswith("auto") else int(batch_size)
        self._generator = Generator.of(
            trained, batch_size=rows, **({} if max_length is None else {"max_length": int(max_length)})
        )
        self._words = trained.tokenizer
        data = trained.config.data
        self._template_name, self._tokenizer_name = chat_template or data.chat_template, data.tokenizer
        self._seed = int(seed)
        self.truncated = 0

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        """Made of ``--model_args``, then of the harness's own options where they say nothing else."""
        own = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**own, **arg_dict})

    # ------------------------------------------------------------------------------ what TemplateLM asks for

    @property
    def eot_token_id(self) -> int:
        """The end of a document, or its start where there is no end."""
        for token in (self._words.eos_id, self._words.bos_id):
            if token is not None:
                return token
        raise ValueError(f"the tokenizer {self._tokenizer_name!r} has neither a start nor an end of documents")

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text: the start of a document, as in training."""
        return self.eot_token_id if self._words.bos_id is None else self._words.bos_id

    @property
    def max_length(self) -> int:
        """The most tokens of context and continuation."""
        return self._generator.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, after the start of a document unless told otherwise."""
        ids = self._words.encode(string).tolist()
        bos = self._words.bos_id
        if add_special_tokens is False or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        del disable_tqdm
        rows = []
        for _texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation must have 1 to max_length={self.max_length} tokens, got {len(continuation)}"
                )
            row = [*context, *continuation]
            if len(row) > self.max_length + 1:
                self._count_truncated()
            rows.append(np.asarray(row[-(self.max_length + 1) :], np.int32))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        # Longest first: what doesn't fit in memory shows at once, and rows of a batch are of about one length.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        width = self._generator.batch_size
        for start in range(0, len(order), width):
            batch = order[start : start + width]
            filled = [rows[i] for i in batch] + [rows[batch[-1]]] * (width - len(batch))
            scores, likeliest = self._generator.engine.score(filled)
            for place, i in enumerate(batch):
                end = len(rows[i]) - 1
                part = slice(end - len(requests[i][2]), end)
                found[i] = float(scores[place, part].sum(dtype=np.float64)), bool(likeliest[place, part].all())
        for (texts, _context, _continuation), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, every token once, in windows of the greatest length."""
        pairs, owners = [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for window in windows:
                pairs.append((None, *utils.make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(pairs, disable_tqdm), strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Completions; those asked for in one way go together, and each draws by a seed of its own."""
        del disable_tqdm
        groups: dict[tuple, list[int]] = collections.defaultdict(list)
        prompts: list[list[int]] = []
        limits = []
        for i, request in enumerate(requests):
            context, options = request.args
            sampling, limit = self._sampling(dict(options))
            limit = min(limit, self.max_length - 1)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            if len(ids) > self.max_length - limit:
                self._count_truncated()
            prompts.append(ids[-(self.max_length - limit) :])
            limits.append(limit)
            groups[sampling].append(i)
        texts = [""] * len(requests)
        for number, ((temperature, top_k, top_p, stop), members) in enumerate(groups.items()):
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, seed=self._seed + number)
            found = self._generator.complete(
                [prompts[i] for i in members], sampling, max_new_tokens=[limits[i] for i in members]
            )
            for i, [completion] in zip(members, found, strict=True):
                texts[i] = completion.text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    # ------------------------------------------------------------------------------ conversations

    @property
    def tokenizer_name(self) -> str:
        """Names the requests' cache: model, tokenizer and template."""
        return f"{self._name}-{self._tokenizer_name}-{self._template_name}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's name, which the harness keeps beside its results."""
        if chat_template is False or chat_template is None:
            return None
        if isinstance(chat_template, str):
            self._template_name = chat_template
        return self._template_name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without a prompt for an answer it ends within the assistant's last message."""
        template = load_template(self._template_name, self._tokenizer_name)
        if add_generation_prompt or chat_history[-1]["role"] != "assistant":
            return template.render(chat_history, add_generation_prompt)
        return template.render(chat_history[:-1], True) + chat_history[-1]["content"]

    # ------------------------------------------------------------------------------ helpers

    def _sampling(self, options: dict[str, Any]) -> tuple[tuple[float, int | None, float, tuple[str, ...]], int]:
        """(temperature, top_k, top_p, stop) and the most tokens, of what a task asks for."""
        stop = options.pop("until", None) or []
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        limit = int(options.pop("max_gen_toks", None) or options.pop("max_new_tokens", None) or 256)
        temperature = float(options.pop("temperature", None) or 0.0)
        if not options.pop("do_sample", temperature > 0):
            temperature = 0.0
        top_k, top_p = options.pop("top_k", None), float(options.pop("top_p", None) or 1.0)
        options.pop("max_new_tokens", None)
        if options:
            raise ValueError(
                f"generation options {sorted(options)} are not supported: expected until, max_gen_toks, do_sample, "
                "temperature, top_k, top_p"
            )
        return (temperature, None if not top_k else int(top_k), top_p, tuple(text for text in stop if text)), limit

    def _count_truncated(self) -> None:
        self.truncated += 1
        if self.truncated == 1:
            _LOG.warning("a context is longer than max_length=%d and loses its beginning", self.max_length)


def register() -> None:
    """Makes the model known to the harness under the name ``iha_jax``."""
    import lm_eval.models  # noqa: F401  (its own come first: an empty registry would never load them)

    if "iha_jax" not in model_registry:
        model_registry.register("iha_jax")(HarnessModel)


def main(arguments: Sequence[str] | None = None) -> int:
    """The harness's command line.

    Args:
      arguments: default the process's.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
