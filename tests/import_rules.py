"""The import table of the project and the checker that reads sources against it.

`test_architecture.py` runs it. Change the table and the README's tree together.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path

import openelm_mlx

ROOT = Path(openelm_mlx.__file__).parent.parent
PACKAGES = ("openelm_mlx", "convert")

# A module may import modules of the rows above its own. Names without a dot are openelm_mlx's.
LAYERS = {
    "foundation": "atomic blas",
    "0": """activations attention_gradient cache chat_template compressed config config_check
        cpu_attention
        cpu_exp detokenizer
        distributed doctor document_stream evaluation_args graph_count hub interrupts losses
        metrics mismatch optim
        plots plots_bench plots_layers preference_args published python_text recipe recompute
        recipe_flags recipe_values run_flags sampling scaling scoring_plan sentencepiece_json
        text_files text_filters text_formats tokenizer tokenizer_backends tokenizer_codec
        tokenizer_files tokenizer_search watchdog
        convert.coreai_runner convert.dtypes convert.licence
        convert.mil_blob convert.mil_constants convert.mil_eval convert.mil_features
        convert.mil_findings convert.mil_ops convert.mil_ops_compressed
        convert.mil_ops_elementwise convert.mil_ops_index convert.mil_ops_matrix
        convert.mil_ops_reduce convert.mil_ops_shapes convert.mil_package
        convert.mil_tools convert.mil_plan
        convert.mil_types
        convert.names convert.pt_archive convert.pt_containers convert.pt_dtypes
        convert.pt_file convert.pt_globals convert.pt_numpy convert.pt_tensor
        convert.pt_unpickler convert.pt_writer""",
    "1": """batches compatibility data data_corenet data_encoding data_sources memory model packing
        packing_plan training_args tuning_args tuning_batches tuning_data tuning_files
        tuning_formats tuning_lengths tuning_pairs tuning_tokens weight_files""",
    "2": """adapter_args adapter_embeddings adapter_files adapter_fuse adapter_layers cpu_weights
        fitting lora rank_checks scoring sharding""",
    "3": "answer_memory checkpoint evaluation_record objectives training_state tuning_settings",
    "4": """commonsense decoding draft_model non_finite perplexity preference progress proposals
        replay run_folder speculative stepwise_scoring token_scoring trainer training_step
        validation
        convert.adapter_merge convert.average convert.coreai convert.coreai_api
        convert.coreai_bundle convert.coreai_engine convert.coreai_export convert.coreai_graph
        convert.coreai_ops convert.coreai_span convert.coreai_verify convert.coreai_weights
        convert.coreml convert.coreml_bundle convert.coreml_caches
        convert.coreml_card convert.coreml_client convert.coreml_describe convert.coreml_export
        convert.coreml_graph
        convert.coreml_guard convert.coreml_layers convert.coreml_package
        convert.coreml_reference convert.coreml_rotation convert.coreml_report
        convert.coreml_parity convert.coreml_on_mac convert.coreml_lints
        convert.coreml_parameters convert.coreml_predictor convert.coreml_settings
        convert.coreml_codes convert.coreml_palette convert.coreml_stored
        convert.coreml_verification convert.coreml_verify
        convert.coreml_weights convert.corenet convert.corenet_checkpoint
        convert.corenet_config convert.corenet_lora convert.corenet_reader
        convert.corenet_rows convert.corenet_writer convert.huggingface
        convert.huggingface_config convert.peft convert.peft_adapters convert.peft_config
        convert.peft_tensors convert.quantize convert.quantize_check convert.quantize_plan
        convert.source""",
    "5": """batch batch_file bundle_scoring chat checkpoint_finder checkpoint_scores comparison
        comparison_report dpo dpo_run evaluate evaluation finetune fuse fuse_report generate
        generation_settings info lm_harness lm_tasks package_scoring pretrain pretrain_run
        pretrain_settings scored_models serve server server_generation suites
        tokenizer_training tuning_run""",
    "6": """bench bench_cases bench_evaluation bench_loss bench_report bench_run bench_shared
        bench_start bench_training
        bench_work check_release demo demo_report demo_room demo_run demo_steps
        plot_command convert.coreml_run""",
    "7": "cli convert.cli",
}
# One thing split for reading: its parts may import each other though in one layer (patterns).
FAMILIES = (
    "tokenizer* sentencepiece_json detokenizer chat_template hub",
    "config config_check scaling",
    "adapter_* lora",
    "recipe*",
    "batches data* packing* tuning_*",
    "compressed document_stream text_*",
    "decoding draft_model proposals speculative",
    "non_finite progress replay run_folder trainer training_step validation",
    "batch* chat generate generation_settings serve*",
    "bench* plot_command",
    "demo*",
    """bundle_scoring checkpoint_finder checkpoint_scores comparison* evaluat* package_scoring
        pretrain_settings scored_models suites""",
    "lm_* suites",
    "batch generation_settings lm_harness",
    "perplexity *_scoring decoding",
    "answer_memory evaluation_record",
    "dpo dpo_run finetune tuning_run",  # the same models tuned on other data
    "metrics plots plots_*",
    "activations attention_gradient cpu_attention cpu_exp losses recompute",
    "pretrain*",
    "cli convert.cli",
    "convert.pt_*",
    "convert.corenet* convert.adapter_merge",
    "convert.huggingface* convert.quantize* convert.source convert.peft*",
    "convert.peft* convert.adapter_merge",
    "fuse*",
    "convert.mil_*",
    "convert.coreml* convert.quantize_check convert.source",
    "convert.coreai* convert.source",
)
# The library reaches into `convert` only here (stages of layer 6 and 7 aside), inside functions.
INTO_CONVERT = "checkpoint fitting weight_files"
CONVERT_FOR_LIBRARY = (
    "convert.names convert.pt_file convert.mil_package convert.mil_ops convert.mil_eval"
)
# A stage that makes a model folder of another, as the converters do: measures, hashes, licence.
ALSO_FROM_CONVERT = {
    "fuse": "convert.licence convert.quantize_check convert.source",
    "bundle_scoring": "convert.coreai_runner",
    "checkpoint_finder": "convert.corenet",
    "package_scoring": "convert.coreml_client convert.coreml_describe convert.coreml_predictor",
}

# Third parties: what a layer adds to those above it in LAYERS, anywhere or inside functions only.
ANYWHERE = {"0": "mlx yaml sentencepiece", "1": "numpy", "4": "tqdm"}
INSIDE = {
    "0": "ftfy huggingface_hub jinja2 matplotlib pyarrow tokenizers zstandard",
    "1": "datasets",
    "4": "wandb",
    "5": "lm_eval mlx_lm",
}
MLX_ALONE = "cache losses model optim sampling"  # no other third party
# Exceptions, by pattern; `!` where a module-level import is allowed.
ALSO = {
    "model": "mlx_lm",  # its attention, where a cache is quantised
    "server*": "mlx_lm!",  # themselves imported only when a server is asked for
    "convert.pt_*": "numpy!",
    "convert.mil_*": "numpy! coremltools google",  # google.protobuf comes with coremltools
    "convert.coreml*": "coremltools",
    "convert.coreai_api": "coreai",
    "convert.coreai_engine": "coreai",
    "convert.coreai_runner": "numpy!",
}
EMPTY_NAMES = {"utils", "util", "common", "base", "helpers", "misc"}
ADVICE = "add it to the table in tests/import_rules.py and to the README's tree"

RANKS = list(LAYERS)


def _full(name: str) -> str:
    return name if name.startswith("convert.") else f"openelm_mlx.{name}"


def _short(module: str) -> str:
    return module.removeprefix("openelm_mlx.")


LAYER_OF = {_full(name): rank for rank, names in LAYERS.items() for name in names.split()}
LAYER_OF |= {"openelm_mlx": "foundation", "convert": "foundation"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import statement's target."""

    target: str  # the dotted module that is reached
    line: int
    deferred: bool  # in a function or under TYPE_CHECKING: not run when the module is imported
    for_types: bool  # under TYPE_CHECKING


