"""Implements `ckptmove.validate`: check that a checkpoint is intact, loads and trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from .. import formats
from ..display.phrases import plural
from ..errors import CorruptError, InputError, RefusedError, StrPath, UntrustedError
from ..formats.checkpoint import Checkpoint
from ..formats.folders.layouts import common_folder
from ..formats.folders.training_folder import FolderCheckpoint
from ..manifest.device import with_index
from ..manifest.manifest import Manifest
from ..reports.validate import (
    ALL_CHECKS,
    FAILED,
    PASSED,
    SKIPPED,
    Finding,
    TrialResult,
    ValidationReport,
)
from ..runtime.torch_import import why_no_torch
from ..sources import place_of
from ..sources.downloads import Downloads
from ..trial.state.loaders import not_loaded, reserve_for_safetensors, usual_device
from ..writing.verify import Progress
from .against import compare
from .folders.checks import check_folder
from .folders.weight_copies import true_notes
from .options import FollowLinks, Input, Option, Simulate, Strict, declare_options
from .strict import refuse_unknown_around

_MOST_LISTED = 8  # faults
_WITHOUT_STRICT = "without --strict it is checked all the same"


@declare_options
def validate(
    src: StrPath,
    *,
    against: Annotated[
        StrPath | None,
        Option(
            "Require that SRC equals this checkpoint; devices may differ, and floating-point "
            "tensors may have been cast.",
            "OTHER",
            "Comparison",
        ),
    ] = None,
    subset: Annotated[
        bool,
        Option(
            "Allow SRC to hold only a part of the other checkpoint, under other names, as convert "
            "--select or --preset hf write it.",
            former="part",
        ),
    ] = False,
    ignore_code: Annotated[
        bool,
        Option(
            "Allow the code in SRC to differ from that of the other checkpoint, or to be missing."
        ),
    ] = False,
    model: Annotated[
        str | os.PathLike[str] | Callable[..., Any] | None,
        Option(
            "Load the weights into the model that FACTORY makes.",
            "FACTORY",
            "Model",
            python="FACTORY may be a callable.",
            value="FACTORY is `package.module:name`, `path/to/file.py:name`, a folder of "
            "transformers or of a model of diffusers, a TorchScript file or a `.pt2` file.",
        ),
    ] = None,
    input: Input = (),
    step: Annotated[
        Literal["forward", "train"] | None, Option("Run one step of this kind.")
    ] = None,
    optimizer: Annotated[
        str | None,
        Option(
            "The class of the optimizer, package.module:Class, if it cannot be recognized from its "
            "state.",
            "CLASS",
        ),
    ] = None,
    device: Annotated[
        str,
        Option(
            "Load and run on this device; auto is the device that the checkpoint names, or the CPU "
            "if this machine does not have it.",
            "DEVICE",
            "Device",
        ),
    ] = "auto",
    simulate: Simulate = False,
    timeout: Annotated[
        float,
        Option(
            "Stop a model made from a file, or a simulation, after this time.", "SECONDS", "Model"
        ),
    ] = 600,
    trust_pickle: Annotated[
        bool,
        Option(
            "Allow unpickling the file that the model is made from (FACTORY, or else SRC), which "
            "runs any code that it holds. The reload check does not unpickle, even so.",
            group="Safety",
            python="A model made from a file still runs in its own process, which is stopped if it "
            "starts another process, opens a socket, or writes outside its temporary folder.",
        ),
    ] = False,
    strict: Strict = False,
    follow_links: FollowLinks = False,
    progress: Progress | None = None,
) -> ValidationReport:
    """Check that a checkpoint is intact, equals its source, loads and trains; write nothing.

    A check that fails becomes a finding, not an error; the checks after it are still made where
    possible. Without `model` and `step`, the last three checks are skipped. A checkpoint in an
    object store is copied to a temporary folder for torch and the model, which can open only files.

    Args:
        src: the checkpoint.
        progress: a function that is called with the number of bytes read or compared since the last
            call.

    Returns:
        What each check found; `ok` says whether none failed.

    Raises:
        UsageError: the request makes no sense.
        DeviceError: the name of the device is not valid; or a model is to run on a device that this
            machine does not have, and `simulate` is not set.
        InputError: a file is missing, cannot be opened, or is not trusted (`UntrustedError`: it
            names unknown callables, and `strict` is set).
        RefusedError: the checkpoint cannot be copied to this machine, and a model needs it.
    """
    (path, notes), other = formats.named_checkpoint(src), None
    if against is not None:
        other, more = formats.named_checkpoint(against)
        notes = (*notes, *more)
    device = device if device == "auto" else with_index(device)
    has_trial = model is not None or step is not None
    with Downloads() as copies:
        container, manifest, files = _check_container(
            path, progress, copies, has_trial=has_trial, strict=strict, follow_links=follow_links
        )
        if manifest is None:
            skipped = _skip(ALL_CHECKS[1:], "it can't be read")
            return ValidationReport(
                source=path,
                against=other,
                device=device,
                simulated=False,
                checks=(container, *skipped),
                warnings=tuple(notes),
            )
        compared = compare(
            path,
            other,
            progress,
            subset=subset,
            ignore_code=ignore_code,
            strict=strict,
            follow_links=follow_links,
        )
        trial = TrialResult(device, False, _skip(ALL_CHECKS[3:], "no model was named"))
        if has_trial:
            trial = _run_trial(
                path,
                copies,
                device,
                against=None if step is None else other,
                model=model,
                inputs=(input,) if isinstance(input, str) else tuple(input),
                step=step,
                optimizer=optimizer,
                simulate=simulate,
                trust_pickle=trust_pickle,
                timeout=timeout,
            )
        where, reload = _check_reload(files, manifest, trial.device)
        ran = (_about_source(each, copies) for each in (reload, *trial.findings))
        checks = (container, compared, *ran)
    warnings = (*notes, *manifest.warnings)
    return ValidationReport(
        source=path,
        against=other,
        device=where,
        simulated=trial.simulated,
        checks=checks,
        warnings=warnings,
    )


def _skip(checks: Sequence[str], why: str) -> tuple[Finding, ...]:
    return tuple(Finding(check, SKIPPED, why) for check in checks)


def _check_container(
    path: str,
    progress: Progress | None,
    copies: Downloads,
    *,
    has_trial: bool,
    strict: bool,
    follow_links: bool,
) -> tuple[Finding, Manifest | None, Sequence[tuple[str, Sequence[str]]] | RefusedError]:
    """Check the container to the last byte; return the finding, the manifest and the files.

    Files in a store are copied; if they can't be, the reason is returned instead of the files.
    """
    summed = 0

    def report(nbytes: int) -> None:
        nonlocal summed
        summed += nbytes
        if progress is not None:
            progress(nbytes)

    try:
        with formats.open_checkpoint(path, follow_links=follow_links) as found:
            manifest = found.manifest
            if strict:
                refuse_unknown_around(
                    path, found, otherwise=_WITHOUT_STRICT, follow_links=follow_links
                )
            faults = _damage(found, path, report)
            files: Sequence[str] | RefusedError = [source.path for source in found.files]
            found.check_unchanged()
            if not place_of(path).opens_by_path:
                files = _fetch(path, found, copies, has_trial)
            parts = files if isinstance(files, RefusedError) else _files_by_format(found, files)
            for format, of_part in () if isinstance(parts, RefusedError) else parts:
                if format.startswith("safetensors"):
                    faults += [fault for file in of_part for fault in _library_faults(file)]
            checks = check_folder(found, path, follow_links=follow_links)
            faults += checks.faults
            told = (said for each in found.container.everything() for said in each.warnings)
            said = tuple(dict.fromkeys((*manifest.warnings, *told)))  # the scan may have added some
            manifest = replace(manifest, warnings=true_notes(said))
    except UntrustedError:
        raise
    except InputError as error:
        if place_of(path).is_unreachable(error):
            raise
        start = f"{error.path}: " if error.path not in (None, path) else ""
        hint = error.hint
        about = ((), {}) if hint is None else ((hint,), {"hint": hint})
        return Finding("container", FAILED, f"{start}{error}", *about), None, ()
    count = len(manifest.tensors)
    what = f"{manifest.format}, {plural(count, 'tensor') if count else 'no tensors'}"
    data = {"format": manifest.format, "nbytes": manifest.nbytes, "tensors": count}
    data["faults"] = faults
    if checks.not_checked:
        data["not_checked"] = checks.not_checked
    if faults:
        title = f"{what}: {plural(len(faults), 'fault')}"
        return Finding("container", FAILED, title, faults[:_MOST_LISTED], data), manifest, parts
    how = "every checksum is right" if summed else "all in its place; it has no checksums"
    if manifest.files and summed:
        without = sum(each.format.startswith("safetensors") for each in manifest.files)
        how = "every checksum of its files is right"
        if without:
            how += f"; {plural(without, 'file')} of safetensors, which has none"
    title = f"{what}: {how}"
    return Finding("container", PASSED, title, checks.details, data), manifest, parts


def _damage(found: Checkpoint, path: str, report: Callable[[int], object]) -> list[str]:
    """Describe what is wrong with the bytes; name the file if the user named a folder."""
    only = found.files[0].path if found.folder is not None and len(found.files) == 1 else path
    name = only.removeprefix(place_of(path).child("").path)
    start = f"{name}: " if name != path else ""
    return [f"{start}{fault}" for fault in found.damage(report)]


def _files_by_format(found: Checkpoint, files: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Return the files of each part of a checkpoint, with their format."""
    if not isinstance(found, FolderCheckpoint):
        return [(found.format, files)]
    return [
        (each.checkpoint.format, files[each.first : each.first + len(each.checkpoint.files)])
        for each in found.parts
    ]


