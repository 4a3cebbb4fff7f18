"""Synthetic tasks whose answers are known: made on the fly in NumPy, the same for the same seed.

Every task is a frozen dataclass with ``sample(rng, count)``, which gives a dict of arrays with ``count`` rows:

    task = RelationComposition(arity=3)
    batch = task.sample(np.random.default_rng(0), 64)     # {"inputs", "targets", "weights"}
    for batch in stream(task, 64, seed=0): ...            # batch i depends on the seed and i alone
"""

from iha_jax.data.tasks.counting import PermutationMatchCount
from iha_jax.data.tasks.niah import NeedleInHaystack
from iha_jax.data.tasks.polynomials import PolynomialFilters
from iha_jax.data.tasks.recall import MultiKeyRecall
from iha_jax.data.tasks.relations import RelationComposition
from iha_jax.data.tasks.stream import Task, stream

__all__ = [
    "MultiKeyRecall",
    "NeedleInHaystack",
    "PermutationMatchCount",
    "PolynomialFilters",
    "RelationComposition",
    "Task",
    "stream",
]
