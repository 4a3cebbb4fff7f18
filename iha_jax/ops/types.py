"""Names shared by the operations: literals of the public signature."""

from typing import Literal

Causal = Literal["virtual", "token"] | None
Implementation = Literal["reference", "blockwise", "pallas"] | None
