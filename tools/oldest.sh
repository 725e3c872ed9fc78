#!/usr/bin/env bash
# Runs the quick tests with the oldest libraries that pyproject.toml allows, in a fresh virtual environment: run it by
# hand after a change of a floor, `tools/oldest.sh [ENVIRONMENT] [pytest's arguments]`, and keep its output. Test tools
# have their newest versions. Old libraries warn of what later ones changed, so here warnings are no errors.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-oldest}
shift || true
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off

python3.11 -m venv --clear "$venv"
"$venv/bin/python" - > "$venv/oldest.txt" <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for line in [*project["dependencies"], *extras["lora"], *extras["transformers"]]:
    print(line.replace(">=", "=="))
print(*(line for line in extras["dev"] if not line.startswith("xdm_ft")), sep="\n")
PYTHON
cat "$venv/oldest.txt"
"$venv/bin/pip" install --quiet -r "$venv/oldest.txt"
"$venv/bin/pip" install --quiet --no-deps -e .
"$venv/bin/pip" check
"$venv/bin/pip" freeze --exclude-editable
"$venv/bin/pytest" -o filterwarnings=default "$@"
