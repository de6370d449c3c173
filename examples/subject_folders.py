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
"""Reads the photos and the prompts of subjects, in the layout of a benchmark or in a plain one.

DreamBooth (github.com/google/dreambooth): a folder of photos for each subject, and beside them
`prompts_and_classes.txt`, which has lines `subject,class` and one list of prompts for objects and one for live
subjects, such as `'a {0} {1} in the snow'.format(unique_token, class_token)`. The second list is for cats and dogs.

    dreambooth/dataset/prompts_and_classes.txt
    dreambooth/dataset/backpack/00.jpg

CustomConcept101 (github.com/adobe-research/custom-diffusion): `dataset.json`, a list of entries with
`instance_data_dir`, `class_prompt`, `prompt_filename` and perhaps `instance_prompt`; a file of prompts has one in each
line, with `{}`. The paths may be relative to the folder of `dataset.json` or to the one above, or begin with folders
that are not there.

    customconcept101/dataset.json
    customconcept101/prompts/pet_cat1.txt
    customconcept101/benchmark_dataset/pet_cat1/1.jpeg

Plain: a folder of photos, or one with a folder of photos for each subject, and a file with one prompt in each line,
with `{}` where the subject goes. `classes.txt`, with lines `folder,class`, may say what the subjects are.

    photos/prompts.txt
    photos/classes.txt
    photos/rex/1.jpg

Prompts are drawn with the unique token in front of the class ("a sks cat in the snow"), as the LoRA has learnt them. A
text encoder that has not learnt the token reads them without it ("a cat in the snow").
"""

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import blockskip_utils as blockskip
from blockskip_utils import refuse