def sources(root: Path = ROOT) -> dict[str, str]:
    """Every module of the two packages: dotted name to source text."""
    found = {}
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(source: str, modules: set[str]) -> Iterator[Import]:
    """All import statements of a module, wherever they stand."""
    for node, deferred, for_types in _statements(source):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            prefix = "." * node.level + (node.module or "")
            targets = [_reached(prefix, alias.name, modules) for alias in node.names]
        for target in targets:
            yield Import(target=target, line=node.lineno, deferred=deferred, for_types=for_types)


@lru_cache(maxsize=512)
def _statements(source: str) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """The statements, and whether each is deferred and for types; parsed once for all tests."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool, bool]] = []

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, in_function or for_types, for_types))
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                visit(child, in_function, for_types)

    visit(ast.parse(source), False, False)
    return found


def _reached(module: str, name: str, modules: set[str]) -> str:
    """The module that ``from module import name`` loads: a submodule, or a lazy name's home."""
    if f"{module}.{name}" in modules:
        return f"{module}.{name}"
    return openelm_mlx._PUBLIC.get(name, module) if module == "openelm_mlx" else module


def faults(texts: dict[str, str], modules: set[str] | None = None) -> list[str]:
    """What breaks the table, one line each, in order of module and line.

    ``modules`` are the names that exist, where ``texts`` holds only some of them.
    """
    found = []
    modules = set(texts) | (modules or set())
    for module, text in sorted(texts.items()):
        if module not in LAYER_OF:
            found.append(f"{module} is not in the import table: {ADVICE}")
            continue
        for item in sorted(imports(text, modules), key=lambda i: i.line):
            fault = _fault(module, item)
            if fault:
                found.append(f"{module}:{item.line} imports {item.target}: {fault}")
    return found


