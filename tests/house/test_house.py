"""The walls of the house: who may import whom, who may print, and what must be said."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import ckptmove
from ckptmove.cli import COMMANDS, cli

ROOT = Path(ckptmove.__file__).parent
PROJECT = ROOT.parent

#: Every module, floor by floor from the ground up; each imports only what stands before it.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "display.phrases",
        "display.text",
        "display.blocks",
        "display.columns",
        "display.plain",
        "display.json_text",
        "display.page",
        "display.report",
        "version",
        "plans.plan",
        "plans.crc32",
        "plans",
    ),
    (
        "system",
        "system.files",
        "system.signals",
        "system.forks",
        "system.locks",
        "system.temporary",
        "system.memory",
        "system.names",
        "sources.budget",
        "sources.source",
        "sources.file",
        "sources.nearby",
        "sources.checksums",
        "sources.fetch_pool",
        "sources.joined",
        "sources.place",
        "sources.s3_session",
        "sources.filesystem",
        "sources.known_objects",
        "sources.range_request",
        "sources.cache",
        "sources.passing_digests",
        "sources.remote_object",
        "sources.remote_place",
        "sources.downloads",
        "sources",
    ),
    (
        "pickles.device_tags",
        "pickles.flag_row",
        "pickles.nodes",
        "pickles.opcodes.table",
        "pickles.opcodes.reader",
        "pickles.base64_text",
        "pickles.opcodes.mixed_rows",
        "pickles.opcodes.rows",
        "pickles.opcodes.pairs",
        "pickles.hash_costs",
        "pickles.opcodes.literals",
        "pickles.opcodes.python2_names",
        "pickles.opcodes.memo",
        "pickles.opcodes.marked_stack",
        "pickles.opcodes.plain_tensors",
        "pickles.opcodes.copies",
        "pickles.opcodes.machine",
        "pickles.opcodes.tensor_layouts",
        "pickles.opcodes.tensor_machine",
        "pickles.opcodes",
        "pickles.scan",
        "pickles.gaps",
        "pickles.fetch",
        "pickles.replacements",
        "pickles.fitting",
        "pickles.walk",
        "pickles.prefix",
        "pickles.reached_globals",
        "pickles.emit",
        "pickles.compare",
        "pickles.respelled",
        "pickles.splice",
        "pickles.terms.spelling",
        "pickles.terms.reading",
        "pickles.terms.text",
        "pickles.terms",
        "pickles",
        "zips.members",
        "zips.directory_rows",
        "zips.archive",
        "zips.local_headers",
        "zips.layout",
        "zips.in_a_row",
        "zips.found_entries",
        "zips.found_records",
        "zips.content",
        "zips.rewrite",
        "zips.checking",
        "zips.amend",
        "zips",
    ),
    (
        "manifest.device",
        "manifest.dtypes",
        "manifest.paths",
        "manifest.other_records",
        "manifest.folder_files",
        "manifest.manifest",
        "manifest.storage_table",
        "manifest",
    ),
    (
        "torch_pickle.callables.reviewed_names",
        "torch_pickle.callables.allowlist",
        "torch_pickle.callables.numpy_dtypes",
        "torch_pickle.callables.uses",
        "torch_pickle.sections.tensor_names",
        "torch_pickle.pickled_modules",
        "torch_pickle.values.persistent_ids",
        "torch_pickle.torchscript_code",
        "torch_pickle.values.strided",
        "torch_pickle.callables",
        "torch_pickle.streams",
        "torch_pickle.unknown",
        "torch_pickle.merged_contents",
        "torch_pickle.values.numpy_arrays",
        "torch_pickle.sections.sections",
        "torch_pickle.sections.averages",
        "torch_pickle.sections",
        "torch_pickle.values.plain_tensors",
        "torch_pickle.values.tensors",
        "torch_pickle.values",
        "torch_pickle.children",
        "torch_pickle.listed_tensors",
        "torch_pickle.listing",
        "torch_pickle",
        "torch_pickle.tree",
        "placement.move_totals",
        "placement.rules",
        "placement.place",
        "placement",
    ),
    (
        "reports.folder_files",
        "reports.groups",
        "display",
        "reports.tree",
        "reports.inspect",
        "reports.live",
        "reports.device_values",
        "reports.move",
        "reports.events",
        "reports.doctor",
        "reports.batch.items",
        "reports.batch.log",
        "reports.batch.table",
        "reports.relocate",
        "reports.salvage",
        "reports.convert",
        "reports.difference",
        "reports.diff",
        "reports.validate",
        "reports.recover",
        "reports.batch.report",
        "reports.batch",
        "reports",
    ),
    (
        "graph.normalize",
        "graph.traversal",
        "graph.plain_tensors",
        "graph.canonical",
        "graph.fingerprint",
        "graph.program_tensors",
        "graph.draft",
        "graph.array_order",
        "graph.edit.numpy_arrays",
        "graph.fill",
        "graph.parts",
        "graph.names",
        "graph.edit.flatten_modules",
        "graph.patterns",
        "graph.edit.subtree",
        "graph.edit.model_weights",
        "graph.edit.select",
        "graph.edit.narrow",
        "graph.compare.tree_position",
        "graph.compare.difference",
        "graph.compare.excerpts",
        "graph.compare.names_alike",
        "graph.compare.other_content",
        "graph.edges",
        "graph.compare.side",
        "graph.compare.pairing",
        "graph.compare",
        "graph.edit.cast",
        "graph.tensor_terms",
        "graph.tree_text",
        "graph.edit.optimizer_ids",
        "graph.edit.callables",
        "graph.edit",
        "graph",
    ),
    (
        "runtime.torch_import",
        "runtime.environment.wheels",
        "runtime.environment.machine",
        "runtime.environment.facts",
        "runtime.environment.evidence",
        "runtime.environment.nvidia",
        "runtime.environment.usable",
        "runtime.environment",
        "runtime.opaque",
        "runtime.bfloat16",
        "runtime.elements",
        "runtime.strided",
        "runtime.gather",
        "runtime.compare_elements",
        "runtime.element_runs",
        "runtime.compare_tensors",
        "runtime.matching",
        "runtime.device_copies",
        "runtime.storages",
        "runtime.mapped_tensors",
        "runtime.rebuild",
        "runtime.plain",
        "runtime.arrays",
        "runtime.build",
        "runtime.pickling",
        "runtime",
        "live.tracing.program.source_lines",
        "live.tracing.program.syntax",
        "live.inventory.containers",
        "live.inventory.opaque_types",
        "live.inventory.object_walk",
        "live.inventory.arguments",
        "live.inventory.holdings",
        "live.inventory.offloaded",
        "live.inventory.ownership",
        "live.inventory.findings",
        "live.tracing.program.conditions",
        "live.tracing.program.settings",
        "live.tracing.program.program_source",
        "live.tracing.program.given_device",
        "live.tracing.recording.remembered",
        "live.tracing.recording.history",
        "live.tracing.program.library_calls",
        "live.tracing.recording.device_choice",
        "live.tracing.program.loop_tensors",
        "live.inventory.manifest",
        "live.tracing.program",
        "live.tracing.recording.operations",
        "live.tracing.recording.tally",
        "live.tracing.recording.call_sites",
        "live.tracing.recording.call_arguments",
        "live.tracing.recording.stepping",
        "live.tracing.recording.tensor_names",
        "live.tracing.recording.operand_code",
        "live.tracing.recording.unused_copies",
        "live.tracing.recording.updates",
        "live.tracing.recording.host_copies",
        "live.tracing.recording.sampling",
        "live.tracing.recording.cut_gradients",
        "live.tracing.recording.stale_copies",
        "live.tracing.recording.model_calls",
        "live.tracing.recording.recorder",
        "live.tracing.causes.background",
        "live.tracing.causes.device_exceptions",
        "live.tracing.causes.evidence",
        "live.tracing.causes.costs",
        "live.tracing.causes.batch_causes",
        "live.tracing.causes.operand_causes",
        "live.tracing.causes.training_causes",
        "live.tracing.causes.verdicts",
        "live.tracing.recording",
        "live.tracing.causes",
        "live.tracing.trace",
        "live.tracing",
        "live.transfer.devices",
        "live.transfer.copy",
        "live.transfer.plain_batch",
        "live.transfer.to_device",
        "live.transfer.prefetch",
        "live.transfer.swap_storages",
        "live.transfer.movable",
        "live.transfer.parametrized",
        "live.transfer.move",
        "live.transfer",
        "live.inventory",
        "live",
    ),
    (
        "writing.copy",
        "writing.running_checksums",
        "writing.verify",
        "writing.final_name",
        "writing.execute",
        "writing.staged_file",
        "writing.staged_folder",
        "writing.abandoned",
        "writing.destination",
        "writing.upload.errors",
        "writing.upload.stream_plan",
        "writing.upload.server_copy",
        "writing.upload.parts",
        "writing.upload.unfinished",
        "writing.upload.s3",
        "writing.upload.fsspec",
        "writing.upload.staged_object",
        "writing.upload.staged_prefix",
        "writing.upload.destination",
        "writing.upload",
        "writing",
        "writing.in_place.journal_name",
        "writing.in_place.journal",
        "writing.in_place.locked_file",
        "writing.in_place.folder_journal",
        "writing.in_place.find_journal",
        "writing.in_place.folder_undo",
        "writing.in_place.undo",
        "writing.in_place.change",
        "writing.in_place",
    ),
    (
        "formats.archives.tar_archive",
        "formats.safetensors.header",
        "formats.safetensors.metadata",
        "formats.session",
        "formats.writing",
        "formats.file_shares",
        "formats.relocation_check",
        "formats.storage_bytes",
        "formats.checkpoint",
        "formats.folders.weight_names",
        "formats.folders.run_folders",
        "formats.probe",
        "formats.base",
        "formats.unread_formats",
        "formats.archives.zip_container",
        "formats.table",
        "formats.archives.documents",
        "formats.archives.records",
        "formats.archives",
        "formats.torch.frame",
        "formats.torch.zip_writing",
        "formats.torch.zip",
        "formats.torch.package",
        "formats.torch.legacy",
        "formats.torch.tar",
        "formats.torch.nemo",
        "formats.torch",
        "formats.safetensors.writing",
        "formats.safetensors.file",
        "formats.safetensors",
        "formats.pickle",
        "formats.programs.script_operators",
        "formats.programs.torchscript",
        "formats.programs.export_graph",
        "formats.programs.export_archive",
        "formats.programs.torch_export",
        "formats.programs.torchscript_v1",
        "formats.programs",
        "formats.bundle_writing",
        "formats.bundle",
        "formats.folders.parts",
        "formats.folders.sharded",
        "formats.folders.layouts",
        "formats.distributed.deepspeed.rank_files",
        "formats.distributed.rank_groups",
        "formats.folders.missing_files",
        "formats.folders.training_folder",
        "formats.folders.companions",
        "formats.folders.agreement",
        "formats.distributed.boxes",
        "formats.distributed.dcp.metadata_walk",
        "formats.distributed.dcp.item_patterns",
        "formats.distributed.dcp.item_machine",
        "formats.distributed.dcp.metadata",
        "formats.distributed.dcp.packed",
        "formats.distributed.dcp.items",
        "formats.distributed.dcp.equal_items",
        "formats.distributed.dcp.saves",
        "formats.distributed.dcp.tree",
        "formats.distributed.dcp.flattening",
        "formats.distributed.dcp.item_frame",
        "formats.distributed.dcp.rank_file",
        "formats.distributed.dcp.metadata_writing",
        "formats.distributed.dcp.writing",
        "formats.distributed.dcp.folder",
        "formats.distributed.deepspeed.flat",
        "formats.distributed.saved_file",
        "formats.distributed.deepspeed.trained",
        "formats.distributed.deepspeed.zero",
        "formats.distributed.deepspeed.pipeline",
        "formats.distributed.deepspeed.zero_container",
        "formats.distributed.deepspeed.folder",
        "formats.distributed.deepspeed.model_and_optimizer",
        "formats.distributed.deepspeed.universal_writing",
        "formats.distributed.deepspeed.universal",
        "formats.distributed.deepspeed",
        "formats.distributed.divided_tensor",
        "formats.distributed.alike",
        "formats.distributed.part_of_rank",
        "formats.distributed.fsdp_ranks",
        "formats.distributed.dcp.ranks_by_sizes",
        "formats.distributed.dcp.hf_shards",
        "formats.distributed.dcp",
        "formats.distributed",
        "formats.folders.folder_record",
        "formats.folders.model_folder",
        "formats.folders.whole_folder",
        "formats.folders",
        "formats.diagnosis",
        "formats",
        "formats.loading",
        "formats.salvage.remains",
        "formats.salvage.zero_fill",
        "formats.salvage.listing",
        "formats.salvage.pickled",
        "formats.salvage.programs",
        "formats.salvage.zipped",
        "formats.salvage.safetensors",
        "formats.salvage.readable",
        "formats.salvage.sharded",
        "formats.salvage.distributed",
        "formats.salvage.tars",
        "formats.salvage.draft",
        "formats.salvage",
    ),
    (
        "trial.model.import_by_name",
        "trial.sandbox.magnitudes",
        "trial.sandbox.exported_graphs",
        "trial.sandbox.exported_programs",
        "trial.sandbox.torchscript",
        "trial.sandbox.configurations",
        "trial.model.factory",
        "trial.model.inputs",
        "trial.model",
        "trial.state.loaders",
        "trial.state.checkpoint_state",
        "trial.state.state_dict_fit",
        "trial.state.optimizer_state",
        "trial.step",
        "trial.stage",
        "trial.findings",
        "trial.run",
        "trial.sandbox.system_calls",
        "trial.sandbox.fence",
        "trial.sandbox.guard",
        "trial.subprocess_call",
        "trial.sandbox.confinement",
        "trial.sandbox",
        "trial.simulation.device_memory",
        "trial.simulation.torch_answers",
        "trial.simulation.hooks",
        "trial.simulation.kernels",
        "trial.simulation.patches",
        "trial.simulation.operand_rules",
        "trial.simulation.device_kernels",
        "trial.simulation.autocasting",
        "trial.simulation.device",
        "trial.simulation.pinning",
        "trial.simulation.script_host",
        "trial.simulation",
        "trial.stage_fake",
        "trial.script_causes",
        "trial.program_history",
        "trial.script",
        "trial.examine",
        "trial.trial",
        "trial.state.reload",
        "trial.state",
        "trial",
    ),
    (
        "api.options",
        "api.strict",
        "api.inspect",
        "api.diff",
        "api.folders.weight_copies",
        "api.folders.files",
        "api.folders.relocate",
        "api.relocate",
        "api.conversion.target",
        "api.conversion.trust",
        "api.conversion.edits",
        "api.conversion.plan",
        "api.conversion",
        "api.folders.convert",
        "api.folders.one_file",
        "api.convert",
        "api.load",
        "api.save",
        "api.against",
        "api.folders.checks",
        "api.folders",
        "api.validate",
        "api.doctor",
        "api.recover",
        "api.salvage",
        "api.in_memory",
        "api",
    ),
    (
        "training.lightning",
        "training.transformers",
        "training",
    ),
    (
        "batches.trees.tree",
        "batches.trees.ledger",
        "batches.trees.local_tree",
        "batches.trees.object_ledger",
        "batches.trees.remote_tree",
        "batches.trees",
        "batches.selection",
        "batches.discovery",
        "batches.outputs",
        "batches.options",
        "batches.keywords",
        "batches.fingerprints",
        "batches.messages",
        "batches.run_item",
        "batches.forecast",
        "batches.source_removal",
        "batches.executors.time_limit",
        "batches.executors.worker",
        "batches.executors.bundle",
        "batches.executors.process_pool",
        "batches.executors.ray_driver",
        "batches.executors.ray_executor",
        "batches.executors",
        "batches.planning",
        "batches.running",
        "batches.batch",
        "batches",
    ),
    ("",),
    (
        "cli.display.terminal",
        "cli.display.streams",
        "cli.help_text",
        "cli.first_use",
        "cli.display.pages",
        "cli.declare",
        "cli.display.output",
        "cli.display.batch_files",
        "cli.display.batch_metrics",
        "cli.display.batch_progress",
        "cli.display",
        "cli.inspect",
        "cli.relocate",
        "cli.convert",
        "cli.diff",
        "cli.validate",
        "cli.doctor",
        "cli.recover",
        "cli.salvage",
        "cli.batch",
        "cli",
        "__main__",
    ),
)
ORDER = [module for floor in FLOORS for module in floor]
#: The modules of each room.
ROOMS: dict[str, list[str]] = {}
for _module in ORDER:
    ROOMS.setdefault(_module.partition(".")[0] or "ckptmove", []).append(_module)
every_room = pytest.mark.parametrize("room", ROOMS)
#: The rooms that import torch.
TORCH = ("runtime", "live", "trial", "training")


def modules() -> list[str]:
    found = [name for _, name, _ in pkgutil.walk_packages([str(ROOT)], "ckptmove.")]
    return ["", *(name.removeprefix("ckptmove.") for name in found)]


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")) if module else ROOT
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree_of(module: str) -> ast.Module:
    """What is written in a module, parsed once."""
    return ast.parse(file_of(module).read_text())


def imports(module: str) -> Iterator[str]:
    """The modules of ours that a module imports, wherever in its text."""
    file = file_of(module)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            said = node.module.split(".") if node.module else []
            if not node.level and said[0] != "ckptmove":
                continue
            target = package[: len(package) - node.level + 1] + said if node.level else said[1:]
            for alias in node.names:
                inner = ".".join([*target, alias.name])
                yield inner if inner in ORDER else ".".join(target)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ckptmove":
                    yield alias.name.removeprefix("ckptmove").removeprefix(".")


def test_every_module_has_a_floor() -> None:
    assert sorted(modules()) == sorted(ORDER)


@every_room
def test_imports_go_down(room: str) -> None:
    for module in ROOMS[room]:
        found = [name for name in imports(module) if name != module]  # as code for others does
        above = [name for name in found if ORDER.index(name) > ORDER.index(module)]
        assert not above, f"{module} imports {above}, which stand above it"


def landing() -> list[Path]:
    """Files and rooms of the package, but for folders in which only old bytecode is left."""
    return [path for path in ROOT.iterdir() if path.is_file() or any(path.glob("*.py"))]


def test_the_landing_stays_clear() -> None:
    """Who enters sees all at a glance; a new module goes into the room of its trade."""
    assert len(landing()) <= 26


def test_no_room_is_called_as_a_public_name() -> None:
    """Importing `ckptmove.batch` would put a module in the place of the verb."""
    assert not {path.stem for path in landing()} & {*ckptmove.__all__}


def test_contributing_shows_the_house() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    house = text[text.index("## The house") : text.index("## Rules")]
    named = set(re.findall(r"`([a-z_/]+)`", house))
    missing = {
        module
        for module in ORDER
        if module and not {module.replace(".", "/"), module.split(".")[0] + "/"} & named
    } - {"__main__"}
    assert not missing


@every_room
def test_only_the_command_line_prints(room: str) -> None:
    for module in ROOMS[room]:
        found = [node.func for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)]
        calls = {ast.unparse(each) for each in found}
        assert "print" not in calls, module
        if room != "cli":
            assert not {"click.echo", "sys.stdout.write", "sys.stderr.write"} & calls, module


def test_one_module_asks_whether_a_path_is_a_url() -> None:
    asking = [module for module in ORDER if "is_url(" in file_of(module).read_text()]
    assert asking == ["sources.place"], "the others call a method of a place"


@every_room
def test_files_stay_short(room: str) -> None:
    for module in ROOMS[room]:
        lines = len(file_of(module).read_text().splitlines())
        assert lines <= 440, f"split {module} by noun"


def test_everything_imports_without_what_is_optional() -> None:
    walled = (
        "torch",
        "numpy",
        "safetensors",
        "isal",
        "fsspec",
        "s3fs",
        "aiohttp",
        "botocore",
        "asyncio",
    )
    script = f"""
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {walled!r}:
            raise ImportError(name + " is not to be imported")
