"""Peak matrix rates of the chips people have, for the share that a run reaches (MFU)."""

import jax

# Dense bfloat16 FLOP/s of one JAX device, by the start of its ``device_kind``; vendors' data sheets. TPU v2, v3
# and v7x show two devices a chip, the others one. The longest start that fits counts.
_PEAKS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "TPU v7x": 1153.5e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None for one that isn't in the table (a CPU, say)."""
    kind = device.device_kind
    fitting = [name for name in _PEAKS if kind == name or kind.startswith((name + " ", name + "-"))]
    return _PEAKS[max(fitting, key=len)] if fitting else None
