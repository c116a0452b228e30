"""Faults in what was built around single files: folders, salvage, uploads."""

from __future__ import annotations

from mutant import Mutant

OF_FOLDERS = (
    # -- folders in place
    Mutant(
        "seal of a folder's journal not checked",
        "writing/in_place/folder_journal.py",
        "    if digest.digest() != read(nbytes - _SEAL_NBYTES, _SEAL_NBYTES):\n",
        "    if False:\n",
        "tests/writing/test_in_place_folder.py",
    ),
    Mutant(
        "first file of a folder undone alone",
        "writing/in_place/folder_undo.py",
        "        for file, changes in files:  # now",
        "        for file, changes in files[:1]:  # now",
        "tests/writing/test_in_place_folder.py",
    ),
    # -- distributed checkpoints
    Mutant(
        "chunks that overlap accepted",
        "formats/distributed/boxes.py",
        "    if covered > wanted or (len(filled) > 1 and not",
        "    if covered > wanted and (len(filled) > 1 and not",
        "tests/formats/test_dcp.py tests/sources/test_joined.py",
    ),
    Mutant(
        "missing chunks accepted",
        "formats/distributed/boxes.py",
        "    if covered < wanted:\n",
        "    if False:\n",
        "tests/formats/test_dcp.py",
    ),
    Mutant(
        "item of DCP lies elsewhere",
        "formats/distributed/dcp/metadata_walk.py",
        '    if not fits or file in (".", "..") or not _SEPARATORS.isdisjoint(file):\n',
        "    if not fits:\n",
        "tests/formats/test_dcp.py",
    ),
    Mutant(
        "rows of a rank written from the first",
        "formats/distributed/dcp/writing.py",
        "rows = box.offsets[0] * view.stride[0] if view.shape else 0",
        "rows = 0",
        "tests/formats/distributed/test_dcp_writing.py",
    ),
    Mutant(
        "padding of ZeRO's parameters ignored",
        "formats/distributed/deepspeed/zero.py",
        "                start += numel + padding\n",
        "                start += numel\n",
        "tests/formats/distributed/test_deepspeed.py",
    ),
    Mutant(
        "length of ZeRO's partitions not checked",
        "formats/distributed/deepspeed/zero.py",
        "        if there < needed or -(-needed // unit) != -(-there // unit):\n",
        "        if False:\n",
        "tests/formats/distributed/test_deepspeed.py",
    ),
    Mutant(
        "part of a shard put at the start of its tensor",
        "formats/distributed/dcp/hf_shards.py",
        "        at, run = runs.at * width,",
        "        at, run = 0,",
        "tests/formats/distributed/test_hf_shards.py",
    ),
    # -- salvage
    Mutant(
        "damaged record salvaged as a right one",
        "zips/found_records.py",
        "        return ProofLevel.RIGHT if self.sum(header, stored_nbytes) == crc32"
        " else ProofLevel.WRONG\n",
        "        return ProofLevel.RIGHT\n",
        "tests/whole/test_salvage.py::test_bits_that_were_flipped "
        "tests/whole/test_salvage.py::test_parts_that_were_overwritten",
    ),
    # -- uploads
    Mutant(
        "upload of a living process aborted",
        "writing/upload/unfinished.py",
        "        return _start_of(record.pid) == record.started\n",
        "        return False\n",
        "tests/batches/test_batch_uploads.py",
    ),
    Mutant(
        "upload elsewhere aborted",
        "writing/upload/unfinished.py",
        '        if not prefix or key.startswith(f"{prefix}/"):\n',
        "        if True:\n",
        "tests/batches/test_batch_uploads.py",
    ),
)
