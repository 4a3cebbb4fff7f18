#!/usr/bin/env bash
# Installs Python if need be, JAX for TPUs and this package. May be run again: what is up to date stays untouched.
#
#   tpu/setup.sh [--venv DIR] [--extras NAMES] [--jax REQUIREMENT]
#
#   --venv    virtual environment, made if it is not there (default .venv in this repository)
#   --extras  of this package, comma-separated (default train)
#   --jax     what pip is asked for (default jax[tpu])
#
# In a Colab notebook the notebook's own Python is used, and its JAX stays as it is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv extras=train jax='jax[tpu]'

while [ $# -gt 0 ]; do
  case $1 in
    --venv | --extras | --jax)
      if [ $# -lt 2 ]; then
        echo "error: $1 needs a value" >&2
        exit 2
      fi
      case $1 in
        --venv) venv=$2 ;;
        --extras) extras=$2 ;;
        --jax) jax=$2 ;;
      esac
      shift 2
      ;;
    *)
      sed -n '4,8s/^# \{0,3\}//p' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
done

# The interpreter can run this package and make environments (Debian's may lack the parts for it).
suits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
  local python
  for python in python3.13 python3.12 python3.11 python3; do
    if suits "$python"; then
      "$python" -m venv --clear "$venv"
      return
    fi
  done
  # TPU VMs come with Python 3.10. uv brings a newer one without the administrator's rights.
  export PATH=$HOME/.local/bin:$PATH
  if ! command -v uv >/dev/null; then
    python3 -m pip install --quiet --user uv || curl -LsSf https://astral.sh/uv/install.sh | sh
  fi
  uv venv --quiet --clear --seed --python 3.12 "$venv"
}

# JAX asks for it on v5e and newer: the runtime starts and stops much faster.
enable_huge_pages() {
  local setting=/sys/kernel/mm/transparent_hugepage/enabled
  if [ -e "$setting" ] && ! grep -q '\[always\]' "$setting"; then
    echo always | sudo -n tee "$setting" >/dev/null 2>&1 ||
      echo "note: transparent huge pages are off, and switching them on needs sudo" >&2
  fi
}

if [ -n "${COLAB_RELEASE_TAG:-}" ]; then
  python3 -m pip install --quiet --editable "${root}[$extras]"
  echo "installed into Colab's Python"
  exit 0
fi

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
# Written last: an installation that was cut off is done again.
stamp=$venv/.iha_jax
wanted="$root $extras $jax $(sha256sum "$root/pyproject.toml" | cut -d ' ' -f 1)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "$venv is up to date"
else
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    make_venv
  fi
  "$venv/bin/python" -m pip install --quiet "$jax" --editable "${root}[$extras]"
  echo "$wanted" >"$stamp"
  echo "installed into $venv"
fi
if compgen -G '/dev/accel*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
  enable_huge_pages
fi