def _fetch(
    path: str, found: Checkpoint, copies: Downloads, has_trial: bool
) -> Sequence[str] | RefusedError:
    """Return local copies of the files that hold tensors, if a later check opens them."""
    if why_no_torch():
        return ()
    try:
        folder = place_of(path).is_folder()
        paths = copies.take(path, found.sources, folder=folder, beside=has_trial)
    except RefusedError as error:
        if has_trial:
            raise
        return error
    return paths[: len(found.files)]


def _run_trial(
    path: str,
    copies: Downloads,
    device: str,
    *,
    against: StrPath | None,
    **options: Any,  # noqa: ANN401 those of `run_trial`
) -> TrialResult:
    """Run the model and take a step, with local files."""
    no_torch = why_no_torch()
    if no_torch is not None:
        return TrialResult(device, False, _skip(ALL_CHECKS[3:], no_torch))
    from ..system.signals import exits_raised
    from ..trial.trial import run_trial

    other = _local_path(against, copies)
    try:
        with exits_raised():
            return run_trial(copies.here(path), device=device, against=other, **options)
    except CorruptError as error:
        unfit = Finding("model", FAILED, f"the state can't be read: {error}")
        return TrialResult(device, False, (unfit, *_skip(ALL_CHECKS[4:], "not reached")))
    except InputError as error:
        raise _error_about_source(error, copies) from error


