#!/usr/bin/env bash
# Makes a virtual environment with the tested versions, or does nothing if it is there and complete.
#     bash examples/make_venv.sh               in .venv of the project
#     VENV=/some/folder bash examples/make_venv.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
stamp="$venv/installed-requirements.txt" # written last, so that an interrupted installation is repeated
wanted=$(cat requirements.txt tests/requirements.txt requirements-tested.txt)

works() { "$1" -c 'import sys' 2>/dev/null; }

if works "$venv/bin/python" && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "Using the virtual environment $venv."
    exit 0
fi

if ! works "$venv/bin/python"; then
    if [ -e "$venv" ] && [ "$venv" != .venv ]; then
        echo "error: VENV=$venv exists and is no working virtual environment: name another folder" >&2
        exit 1
    fi
    python=
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "error: found no Python of version 3.11 or newer with venv and pip, which the tested versions need" >&2
        exit 1
    fi
    echo "Making the virtual environment $venv with $("$python" --version)."
    "$python" -m venv --clear "$venv"
fi

echo "Installing the tested versions: some minutes, nearly all of it for PyTorch. pip is silent meanwhile."
rm -f "$stamp"
"$venv/bin/python" -m pip install -qq --no-cache-dir --disable-pip-version-check \
    -r requirements.txt -r tests/requirements.txt -c requirements-tested.txt
printf '%s\n' "$wanted" >"$stamp"