sys.meta_path.insert(0, Wall())
import importlib
for module in {[name for name in modules() if name.split(".")[0] not in TORCH]!r}:
    if module != "__main__":
        importlib.import_module("ckptmove." + module if module else "ckptmove")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PROJECT)


def public(module: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and their methods with public names."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                if any(ast.unparse(each) == "overload" for each in node.decorator_list):
                    continue
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from inside(node.body, f"{prefix}{node.name}.")

    yield from inside(tree_of(module).body, "")


_OPCODES = ("Machine.", "MarkedStack.", "Literals.", "Reader.")  # each says what it does


@every_room
def test_every_public_name_has_a_docstring(room: str) -> None:
    for module in ROOMS[room]:
        machine = module in (
            "pickles.opcodes.machine",
            "pickles.opcodes.marked_stack",
            "pickles.opcodes.literals",
            "pickles.opcodes.reader",
        )
        bare = [
            name
            for name, node in public(module)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not ast.get_docstring(node)
            and not (machine and name.startswith(_OPCODES))
            and not described_above(module, name)
        ]
        assert not bare, module
        assert ast.get_docstring(tree_of(module)), module


def described_above(module: str, name: str) -> bool:
    """Whether a method overrides one that has a docstring."""
    cls, _, method = name.rpartition(".")
    bases = getattr(importlib.import_module(f"ckptmove.{module}"), cls).__mro__[1:] if cls else ()
    return any(method in base.__dict__ and base.__dict__[method].__doc__ for base in bases)


#: Words that a reader has to read twice, and what the code says no more.
RIDDLES = re.compile(r"\b(anew|so called|[Nn]obody|[Ss]omebody|[Rr]ehears\w*|played)\b")


@every_room
def test_a_module_says_in_its_first_line_what_it_does(room: str) -> None:
    for module in ROOMS[room]:
        text = ast.get_docstring(tree_of(module)) or ""
        first = text.split("\n\n")[0]
        assert "\n" not in first, module
        assert first.endswith("."), module
        assert not RIDDLES.search(first), module


@pytest.mark.parametrize("name", ckptmove.__all__)
def test_public_names_are_described_in_plain_words(name: str) -> None:
    found = getattr(ckptmove, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        text = inspect.getdoc(found) or ""
        assert "\n" not in text.split("\n\n")[0]
        assert not RIDDLES.search(text)


def test_public_surface_is_sorted_and_there() -> None:
    assert sorted(ckptmove.__all__) == list(ckptmove.__all__)
    for name in ckptmove.__all__:
        assert getattr(ckptmove, name) is not None
    assert sorted(ckptmove.__all__) == sorted([*ckptmove._MODULES, "__version__"])


def test_type_checkers_see_the_public_names_where_they_come_from() -> None:
    seen = {
        alias.name: f"ckptmove.{node.module}"
        for branch in ast.parse(file_of("").read_text()).body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == ckptmove._MODULES


def test_every_error_is_in_the_tree_that_errors_shows() -> None:
    shown = inspect.getdoc(sys.modules["ckptmove.errors"]) or ""
    names = [name for name in ckptmove.__all__ if name.endswith(("Error", "Failed"))]
    for name in names:
        error = getattr(ckptmove, name)
        assert issubclass(error, ckptmove.CkptmoveError)
        assert re.search(rf"\b{name}\b", shown)
        assert error("x").exit_code == error.exit_code


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_that_ends_in_an_example(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command
    assert command.help
    assert f"ckptmove {name} " in command.help
    assert all(each.help for each in command.params if isinstance(each, click.Option))


def test_the_project_speaks_of_itself_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        text = (PROJECT / name).read_text(errors="replace") if (PROJECT / name).exists() else ""
        assert not re.search(r"(?<![\w.])/(work|home|root|farm)/", text), name


def test_a_type_checker_does_not_take_every_name_for_a_public_one() -> None:
    """A `__getattr__` that it sees makes `from ckptmove import Misspelled` right."""
    top = ast.parse(Path(ckptmove.__file__).read_text()).body
    functions = {each.name for each in top if isinstance(each, ast.FunctionDef)}
    assert functions == {"__dir__"}