def _local_path(against: StrPath | None, copies: Downloads) -> str | None:
    """Return a local path of the checkpoint to compare with."""
    if against is not None and not place_of(against).opens_by_path:
        with formats.open_checkpoint(against) as found:
            folder = place_of(against).is_folder()
            copies.take(os.fspath(against), found.sources, folder=folder, beside=True)
    return None if against is None else copies.here(against)


def _error_about_source(error: InputError, copies: Downloads) -> InputError:
    """Make an error name the source instead of its copy."""
    path = None if error.path is None else copies.with_original_names(error.path)
    return type(error)(copies.with_original_names(str(error)), path=path, hint=error.hint)


def _about_source(finding: Finding, copies: Downloads) -> Finding:
    """Make a finding name the source instead of its copy."""
    details = [copies.with_original_names(each) for each in finding.details]
    return replace(finding, title=copies.with_original_names(finding.title), details=details)


def _library_faults(path: str) -> list[str]:
    """Return the faults that the safetensors library finds in its files, if it is installed."""
    if why_no_torch():  # the library imports it
        return []
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return []
    try:
        reserve_for_safetensors(path)
        with safe_open(path, framework="pt") as file:
            file.keys()
    except ImportError:  # it imports torch
        return []
    except (SafetensorError, OSError) as error:
        return [f"the safetensors library refuses it: {str(error).splitlines()[0]}"]
    return []


def _check_reload(
    files: Sequence[tuple[str, Sequence[str]]] | RefusedError, manifest: Manifest, device: str
) -> tuple[str, Finding]:
    """Check whether torch itself loads the checkpoint, and on which device."""
    if isinstance(files, RefusedError):
        return device, Finding("reload", SKIPPED, str(files))
    kinds = [format for format, _ in files]
    skipped = [finding for finding in map(not_loaded, kinds) if finding is not None]
    is_on_cpu = device == "cpu" or (device == "auto" and usual_device(manifest) == "cpu")
    if is_on_cpu and len(skipped) == len(kinds) == 1:
        return "cpu", skipped[0]
    no_torch = why_no_torch()
    if no_torch is not None:
        return device, Finding("reload", SKIPPED, no_torch)
    from ..trial.state.reload import check_reload, there

    wanted = there(manifest, device)
    if len(files) == 1:
        (format, only), *_ = files
        return wanted, check_reload(only, format, wanted)
    return wanted, _of_all(
        [(of_part, check_reload(of_part, each, wanted)) for each, of_part in files]
    )


def _of_all(findings: Sequence[tuple[Sequence[str], Finding]]) -> Finding:
    """Combine the findings of a folder's parts into one: the worst decides."""
    outcomes = {each.outcome for _, each in findings}
    worst = next(each for each in (FAILED, SKIPPED, PASSED) if each in outcomes)
    folder = common_folder([each for files, _ in findings for each in files])
    lines = [
        f"{files[0].removeprefix(folder)}: {each.title}"
        for files, each in findings
        if files and (each.outcome == worst or each.outcome == FAILED)
    ]
    done = sum(each.outcome == PASSED for _, each in findings)
    title = f"torch and safetensors load {done:,} of {plural(len(findings), 'file')}"
    return Finding("reload", worst, title, lines)
