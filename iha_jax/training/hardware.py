"""Peak rates of the chips people have, for the share that a run reaches (MFU) and for plans."""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Published memory and network of one JAX device of a TPU.

    Attributes:
      hbm_bytes: capacity.
      hbm_bandwidth: bytes per second.
      ici_links: to neighbouring chips, two for every dimension of the torus.
      ici_bandwidth: bytes per second of one link in one direction.
      dcn_bandwidth: bytes per second to other slices in one direction, this device's share of its host's network cards.
    """

    hbm_bytes: float
    hbm_bandwidth: float
    ici_links: int
    ici_bandwidth: float
    dcn_bandwidth: float


# cloud.google.com/tpu/docs, "System architecture" of each generation: HBM capacity and bandwidth, and the
# bidirectional bandwidth between chips, 400, 1200, 800 and 1200 GB/s a chip, here by link and direction. A TPU7x chip
# is two devices, which share its memory and links. To the data-centre network: v5e 6.4 Tbit/s for a pod of 256 chips
# (two cards of 100 Gbit/s for 8 chips), v5p 50 Gbit/s a chip, v6e 25.6 Tbit/s for 256 chips (four cards of 200 Gbit/s
# for 8 chips). Assumed, not published: that this holds in each direction, as of Ethernet, and that a TPU7x chip has
# the 100 Gbit/s of a v6e.
_MEMORY = {
    "TPU v5 lite": Memory(16 * 2**30, 819e9, 4, 50e9, 3.125e9),
    "TPU v5": Memory(95 * 2**30, 2765e9, 6, 100e9, 6.25e9),
    "TPU v6 lite": Memory(32 * 2**30, 1640e9, 4, 100e9, 12.5e9),
    "TPU7x": Memory(96 * 2**30, 3690e9, 6, 50e9, 6.25e9),
}


def memory_of(device_kind: str) -> Memory:
    """Memory and network of a TPU device, by its ``device_kind``.

    Raises:
      ValueError: for a device that isn't in the table; those that are, are named.
    """
    if device_kind not in _MEMORY:
        raise ValueError(f"no figures for devices of kind {device_kind!r}: known are {sorted(_MEMORY)}")
    return _MEMORY[device_kind]
