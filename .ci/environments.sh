# Fresh virtual environments, and the time that each step takes; for .ci/run and .ci/nightly.
set -euo pipefail
environments=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$environments"' EXIT
export PYTHONPATH=
export PIP_CACHE_DIR=${PIP_CACHE_DIR:-$environments/downloads} # what one environment downloads, the next ones install
export PIP_DISABLE_PIP_VERSION_CHECK=1
export PFLJAX_TESTS_COMPILED=$environments/compiled # what tests of one step compile, those of the next ones read
path=$PATH
times=()
current=
SECONDS=0
begun=0

use() { # a fresh environment: NAME, its Python
  "$2" -m venv "$environments/$1" && enter "$1"
}

enter() { # an environment that is there: NAME
  PATH="$environments/$1/bin:$path"
}

end_step() { # notes the time of the step that runs, if one does
  if [ -n "$current" ]; then
    times+=("$(printf '%5d s  %s' $((SECONDS - begun)) "$current")")
  fi
  current=
}

step() { # begins a step: its name
  end_step
  current=$*
  begun=$SECONDS
  echo "== $* (after $((SECONDS / 60)) minutes)"
}

report() { # the time of each step
  end_step
  echo "== passed in $SECONDS s"
  printf '%s\n' "${times[@]}"
}

find_newest() { # the first Python 3.13 that starts; a name on the path may be a shim of pyenv that does not
  local candidate
  for candidate in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3.13; do
    if "$candidate" -c 'import venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

use_newest() { # an environment with the newest JAX, which needs Python 3.12 or later; fails if there is no such Python
  local newest
  newest=$(find_newest)
  [ -n "$newest" ] && use newest "$newest"
}

install_libtpu() { # the compiler of TPUs; fails if it cannot be fetched
  timeout 600 pip install -q -e '.[tpu-target]'
}

# Tests of what needs PyTorch, Flower or Hugging Face's datasets; they are skipped in the other environments.
doors=(
  tests/flower tests/models/test_torch.py tests/models/test_torch_missing.py tests/models/test_torchvision.py
  tests/api/test_torch_runs.py tests/data/test_torch_data.py tests/data/sources/test_hub.py
  tests/data/sources/test_saved.py tests/experiments/test_architectures.py
)
examples=tests/examples/test_examples.py
examples_of_doors=(
  "$examples::test_a_pytorch_network_learns_and_is_one_again"
  "$examples::test_a_data_set_of_hugging_face_is_divided_and_learned"
  "$examples::test_a_run_on_flower_has_the_scores_of_its_simulation"
)

use_doors() { # an environment with these packages; fails if they cannot be fetched
  use doors python3
  # PyTorch first: pip would take its newest release for the range of the extra
  timeout 600 pip install -q 'torch==2.13.0' && timeout 600 pip install -q -e '.[test,torch,flower,hf,device]'
}