def _fault(module: str, item: Import) -> str | None:
    top = item.target.partition(".")[0]
    if item.target.startswith("."):
        return "write the full name of the module"
    if top in PACKAGES:
        return _project_fault(module, item)
    return None if top in sys.stdlib_module_names else _third_party_fault(module, item)


def _project_fault(module: str, item: Import) -> str | None:
    target = item.target
    if target not in LAYER_OF:
        return f"it is not in the import table: {ADVICE}"
    own, other = LAYER_OF[module], LAYER_OF[target]
    if "." not in target or _one_family(module, target):
        return None
    if module == "openelm_mlx":
        return None if item.for_types or other == "foundation" else "make it a lazy public name"
    if RANKS.index(other) >= RANKS.index(own):
        return f"layer {other} is not below layer {own}"
    if target.startswith("convert."):
        return None if module.startswith("convert.") else _into_convert_fault(module, item)
    if module.startswith("convert.") and own == "0" and other != "foundation":
        return "the lowest converters import nothing of the library"
    return None


def _one_family(module: str, target: str) -> bool:
    return bool(_families(module) & _families(target))


@cache
def _families(module: str) -> frozenset[str]:
    return frozenset(family for family in FAMILIES if _matches(module, family.split()))


def _matches(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(_short(module), pattern) for pattern in patterns)


def _into_convert_fault(module: str, item: Import) -> str | None:
    if LAYER_OF[module] in ("6", "7"):
        return None
    common = CONVERT_FOR_LIBRARY if _short(module) in INTO_CONVERT.split() else ""
    if item.target not in f"{common} {ALSO_FROM_CONVERT.get(_short(module), '')}".split():
        return "the library does not import convert"
    return None if item.deferred else "only inside a function"


def _third_party_fault(module: str, item: Import) -> str | None:
    top, rank = item.target.partition(".")[0], RANKS.index(LAYER_OF[module])
    also = [
        name for key, names in ALSO.items() if _matches(module, [key]) for name in names.split()
    ]
    if _short(module) in MLX_ALONE.split() and top not in ("mlx", *also):
        return "this module stands on mlx alone"
    if top in _reach(ANYWHERE, rank) or f"{top}!" in also:
        return None
    if top not in _reach(INSIDE, rank) | set(also):
        return f"not a third party of layer {LAYER_OF[module]}"
    return None if item.deferred else "only inside a function"


def _reach(table: dict[str, str], rank: int) -> set[str]:
    rows = [names for key, names in table.items() if RANKS.index(key) <= rank]
    return {name for names in rows for name in names.split()}
