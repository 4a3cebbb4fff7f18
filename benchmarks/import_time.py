"""How long `import iha_jax` takes beside what it cannot do without.

    python benchmarks/import_time.py

Each import in a fresh interpreter, in turns; the fastest of each counts. The bar is 1.5 times
the time of importing flax.nnx.
"""

import argparse
import subprocess
import sys

CODE = "import time; begun = time.perf_counter(); import {}; print(time.perf_counter() - begun)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    fastest: dict[str, float] = {}
    for _ in range(options.repeats):
        for module in ("jax", "flax.nnx", "iha_jax"):
            done = subprocess.run(
                [sys.executable, "-c", CODE.format(module)], capture_output=True, text=True, check=True
            )
            fastest[module] = min(float(done.stdout), fastest.get(module, float("inf")))
    for module, seconds in fastest.items():
        print(f"{module:10} {seconds:6.2f} s   {seconds / fastest['flax.nnx']:5.2f} × flax.nnx")


if __name__ == "__main__":
    main()
