# Environment of a TPU run, by generation: . tpu/env.sh v5e|v5p|v6e
