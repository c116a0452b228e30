"""Plant faults, one at a time, in a copy of the package, and tell which no test notices.

Usage: scripts/mutants [--list] [NAME...]

A fault is a change of the text of one file. The tests nearest to it run on the copy; a fault that
they let pass survives. A text that is not there exactly once is an error: the list is out of date.
All these tests run once without a fault first: a test that fails then would notice anything, so it
is named, and left out of the others. Ends with 1 if a fault survived.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from mutant import Mutant
from mutants_of_folders import OF_FOLDERS

ROOT = Path(__file__).parents[1]
_PATIENCE = 900  # seconds for the tests of one fault: a fault may hang
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE"),
    *("-p", "no:cacheprovider"),
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)

MUTANTS = (
    # -- new files and folders
    Mutant(
        "fsync of a new file dropped",
        "writing/execute.py",
        "            self._sync()\n            verifier.finish(report)\n",
        "            verifier.finish(report)\n",
        "tests/writing/test_staged_file_power.py",
    ),
    Mutant(
        "sync of files that are named later dropped",
        "batches/executors/bundle.py",
        "            sync_together(file for each in begun for file in each.files)\n",
        "",
        "tests/batches/test_batch_bundles.py",
    ),
    Mutant(
        "fsync of the directory dropped",
        "writing/final_name.py",
        "            self.folder.sync()\n        except OSError as error:\n",
        "            pass\n        except OSError as error:\n",
        "tests/writing/test_staged_file_power.py",
    ),
    Mutant(
        "renamed before it is verified",
        "api/relocate.py",
        "            self._verify(made.open_written())\n            made.commit()\n",
        "            made.commit()\n            self._verify(made.open_written())\n",
        "tests/writing/test_staged_file_faults.py tests/api/test_relocate.py",
    ),
    Mutant(
        "checksum of a record not compared",
        "writing/verify.py",
        "        if crc32 != check.checksum.crc32:\n",
        "        if False:\n",
        "tests/writing/test_staged_file.py tests/writing/test_staged_file_disks.py "
        "tests/api/test_convert_damage.py",
    ),
    Mutant(
        "bytes not compared with the source",
        "writing/verify.py",
        "            if not self._is_in(file, at + shift, view):\n",
        "            if False:\n",
        "tests/writing/test_staged_file_plans.py",
    ),
    Mutant(
        "short write ignored",
        "writing/copy.py",
        "        view, at = view[taken:], at + taken\n",
        "        view, at = view[len(view) :], at + taken\n",
        "tests/writing/test_copy.py",
    ),
    Mutant(
        "short copy ignored",
        "writing/copy.py",
        "                at += moved\n",
        "                at = min(end, at + _STRIDE)\n",
        "tests/writing/test_copy.py",
    ),
    Mutant(
        "existing file replaced without --force",
        "writing/staged_file.py",
        "            if self.force:\n                self._name.folder.replace",
        "            if True:\n                self._name.folder.replace",
        "tests/writing/test_staged_file.py tests/writing/test_staged_file_faults.py",
    ),
    Mutant(
        "temporary file left behind",
        "writing/staged_file.py",
        "            self._remove()\n        super().__exit__",
        "        super().__exit__",
        "tests/writing/test_staged_file.py",
    ),
    Mutant(
        "change of the source unnoticed",
        "sources/file.py",
        " or _version(now) != _version(before):\n",
        ":\n",
        "tests/writing/test_staged_file.py tests/writing/test_staged_file_faults.py",
    ),
    Mutant(
        "path leads out of a new folder",
        "writing/staged_folder.py",
        '        if why:\n            raise RefusedError(f"{name!r} is',
        '        if False:\n            raise RefusedError(f"{name!r} is',
        "tests/writing/test_staged_folder.py",
    ),
    # -- in place
    Mutant(
        "fsync of the journal dropped",
        "writing/in_place/locked_file.py",
        "                at += len(part)\n            sync(fd)\n",
        "                at += len(part)\n",
        "tests/writing/test_in_place_power.py",
    ),
    Mutant(
        "name of the journal not synced",
        "writing/in_place/locked_file.py",
        "self.folder.rename(self._unfinished, self.journal)\n        self.folder.sync()\n",
        "self.folder.rename(self._unfinished, self.journal)\n",
        "tests/writing/test_in_place_power.py",
    ),
    Mutant(
        "journal removed before the change is on disk",
        "writing/in_place/change.py",
        "        self.held.sync_written()\n        for change in self.journal.changes:\n",
        "        for change in self.journal.changes:\n",
        "tests/writing/test_in_place_power.py",
    ),
    Mutant(
        "journal of another file believed",
        "writing/in_place/journal.py",
        "        if _tail(nbytes, read, self.changes) != self.tail:\n",
        "        if False:\n",
        "tests/writing/test_recover.py tests/writing/test_in_place.py",
    ),
    Mutant(
        "change made without a lock",
        "writing/in_place/locked_file.py",
        "                return lock_file(self.fd)\n",
        "                return True\n",
        "tests/writing/test_in_place.py tests/writing/test_recover.py",
    ),
    # -- pickles
    Mutant(
        "wrong memo slot",
        "pickles/opcodes/machine.py",
        "        self.fill(self.memo.filled)\n",
        "        self.fill(self.memo.filled + 1)\n",
        "tests/pickles/test_walk.py tests/whole/test_differentials.py",
    ),
    Mutant(
        "opcode straddles its frame",
        "pickles/opcodes/machine.py",
        "        if self.position > self.frame_end:\n",
        "        if False:\n",
        "tests/pickles/test_walk.py tests/pickles/test_walk_faults.py",
    ),
    Mutant(
        "object built twice",
        "pickles/opcodes/machine.py",
        "        if not isinstance(target, Call) or target.built:\n",
        "        if not isinstance(target, Call):\n",
        "tests/pickles/test_walk.py tests/pickles/test_walk_faults.py",
    ),
    Mutant(
        "allow-list entry too many",
        "torch_pickle/callables/allowlist.py",
        '        "_codecs": "encode",\n',
        '        "_codecs": "encode",\n        "os": "system",\n',
        "tests/whole/test_payloads.py tests/house/test_house.py",
    ),
    # -- zips
    Mutant(
        "record named twice accepted",
        "zips/archive.py",
        '            raise CorruptError(f"the record {twice!r} occurs twice")\n',
        "            pass\n",
        "tests/zips/test_archive.py tests/zips/test_archive_faults.py",
    ),
    Mutant(
        "local header not compared",
        "zips/archive.py",
        "        if not agree:\n",
        "        if False:\n",
        "tests/zips/test_archive.py tests/zips/test_archive_faults.py",
    ),
    Mutant(
        "overlapping records accepted",
        "zips/local_headers.py",
        "        if header_at < end:\n",
        "        if False:\n",
        "tests/zips/test_archive.py tests/zips/test_archive_faults.py",
    ),
    Mutant(
        "record not checked when it is read",
        "zips/archive.py",
        "        if not record.lacks_checksum and zlib.crc32(content) != record.crc32:\n",
        "        if False:\n",
        "tests/zips/test_archive.py tests/zips/test_archive_faults.py",
    ),
    # -- safetensors
    Mutant(
        "gap between tensors accepted",
        "formats/safetensors/header.py",
        "        if entry.start != at:\n",
        "        if entry.start < at:\n",
        "tests/formats/test_safetensors_header.py",
    ),
    Mutant(
        "key said twice accepted",
        "formats/safetensors/header.py",
        "    if len(found) != len(pairs):\n",
        "    if False:\n",
        "tests/formats/test_safetensors_header.py",
    ),
    Mutant(
        "index leads out of its folder",
        "formats/folders/sharded.py",
        "        if not is_plain_name(file):\n",
        "        if False:\n",
        "tests/formats/test_sharded.py tests/formats/test_model_folder.py",
    ),
    # -- tensors
    Mutant(
        "gather off by one",
        "runtime/strided.py",
        "(shape, stride, (gather.offset + offset) * units)\n",
        "(shape, stride, max(0, gather.offset + offset - 1) * units)\n",
        "tests/runtime/test_gather.py",
    ),
    Mutant(
        "strides reversed",
        "runtime/strided.py",
        "        shape, stride = [n for n, _ in dims], [step for _, step in dims]\n",
        "        shape, stride = [n for n, _ in dims], [step for _, step in dims][::-1]\n",
        "tests/runtime/test_gather.py",
    ),
    Mutant(
        "tensor reaches outside its storage",
        "torch_pickle/values/strided.py",
        "    if reach_of(shape, stride, offset, dtype) > storage.nbytes:\n",
        "    if False:\n",
        "tests/manifest/test_manifest.py tests/whole/test_mutations.py tests/api/test_inspect.py",
    ),
    Mutant(
        "alias dropped",
        "graph/parts.py",
        "                self.found.shared[name] = part\n",
        "                pass\n",
        "tests/api/test_convert.py tests/api/test_round_trips.py",
    ),
    Mutant(
        "only the first bytes compared",
        "runtime/compare_tensors.py",
        "            at += count\n\n",
        "            at = nbytes\n\n",
        "tests/api/test_diff_whole.py tests/api/test_diff.py",
    ),
    # -- verdicts and trust
    Mutant(
        "link out of its folder followed",
        "sources/place.py",
        "    if not allowed or (source is not None and not source.same_file(leads_to)):\n",
        "    if False:\n",
        "tests/sources/test_links.py",
    ),
    Mutant(
        "untrusted callable written",
        "api/conversion/trust.py",
        "    if trusted or not added:\n",
        "    if True:\n",
        "tests/api/test_trust.py",
    ),
    Mutant(
        "unknown callable let pass by --strict",
        "api/strict.py",
        "    if manifest.unknown_callables:\n",
        "    if False:\n",
        "tests/api/test_strict.py",
    ),
    Mutant(
        "any operator of a program accepted",
        "trial/sandbox/exported_graphs.py",
        "    found = _OPERATOR.fullmatch(said)\n    if found is None:\n",
        "    return True\n    found = _OPERATOR.fullmatch(said)\n    if found is None:\n",
        "tests/trial/test_validate_programs.py",
    ),
    Mutant(
        "guarded process not ended",
        "trial/sandbox/guard.py",
        "        os._exit(CODE)\n",
        "        return None  # type: ignore\n",
        "tests/trial/test_guard.py",
    ),
    Mutant(
        "system call too many",
        "trial/sandbox/system_calls.py",
        "    getsockopt 55 209\n",
        "    getsockopt 55 209, setpriority 141 140\n",
        "tests/trial/test_guard.py",
    ),
    Mutant(
        "attribute that unpickling calls",
        "torch_pickle/callables/uses.py",
        "        if compact_form(call) is None and not _calls_no_attribute(name, call):\n",
        "        if False:\n",
        "tests/whole/test_payloads.py::test_attributes_that_unpickling_calls_are_unknown",
    ),
    Mutant(
        "records passed over not looked into",
        "formats/archives/zip_container.py",
        "        yield from self._beside\n",
        "        yield from ()\n",
        "tests/whole/test_payloads.py::test_records_that_torch_passes_over_are_looked_into",
    ),
    Mutant(
        "object of a program taken for a tensor",
        "formats/programs/export_archive.py",
        "            if file.startswith(tuple(_OBJECTS)) or (is_pickled and meta is None):\n",
        "            if is_pickled and meta is None:\n",
        "tests/whole/test_payloads.py::test_constants_of_a_program_that_torch_unpickles",
    ),
    Mutant(
        "field of a dtype anywhere",
        "torch_pickle/callables/numpy_dtypes.py",
        " and 0 <= at <= size - each\n",
        "\n",
        "tests/torch_pickle/test_numpy_dtypes.py",
    ),
    Mutant(
        "other records not compared",
        "graph/compare/other_content.py",
        "            difference = _unlike(mine[name], others[name], no_devices=False)\n",
        "            difference = None\n",
        "tests/formats/test_bundle.py tests/api/test_diff_whole.py",
    ),
    Mutant(
        "metadata not compared",
        "graph/compare/other_content.py",
        "    found = list(_unlike_metadata(old, new))\n",
        "    found: list[Difference] = []\n",
        "tests/formats/test_metadata.py",
    ),
    # -- who goes where
    Mutant(
        "section misnamed",
        "torch_pickle/sections/sections.py",
        "        return Section.SCHEDULER\n",
        "        return Section.OTHER\n",
        "tests/torch_pickle/test_sections.py",
    ),
    Mutant(
        "optimizer steps moved",
        "placement/place.py",
        '    return at_home and wanted != "cpu" and not rules.everything\n',
        "    return False\n",
        "tests/placement/test_placement.py",
    ),
    Mutant(
        "--require always holds",
        "manifest/manifest.py",
        "            if not all(is_there(",
        "            if False and not all(is_there(",
        "tests/manifest/test_manifest.py tests/api/test_inspect.py",
    ),
    Mutant(
        "losses accepted without --drop",
        "api/conversion/plan.py",
        "    if refused:\n        lines = ",
        "    if False:\n        lines = ",
        "tests/api/test_convert.py",
    ),
    *OF_FOLDERS,
)


def mutated_copy(mutant: Mutant | None, folder: Path) -> None:
    """Copy the package and its tests, with a fault, or as they are where it is None.

    Raises:
        SystemExit: the text to be replaced is not there exactly once.
    """
    for name in ("ckptmove", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    if mutant is None:
        return
    path = folder / "ckptmove" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} holds the text {text.count(mutant.old)} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def failures(mutant: Mutant | None, arguments: Iterable[str]) -> list[str]:
    """What noticed a fault: the tests that fail, or that they did not end; empty if all pass.

    `arguments` are pytest's: the tests, and which of them are left out.

    Raises:
        SystemExit: the tests can't run.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        Path(folder).chmod(0o755)  # a test runs as somebody else
        mutated_copy(mutant, Path(folder))
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "CKPTMOVE_TEST_ALL": "1",
        }
        try:
            done = subprocess.run(
                [*_PYTEST, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_PATIENCE if mutant else None,
            )
        except subprocess.TimeoutExpired:
            return [f"the tests did not end in {_PATIENCE} s"]
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests can't run:\n{(done.stdout + done.stderr)[-2000:]}")
    return _FAILED.findall(done.stdout) or ["a test that is not named"] * done.returncode


def main() -> None:
    """Plant the faults that are named, or all."""
    wanted = sys.argv[1:]
    if wanted == ["--list"]:
        print(*(mutant.name for mutant in MUTANTS), sep="\n")
        return
    known = {mutant.name for mutant in MUTANTS}
    if unknown := set(wanted) - known:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    every_test = dict.fromkeys(test for mutant in mutants for test in mutant.tests.split())
    unsteady = failures(None, every_test)
    for test in unsteady:
        print(f"left out, since it fails without a fault, too: {test}", flush=True)
    left_out = [f"--deselect={test}" for test in unsteady]
    survivors = 0
    for mutant in mutants:
        started = time.monotonic()
        noticed = failures(mutant, ["-x", *mutant.tests.split(), *left_out])
        verdict = "noticed" if noticed else "SURVIVED"
        seconds = time.monotonic() - started
        print(f"{verdict:9} {seconds:5.0f} s  {mutant.name}", flush=True)
        if noticed:
            print(f"{'by':>17} {noticed[0]}", flush=True)
        survivors += not noticed
    print(f"{len(mutants)} planted, {survivors} survived")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
