"""Model folder -> Core AI bundle: the order of work.

The graph is written straight from MLX's arrays, and Apple's runtime judges it before it is kept.
"""

from dataclasses import dataclass
from pathlib import Path

from convert.coreai_api import authoring
from convert.coreai_bundle import Contents, write_bundle
from convert.coreai_graph import build
from convert.coreai_verify import Verification, describe, verify, write_report
from convert.coreai_weights import load_fused, settle
from convert.source import Source
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was done.

    Attributes:
        folder: the bundle.
        weights: how they are stored.
        bytes: of the bundle.
        verification: None where it was not asked for.
    """

    folder: Path
    weights: str
    bytes: int
    verification: Verification | None


def export(
    folder: str | Path,
    output: str | Path,
    *,
    weights: str | None = None,
    adapter_path: str | Path | None = None,
    tokenizer: str | Path | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> Export:
    """Write a bundle for Apple's Swift package.

    Args:
        folder: a model folder or Hub repository.
        output: the bundle's folder, whose name becomes the bundle's.
        weights: ``fp16`` (default), ``mlx`` (default for a quantised folder: its codes as they are,
            their scales in float16), or ``fp32`` and ``mlx-fp32``, which apps cannot use but which
            Apple's Linux runtime executes exactly and fast.
        adapter_path: adapters to fuse.
        tokenizer: file, folder or Hub id, in place of the folder's own.
        check: verify before anything is kept.
        overwrite: replace a bundle that is there.

    Raises:
        FileExistsError: if ``output`` is there and may not be replaced.
        FileNotFoundError: if the folder is missing.
        ImportError: if the extra ``coreai`` is not installed.
        RuntimeError: if Apple's runtime fails.
        ValueError: if a setting is wrong, there is no tokenizer, or the bundle does not hold.
    """
    output = Path(output).expanduser()
    if output.suffix == ".aimodel":
        raise ValueError(f"{output}: give the name of a folder; the .aimodel will lie inside it")
    authoring()
    refuse_existing_folder(output, overwrite=overwrite)
    source = Source.find(folder)
    found, chat = source.companions(tokenizer, instruct=False, output=output)
    if found is None:
        raise ValueError(
            f"{source.name} has no tokenizer, and a bundle without tokenizer.json sends the app to "
            "the Hub for one: give --tokenizer"
        )
    model = load_fused(source.folder, adapter_path)
    kind = settle(model, weights)
    contents = Contents(
        name=output.resolve().name,
        source=source,
        args=model.args,
        weights=kind,
        tokenizer=found,
        chat=chat,
        adapters=None if adapter_path is None else Path(adapter_path).name,
    )
    with atomic_folder(output, overwrite=overwrite) as temporary:
        bundle = write_bundle(temporary, build(model, kind), contents)
        size = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
        verification = verify(bundle, model) if check else None
        if verification is not None:
            if not verification.holds:
                raise ValueError(
                    f"the bundle was not kept, since it {describe(verification).splitlines()[0]}; "
                    "--no-verify keeps it all the same"
                )
            write_report(verification, temporary / "verification.json")
    return Export(folder=output, weights=kind, bytes=size, verification=verification)
