"""Convert a folder to a folder: every checkpoint in it by itself, and the other files as they are.

The options apply to the weights of models, which get the names that libraries load. Training state,
such as an optimizer, keeps its whole tree: `optimizer.pt` becomes `optimizer.pt.safetensors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ... import formats
from ...errors import CkptmoveError, RefusedError
from ...formats.checkpoint import Checkpoint
from ...formats.distributed.rank_groups import CONFIGURED
from ...formats.folders.run_folders import own_folders, several_checkpoints
from ...formats.folders.training_folder import roots_as
from ...formats.folders.weight_names import INDEX, NOT_COMPARED, torch_name
from ...formats.writing import WriteOptions
from ...graph.draft import CheckpointGraph
from ...manifest.manifest import Section, TensorEntry
from ...reports.convert import ConvertReport, Loss
from ...sources import place_of
from ...sources.joined import JoinedFiles
from ..conversion.edits import Changes, Edits, is_state_dict
from ..conversion.plan import ConversionOptions, check_losses, plan_conversion, refused_losses
from ..conversion.target import PlannedPart, Target
from ..conversion.trust import TrustedPlan
from ..strict import refuse_unknown, refuse_unknown_in
from .files import (
    CONFIGURATION,
    CheckpointFile,
    Companion,
    FolderFiles,
    check_apart,
    files_of,
    main_dtype,
    with_dtype,
)
from .weight_copies import losses_of_copies

_SAFE = ".safetensors"
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_WEIGHTS = frozenset((Section.MODEL, Section.EMA))
#: Files about a training run that are not checkpoints.
_OF_TRAINING = frozenset(("trainer_state.json",))


class PartPlan(NamedTuple):
    """How one checkpoint of the folder is written."""

    file: CheckpointFile
    planned: PlannedPart
    plan: TrustedPlan
    changes: Changes
    format: str
    dtype: str | None  #: the dtype of most of its weights, if it differs from before


def convert_folder(
    src: str,
    target: Target,
    edits: Edits,
    options: ConversionOptions,
) -> ConvertReport:
    """Convert a whole folder; raises as `convert`. The report does not have the time taken."""
    check_apart(src, target.path)
    warnings = list[str]()
    files = files_of(src, warnings, keep=options.keep_files, follow_links=options.follow_links)
    own = own_folders(each.name for each in files.checkpoints)
    if own and all(
        each.name.startswith(tuple(f"{one}/" for one in own)) for each in files.checkpoints
    ):
        raise several_checkpoints(own, place_of(src))
    if options.strict:
        for each in files.companions:
            if not each.is_folder:
                refuse_unknown_in(each.path, otherwise=options.otherwise)
    with ExitStack() as stack:
        conversion = _FolderConversion(src, target, edits, options, files, warnings)
        conversion.plan(stack)
        conversion.compare_copies(dry_run=options.dry_run)
        companions = conversion.companions()
        parts = [part.planned for part in conversion.parts]
        if options.dry_run:
            target.check(parts, companions, force=options.force)
        else:
            target.write(
                parts, companions, force=options.force, progress=options.progress, like=src
            )
        return conversion.report(companions, written=not options.dry_run)


class _FolderConversion:
    """The conversion of one folder."""

    def __init__(
        self,
        path: str,
        target: Target,
        edits: Edits,
        options: ConversionOptions,
        files: FolderFiles,
        warnings: list[str],
    ) -> None:
        self.path = path
        self.target = target
        self.edits = edits
        self.options = options
        self.files = files
        self.warnings = warnings
        self.parts = list[PartPlan]()
        self.pickles = list(files.pickles)
        self.left_out = list[str]()
        self.copies = list[Loss]()  # files that should equal the weights, but differ
        self.nbytes = 0
        self._kept = list[Companion]()  # checkpoints that stay as they are

    def plan(self, stack: ExitStack) -> None:
        """Plan how every checkpoint is written.

        Raises RefusedError if an entry of the weights would be lost, or nothing is selected;
        InputError if one of the checkpoints can't be read.
        """
        opened = [
            (self._with_usual_name(file), self._open(file, stack))
            for file in self.files.checkpoints
        ]
        if not opened:
            with formats.open_checkpoint(self.path):  # raises an error that says why
                raise RefusedError("no checkpoint is in it", path=self.path)
        usual = any(file.is_weights for file, _ in opened)
        drafts = list[tuple[CheckpointFile, CheckpointGraph, list[TensorEntry] | None]]()
        for file, found in opened:
            tensors = list(found.manifest.tensors)
            is_model = file.is_weights or (
                not usual and any(each.section in _WEIGHTS for each in tensors)
            )
            draft = found.draft(nested=self.edits.narrow and is_model)
            drafts.append((file, draft, tensors if is_model else None))
        models = [tensors for _, _, tensors in drafts if tensors is not None]
        if len(models) > 1:
            try:
                self.edits.check_heard(models)
            except RefusedError as error:
                if len(models) < len(drafts):
                    error.hint = self._where_names_count(error.hint)
                raise
        for file, draft, of_model in drafts:
            try:
                self._plan_one(file, draft, of_model, several=len(models) > 1)
            except CkptmoveError as error:
                error.about(draft.path)
                if isinstance(error, RefusedError) and len(models) < len(drafts):
                    error.hint = self._where_names_count(error.hint)
                raise
            draft.release()
        if not self.parts:
            raise RefusedError("nothing of it is selected", path=self.path)

    def _with_usual_name(self, file: CheckpointFile) -> CheckpointFile:
        """Give a model that ranks saved the usual name, if its own name says nothing."""
        is_one = file.section is Section.OTHER and self._only_models
        return file._replace(within=True) if is_one else file

    @property
    def _only_models(self) -> bool:
        """Whether only weights are written, in the form that libraries expect."""
        return self.edits.bare and self.edits.narrow

    def compare_copies(self, *, dry_run: bool) -> None:
        """Compare the copies of the weights with the weights that are used; a dry run skips this.

        Raises RefusedError if a copy differs and `drops` does not name it.
        """
        if not dry_run:
            follow = self.options.follow_links
            self.copies = list(losses_of_copies(self.path, self.files.copies, follow_links=follow))
            try:
                check_losses(self.copies, self.options.drops)
            except RefusedError as error:
                error.about(self.path)
                name = refused_losses(self.copies, self.options.drops)[0].name
                error.hint = f"--keep-files '{name}' copies it as it is; {error.hint}"
                raise
        other = {loss.name for loss in self.copies}
        for used, copies in self.files.copies:
            same = [each for each in copies if each not in other]
            if same:
                holds = "hold the same tensors" if len(same) > 1 else "holds the same tensors"
                what = f"should hold the same{NOT_COMPARED}" if dry_run else holds
                more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
                self.warnings.append(f"{used} is used as the weights; {same[0]}{more} {what}")

    def _where_names_count(self, hint: str | None) -> str | None:
        """Return a hint for names that match no weights, but may be names in an optimizer."""
        edits = self.edits
        if not (edits.select or edits.exclude or edits.root):
            return hint
        return (
            "from folder to folder, names are those of the weights; with a file as DST, such as "
            "one.safetensors, those of all that is in the folder"
        )

    def _open(self, file: CheckpointFile, stack: ExitStack) -> Checkpoint:
        place = place_of(self.path).child(file.name) if file.name else place_of(self.path)
        follow = self.options.follow_links
        found = stack.enter_context(formats.open_checkpoint(place.path, follow_links=follow))
        for source in () if follow else found.sources:
            if isinstance(source, JoinedFiles):  # its parts are sources of their own
                continue
            place_of(source.path).check_link(place_of(self.path), source)
        if file.section is not None:
            found.container.roots = list(roots_as(file.section, found))
        if self.options.strict:
            refuse_unknown(found.manifest, otherwise=self.options.otherwise)
        self.nbytes += sum(source.own_nbytes for source in found.sources)
        return found

    def _plan_one(
        self,
        file: CheckpointFile,
        draft: CheckpointGraph,
        tensors: list[TensorEntry] | None,
        *,
        several: bool,
    ) -> None:
        edits: Edits | None
        if tensors is None:
            edits = None if self.edits.narrow else self.edits.of_training_state
        else:
            edits = self.edits.share(tensors) if several else self.edits
        if edits is None:
            self.left_out.append(file.name)
            return
        changes = edits.apply(draft)
        options = self._write_options(file, draft, is_model=tensors is not None)
        if tensors is None:
            losses = [*draft.losses, *self.target.format.losses(draft, options)]
            lost = refused_losses(losses, self.options.drops)
            if lost:
                self.pickles.append(Loss(file.name, f"holds {lost[0].name}, which {lost[0].why}"))
                self._kept += self._as_companions(file)
                return
        plan = plan_conversion(
            draft,
            self.target.format,
            options,
            self.options.drops,
            trusted=self.options.trusted,
            force=self.options.force,
        )
        after = main_dtype(draft.list_contents().tensors) if changes.cast and tensors else None
        before = main_dtype(tensors or ())
        dtype = after if after != before else None
        prefix = "" if options.in_folder else file.folder + self._single_name(file, draft)
        names = {name: (file.folder + name) if name else prefix for name in plan.weights.files}
        planned = PlannedPart(plan.weights, draft.sources, names)
        self.warnings += draft.warnings
        self.parts.append(PartPlan(file, planned, plan, changes, draft.format, dtype))

    def _write_options(
        self, file: CheckpointFile, draft: CheckpointGraph, *, is_model: bool
    ) -> WriteOptions:
        options = self.options.options._replace(stem=self.target.stem_of(file.stem))
        safe = self.target.format.name == "safetensors"
        if file.is_weights or (is_model and safe and is_state_dict(draft)):
            return options
        if is_model:
            return options._replace(in_folder=options.max_shard_nbytes is not None)
        return WriteOptions(file.stem)

    def _single_name(self, file: CheckpointFile, draft: CheckpointGraph) -> str:
        """Return the new file name of a checkpoint that does not hold only weights."""
        name = file.name_in_folder
        if self.target.format.name == "safetensors":
            return name if name.endswith(_SAFE) else name + _SAFE
        if file.section is not None and not name.endswith(_TORCH):
            return name + _TORCH[0]
        if not draft.format.startswith("safetensors"):
            return name
        stem = name.removesuffix(_SAFE)
        return stem if stem.endswith(_TORCH) else torch_name(stem)

    def _as_companions(self, file: CheckpointFile) -> Iterable[Companion]:
        within = None if self.options.follow_links else self.path
        for name in file.files:
            place = place_of(self.path).child(name)
            yield Companion(name, place.path, place.nbytes(), within)

    def companions(self) -> list[Companion]:
        """Return the files to copy; configurations get the dtype of the new weights.

        Raises RefusedError if one of them has the name of another file that is written.
        """
        found = sorted([*self.files.companions, *self._kept])
        if self._only_models:
            others = {each.name for each in found}
            found = [self._beside_model(each, others) for each in found]
            gone = [each for each in found if each.name.rpartition("/")[2] in _OF_TRAINING]
            self.left_out += [each.name for each in gone]
            found = [each for each in found if each not in gone]
        names = [name for part in self.parts for name in part.planned.sizes]
        taken = Counter([*names, *(each.name.partition("/")[0] for each in found)])
        taken.update(each.name for each in found if "/" in each.name)
        before = {name for each in self.files.checkpoints for name in each.files}
        for name in names:
            if taken[name] > 1:
                raise self._clash(f"two files of the new folder would be called {name!r}", name)
            whole = name.removesuffix(INDEX)
            if whole != name and whole in taken and not {name, whole} <= before:
                raise self._clash(
                    f"{whole!r} and {name!r} would both be in the new folder: libraries would "
                    "load either",
                    name,
                )
        dtypes = {part.file.folder + CONFIGURATION: part.dtype for part in self.parts if part.dtype}
        return [
            with_dtype(each, dtypes[each.name]) if each.name in dtypes else each for each in found
        ]

    def _beside_model(self, each: Companion, others: Collection[str]) -> Companion:
        """Move a file of a model that ranks saved beside the model, unless the name is taken."""
        for part in self.parts:
            start = part.file.folder
            inside = f"{start}{CONFIGURED}/"
            if part.file.section is Section.OTHER and each.name.startswith(inside):
                beside = start + each.name.removeprefix(inside)
                return each if beside in {start, *others} else each._replace(name=beside)
        return each

    def _clash(self, message: str, name: str) -> RefusedError:
        makers = [each.file.name for each in self.parts if name in each.planned.sizes]
        made_of = next((each for each in makers if each != name), makers[0])
        hint = f"--keep-files '{made_of}' copies that as it is"
        return RefusedError(message, path=self.path, hint=hint)

    def report(self, companions: Sequence[Companion], *, written: bool) -> ConvertReport:
        """Report what was done, or would be done."""
        parts = self.parts
        files = self.target.sizes([part.planned for part in parts], companions)
        alone = len(parts) == 1
        changes = [part.changes for part in parts]
        cast = Counter[str]()
        for each in changes:
            cast.update(each.cast)
        weights = [each.weights for each in changes if each.weights is not None]
        models = {part.format for part in parts if part.file.is_weights}
        copied = sum(each.nbytes for each in companions if not each.is_folder)

        def about(part: PartPlan, name: str) -> str:
            return name if alone else f"{part.file.name}: {name}"

        told = (about(part, each) for part in parts for each in part.plan.weights.warnings)
        return ConvertReport(
            source=self.path,
            destination=self.target.path,
            source_format=models.pop() if len(models) == 1 else parts[0].format,
            format=self.target.format.name,
            written=written,
            files=files,
            tensors=sum(part.plan.weights.tensors for part in parts),
            left_out=(
                *self.left_out,
                *(about(part, name) for part in parts for name in part.changes.left_out),
            ),
            weights=weights[0] if len(weights) == 1 else None,
            dropped=(
                *self.copies,
                *(
                    loss._replace(name=about(part, loss.name))
                    for part in parts
                    for loss in part.plan.dropped
                ),
            ),
            shared={
                about(part, name): owner
                for part in parts
                for name, owner in part.plan.weights.shared.items()
            },
            duplicates=tuple(
                about(part, name) for part in parts for name in part.plan.weights.duplicates
            ),
            cast=dict(cast),
            renamed=sum(each.renamed for each in changes),
            kept=tuple(
                kept._replace(name=about(part, kept.name))
                for part in parts
                for kept in part.changes.kept
            ),
            parts={part.file.name: tuple(part.planned.sizes) for part in parts},
            pickles=tuple(self.pickles),
            unknown_callables=tuple(
                dict.fromkeys(name for part in parts for name in part.plan.unknown_callables)
            ),
            warnings=tuple(dict.fromkeys((*self.warnings, *told))),
            nbytes=self.nbytes + copied,
            bytes_written=sum(files.values()) if written else 0,
        )
