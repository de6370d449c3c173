# Copyright 2026 The DiT-BlockSkip authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The house: both scripts tell one story, and nothing in it is too long to read.

These fail if the scripts drift apart, if a function stands in both, if one grows past a screen, or if a public
function of the shared module has no docstring.
"""

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

SCRIPTS = ["train_dreambooth_blockskip_flux.py", "train_dreambooth_blockskip_sana.py"]
TREES = {name: ast.parse((ROOT / name).read_text()) for name in [*SCRIPTS, "blockskip_utils.py"]}


def functions(name):
    return [node for node in TREES[name].body if isinstance(node, ast.FunctionDef)]


def test_the_scripts_have_the_same_functions_in_the_same_order():
    names = [[function.name for function in functions(script)] for script in SCRIPTS]
    assert names[0] == names[1]


def test_no_function_stands_in_both_scripts():
    bodies = [{f.name: ast.dump(ast.Module(body=f.body, type_ignores=[])) for f in functions(s)} for s in SCRIPTS]
    assert not [name for name in bodies[0] if bodies[0][name] == bodies[1][name]]


def test_main_is_the_same_story_but_for_the_models_name():
    stories = [ast.unparse(next(f for f in functions(s) if f.name == "main")) for s in SCRIPTS]
    assert stories[0].replace("FLUX", "SANA") == stories[1]


@pytest.mark.parametrize("name", TREES)
def test_functions_fit_a_screen_and_public_ones_are_documented(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (60 if node.name == "main" else 70), f"{node.name} has {lines} lines"
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_the_scripts_import_nothing_else_of_ours():
    for name, tree in TREES.items():
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "torchvision" not in imported
        ours = {path.stem for path in ROOT.glob("*.py")} | {path.stem for path in ROOT.glob("*/*.py")}
        assert imported & ours <= {"blockskip_utils"} - {name.removesuffix(".py")}


def test_the_files_run_from_a_folder_of_their_own(tmp_path):
    for name in TREES:
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in SCRIPTS:
        done = subprocess.run([sys.executable, name, "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "--skip_first" in done.stdout
