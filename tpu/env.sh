# shellcheck shell=bash
# Environment of a run on TPUs: . tpu/env.sh v5e|v5p|v6e, in bash, before Python starts. Without a generation it
# changes nothing. What is set already wins, and sourcing it twice is sourcing it once.
#
# A flag that libtpu does not know ends the process at its start, so what is here was compiled with (libtpu 0.0.52; that
# of Colab, 0.0.21.1, reads it too) and changed the program of a sharded training step for the better. Left out are the
# flags for asynchronous collectives that recipes hand down, xla_tpu_enable_async_collective_fusion and its kin: with
# libtpu 0.0.52 the program is the same to the byte on v5e, and does not compile on v5p and v6e
# ("not supported/recommended on platforms other than TPU v5e").

_iha_flag() {
  case " ${LIBTPU_INIT_ARGS:-} " in
    *" --$1="*) ;;
    *) export LIBTPU_INIT_ARGS="${LIBTPU_INIT_ARGS:+$LIBTPU_INIT_ARGS }--$1=$2" ;;
  esac
}

# xla_tpu_scoped_vmem_limit_kib: on-chip memory that one operation of XLA may use. More makes larger tiles, which read
# operands less often. Bytes accessed by a step of a fully sharded feed-forward network (2048 x 8192, 4 layers, 16 or 8
# chips), from the default to the value chosen. Pallas kernels state their own limit.
case ${1:-} in
  "") ;;
  v5e) _iha_flag xla_tpu_scoped_vmem_limit_kib 98304 ;; # of 128 MiB: 3.65 -> 3.29 GB, temporaries 297 -> 380 MB
  v5p) _iha_flag xla_tpu_scoped_vmem_limit_kib 49152 ;; # of 64 MiB: 3.97 -> 3.30 GB, temporaries unchanged
  v6e) _iha_flag xla_tpu_scoped_vmem_limit_kib 65536 ;; # of 128 MiB: 3.90 -> 3.41 GB, temporaries unchanged
  *)
    echo "error: tpu/env.sh knows v5e, v5p and v6e, got $1" >&2
    return 2
    ;;
esac
unset -f _iha_flag