DREAMBOOTH_FILE, CUSTOM_CONCEPT_FILE = "prompts_and_classes.txt", "dataset.json"
LIVE_CLASSES = ("cat", "dog")  # of DreamBooth's 30 subjects, 9 are live
UNIQUE_TOKEN = "sks"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as it is drawn, with the unique token, and as it reads without it."""

    drawn: str
    plain: str


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the photos of a folder show, and the prompts for it."""

    name: str
    photos: tuple[blockskip.Photo, ...]
    prompts: tuple[Prompt, ...]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A subject before its photos are read."""

    name: str
    folder: Path
    word: str
    token: str
    templates: tuple[str, ...]


def find_subjects(
    data_dir: Path,
    *,
    prompts: Path | None = None,
    class_word: str | None = None,
    unique_token: str | None = None,
    only: list[str] | None = None,
) -> list[Subject]:
    """The subjects of a folder in any of the layouts, sorted by name; whatever is missing or unreadable is refused.

    Args:
        data_dir: The folder.
        prompts: A file of prompts that takes the place of the layout's.
        class_word: What the subjects are, for a plain layout; default: the folder's name without number.
        unique_token: Stands in front of the class in what is drawn; default: `sks`, or what `dataset.json` has.
        only: Names of subjects; default: all.
    """
    if not data_dir.is_dir():
        refuse(f"--data_dir {data_dir} is not a folder")
    templates = read_prompts(prompts, "--prompts") if prompts else None
    root = next((d for d in (data_dir, data_dir / "dataset") if (d / DREAMBOOTH_FILE).is_file()), None)
    if class_word and (root or (data_dir / CUSTOM_CONCEPT_FILE).is_file()):
        refuse(f"--class_word has no effect on --data_dir {data_dir}, which says what its subjects are: leave it out")
    if root:
        entries = _dreambooth(root, templates)
    elif (data_dir / CUSTOM_CONCEPT_FILE).is_file():
        entries = _custom_concept(data_dir, templates)
    else:
        entries = _plain(data_dir, templates, class_word)
    entries = sorted(entries, key=lambda entry: entry.name)
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        refuse(f"--data_dir {data_dir} names {twice[0]} twice: give each subject a folder of its own name")
    if unknown := sorted(set(only or []) - set(names)):
        refuse(f"--subjects {unknown[0]} is not in --data_dir {data_dir}, which has {', '.join(names)}")
    return [_subject(entry, unique_token) for entry in entries if not only or entry.name in only]


def _subject(entry: _Entry, unique_token: str | None) -> Subject:
    photos = blockskip.read_photos(str(entry.folder), "--data_dir", entry.name)
    if not photos:
        refuse(f"--data_dir: {entry.folder} holds no photo of {entry.name}: put some there")
    token = entry.token if unique_token is None else unique_token
    return Subject(
        entry.name,
        tuple(photos),
        tuple(Prompt(fill(text, token, entry.word), fill(text, "", entry.word)) for text in entry.templates),
    )


def fill(template: str, token: str, word: str) -> str:
    """A prompt from its template: `{}` or `{0} {1}` becomes the unique token and the class."""
    filled = template.replace("{0}", token).replace("{1}", word).replace("{}", f"{token} {word}")
    return " ".join(filled.split())


def read_prompts(file: Path, flag: str) -> tuple[str, ...]:
    """The lines of a file of prompts, without empty ones."""
    lines = tuple(line.strip() for line in _read(file, flag).splitlines() if line.strip())
    if not lines:
        refuse(f"{flag} {file} holds no prompt: write one in each line, with {{}} where the subject goes")
    return tuple(_with_one_place(line, file) for line in lines)


def _with_one_place(template: str, file: Path) -> str:
    if len(re.findall(r"\{1?\}", template)) != 1:
        refuse(f"{file}: '{template}' must have {{}} once, where the subject goes")
    return template


def _read(file: Path, flag: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # a file that Windows has written begins with a mark
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        refuse(f"{flag} {file} cannot be read: {reason}")


# ---------------------------------------------------------------------------------------------------------------------
# The layouts
# ---------------------------------------------------------------------------------------------------------------------


def _dreambooth(root: Path, templates: tuple[str, ...] | None) -> Iterator[_Entry]:
    file = root / DREAMBOOTH_FILE
    classes, lists = _read_dreambooth_file(file)
    note_passed_over(root, {path.name for path in _subfolders(root)} - set(classes), f"{file.name} does not name them")
    for name, word in classes.items():
        if not (root / name).is_dir():
            refuse(f"{file} names {name}, and there is no folder of it: restore it, or take its line out")
        kind = "live" if word.lower() in LIVE_CLASSES and "live" in lists else "object"
        if not (templates or lists.get(kind)):
            refuse(f"{file} holds no prompts of {kind} subjects: restore it, or give --prompts")
        yield _Entry(name, root / name, word, UNIQUE_TOKEN, templates or lists[kind])


def _read_dreambooth_file(file: Path) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The classes by subject, and the lists of prompts: "object", and "live" where there is one."""
    classes, lists, kind = {}, {}, "object"
    for line in _read(file, "--data_dir").splitlines():
        texts = [ast.literal_eval(text) for text in re.findall(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", line)]
        if found := [_with_one_place(text, file) for text in texts if "{" in text]:
            lists.setdefault(kind, []).extend(found)
        elif "prompt" in line.lower():  # a heading
            kind = "live" if "live" in line.lower() else "object" if "object" in line.lower() else kind
        elif not lists and (row := _class_row(line)):
            classes.update([row])
    if not classes:
        refuse(f"--data_dir: {file} names no subject: write a line 'folder,class' for each")
    return classes, {kind: tuple(texts) for kind, texts in lists.items()}


def _class_row(line: str) -> tuple[str, str] | None:
    """Folder and class of a line `folder,class`; None for any other, and for the heading."""
    row = re.fullmatch(r"\s*([\w.-]+)\s*,\s*([\w -]*\w)\s*", line)
    return None if row is None or row.groups() in (("subject_name", "class"), ("folder", "class")) else row.groups()


def _custom_concept(root: Path, templates: tuple[str, ...] | None) -> Iterator[_Entry]:
    file = root / CUSTOM_CONCEPT_FILE
    try:
        entries = json.loads(_read(file, "--data_dir"))
    except ValueError as problem:
        refuse(f"--data_dir: {file} is no JSON: {problem}")
    if not isinstance(entries, list) or not entries:
        refuse(f"--data_dir: {file} must be a list of subjects")
    for entry in entries:
        if not isinstance(entry, dict):
            refuse(f"--data_dir: {file} has entries of several subjects: only single ones can be scored")
        missing = [key for key in ("instance_data_dir", "class_prompt") if not entry.get(key)]
        missing += ["prompt_filename"] if not (templates or entry.get("prompt_filename")) else []
        if missing:
            refuse(f"--data_dir: {file} has an entry without {missing[0]}")
        folder = locate(root, entry["instance_data_dir"])
        if not (folder and folder.is_dir()):
            refuse(f"{file} names the folder {entry['instance_data_dir']}, which is not there")
        prompts = templates or _custom_concept_prompts(root, entry["prompt_filename"])
        token = re.search(r"<\S+?>", entry.get("instance_prompt", ""))
        yield _Entry(
            folder.name, folder, _bare_class(entry["class_prompt"]), token[0] if token else UNIQUE_TOKEN, prompts
        )


def _custom_concept_prompts(root: Path, name: str) -> tuple[str, ...]:
    found = locate(root, name)
    if not (found and found.is_file()):
        refuse(f"{root / CUSTOM_CONCEPT_FILE} names the prompts {name}, which are not there")
    return read_prompts(found, "--data_dir")


def _bare_class(text: str) -> str:
    """ "a photo of a cat" and "cat" are both the class cat."""
    return re.sub(r"^((an?|the) )?((photo|picture|image)s? of )?((an?|the) )?", "", text.strip(), flags=re.IGNORECASE)


def locate(root: Path, name: str) -> Path | None:
    """What a benchmark's path means: the longest end of it that is in `root` or a folder of it; whole, also above."""
    parts = [part for part in Path(name).parts if part not in (".", "..", "/")]
    for start in range(len(parts)):
        tail = Path(*parts[start:])
        within = (root, *sorted(path for path in root.iterdir() if path.is_dir()))
        for base in within if start else (*within, root.resolve().parent):
            if (base / tail).exists():
                return base / tail
    return None


def _plain(root: Path, templates: tuple[str, ...] | None, class_word: str | None) -> Iterator[_Entry]:
    if templates is None:
        if not (root / "prompts.txt").is_file():
            refuse(f"--prompts is missing: name a file of prompts, or put one at {root / 'prompts.txt'}")
        templates = read_prompts(root / "prompts.txt", "--data_dir")
    classes = {}
    if (root / "classes.txt").is_file():
        if class_word:
            refuse(f"--class_word and {root / 'classes.txt'} both say what the subjects are: leave one out")
        classes = _read_classes(root / "classes.txt")
    folders = _subfolders(root)
    if blockskip.find_photos(str(root), "--data_dir"):
        note_passed_over(root, {folder.name for folder in folders}, "the photos beside them are taken as one subject")
        folders = [root]
    if not folders:
        refuse(f"--data_dir {root} holds no photo and no folder of photos: put some there")
    if absent := sorted(set(classes) - {folder.name for folder in folders}):
        refuse(f"{root / 'classes.txt'} names {absent[0]}, and there is no folder of it: restore it or take it out")
    for folder in folders:
        name = folder.resolve().name
        word = class_word or classes.get(name) or re.sub(r"[\W\d_]+", " ", name).strip() or name
        yield _Entry(name, folder, word, UNIQUE_TOKEN, templates)


def _read_classes(file: Path) -> dict[str, str]:
    classes = {}
    for line in _read(file, "--data_dir").splitlines():
        row = _class_row(line)
        if row:
            classes.update([row])
        elif line.strip() and line.strip() != "folder,class":
            refuse(f"--data_dir: {file}: '{line.strip()}' is no line 'folder,class'")
    return classes


def _subfolders(root: Path) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def note_passed_over(folder: Path, names: Iterable[str], reason: str) -> None:
    """Say what in a folder has no effect, and why."""
    if names := sorted(names):
        print(f"{folder}: passed over {', '.join(names)}: {reason}")
