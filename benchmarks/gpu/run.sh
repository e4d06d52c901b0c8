#!/usr/bin/env bash
# On a machine with a GPU and no network: what runs, and how fast. docs/gpu.md says how to call it.
#
#   run.sh prepare   download the wheels that such a machine lacks (where there is a package index); --flashinfer makes it too
#   run.sh tests     the kernels' tests on the real kernels, and greedy tokens beside transformers'
#   run.sh kernels   kernels and whole steps beside the hardware's limits
#   run.sh serve     both services under 1,000 requests, beside transformers' continuous batching
#   run.sh install   the carried wheels alone, and where they are
#
# More arguments go to the part. Results lie in $OUT, by default benchmarks/scratch/gpu/<part>.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT=$PWD
WHEELS=$ROOT/benchmarks/gpu/.wheels

usage() { sed -n '2,11s/^# \{0,1\}//p' "$ROOT/benchmarks/gpu/run.sh" >&2; exit 2; }

part=${1:-}
[ $# -gt 0 ] && shift
case $part in prepare | tests | kernels | serve | install) ;; *) usage ;; esac

# The project's own environment where there is one, else the machine's Python, which has torch.
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=$ROOT/.venv/bin/python
fi

if [ "$part" = prepare ]; then
  PYTHONPATH=$ROOT exec "$PYTHON" -m benchmarks.gpu.prepare "$@"
fi

make_site() { [ -n "$SITE" ] || SITE=$(mktemp -d "${TMPDIR:-/tmp}/cadenza-site-XXXXXX"); }

# Carried wheels go before what the machine has. A name and version for the package, which is not installed there.
install() {
  "$PYTHON" -c 'import grpc_health, grpc_reflection, grpc_status, pydantic_settings, pytest_asyncio' 2>/dev/null && return
  if ! compgen -G "$WHEELS/*.whl" >/dev/null; then
    echo "error: no wheels in ${WHEELS#"$ROOT"/}: call run.sh prepare where there is a package index, and carry them" >&2
    exit 1
  fi
  make_site
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
    --root-user-action ignore --target "$SITE" "$WHEELS"/*.whl
}

name_package() {
  "$PYTHON" -c 'import importlib.metadata as m; m.version("cadenza")' 2>/dev/null && return
  make_site
  local version
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml | head -n 1)
  mkdir -p "$SITE/cadenza-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: cadenza\nVersion: %s\n' "$version" >"$SITE/cadenza-$version.dist-info/METADATA"
}

# Packages are known to leave a `tests` of their own behind, which would go before the project's.
keep_tests() {
  PYTHONPATH=$ROOT "$PYTHON" -c 'import sys, tests; sys.exit(sys.argv[1] not in tests.__path__)' "$ROOT/tests" && return
  make_site
  mkdir -p "$SITE/tests"
  printf '__path__ = [%s]\n' "'$ROOT/tests'" >"$SITE/tests/__init__.py"
}

# Its modules are compiled before it is carried: on the machine that would take its time from all else.
unpack_flashinfer() {
  export FLASHINFER_DISABLE_JIT=1
  if [ "$part" != kernels ] || [ ! -f "$WHEELS/flashinfer.zip" ]; then return; fi
  make_site
  "$PYTHON" -m zipfile -e "$WHEELS/flashinfer.zip" "$SITE" || echo "FlashInfer can not be unpacked" >&2
  export FLASHINFER_WORKSPACE_BASE=$SITE
}

SITE=
install
unpack_flashinfer
name_package
keep_tests
export PYTHONPATH=${SITE:+$SITE:}$ROOT:$ROOT/client
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "$part" = install ]; then
  echo "PYTHONPATH=$PYTHONPATH"
  exit 0
fi
trap '[ -z "$SITE" ] || rm -rf "$SITE"' EXIT

export OUT=${OUT:-$ROOT/benchmarks/scratch/gpu/$part}
mkdir -p "$OUT"
"$PYTHON" -m "benchmarks.gpu.$part" "$@" 2>&1 | tee "$OUT/$part.log"
